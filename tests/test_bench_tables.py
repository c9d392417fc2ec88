"""Tables of the benches of the allocator, of whole trainings and of architectures, drawn from rows."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from bench_cases import ORIGIN as CPU

from bench import (
    alloc_pairs,
    alloc_pausing_report,
    alloc_report,
    alloc_share,
    alloc_traces,
    breadth_report,
    context,
    context_report,
    holds_report,
    holds_training,
    pairs,
    pairs_report,
    plan,
    plots,
    report,
    rows,
    sharded,
)
from bench.context_methods import METHODS
from bench.overhead import CHAIN

ORIGIN = {**CPU, "device": "NVIDIA H200", "driver": "580", "torch": "2.11.0"}
GIB = 2**30
MOE = "prediction/moe"


def row_of(workload: str, method: str, number: int = 0, run: str = "r", **fields: Any) -> rows.Row:
    return {
        "suite": "alloc", "run": run, "round": number, "workload": workload, "method": method, "scale": "full",
        "status": "ok", "time": "2026-01-02T03:04:05+00:00", "origin": ORIGIN, **fields,
    }  # fmt: skip


def training_row(method: str, number: int, ms: float, reserved: float, run: str = "r", **fields: Any) -> rows.Row:
    figures = {
        "mean_ms": ms, "peak_reserved_bytes": int(reserved * GIB), "peak_allocated_bytes": 10 * GIB,
        "utilization": 0.5, "drop_bytes": 101, "growth_bytes": 100, "retries": 0, "driver_calls": 30, "driver_s": 0.002,
    }  # fmt: skip
    return row_of("graphs", method, number, run, **{**figures, **fields})


def test_interval_is_students_over_the_paired_ratios() -> None:
    mean, half = alloc_report.interval([0.98, 1.01, 1.0, 0.99, 1.03])
    assert mean == pytest.approx(1.002, rel=1e-12)
    assert half == pytest.approx(2.776 * statistics.stdev([0.98, 1.01, 1.0, 0.99, 1.03]) / 5**0.5, rel=1e-12)
    assert alloc_report.interval([1.5]) == (1.5, float("inf"))


def test_training_table_pairs_the_rounds_of_one_run() -> None:
    found = [
        training_row("native", 0, 100.0, 20), training_row("pyactcomp", 0, 90.0, 10.1),
        training_row("native", 1, 200.0, 22), training_row("pyactcomp", 1, 220.0, 10.3),
        training_row("native", 2, 1000.0, 22, run="s"), training_row("pyactcomp", 3, 1.0, 5, run="s"),
    ]  # fmt: skip
    text = alloc_report.training_table(found)
    mean, half = alloc_report.interval([0.9, 1.1])
    assert (
        "| `graphs` | native | 10.00 | 22.00 | 2.200 | 0.500 | 1.010 | 0 | 200.0 | 1.000 ± 0.000 | 30 | 2.0 |" in text
    )
    assert (
        f"|  | pyactcomp | 10.00 | 10.30 | 1.030 | 0.500 | 1.010 | 0 | 90.0 | {mean:.3f} ± {half:.3f} | 30 | 2.0 |"
        in text
    )
    assert alloc_report.training_table([{**row, "scale": "tiny"} for row in found]) == ""


def test_training_table_lists_what_failed() -> None:
    found = [
        training_row("native", 0, 100.0, 20),
        {**training_row("pyactcomp", 0, 1.0, 1), "status": "error", "reason": "RuntimeError: wrong loss"},
    ]
    assert "- graphs pyactcomp: error (RuntimeError: wrong loss)" in alloc_report.training_table(found)


def test_pair_table_has_the_ratio_to_natives_same_round() -> None:
    found = []
    for number, drift in enumerate((1.0, 3.0)):
        for method, ns in (("native", 800.0), ("pyactcomp", 400.0)):
            for nbytes in alloc_pairs.SIZES:
                for workload, call, threads in (("pair", "raw", 0), ("threads", "native", 1), ("threads", "native", 2)):
                    median = drift * ns * max(threads, 1)
                    own = {"call": call, "nbytes": nbytes, "threads": threads, "median_ns": median, "best_ns": median}
                    own["operations_per_s"] = 2e9 * threads / median
                    found.append(row_of(workload, method, number, **own))
    for method, ns in (("native", 300_000.0), ("pyactcomp", 450_000.0)):
        for call in alloc_share.CALLS:
            own = {"call": call, "nbytes": 64 << 20, "threads": 0, "median_ns": ns, "best_ns": ns}
            found.append(row_of("share", method, 0, **own))
    text = alloc_report.pair_table(found)
    assert "| size | method | describe: us | best | x native | open and read: us | best | x native |" in text
    assert "| 64 MiB | pyactcomp | 450 | 450 | 1.50 | 450 | 450 | 1.50 |" in text
    assert "| size | method | alloc + delete: ns a pair | best | x native | torch.empty: ns a pair |" in text
    assert "| 4 KiB | native | 1600 | 800 | 1.00 |  |  |  |" in text
    assert "| 8 MiB | pyactcomp | 800 | 400 | 0.50 |  |  |  |" in text
    assert "| size | method | 1 thread: ns a pair | best | x native | M operations/s | 2 threads: ns a pair |" in text
    assert "| 8 MiB | pyactcomp | 800 | 400 | 0.50 | 3.33 | 1600 | 800 | 0.50 | 3.33 |  |  |  |  |" in text


def trace_row(method: str, reserved: int, name: str = alloc_traces.PICTURED) -> rows.Row:
    lines = {"requested": [0, 900, 500], "reserved": [0, reserved, reserved]}
    return row_of(
        f"trace/{name}", method, growth=alloc_traces.GROWTH[method], peak_reserved_bytes=reserved,
        recorded_allocated_bytes=1000, recorded_reserved_bytes=2160, expandable_reserved_bytes=None, driver_s=0.01,
        peak_allocated_bytes=1010, resized_ratios=[1.01, 1.03], recorded_driver_s=0.006, created=7, pieces_moved=2,
        timeline=lines, origin={**ORIGIN, "device": "cpu"},
    )  # fmt: skip


def test_traces_table_compares_with_the_recorded_peaks() -> None:
    text = alloc_report.traces_table([trace_row("pyactcomp-malloc", 2160), trace_row("pyactcomp", 1020)])
    for method, figures in (
        ("pyactcomp (vmm)", "1.020 | 1.010 | 1.020, 1.030"),
        ("pyactcomp-malloc (malloc)", "2.160 | 2.139 | 1.020, 1.030"),
    ):
        assert f"| `sft_varlen` | {method} | 0.00 | {figures} | 2.160 | not run | 10.0 | 6.0 | 7 | 2 |" in text


def test_report_fills_the_allocators_blocks_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = [trace_row("pyactcomp", 1020), trace_row("pyactcomp-malloc", 2160)]
    for number in range(3):
        found += [
            training_row("native", number, 100.0, 20),
            training_row("expandable", number, 103.0 + number, 12),
            training_row("pyactcomp", number, 99.0 + number, 10.2),
        ]
        own = {"call": "raw", "nbytes": 4096, "threads": 0, "median_ns": 700.0, "best_ns": 690.0}
        found.append(row_of("pair", "native", number, **own))
    (tmp_path / "alloc.json").write_text(json.dumps({"schema": 1, "rows": found}))
    readme = tmp_path / "README.md"
    blocks = ("alloc-pair", "alloc-training", "alloc-traces")
    readme.write_text("".join(f"<!-- bench:{block} -->\n<!-- /bench:{block} -->\n" for block in blocks))
    report.run(tmp_path, readme, tmp_path / "docs")
    text = readme.read_text()
    for line in (
        "| 4 KiB | native | 700 | 690 | 1.00 |",
        "| `graphs` | native |",
        "| `sft_varlen` | pyactcomp (vmm) |",
    ):
        assert line in text
    for name in ("allocator_training.png", "allocator_timeline.png"):
        assert (tmp_path / "docs" / name).read_bytes().startswith(b"\x89PNG")


def prediction_row(method: str, predicted: int, real: int, number: int = 0, **fields: Any) -> rows.Row:
    return {
        "suite": "alloc", "run": "r", "round": number, "workload": MOE, "method": method, "scale": "full",
        "status": "ok", "time": "2026-01-02T03:04:05+00:00", "origin": ORIGIN, "events": 93976, "replay_s": 0.0421,
        "predicted_reserved_bytes": predicted, "peak_reserved_bytes": real, "error": (predicted - real) / real,
        **fields,
    }  # fmt: skip


def test_table_shows_the_worst_round_and_what_is_beyond_the_bar() -> None:
    real = 1000 * GIB
    found = [
        prediction_row("native", real, real),
        prediction_row("expandable", 1010 * GIB, real),
        prediction_row("pyactcomp", 1005 * GIB, real),
        prediction_row("pyactcomp", 999 * GIB, real, 1),
    ]
    text = alloc_report.prediction_table(found)
    assert "| `moe` | native | 1000.000 | 1000.000 | exact | 93,976 | 0.042 |" in text
    assert "|  | expandable | 1010.000 | 1000.000 | +1.000 | 93,976 | 0.042 |" in text
    assert "|  | pyactcomp | 1005.000 | 1000.000 | +0.500 | 93,976 | 0.042 |" in text
    assert "Measured on NVIDIA H200; driver 580; torch 2.11.0; commit c0ffee; 2026-01-02; " in text
    assert "**" not in text

    beyond = [prediction_row("native", real + 1, real), prediction_row("pyactcomp", math.floor(0.9949 * real), real)]
    text = alloc_report.prediction_table([*found, *beyond])
    assert "| 1000.000 | **+0.000** |" in text
    assert "| **-0.510** |" in text


def pausing_row(workload: str, method: str, **fields: object) -> dict[str, object]:
    row = {"workload": workload, "method": method, "status": "ok", "scale": "full", "time": "2026-01-01T00:00:00+00:00"}
    return {**row, "origin": ORIGIN, **fields}


def test_tables_leave_the_first_cycle_out_and_the_picture_shows_both_ways(tmp_path: Path) -> None:
    timed = {"pause_s": [9.0, 0.2, 0.4], "resume_s": [9.0, 0.1, 0.1], "released_share": 0.995, "blocks": 5001}
    link = {"to_host_bytes_per_s": 50e9, "from_host_bytes_per_s": 40e9}
    ended = {
        "cycles": 50, "cycle_s": 0.25, "peak_used_bytes": 7 << 30,
        "device_growth_bytes": 0, "host_growth_bytes": 3 << 20,
        "samples": [[0.1 * i, (1 + i % 2) << 30, i % 2] for i in range(12)],
    }  # fmt: skip
    rows = [
        pausing_row("pause_drop", "pyactcomp", nbytes=60 << 30, **timed),
        pausing_row("pause_state", "native", nbytes=3e9, **timed, **link),
        pausing_row("pause_loop", "native", paused=False, **ended),
        pausing_row("pause_loop", "pyactcomp", paused=True, **ended),
    ]
    text = alloc_pausing_report.pausing_table(rows)
    for line in (
        "| pyactcomp | 60 | 0.300 | 0.100 | 99.5 |",
        "| by hand | 2.8 | 5,001 | 9.00 | 0.300 | 0.100 | 20 | 75 | 99.5 |",
        "| native, no pauses | 50 | 7.0 | 250 | 0 | 3 |",
        "| pyactcomp | 50 | 7.0 | 250 | 0 | 3 |",
    ):
        assert line in text
    assert alloc_pausing_report.loop_lines(rows[:3]) == {}
    lines = alloc_pausing_report.loop_lines(rows)
    plots.pausing_loop(lines, tmp_path / "loop.png")
    assert (tmp_path / "loop.png").read_bytes().startswith(b"\x89PNG")


def result(arm: str, seed: int, value: float | None, task: str = "byte_lm", **fields: Any) -> rows.Row:
    lower = task == "byte_lm"
    row = {
        "suite": "holds", "workload": task, "method": arm, "seed": seed, "scale": "full", "status": "ok",
        "metric": "validation bits per byte" if lower else "validation accuracy", "lower_is_better": lower,
        "value": value, "loss": value, "pair": f"p{seed}", "act_bytes": 100 if arm == "vanilla" else 25,
        "training_curve": [[10, 2.0], [20, value]], "validation_curve": [[20, value, value]],
        "time": "2026-01-02T03:04:05+00:00", "origin": ORIGIN,
    }  # fmt: skip
    return {**row, **fields}


def trained(arm: str, worse: list[float], task: str = "byte_lm") -> list[rows.Row]:
    """Return five runs of vanilla around 2 (0.98 for accuracy) and of an arm that is worse by these amounts."""
    level, sign = (2.0, 1) if task == "byte_lm" else (0.98, -1)
    base = [level + 0.1 * sign * offset for offset in (-0.2, -0.1, 0.0, 0.1, 0.2)]
    return [result("vanilla", seed, value, task) for seed, value in enumerate(base)] + [
        result(arm, seed, value + sign * more, task) for seed, (value, more) in enumerate(zip(base, worse, strict=True))
    ]


def one(found: list[rows.Row], arm: str) -> holds_report.Outcome:
    return next(outcome for outcome in holds_report.outcomes(found) if outcome.arm == arm)


def test_bound_is_the_one_sided_t_interval_of_five_pairs() -> None:
    # Mean 3, sample variance (4 + 1 + 0 + 1 + 4) / 4 = 2.5, standard error sqrt(2.5 / 5) = 0.70711; times 2.132.
    assert holds_report.upper_bound([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(3 + 2.132 * math.sqrt(0.5), rel=1e-12)
    # With 4 degrees of freedom Student's t has the distribution 1/2 + s (3 - s^2) / 4 with s = t / sqrt(t^2 + 4).
    s = holds_report.T95 / math.sqrt(holds_report.T95**2 + 4)
    # The quantile is rounded to 3 decimals, and the density there is below 0.06.
    assert 0.5 + s * (3 - s * s) / 4 == pytest.approx(0.95, abs=0.06 * 0.0005)
    assert holds_report.upper_bound([0.0, 0.0, 0.0, 0.0, math.inf]) == math.inf
    with pytest.raises(ValueError, match="5 pairs"):
        holds_report.upper_bound([1.0, 2.0])


@pytest.mark.parametrize("task", sorted(holds_training.TASKS))
def test_degradations_are_paired_and_relative_to_vanilla(task: str) -> None:
    worse = [0.001, 0.002, 0.003, 0.002, 0.002]
    outcome = one(trained("int8", worse, task), "int8")
    level = 2.0 if task == "byte_lm" else 0.98
    assert outcome.degradations == pytest.approx([value / level for value in worse], rel=1e-9)
    expected = [value / level for value in worse]
    half = 2.132 * statistics.stdev(expected) / math.sqrt(5)
    assert outcome.bound == pytest.approx(statistics.mean(expected) + half, rel=1e-9)
    assert outcome.act_x == 0.25
    assert outcome.verdict == "holds"


@pytest.mark.parametrize(
    ("arm", "worse", "verdict"),
    [
        ("int8", [0.009] * 5, "holds"),
        ("int8", [0.011] * 5, "not shown to hold"),
        ("int8", [-0.1, 0.1, 0.0, 0.05, -0.05], "not shown to hold"),  # no worse on average, but nobody can tell
        ("nearest2", [0.2] * 5, "fails, as it must"),
        ("nearest2", [0.0] * 5, "not told apart: the test shows nothing"),
        ("nearest2", [-0.1, 0.1, 0.0, 0.05, -0.05], "not told apart: the test shows nothing"),
    ],
)
def test_verdict_follows_the_bound(arm: str, worse: list[float], verdict: str) -> None:
    assert one(trained(arm, worse), arm).verdict == verdict


def test_diverged_arm_fails() -> None:
    found = [{**row, "value": None} if (row["method"], row["seed"]) == ("nearest2", 2) else row
             for row in trained("nearest2", [0.0] * 5)]  # fmt: skip
    assert one(found, "nearest2").verdict == "fails, as it must"
    assert "diverged" in holds_report.holds_table(found)
    fewer = [row for row in found if (row["method"], row["seed"]) != ("nearest2", 4)]
    assert one(fewer, "nearest2").verdict == "fails, as it must (4 of 5 seeds)"


def test_only_pairs_of_the_same_sources_count() -> None:
    found = trained("int8", [0.0] * 5)
    unpaired = [{**row, "pair": "other"} if (row["method"], row["seed"]) == ("int8", 0) else row for row in found]
    assert one(unpaired, "int8").verdict == "4 of 5 seeds"
    older = [{**row, "origin": {**ORIGIN, "sources": "s0"}} for row in trained("int8", [1.0] * 5)]
    assert one(older + found, "int8").mean == 0.0
    assert holds_report.outcomes([{**row, "scale": "tiny"} for row in found]) == []


def test_report_fills_the_block_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = []
    for task in holds_training.TASKS:
        found += trained("int8", [0.001] * 5, task)
        found += [row for row in trained("nearest2", [0.1] * 5, task) if row["method"] == "nearest2"]
    found[-1] = {**found[-1], "value": None, "training_curve": [[10, None], [20, None]],
                 "validation_curve": [[20, None, None]]}  # fmt: skip
    (tmp_path / "holds.json").write_text(json.dumps({"schema": 1, "rows": found}))
    readme = tmp_path / "README.md"
    readme.write_text("<!-- bench:holds -->\n<!-- /bench:holds -->\n")
    report.run(tmp_path, readme, tmp_path / "docs")
    text = readme.read_text()
    assert "|  | int8 | 2.0010 | 2.0010 | 0.25 | +0.05 % | +0.05 % | +0.50 % | holds |" in text
    assert "|  | nearest2 | 2.1000 | 2.1000 | 0.25 | +5.00 % | +5.00 % | +0.50 % | fails, as it must |" in text
    assert "NVIDIA H200; driver 580; torch 2.11.0; commit c0ffee" in text
    assert (tmp_path / "docs" / "training_holds.png").read_bytes().startswith(b"\x89PNG")


def pair_row(architecture: str, **fields: Any) -> rows.Row:
    found = {
        "library": "transformers", "architecture": architecture, "head": "CAUSAL_LM", "status": "ok", "tensors": 20,
        "lossless": 0, "lossless_dropout": 0, "int8": 0.01, "noise": 0.005, "int8_ckpt": 0.01, "int8_head": None,
        "ratio": 0.25, "kept": [["smaller than min_bytes", 2048]], "time": "2026-01-02", "origin": CPU,
    }  # fmt: skip
    return {**found, **fields}


ROWS = [
    pair_row("good"),
    pair_row("noisy", int8=0.05, noise=0.06),
    pair_row("wrong", int8=0.05, noise=0.03, ratio=0.35),
    pair_row("checkpointed", int8_ckpt=0.07, noise=0.03),
    pair_row("infinite", int8="inf", problems={"int8": "RuntimeError: it | failed"}),
    pair_row("bits", lossless=3, lossless_dropout=None),
    {**pair_row("absent"), "status": "not built", "reason": "ImportError: timm is not installed"},
]


def test_exceptions_are_those_above_their_limits() -> None:
    assert [found["architecture"] for found in ROWS[:-1] if breadth_report.exceptional(found)] == [
        "wrong", "checkpointed", "infinite", "bits"
    ]  # fmt: skip
    table = breadth_report.exceptions_table(ROWS)
    lines = [line.split("`")[1].split("/")[1] for line in table.splitlines() if "`" in line]
    assert lines == ["infinite", "checkpointed", "wrong", "bits"]
    assert "**not finite**" in table
    assert "3 of 20 differ |  |" in table
    assert "it \\| failed" in table


def test_families_are_counted() -> None:
    table = breadth_report.families_table(ROWS)
    line = next(line for line in table.splitlines() if "| causal LM |" in line)
    assert "| 7 | 6 | 5 of 6 | 1.00 % | **not finite** | 1.75 % | 2 | 1 of 6 | 0.25 |" in line
    assert breadth_report.failures_list(ROWS) == (
        "- `` not built: ImportError: timm is not installed ``: `transformers/absent/CAUSAL_LM`"
    )
    text = breadth_report.summary(ROWS)
    assert "7 pairs of 7 architectures; built: 6 of 6; median stored ratio 0.250" in text
    assert "lossless differs: 1\n  transformers/bits/CAUSAL_LM" in text
    assert breadth_report.families_table([]) == breadth_report.exceptions_table([]) == ""


def test_rows_of_earlier_sources_are_not_shown() -> None:
    old = pair_row("old", int8=0.9, origin={**CPU, "sources": "s0"})
    assert "old" not in breadth_report.exceptions_table([old, *ROWS])


CHAIN_FIGURES = ("us", "pack_us", "unpack_us", "nothing_ns")


def tree_row(workload: str, **fields: Any) -> rows.Row:
    figures = {"act_bytes": 2 * 2**30, "peak_minus_base_bytes": 3 * 2**30, "vanilla_act_bytes": 8 * 2**30}
    return {
        "suite": "pairs", "workload": workload, "method": "int8", "before_method": "int8", "scale": "full",
        "status": "ok", "ratios": [0.9, 1.1, 1.0], "ratio": 1.0, "spread": 1.02, "itself": 1.001,
        "before": {**figures, "grad_error": 0.01}, "after": {**figures, "act_bytes": 2**30, "grad_error": 0.02},
        "earlier": {"commit": "0123456789abcdef", "dirty": False, "sources": "s0"},
        "time": "2026-01-02T03:04:05+00:00", "origin": {**ORIGIN, "device": "NVIDIA H200"}, **fields,
    }  # fmt: skip


def test_commits_before_and_gpus_are_compared_apart(tmp_path: Path) -> None:
    first, second, third = (tree_row("bert_large_amp", ratio=ratio) for ratio in (1.0, 1.5, 2.0))
    second["earlier"] = {"commit": "fedcba9876", "dirty": False, "sources": "s1"}
    third["origin"] = {**third["origin"], "device": "NVIDIA H100"}
    steps = pairs_report.steps_table([first, second, third])
    assert "| 0123456 | NVIDIA H200 | `bert_large_amp` | int8 | 1.000 (" in steps
    assert "| fedcba9 | NVIDIA H200 | `bert_large_amp` | int8 | 1.500 (" in steps
    assert "| 0123456 | NVIDIA H100 | `bert_large_amp` | int8 | 2.000 (" in steps


def test_tables_show_both_sides(tmp_path: Path) -> None:
    series = {name: [1.0, 3.0, 4.0] for name in CHAIN_FIGURES}
    found = [
        tree_row("bert_large_amp"),
        tree_row("llama_1b_bf16", status="error", reason="before: broken"),
        tree_row(CHAIN, **{f"{side}_turns": series for side in pairs.SIDES}),
    ]
    (tmp_path / "pairs.json").write_text(json.dumps({"schema": 1, "rows": found}))
    steps = pairs_report.steps_table(rows.read(tmp_path / "pairs.json"))
    cells = "1.000 (0.900 to 1.100) | 1.020, 1.001 | 0.250 / 0.125 | 3.00 / 3.00 | 1.00% / 2.00% |"
    assert f"| 0123456 | NVIDIA H200 | `bert_large_amp` | int8 | {cells}" in steps
    assert "llama_1b_bf16 int8: error (before: broken)" in steps
    assert "Before: 0123456." in steps
    assert f"| {CHAIN} | NVIDIA H200 | nothing ns | 1.0 | 3.0 | 1.0 | 3.0 |" in pairs_report.overhead_table(found)


def measured_row(method: str, tokens: int, rate: float | None, **more: Any) -> dict[str, Any]:
    found = (
        {"status": "ok", "tokens_per_s": rate, "peak_bytes": 50 * rows.GIB, "host_bytes": 0}
        if rate
        else {"status": "oom"}
    )
    return {
        "suite": "context", "shape": "llama8b", "train": "full", "workload": f"llama8b-full-{tokens}", "tokens": tokens,
        "method": method, "scale": "full", "memory_gib": 80.0, "memory_bytes": 79 * rows.GIB, "optimizer": "torchao",
        "time": "2026-01-01T00:00:00+00:00", "origin": ORIGIN, **found, **more,
    }  # fmt: skip


def test_the_table_has_a_column_for_each_length_and_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    found = [
        measured_row("plain", 4096, 8000.0),
        measured_row("plain", 8192, None, reason="CUDA out of memory"),
        measured_row("int8+offload", 4096, 9000.0, host_bytes=12 * rows.GIB, grad_error=0.015),
        measured_row("int8+offload", 8192, 9500.0, peak_bytes=60 * rows.GIB),
        measured_row("trl", 4096, None, status="unavailable", reason="ModuleNotFoundError: No module named 'trl'"),
        {**measured_row("ckpt", 4096, 7000.0), "scale": "tiny"},
    ]
    text = context_report.context_table(found)
    assert "| Llama-3.1-8B, all weights, 8-bit AdamW | plain PyTorch | 8,000; 50.0 | no memory |" in text
    assert "|  | pyactcomp int8, offload | 9,000; 50.0 + 12 | 9,500; 60.0 |" in text
    assert "capped to 79 GiB" in text
    assert "8-bit AdamW: torchao" in text
    assert "pyactcomp int8, offload 1.50%" in text
    assert "trl: unavailable (ModuleNotFoundError: No module named 'trl')" in text
    assert "7,000" not in text
    context_report.draw(context_report.panels(found), tmp_path)
    assert (tmp_path / "long_contexts.png").stat().st_size > 10_000
    assert context_report.context_table([]) == ""
    assert set(context_report.COLOURS) <= set(METHODS)
    assert {*context.SHAPES, *context.TRAINS} == set(context_report.TITLES)


def test_sharded_steps_stand_beside_the_same_without_us() -> None:
    origin = {"commit": "c0ffee", "device": "NVIDIA H200", "command": "python -m bench sharded", "dirty": False}
    base = {
        "workload": "llama_1b_bf16",
        "scale": "full",
        "status": "ok",
        "ranks": 2,
        "origin": origin,
        "time": "2026-11-24T00:00:00",
    }
    figures = {"median_ms": 100.0, "act_bytes": 2**33, "peak_minus_base_bytes": 2**34, "grad_error": 0.0}
    ours = {"median_ms": 103.0, "act_bytes": 2**31, "peak_minus_base_bytes": 2**32, "grad_error": 0.0123}
    drawn = sharded.sharded_table(
        [{**base, **figures, "method": "compile-blocks"}, {**base, **ours, "method": "compile-blocks+int8"}]
    )
    assert "| compile-blocks+int8 | 103.0 | 1.03 | 2.00 | 0.25 | 4.00 | 0.25 | 1.23% |" in drawn
    other = {**base, "origin": {**origin, "device": "NVIDIA H100"}}
    drawn = sharded.sharded_table([{**other, **figures, "method": "vanilla"}, {**base, **ours, "method": "int8"}])
    assert "| NVIDIA H100 | llama_1b_bf16 | vanilla | 100.0 |" in drawn
    # Not beside another GPU's step.
    assert "| NVIDIA H200 | llama_1b_bf16 | int8 | 103.0 |  | 2.00 |  | 4.00 |  | 1.23% |" in drawn
    assert sharded.sharded_table([]) == ""


def test_plans_stand_beside_the_best_of_equal_blocks_that_fits() -> None:
    origin = {"commit": "c0ffee", "device": "NVIDIA H200", "command": "python -m bench plan", "dirty": False}
    shared = {"workload": plan.MODELS[0], "scale": "full", "status": "ok", "time": "2026-11-27T00:00:00"}
    shared["origin"] = origin
    steps = {"keep": (100.0, 20), "int8": (104.0, 8), "checkpoint": (130.0, 6), "int8+checkpoint": (136.0, 4)}
    rows = [
        {**shared, "kind": "uniform", "method": choice, "median_ms": ms, "peak_bytes": gib * plan.GIB}
        for choice, (ms, gib) in steps.items()
    ]
    sizes = {"budget_bytes": 7 * plan.GIB, "planned_bytes": 6.5 * plan.GIB, "peak_bytes": 6.6 * plan.GIB}
    measured = {**shared, "kind": "measured", "what": "0-7 int8+checkpoint, 8-15 int8", "median_ms": 117.0, **sizes}
    above = {**measured, "peak_bytes": 7.1 * plan.GIB, "median_ms": 143.0}
    drawn = plan.plan_table([*rows, {**measured, "method": "0.2"}, {**above, "method": "0.4"}])
    assert "| 0-7 int8+checkpoint, 8-15 int8 | 7.00 | 6.50 | 6.60 | 117.0 | 1.17 | checkpoint 1.30 |" in drawn
    assert "1 of 2 plans kept within their budgets; the peak was predicted within 8.45%." in drawn
    assert "steps took 0.90 to 1.10 times as long" in drawn
    assert plan.plan_table([]) == ""
    assert plan.plan_table(rows) == ""
