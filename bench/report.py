"""Tables and plots from the JSON files alone: nothing is measured here, nothing averaged across runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from . import alloc_report, alloc_traces
from .rows import Row, quantile, select
from .tables import conditions, figure, latest, load, on_cpu, on_gpu, reasons, section, table

GIB = 2**30
METHOD_ORDER = (
    "vanilla", "vanilla-again", "int8", "int8-g128", "int8-triton", "int8+ckpt", "ckpt", "ckpt2", "naive8",
    "save_on_cpu",
)  # fmt: skip
SHORT = ("vanilla", "int8", "ckpt2", "ckpt")
WORKLOAD_ORDER = ("bert_large_amp", "llama_1b_bf16", "gpt2_medium_amp", "swin_base_amp", "resnet50_tf32")


def _rank(order: Sequence[str], name: str) -> tuple[int, str]:
    return (order.index(name) if name in order else len(order), name)


def step_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the latest row of every workload and method, in reading order, with its ratios to vanilla.

    A ratio is taken to the vanilla row of the same run and to no other: ``time_x``, ``act_x``, ``peak_x``.
    """
    measured = on_gpu(rows)
    result = []
    for row in latest(measured, "workload", "method").values():
        ratios: Row = {}
        vanilla = select(measured, run=row["run"], method="vanilla", status="ok")
        if row["status"] == "ok" and vanilla:
            for ratio, figure in (("time_x", "median_ms"), ("act_x", "act_bytes"), ("peak_x", "peak_minus_base_bytes")):
                ratios[ratio] = row[figure] / vanilla[-1][figure]
        result.append({**row, **ratios})
    return sorted(
        result, key=lambda r: (_rank(WORKLOAD_ORDER, r["workload"]), _rank(METHOD_ORDER, r["method"]))
    )  # fmt: skip


def step_table(rows: Iterable[Row], methods: Sequence[str] = METHOD_ORDER) -> str:
    """Return the table of training steps."""
    found = [row for row in step_rows(rows) if row["method"] in methods]
    if not found:
        return ""
    lines = []
    previous = None
    for row in found:
        time = figure(row, "median_ms", ".1f") if row["status"] == "ok" else row["status"]
        error = figure(row, "grad_error", ".2%")
        if error:
            error += f" (vanilla {figure(row, 'grad_error_vanilla', '.1e')})"
        lines.append([
            f"`{row['workload']}`" if row["workload"] != previous else "",
            row["method"],
            time,
            figure(row, "time_x", ".2f"),
            figure(row, "act_bytes", ".2f", GIB),
            figure(row, "act_x", ".2f"),
            figure(row, "peak_minus_base_bytes", ".2f", GIB),
            figure(row, "peak_x", ".2f"),
            error,
        ])  # fmt: skip
        previous = row["workload"]
    header = (
        "workload", "method", "step ms", "x vanilla", "act GiB", "x", "peak - base GiB", "x", "gradient error"
    )  # fmt: skip
    note = (
        "Median of the steps after 3 warm-up steps; every ratio is to the vanilla step of the same run, and "
        "`vanilla-again` shows that run's drift. act: allocated by the forward; peak - base: above weights and "
        "optimizer state; gradient error: relative L2 over all gradients of step 1, beside vanilla against vanilla."
    )
    return section(table(header, lines), note, conditions(found), reasons(found))


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
    note = "Bytes moved over time, as a share of the copy's in the same rounds (* where the copies themselves varied)."
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
    header = ["workload", "method", "pack us", "unpack us", "sum us", "of it: allocate", "encode", "decode"]
    lines = [[row["workload"], row["method"], *(figure(row, name, ".1f") for name in names)] for row in found]
    return section(table(header, lines), "Host time per saved tensor, eager, median.", conditions(found))


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
        for method, run in sorted(methods.items(), key=lambda item: _rank(METHOD_ORDER, item[0])):
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


def short_step_table(rows: Iterable[Row]) -> str:
    """Return the table of training steps with the methods that a reader compares first."""
    return step_table(rows, SHORT)


TABLES = {
    "step": ("step", step_table),
    "step-short": ("step", short_step_table),
    "codec": ("codec", codec_table),
    "overhead": ("overhead", overhead_table),
    "batch": ("batch", batch_table),
    **alloc_report.TABLES,
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


def run(out: Path, readme: Path, docs: Path) -> None:
    """Fill the README's blocks and draw the plots, from what was measured; print each table."""
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

    from . import plots

    if steps := [row for row in step_rows(load(out, "step")) if "time_x" in row]:
        plots.step_time_vs_peak(steps, docs / "step_time_vs_peak.png")
    if points := batch_points(load(out, "batch")):
        plots.throughput_vs_batch(points, docs / "throughput_vs_batch.png")
    if bars := alloc_report.training_bars(load(out, "alloc"), tuple(plots.ALLOCATORS)):
        plots.allocator_training(bars, docs / "allocator_training.png")
    if lines := alloc_report.timeline(load(out, "alloc")):
        plots.allocator_timeline(lines, alloc_traces.PICTURED, docs / "allocator_timeline.png")
