"""The tables of this commit against an earlier one."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from .frontier_report import METHOD_ORDER, WORKLOAD_ORDER, rank
from .overhead import CHAIN
from .pairs import SIDES
from .rows import GIB, Row
from .tables import conditions, figure, latest, on_gpus, reasons, section, table


def _both(row: Row, name: str, form: str, scale: float = 1.0) -> str:
    """Return a figure of both sides."""
    return " / ".join(figure(row[side], name, form, scale) for side in SIDES)


def _earlier(row: Row) -> str:
    return str(row["earlier"]["commit"] or row["earlier"]["sources"])[:7]


def _found(rows: Iterable[Row]) -> list[Row]:
    named = [{**row, "before_commit": _earlier(row)} for row in on_gpus(rows)]
    found = latest(named, "before_commit", "gpu", "workload", "method")
    order = {key[:2]: index for index, key in enumerate(found)}
    return sorted(
        found.values(),
        key=lambda r: (
            order[r["before_commit"], r["gpu"]],
            rank(WORKLOAD_ORDER, r["workload"]),
            rank(METHOD_ORDER, r["method"]),
        ),
    )


def _conditions(found: list[Row]) -> str:
    return f"Before: {', '.join(sorted({row['before_commit'] for row in found}))}. {conditions(found)}"


def steps_table(rows: Iterable[Row]) -> str:
    """Return the table of training steps, before and after."""
    found = [row for row in _found(rows) if row["workload"] != CHAIN]
    if not found:
        return ""
    lines = [
        [
            row["before_commit"],
            row["gpu"],
            f"`{row['workload']}`",
            row["method"] + ("" if row["before_method"] == row["method"] else f" (before: {row['before_method']})"),
            f"{row['ratio']:.3f} ({min(row['ratios']):.3f} to {max(row['ratios']):.3f})",
            f"{row['spread']:.3f}, {row['itself']:.3f}",
            _both(row, "act_bytes", ".3f", row["after"].get("vanilla_act_bytes", 1.0)),
            _both(row, "peak_minus_base_bytes", ".2f", GIB),
            _both(row, "grad_error", ".2%"),
        ]
        for row in found
        if row["status"] == "ok"
    ]
    header = (
        "before", "GPU", "workload", "method", "step, x before", "before: spread, against itself", "act, x vanilla",
        "peak - base GiB", "gradient error",
    )  # fmt: skip
    note = (
        "Step: median and range of the ratios of paired turns; two processes on one GPU take turns. Spread: the "
        "slowest turn of the earlier commit over the fastest. Against itself: odd turns of the earlier commit over "
        "even ones. The other figures are before / after; act: bytes that a forward allocates."
    )
    return section(table(header, lines), note, _conditions(found), reasons(found))


def overhead_table(rows: Iterable[Row]) -> str:
    """Return the table of the host's time per tensor, before and after."""
    found = [row for row in _found(rows) if row["workload"] == CHAIN]
    figures = {"us": "pack + unpack us", "pack_us": "pack us", "unpack_us": "unpack us", "nothing_ns": "nothing ns"}
    lines = []
    for row in found:
        for name, label in figures.items() if row["status"] == "ok" else ():
            series = [row[f"{side}_turns"][name] for side in SIDES]
            lines.append([row["workload"], row["gpu"], label, *(f"{f(s):.1f}" for s in series for f in (min, median))])
    if not found:
        return ""
    header = ["workload", "GPU", "", "before, best", "median", "after, best", "median"]
    note = (
        "Host time per saved tensor; nothing: the time that compression adds to an operator without a saved tensor. "
        "Two processes take turns."
    )
    return section(table(header, lines), note, _conditions(found), reasons(found))


TABLES = {
    "pairs": ("pairs", steps_table),
    "pairs-overhead": ("pairs", overhead_table),
}
"""The suite and the table of each block."""
