"""The tables of training steps, and the bars that are set for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from . import untuned_report
from .measure import CPUS_TRIED
from .rows import GIB, NOT_APPLICABLE, Row, select
from .tables import conditions, figure, latest, on_gpu, on_gpus, reasons, section, table

TITLES = {
    "bert_large_amp": "BERT-large", "llama_1b_bf16": "Llama, 1.2 B", "gpt2_medium_amp": "GPT-2 medium",
    "swin_base_amp": "Swin-B", "resnet50_tf32": "ResNet-50", "plain_gpt_amp": "GPT, hand-written",
    "plain_vit_amp": "ViT-L, hand-written",
}  # fmt: skip
METHOD_ORDER = (
    "vanilla", "vanilla-again", "lossless", "int8", "int8-attention", "int8+offload", "int8-nohead", "int8-unfused",
    "int8-g128", "int8+ckpt", "ckpt", "ckpt2", "liger", "liger+ckpt", "compile", "compile+int8", "compile+int8+head",
    "compile+lossless", "compile0.5", "compile0.3", "compile+int8+budget", "compile-fp8-e4m3", "compile-fp8-e5m2",
    "compile-blocks", "compile-blocks+int8", "save_on_cpu",
)  # fmt: skip
WORKLOAD_ORDER = tuple(TITLES)
SPREAD = 0.05
"""Of the median: steps that differ by more are shown with how much. Where the GPU sets the time they differ by 1 %."""
RATIOS = {"time_x": "median_ms", "act_x": "act_bytes", "peak_x": "peak_minus_base_bytes"}


def rank(order: Sequence[str], name: str) -> tuple[int, str]:
    """Return a key that sorts names by their place in ``order``, and what is not there behind it."""
    return (order.index(name) if name in order else len(order), name)


def latest_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the latest row of every tuned workload and method, in reading order, with its ratios to vanilla.

    A ratio is taken to the vanilla row of the same run and to no other: ``time_x``, ``act_x``, ``peak_x``.
    """
    measured = on_gpu(row for row in rows if row["workload"] not in untuned_report.TITLES)
    result = []
    for row in latest(measured, "workload", "method").values():
        vanilla = select(measured, run=row["run"], method="vanilla", status="ok")
        counted = row["status"] == "ok" and vanilla
        ratios = {ratio: row[name] / vanilla[-1][name] for ratio, name in RATIOS.items() if counted and name in row}
        result.append({**row, **ratios})
    return sorted(result, key=lambda r: (rank(WORKLOAD_ORDER, r["workload"]), rank(METHOD_ORDER, r["method"])))


def _time(row: Row) -> str:
    """Return the median step, with the range of most steps where it is wide."""
    if row["status"] != "ok":
        return str(row["status"])
    text = figure(row, "median_ms", ".1f")
    if row["p80_ms"] - row["p20_ms"] > SPREAD * row["median_ms"]:
        text += f" ({row['p20_ms']:.0f} to {row['p80_ms']:.0f})"
    return text


def steps_table(rows: Iterable[Row]) -> str:
    """Return the table of training steps."""
    found = [row for row in latest_rows(rows) if row["method"] in METHOD_ORDER]
    if not found:
        return ""
    lines = []
    previous = None
    for row in found:
        if row["status"] == NOT_APPLICABLE:
            continue
        error = figure(row, "grad_error", ".2%")
        if error:
            error += f" (vanilla {figure(row, 'grad_error_vanilla', '.1e')})"
        lines.append([
            f"`{row['workload']}`" if row["workload"] != previous else "",
            row["method"],
            _time(row),
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
        "Step: median after 3 warm-up steps, each step on the quickest of "
        f"{CPUS_TRIED} CPUs just before. In brackets: the 20th and 80th percentile, where they lie more than "
        f"{SPREAD:.0%} of the median apart because the step waits for the host. Every ratio is to the vanilla step of "
        "the same run; `vanilla-again` shows that run's drift. act: bytes that the forward allocates. peak - base: "
        "peak above weights and optimizer state. gradient error: relative L2 over all gradients of step 1, beside the "
        "error of vanilla against vanilla."
    )
    return section(table(header, lines), note, _hosts(found), conditions(found), reasons(found))


def _hosts(rows: Iterable[Row]) -> str:
    """Return how fast Python ran beside the steps, where that differs."""
    loops = sorted(row["host_loop_ms"] for row in rows if "host_loop_ms" in row)
    if not loops or loops[-1] - loops[0] <= SPREAD * loops[0]:
        return ""
    return (
        f"A fixed loop of Python beside these steps took from {loops[0]:.0f} to {loops[-1]:.0f} ms: so far apart were "
        "the hosts, and some steps wait for their host."
    )


@dataclass(frozen=True)
class Bar:
    """The most that a figure of a method may be on each workload; a ratio to ``against``'s where that is named."""

    what: str
    method: str
    figure: str
    most: dict[str, float]
    against: dict[str, str] = field(default_factory=dict)
    form: str = ".3f"

    def value(self, workload: str, found: dict[tuple[str, str], Row]) -> float | None:
        """Return what is held against the bar; None where a figure for it is missing."""
        value: float | None = found.get((workload, self.method), {}).get(self.figure)
        if value is None or not self.against:
            return value
        other: float | None = found.get((workload, self.against[workload]), {}).get(self.figure)
        return None if other is None else value / other


def _on(*most: float) -> dict[str, float]:
    """Return the limits of the first workloads, in their order."""
    return dict(zip(WORKLOAD_ORDER, most, strict=False))


_CHECKPOINTED = {"bert_large_amp": "ckpt", "llama_1b_bf16": "liger+ckpt", "gpt2_medium_amp": "ckpt"}
BARS = (
    Bar("lossless: gradient tensors that differ in any bit", "exact", "differing", _on(0, 0, 0, 0, 0), form=".0f"),
    Bar("lossless: act, x vanilla", "lossless", "act_x", _on(0.62, 0.58, 0.62)),
    Bar("lossless: step, x vanilla", "lossless", "time_x", _on(1.04, 1.04, 1.04, 1.04, 1.04)),
    Bar("int8: act, x vanilla", "int8", "act_x", _on(0.27, 0.20, 0.27, 0.27, 0.25)),
    Bar("int8: step, x vanilla", "int8", "time_x", _on(1.04, 0.87, 1.04, 1.04, 1.08)),
    Bar("int8: peak - base, x vanilla", "int8", "peak_x", _on(0.35, 0.25, 0.30, 0.30, 0.28)),
    Bar("int8: gradient error", "int8", "grad_error", _on(0.02, 0.02, 0.02, 0.02, 0.02), form=".2%"),
    Bar("int8+ckpt: peak - base, x ckpt (llama: x liger+ckpt)", "int8+ckpt", "peak_x", _on(0.75, 0.75, 0.75),
        _CHECKPOINTED),
    Bar("int8+ckpt: step, x ckpt (llama: x liger+ckpt)", "int8+ckpt", "time_x", _on(1.0, 1.0, 1.0), _CHECKPOINTED),
)  # fmt: skip


def _verdict(bar: Bar, workload: str, found: dict[tuple[str, str], Row]) -> tuple[str, str]:
    """Return "met", "missed", "not measured" or, where the bar does not count, nothing; and the cell's text."""
    if workload not in bar.most:
        return "", ""
    if differing := found.get((workload, bar.method), {}).get("vanilla_differing"):
        return "", f"two vanilla runs differ in {differing}"
    value = bar.value(workload, found)
    if value is None:
        return "not measured", "not measured"
    limit = format(bar.most[workload], bar.form)
    if value <= bar.most[workload]:
        return "met", f"{format(value, bar.form)} <= {limit}, met"
    return "missed", f"**{format(value, bar.form)} > {limit}, missed**"


def bars_table(rows: Iterable[Row]) -> str:
    """Return the table of bars: what was asked, what was measured, and whether it is met."""
    concerned = {bar.method for bar in BARS} | set(_CHECKPOINTED.values())
    held = [row for row in latest_rows(rows) if row["method"] in concerned and row["status"] != NOT_APPLICABLE]
    if not held:
        return ""
    found = {(row["workload"], row["method"]): row for row in held if row["status"] == "ok"}
    barred = [workload for workload in WORKLOAD_ORDER if any(workload in bar.most for bar in BARS)]
    verdicts = [[_verdict(bar, workload, found) for workload in barred] for bar in BARS]
    counts = Counter(verdict for line in verdicts for verdict, _ in line if verdict)
    lines = [[bar.what, *(text for _, text in line)] for bar, line in zip(BARS, verdicts, strict=True)]
    names = ["at most", *(f"`{workload}`" for workload in barred)]
    undetermined = "\n".join(
        f"- {row['workload']}, with warnings only: {row['nondeterministic']}"
        for row in held
        if row.get("nondeterministic")
    )
    summary = f"Of {counts.total()} bars {', '.join(f'{counts[v]} {v}' for v in ('met', 'missed', 'not measured'))}."
    return section(table(names, lines), summary, undetermined, conditions(held), reasons(held))


def front_table(rows: Iterable[Row]) -> str:
    """Return the table of the first page: ours beside plain PyTorch, with units, all rows measured at one commit."""
    found = [
        row for row in latest_rows(rows) if row["method"] == "int8" and row["workload"] in TITLES and "time_x" in row
    ]
    if not found:
        return ""
    counts = Counter(row["origin"]["commit"] for row in found)
    # Of commits that measured as many models, the one measured last.
    measured = max(found, key=lambda row: (counts[row["origin"]["commit"]], row["time"]))["origin"]
    shown = [row for row in found if row["origin"]["commit"] == measured["commit"]]
    lines = [
        [TITLES[row["workload"]], *(_change(row, ratio) for ratio in ("act_x", "peak_x", "time_x"))] for row in shown
    ]
    header = (f"{measured['device']}, one step", "activations", "peak above weights and optimizer", "step time")
    errors = [row["grad_error"] for row in shown]
    days = sorted({row["time"][:10] for row in shown})
    note = (
        "Plain PyTorch -> `compress`, with `fuse_head=True` for a language model. Gradients differ by "
        f"{min(errors):.1%} to {max(errors):.1%} of their norm. Measured with torch {measured['torch']} at commit "
        f"{measured['commit'][:10]} ({' to '.join(days)})."
    )
    return section(table(header, lines), note)


def _change(row: Row, ratio: str) -> str:
    """Return plain PyTorch's figure of the same run, and this row's."""
    ours = row[RATIOS[ratio]]
    plain = ours / row[ratio]
    if ratio == "time_x":
        return f"{plain:.0f} -> {ours:.0f} ms ({row[ratio]:.2f}x)"
    return f"{plain / GIB:.1f} -> {ours / GIB:.1f} GiB"


PEERS = ("liger", "liger+ckpt", "compile", "compile0.5", "compile-blocks", "save_on_cpu", "ckpt2")


def summary_table(rows: Iterable[Row]) -> str:
    """Return the table of ratios: ours, checkpointing and the quickest peer, against plain PyTorch."""
    found = {(row["workload"], row["method"]): row for row in latest_rows(rows) if "time_x" in row}
    shown: list[Row] = []
    lines = []
    for workload, name in TITLES.items():
        if (workload, "vanilla") not in found or (workload, "int8") not in found:
            continue
        plain = found[workload, "vanilla"]
        size = [plain["median_ms"], plain["act_bytes"] / GIB, plain["peak_minus_base_bytes"] / GIB]
        cells = [name, "{:.0f} ms, {:.0f}, {:.0f} GiB".format(*size)]
        shown.append(plain)
        peers = [found[workload, peer] for peer in PEERS if (workload, peer) in found]
        for row in (found[workload, "int8"], found.get((workload, "ckpt")), min(peers, key=_ratio, default=None)):
            cells.append(_ratios(row))
            shown += [row] if row else []
        cells[-1] += f" ({shown[-1]['method']})" if peers else ""
        lines.append(cells)
    if not lines:
        return ""
    header = ("", "plain PyTorch", "pyactcomp int8", "checkpointing", "quickest peer")
    note = (
        "Each cell: step, activations, peak above weights and optimizer; absolute for plain PyTorch, multiples of "
        "plain PyTorch for the others. Quickest peer: the shortest step among " + ", ".join(PEERS) + "."
    )
    on = f"Measured on {shown[0]['origin']['device']}, torch {shown[0]['origin']['torch']}."
    return section(table(header, lines), f"{note} {on}")


def _ratio(row: Row) -> float:
    return float(row["time_x"])


def _ratios(row: Row | None) -> str:
    return "" if row is None else f"{row['time_x']:.2f}, {row['act_x']:.2f}, {row['peak_x']:.2f}"


def _compiled_alone(row: Row, compiled: Sequence[Row]) -> Row | None:
    """Return the row of the same compilation without us: of the same run, else of the commit, else the GPU's newest."""
    method = "compile-blocks" if row["method"].startswith("compile-blocks") else "compile"
    candidates = select(compiled, workload=row["workload"], method=method)
    same_gpu = select(candidates, gpu=row["gpu"])
    same_commit = [each for each in same_gpu if each["origin"]["commit"] == row["origin"]["commit"]]
    return next(reversed(select(candidates, run=row["run"]) or same_commit or same_gpu), None)


def _host_factor(row: Row, alone: Row, measured: Sequence[Row]) -> float:
    """Return how much slower plain training ran beside ``row`` than beside ``alone``; 1 if unknown."""
    plain = [select(measured, run=each["run"], method="vanilla", status="ok") for each in (row, alone)]
    return plain[0][-1]["median_ms"] / plain[1][-1]["median_ms"] if all(plain) else 1.0


def compiled_table(rows: Iterable[Row]) -> str:
    """Return the table of compiled training: each method against the same compilation without us, on every GPU."""
    measured = on_gpus(rows)
    compiled = [row for row in select(measured, status="ok") if row["method"].startswith("compile")]
    newest = latest(compiled, "gpu", "workload", "method")
    order = sorted(newest, key=lambda key: (key[0], rank(WORKLOAD_ORDER, key[1]), rank(METHOD_ORDER, key[2])))
    lines, shown, previous = [], [], ("", "")
    for gpu, workload, method in order:
        row = newest[gpu, workload, method]
        alone = _compiled_alone(row, compiled)
        if alone is None or method == alone["method"]:
            continue
        shown += [alone, row]
        ratios = [row[name] / alone[name] for name in RATIOS.values()]
        ratios[0] /= _host_factor(row, alone, measured)
        begun = [figure(each, "first_step_s", ".0f") for each in (row, alone)]
        lines.append([
            gpu if gpu != previous[0] else "",
            f"`{workload}`" if (gpu, workload) != previous else "",
            method,
            *(format(ratio, ".3f") for ratio in ratios),
            figure(row, "grad_error", ".2%"),
            " / ".join(begun) if all(begun) else "",
        ])  # fmt: skip
        previous = gpu, workload
    if not lines:
        return ""
    header = ("GPU", "workload", "method", "step", "act", "peak - base", "gradient error", "first step s")
    note = (
        "Step, act and peak - base as multiples of the same compilation without pyactcomp, whole or by blocks, in the "
        "same run, at the same commit or in the GPU's newest run. Steps of two runs are first divided by their runs' "
        "plain training. First step: with the method / without it; under 20 s graphs came from a cache."
    )
    return section(table(header, lines), note, conditions(shown))


TABLES = {
    "frontier": ("frontier", steps_table),
    "frontier-compiled": ("frontier", compiled_table),
    "frontier-front": ("frontier", front_table),
    "frontier-summary": ("frontier", summary_table),
    "frontier-bars": ("frontier", bars_table),
}
"""The suite and the table of each block."""
