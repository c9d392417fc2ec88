"""The tables of the suite `alloc`, and the figures of its pictures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from .alloc_held_out import TRAININGS
from .alloc_methods import METHODS, NATIVE, OURS
from .alloc_pairs import THREADS
from .alloc_prediction import workload_of
from .alloc_traces import GROWTH, PICTURED
from .alloc_workloads import WORKLOADS
from .rows import GIB, Row, quantile, select
from .tables import conditions, figure, latest, on_gpu, reasons, section, table

MIB = 2**20
CASE = ("workload", "call", "nbytes", "threads")
"""What two rows of different methods must share to be compared, besides the run and the round."""
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Two-sided 95 % quantiles of Student's t, by degrees of freedom from 1."""

Rounds = dict[tuple[Any, ...], list[Row]]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half of its 95 % interval, infinite for a single value."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, math.inf
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return mean, T95[min(len(values) - 1, len(T95)) - 1] * deviation / math.sqrt(len(values))


def rounds(rows: Iterable[Row], workloads: Iterable[str], ratios: dict[str, tuple[str, str]]) -> Rounds:
    """Return the latest rows of the workloads' rounds, by (method, *case), in reading order.

    ``ratios`` names what to add to each row: its own figure over one of native's, of the same run and round.
    """
    known = list(workloads)
    measured = [row for row in on_gpu(rows) if row["workload"] in known and row["status"] == "ok"]
    case = {id(row): tuple(row.get(name, "") for name in CASE) for row in measured}
    natives = {(row["run"], row["round"], case[id(row)]): row for row in measured if row["method"] == NATIVE}
    found: Rounds = {}
    for row in latest(measured, "method", "round", *CASE).values():
        native = natives.get((row["run"], row["round"], case[id(row)]))
        added = {name: row[own] / native[theirs] for name, (own, theirs) in ratios.items()} if native else {}
        found.setdefault((row["method"], *case[id(row)]), []).append({**row, **added})
    order = list(METHODS)
    return dict(sorted(found.items(), key=lambda item: (known.index(item[0][1]), order.index(item[0][0]))))


def _failed(rows: Iterable[Row], workloads: Iterable[str]) -> str:
    """Return the reasons of methods that have no row that is newer and better."""
    known = list(workloads)
    return reasons(latest([row for row in on_gpu(rows) if row["workload"] in known], "workload", "method").values())


def _median(found: Iterable[Row], name: str) -> float | None:
    values = [row[name] for row in found if row.get(name) is not None]
    return quantile(values, 0.5) if values else None


def _cell(value: float | None, form: str, scale: float = 1.0) -> str:
    return figure({"it": value}, "it", form, scale)


def _size(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes >> 10} KiB"


COLUMNS = {
    "pair": (("raw", 0, "alloc + delete"), ("empty", 0, "torch.empty")),
    "threads": tuple(("native", n, "1 thread" if n == 1 else f"{n} threads") for n in THREADS),
    "share": (("send", 0, "describe"), ("open", 0, "open and read")),
}
"""Of the tables: call, threads, and what the column is called."""
UNITS = {"pair": ("ns a pair", 1.0), "threads": ("ns a pair", 1.0), "share": ("us", 1e3)}


def pair_table(rows: Iterable[Row]) -> str:
    """Return the tables of what an allocation and its free cost, and what a tensor's way to another process does."""
    everything = list(rows)
    found = rounds(everything, COLUMNS, {"x": ("median_ns", "median_ns")})
    parts = []
    for kind, columns in COLUMNS.items():
        keys = dict.fromkeys((nbytes, method) for method, workload, _, nbytes, _ in found if workload == kind)
        lines = []
        for nbytes, method in sorted(keys, key=lambda key: key[0]):
            cells = []
            for call, threads, _ in columns:
                own = found.get((method, kind, call, nbytes, threads), [])
                best = min((row["best_ns"] for row in own), default=None)
                times = [_cell(value, ".0f", UNITS[kind][1]) for value in (_median(own, "median_ns"), best)]
                cells += [*times, _cell(_median(own, "x"), ".2f")]
                if kind == "threads":
                    cells.append(_cell(_median(own, "operations_per_s"), ".2f", 1e6))
            lines.append([_size(nbytes), method, *cells])
        header = ["size", "method"]
        for _, _, name in columns:
            header += [
                f"{name}: {UNITS[kind][0]}",
                "best",
                "x native",
                *(["M operations/s"] if kind == "threads" else []),
            ]
        if lines:
            parts.append(table(header, lines))
    if not parts:
        return ""
    note = (
        "Hot; median over the rounds, one process per round. x native: median of the ratios to the native process of "
        "the same round. alloc + delete: torch's own interface to its allocator, from Python. Threads are native, hold "
        "no interpreter lock and use one stream each; ns a pair is per thread, operations/s is over all threads."
    )
    if any(workload == "share" for _, workload, *_ in found):
        note += (
            " Describe, open and read: a new tensor's first use in another process, the sender's part and the "
            "receiver's."
        )
    measured = [row for own in found.values() for row in own]
    return section(*parts, note, conditions(measured), _failed(everything, COLUMNS))


TRAINING_RATIOS = {
    "reserved_x": ("peak_reserved_bytes", "peak_allocated_bytes"),
    "step_x": ("mean_ms", "mean_ms"),
}


def training_table(rows: Iterable[Row]) -> str:
    """Return the table of the dynamic-shape trainings."""
    everything = list(rows)
    found: dict[tuple[object, ...], list[Row]] = {}
    for name in TRAININGS:  # each on the GPU that measured it last
        found |= rounds(select(everything, workload=name), TRAININGS, TRAINING_RATIOS)
    if not found:
        return ""
    lines = []
    previous = None
    for (method, workload, *_), own in found.items():
        ratios = [row["step_x"] for row in own if "step_x" in row]
        mean, half = interval(ratios) if ratios else (None, math.inf)
        reserved = max(row["peak_reserved_bytes"] for row in own)
        lines.append([
            f"`{workload}`" if workload != previous else "",
            method,
            _cell(max(row["peak_allocated_bytes"] for row in own), ".2f", GIB),
            _cell(reserved, ".2f", GIB),
            _cell(max((row["reserved_x"] for row in own if "reserved_x" in row), default=None), ".3f"),
            _cell(_median(own, "utilization"), ".3f"),
            _cell(quantile([row["drop_bytes"] / row["growth_bytes"] for row in own], 0.5), ".3f"),
            _cell(max((row["retries"] or 0 for row in own), default=None), ".0f"),
            _cell(_median(own, "mean_ms"), ".1f"),
            "" if mean is None else f"{mean:.3f}" + (f" ± {half:.3f}" if math.isfinite(half) else ""),
            _cell(_median(own, "driver_calls"), ".0f"),
            _cell(_median(own, "driver_s"), ".1f", 1e-3),
        ])  # fmt: skip
        previous = workload
    header = (
        "workload", "method", "allocated GiB", "reserved GiB", "reserved / native allocated", "utilisation",
        "drop / reserved", "retries", "step ms", "x native", "driver calls", "driver ms",
    )  # fmt: skip
    counts = sorted({len(own) for own in found.values()})
    note = (
        f"{' or '.join(map(str, counts))} interleaved runs each, one process per run, with the same seeds. Peaks: the "
        "worst run. reserved / native allocated: over the native peak allocated in the same round. utilisation: peak "
        "active over peak reserved. drop / reserved: the drop of cudaMemGetInfo's free bytes during the run, over the "
        "bytes that the allocator reports as reserved meanwhile. step ms: mean of the steps after the first 5, growth "
        "included. x native: mean of the rounds' ratios and the 95 % interval of the mean. driver ms: pyactcomp by its "
        "own clock, native by acquiring the same segments again after the run."
    )
    devices = {str(key[1]): own[-1]["origin"]["device"] for key, own in found.items()}
    described = "\n".join(f"- `{name}`, {device}: {TRAININGS[name].conditions}" for name, device in devices.items())
    measured = [row for own in found.values() for row in own]
    return section(table(header, lines), note, described, conditions(measured), _failed(everything, TRAININGS))


BARS = {NATIVE: 0.0, OURS: 0.005}
"""The largest error of a prediction that was aimed at, as a share of what the real run reserved."""


def prediction_table(rows: Iterable[Row]) -> str:
    """Return the table of what replays of recorded runs predict, beside what real runs reserved."""
    everything = list(rows)
    known = list(map(workload_of, TRAININGS))
    found = rounds(everything, known, {})
    if not found:
        return ""
    lines = []
    previous = None
    for (method, workload, *_), own in found.items():
        worst = max(own, key=lambda row: abs(row["error"]))
        error = f"{100 * worst['error']:+.3f}" if worst["error"] else "exact"
        lines.append([
            f"`{workload.removeprefix('prediction/')}`" if workload != previous else "",
            method,
            _cell(worst["predicted_reserved_bytes"], ".3f", GIB),
            _cell(worst["peak_reserved_bytes"], ".3f", GIB),
            f"**{error}**" if abs(worst["error"]) > BARS.get(method, math.inf) else error,
            f"{worst['events']:,}",
            _cell(_median(own, "replay_s"), ".3f"),
        ])  # fmt: skip
        previous = workload
    header = ("workload", "method", "predicted GiB", "real GiB", "error %", "events", "replay s")
    counts = sorted({len(own) for own in found.values()})
    note = (
        f"Peak reserved; {' or '.join(map(str, counts))} rounds, the one with the largest error shown. In each round a "
        "process under the native allocator records itself; the replay of that recording predicts the peak of each "
        "allocator, and a process of its own under each allocator measures the peak, native included. Bold: beyond "
        f"{BARS[OURS]:.1%} for {OURS}, or not exact for {NATIVE}."
    )
    measured = [row for own in found.values() for row in own]
    return section(table(header, lines), note, conditions(measured), _failed(everything, known))


def trace_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the latest replay of each trace under each growth."""
    replayed = [row for row in select(rows, scale="full") if row["workload"].startswith("trace/")]
    return sorted(
        latest(replayed, "workload", "method").values(), key=lambda r: (r["workload"], list(GROWTH).index(r["method"]))
    )


def traces_table(rows: Iterable[Row]) -> str:
    """Return the table of the replayed traces."""
    found = trace_rows(rows)
    fitting = [row for row in found if row["status"] == "ok"]
    if not found:
        return ""
    lines = []
    for row in fitting:
        allocated = row["recorded_allocated_bytes"]
        lines.append([
            f"`{row['workload'].removeprefix('trace/')}`",
            f"{row['method']} ({row['growth']})",
            _cell(row["peak_reserved_bytes"], ".2f", GIB),
            _cell(row["peak_reserved_bytes"], ".3f", allocated),
            _cell(row["peak_reserved_bytes"], ".3f", row["peak_allocated_bytes"]),
            f"{fmean(row['resized_ratios']):.3f}, {max(row['resized_ratios']):.3f}",
            _cell(row["recorded_reserved_bytes"], ".3f", allocated),
            _cell(row["expandable_reserved_bytes"], ".3f", allocated) or "not run",
            _cell(row["driver_s"], ".1f", 1e-3),
            _cell(row["recorded_driver_s"], ".1f", 1e-3),
            _cell(row["created"], ".0f"),
            _cell(row["pieces_moved"], ".0f"),
        ])  # fmt: skip
    header = (
        "trace", "method", "reserved GiB", "reserved / allocated", "/ replay's allocated", "other sizes: mean, worst",
        "native, recorded", "expandable, recorded",
        "driver ms", "native's driver ms", "created", "moved",
    )  # fmt: skip
    note = (
        "reserved: peak of a replay on the simulated device. reserved / allocated: that peak over the peak allocated "
        "that the recorded run measured, on an H200 under the native allocator; then over the replay's own peak. other "
        "sizes: reserved over the replay's allocated with all sizes above 1 MiB times one of nine factors from 0.8 to "
        "2.1. recorded: the first ratio in the "
        "recorded run, and in a run with expandable_segments. driver ms: estimated from the measured cost of each "
        "call; for native, 60 us a segment. created: handles or segments. moved: handles mapped elsewhere instead of "
        "asking the driver for new ones."
    )
    return section(table(header, lines), note, conditions(found), reasons(found))


def front_line(rows: Iterable[Row]) -> str:
    """Return the sentence of the first page: what the pictured trace reserves under PyTorch's allocator and ours."""
    found = {row["method"]: row for row in trace_rows(rows) if row["workload"] == f"trace/{PICTURED}"}
    ours = found.get(OURS)
    if ours is None or ours["status"] != "ok":
        return ""
    native, reserved = ours["recorded_reserved_bytes"] / GIB, ours["peak_reserved_bytes"] / GIB
    return (
        f"A fine-tuning with random sequence lengths, recorded on an H200, reserves {native:.1f} GiB under PyTorch's "
        f"allocator; a replay of the recording under this one reserves {reserved:.1f} GiB."
    )


def training_bars(rows: Iterable[Row], methods: Sequence[str]) -> dict[str, dict[str, Row]]:
    """Return for each workload and method the worst reserved over native's allocated, and the step ratio's interval."""
    bars: dict[str, dict[str, Row]] = {}
    for (method, workload, *_), own in rounds(rows, WORKLOADS, TRAINING_RATIOS).items():
        paired = [row for row in own if "step_x" in row]
        if method not in methods or not paired:
            continue
        mean, half = interval([row["step_x"] for row in paired])
        bars.setdefault(workload, {})[method] = {
            "reserved_x": max(row["reserved_x"] for row in paired),
            "step_x": mean,
            "step_x_half": half if math.isfinite(half) else 0.0,
            "device": own[-1]["origin"]["device"],
        }
    return bars


def timeline(rows: Iterable[Row]) -> dict[str, list[int]]:
    """Return what the pictured trace requested, and what native's decisions and ours reserved for it."""
    found = {row["method"]: row for row in trace_rows(rows) if row["status"] == "ok" and row.get("timeline")}
    if not {OURS, "pyactcomp-malloc"} <= found.keys():
        return {}
    return {
        "requested": found[OURS]["timeline"]["requested"],
        "native": found["pyactcomp-malloc"]["timeline"]["reserved"],
        "pyactcomp": found[OURS]["timeline"]["reserved"],
    }


TABLES = {
    "alloc-pair": ("alloc", pair_table),
    "alloc-training": ("alloc", training_table),
    "alloc-traces": ("alloc", traces_table),
    "alloc-front": ("alloc", front_line),
    "alloc-prediction": ("alloc", prediction_table),
}
