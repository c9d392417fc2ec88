"""The table of the suite `alloc`'s part `pause`, and the figures of its picture."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from .alloc_methods import NATIVE, OURS, PAUSING
from .alloc_pausing import WORKLOADS
from .rows import GIB, Row, select
from .tables import conditions, latest, on_gpu, reasons, section, table

NAMES = {NATIVE: "by hand"}
"""How the table calls a method, where not by its own name."""


def _found(rows: Iterable[Row], workload: str, **key: bool) -> dict[str, Row]:
    """Return each method's last row, in reading order."""
    measured = select(on_gpu(rows), workload=workload, status="ok", **key)
    by_method = {row["method"]: row for row in measured}
    return {method: by_method[method] for method in PAUSING if method in by_method}


def _name(method: str) -> str:
    return NAMES.get(method, method)


def _seconds(samples: list[float]) -> str:
    return f"{median(samples[1:]):.3f}"


def drop_table(rows: Iterable[Row]) -> str:
    """Return the table of memory whose contents are dropped."""
    lines = [
        [
            _name(method),
            f"{row['nbytes'] / GIB:.0f}",
            _seconds(row["pause_s"]),
            _seconds(row["resume_s"]),
            f"{100 * row['released_share']:.1f}",
        ]
        for method, row in _found(rows, "pause_drop").items()
    ]
    return table(["dropped", "GiB", "pause s", "resume s", "released %"], lines) if lines else ""


def state_table(rows: Iterable[Row]) -> str:
    """Return the table of a training's state, whose contents come back."""
    lines = []
    for method, row in _found(rows, "pause_state").items():
        rates = [row["nbytes"] / median(row[name][1:]) for name in ("pause_s", "resume_s")]
        links = [row["to_host_bytes_per_s"], row["from_host_bytes_per_s"]]
        lines.append([
            _name(method),
            f"{row['nbytes'] / GIB:.1f}",
            f"{row['blocks']:,}",
            f"{row['pause_s'][0]:.2f}",
            _seconds(row["pause_s"]),
            _seconds(row["resume_s"]),
            *(f"{100 * rate / link:.0f}" for rate, link in zip(rates, links, strict=True)),
            f"{100 * row['released_share']:.1f}",
        ])  # fmt: skip
    header = [
        "kept", "GiB", "tensors", "first pause s", "pause s", "resume s", "% of the link, to the host", "from the host",
        "released %",
    ]  # fmt: skip
    return table(header, lines) if lines else ""


def loop_table(rows: Iterable[Row]) -> str:
    """Return the table of the loop of training and generation."""
    everything = list(rows)
    lines = []
    for paused in (False, True):
        for method, row in _found(everything, "pause_loop", paused=paused).items():
            lines.append([
                _name(method) if paused else f"{method}, no pauses",
                f"{row['cycles']}",
                f"{row['peak_used_bytes'] / GIB:.1f}",
                f"{1e3 * row['cycle_s']:.0f}",
                f"{row['device_growth_bytes'] / 2**20:.0f}",
                f"{row['host_growth_bytes'] / 2**20:.0f}",
            ])  # fmt: skip
    header = ["loop", "cycles", "peak in use GiB", "cycle ms", "device growth MiB", "host growth MiB"]
    return table(header, lines) if lines else ""


NOTE = (
    "dropped, kept: one process for each method; medians after the first cycle. by hand: plain PyTorch, each storage "
    "copied to pinned memory, freed and allocated again. kept: parameters and AdamW's state of a mixture of experts; "
    "all bytes are compared afterwards. first pause: includes pinning host memory. % of the link: contents over the "
    "time, as a share of the rate at which one copy of 1 GiB between device and pinned memory ran in the same process. "
    "released: of the bytes reserved for the tag, by cudaMemGetInfo. loop: a decoder of 12 layers of 1536 trains on 8 "
    "x 1024 tokens, then fills a cache of 40 GiB and generates; AdamW's state and the cache are paused by turns. "
    "growth: between the sixth cycle and the last."
)


def pausing_table(rows: Iterable[Row]) -> str:
    """Return the tables of pausing."""
    everything = list(rows)
    parts = [part(everything) for part in (drop_table, state_table, loop_table)]
    if not any(parts):
        return ""
    mine = [row for row in on_gpu(everything) if row["workload"] in WORKLOADS]
    measured = list(latest(select(mine, status="ok"), "workload", "method", "paused").values())
    failed = latest(mine, "workload", "method").values()
    return section(*parts, NOTE, conditions(measured), reasons(failed))


def loop_lines(rows: Iterable[Row]) -> dict[str, Row]:
    """Return the rows of the picture: the loop natively without pauses, and with ours; empty where one is missing."""
    everything = list(rows)
    found = {
        "native, no pauses": _found(everything, "pause_loop", paused=False).get(NATIVE),
        "pyactcomp": _found(everything, "pause_loop", paused=True).get(OURS),
    }
    return {name: row for name, row in found.items() if row is not None} if all(found.values()) else {}


TABLES = {"alloc-pause": ("alloc", pausing_table)}
