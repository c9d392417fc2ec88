"""Tables and plots from the JSON files alone: nothing is measured here, nothing averaged across runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from . import (
    alloc_pausing_report,
    alloc_report,
    alloc_traces,
    breadth_report,
    context_report,
    estimate,
    frontier_report,
    holds_report,
    pairs_report,
    plan,
    sharded,
    untuned_report,
)
from .frontier_report import METHOD_ORDER, rank
from .rows import Row, quantile, read, select
from .tables import conditions, figure, latest, load, on_cpu, on_gpu, reasons, section, table


def _codec_cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row["status"] != "ok":
        return str(row["status"])
    return f"{row['share_of_copy']:.2f}" + ("*" if row["contended"] else "")


def codec_table(rows: Iterable[Row]) -> str:
    """Return the tables of the codec: the share of the copy's rate, and at the smallest size time over copy's."""
    everything = list(rows)
    sections = []
    for found in (on_gpu(everything), on_cpu(everything)):
        current = latest(found, "workload", "method", "phase")
        for dtype in dict.fromkeys(workload.split("/")[0] for workload, _, _ in current):
            part = {key: row for key, row in current.items() if key[0].startswith(dtype + "/")}
            sections.append(_codec_part(dtype, part))
    return section(*sections)


def _codec_part(dtype: str, part: dict[tuple[str, ...], Row]) -> str:
    sizes = sorted({(row["nbytes"], workload) for (workload, _, _), row in part.items()})
    lines = []
    for method in dict.fromkeys(method for _, method, _ in part if method != "copy"):
        for phase in ("quantise", "dequantise"):
            cells = [part.get((workload, method, phase), part.get((workload, method, ""))) for _, workload in sizes]
            smallest = cells[0]
            ratio = f"{smallest['time_over_copy']:.2f}" if smallest and smallest["status"] == "ok" else ""
            lines.append([method, phase, *map(_codec_cell, cells), ratio])
    names = [workload.split("/")[1] for _, workload in sizes]
    header = [f"{dtype}, share of copy", "", *names, f"time / copy at {names[0]}"]
    copies = [row for (_, method, phase), row in part.items() if method == "copy" and phase == "quantise"]
    largest = max(copies, key=lambda row: row["nbytes"], default=None)
    note = "Bytes moved over time, as a share of the copy in the same rounds; * where the copies themselves varied."
    if largest is not None and largest["origin"]["device"] != "cpu":
        rate = largest["bytes_moved"] / largest["median_us"] / 1e6
        note += f" The copy moves {rate:.2f} TB/s at {largest['workload'].split('/')[1]}."
    found = list(part.values())
    return section(table(header, lines), note, conditions(found), reasons(found))


def overhead_table(rows: Iterable[Row]) -> str:
    """Return the table of host time per tensor."""
    found = list(latest([r for r in on_gpu(rows) if r["status"] == "ok"], "workload", "method").values())
    if not found:
        return ""
    names = ("pack_us", "unpack_us", "sum_us", "allocate_us", "encode_us", "decode_us")
    header = ["workload", "method", "pack us", "unpack us", "sum us", "of it: allocate", "encode", "decode", "step, x"]
    lines = [
        [row["workload"], row["method"], *(figure(row, name, ".1f") for name in names), figure(row, "time_x", ".2f")]
        for row in found
    ]
    note = "Host time over plain PyTorch per saved tensor, eager, median; step: a step's, in units of plain PyTorch's."
    return section(table(header, lines), note, conditions(found))


def batch_points(rows: Iterable[Row]) -> dict[str, dict[str, list[Row]]]:
    """Return for each workload and method the rows of its latest run, by batch size."""
    measured = on_gpu(rows)
    points: dict[str, dict[str, list[Row]]] = {}
    for (workload, method), last in latest(measured, "workload", "method").items():
        run = select(measured, workload=workload, method=method, run=last["run"])
        points.setdefault(workload, {})[method] = sorted(run, key=lambda row: row.get("batch", 0))
    return points


def batch_table(rows: Iterable[Row]) -> str:
    """Return the table of the largest batch and the best throughput under the memory cap."""
    found = []
    lines = []
    for workload, methods in batch_points(rows).items():
        for method, run in sorted(methods.items(), key=lambda item: rank(METHOD_ORDER, item[0])):
            found += run
            fitting = [row for row in run if row["status"] == "ok"]
            failed = [str(row["batch"]) for row in run if row["status"] == "oom"]
            best = max(fitting, key=lambda row: row["samples_per_s"], default=None)
            largest = str(fitting[-1]["batch"]) if fitting else ""
            cells = [f"{best['samples_per_s']:.1f}", str(best["batch"])] if best else ["", ""]
            lines.append([f"`{workload}`", method, largest, failed[0] if failed else "", *cells])
    if not found:
        return ""
    header = ["workload", "method", "largest batch", "out of memory at", "best samples/s", "at batch"]
    cap = quantile([row["memory_gib"] for row in found if row.get("memory_gib")], 0.5)
    return section(table(header, lines), f"Allocator capped at {cap:g} GiB.", conditions(found))


TABLES = {
    **frontier_report.TABLES,
    **untuned_report.TABLES,
    "codec": ("codec", codec_table),
    "overhead": ("overhead", overhead_table),
    "batch": ("batch", batch_table),
    **holds_report.TABLES,
    **alloc_report.TABLES,
    **alloc_pausing_report.TABLES,
    **breadth_report.TABLES,
    **pairs_report.TABLES,
    "sharded": ("sharded", sharded.sharded_table),
    **context_report.TABLES,
    "estimate": ("estimate", estimate.estimate_table),
    "plan": ("plan", plan.plan_table),
}
"""The suite and the table of each block."""


def fill(text: str, suite: str, content: str) -> str | None:
    """Return the text with the suite's block filled, None where it has no such block."""
    begin, end = f"<!-- bench:{suite} -->", f"<!-- /bench:{suite} -->"
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        return None
    return f"{head}{begin}\n{content}\n{end}{tail}"


def run(out: Path, readme: Path, docs: Path, against: Path | None = None) -> None:
    """Fill the README's blocks and draw the plots, from what was measured; print each table.

    ``against`` is an earlier file of the suite `breadth`: what it stored less of is printed, and drawn nowhere.
    """
    text = readme.read_text() if readme.exists() else ""
    for block, (suite, draw) in TABLES.items():
        content = draw(load(out, suite))
        if not content:
            print(f"{block}: no rows to show in {out}")
            continue
        print(f"## {block}\n\n{content}\n")
        if (filled := fill(text, block, content)) is not None:
            text = filled
    if readme.exists():
        readme.write_text(text)
    if against is not None:
        print(breadth_report.against(load(out, "breadth"), read(against)))

    from . import frontier_plot, holds_plot, plots

    if points := [row for row in frontier_report.latest_rows(load(out, "frontier")) if "time_x" in row]:
        frontier_plot.draw(points, docs)
    if outcomes := holds_report.outcomes(load(out, "holds")):
        holds_plot.draw(outcomes, docs)
    if points := batch_points(load(out, "batch")):
        plots.throughput_vs_batch(points, docs / "throughput_vs_batch.png")
    if found := context_report.panels(load(out, "context")):
        context_report.draw(found, docs)
    if bars := alloc_report.training_bars(load(out, "alloc"), tuple(plots.ALLOCATORS)):
        plots.allocator_training(bars, docs / "allocator_training.png")
    if lines := alloc_report.timeline(load(out, "alloc")):
        plots.allocator_timeline(lines, alloc_traces.PICTURED, docs / "allocator_timeline.png")
    if loops := alloc_pausing_report.loop_lines(load(out, "alloc")):
        plots.pausing_loop(loops, docs / "allocator_pausing.png")
