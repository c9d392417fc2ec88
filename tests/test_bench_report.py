"""Tables and pictures of the benches, drawn from rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_cases import ORIGIN

from bench import (
    frontier,
    frontier_plot,
    frontier_report,
    report,
    rows,
    untuned_report,
)


def step_row(method: str, ms: float, act: int, peak: int, run: str, **fields: Any) -> rows.Row:
    origin = {**ORIGIN, "device": "NVIDIA H200", "torch": "2.11.0", "driver": "580"}
    row = {
        "suite": "frontier", "run": run, "workload": "bert_large_amp", "method": method, "scale": "full",
        "status": "ok", "median_ms": ms, "p20_ms": ms, "p80_ms": ms,
        "act_bytes": act * 2**30, "peak_minus_base_bytes": peak * 2**30,
        "time": "2026-01-02T03:04:05+00:00", "origin": origin,
    }  # fmt: skip
    return {**row, **fields}


def write(folder: Path, suite: str, found: list[rows.Row]) -> None:
    (folder / f"{suite}.json").write_text(json.dumps({"schema": 1, "rows": found}))


def test_report_takes_ratios_within_one_run() -> None:
    found = [
        step_row("vanilla", 100.0, 20, 24, "first"),
        step_row("int8", 110.0, 10, 12, "first"),
        step_row("vanilla", 200.0, 20, 24, "second"),
        step_row("ckpt", 250.0, 5, 6, "second"),
        step_row("ckpt2", 150.0, 5, 6, "third"),
    ]
    latest = frontier_report.latest_rows(found)
    assert {row["method"]: row.get("time_x") for row in latest} == {
        "vanilla": 1.0, "int8": 1.1, "ckpt": 1.25, "ckpt2": None
    }  # fmt: skip
    int8 = next(row for row in latest if row["method"] == "int8")
    assert (int8["act_x"], int8["peak_x"]) == (0.5, 0.5)


def test_report_shows_the_range_of_steps_that_wait_for_the_host() -> None:
    rows_of = [
        step_row("vanilla", 100.0, 20, 24, "first", p20_ms=98.0, p80_ms=103.0),
        step_row("int8", 110.0, 10, 12, "first", p20_ms=104.6, p80_ms=121.4),
    ]
    table = frontier_report.steps_table(rows_of)
    assert "| 100.0 | 1.00 |" in table
    assert "| 110.0 (105 to 121) | 1.10 |" in table


@pytest.mark.parametrize(("loops", "said"), [((10.0, 10.4), False), ((10.0, 17.0), True)])
def test_report_says_how_far_apart_the_hosts_were(loops: tuple[float, float], said: bool) -> None:
    rows_of = [
        step_row("vanilla", 100.0, 20, 24, "first"),
        step_row("int8", 110.0, 10, 12, "first", host_loop_ms=loops[1]),
        step_row("ckpt", 110.0, 10, 12, "first", host_loop_ms=loops[0]),
    ]
    assert ("from 10 to 17 ms: so far apart" in frontier_report.steps_table(rows_of)) is said


def test_untuned_models_have_a_table_of_their_own_with_what_is_over_its_bar_in_bold() -> None:
    own = {"workload": "whisper_medium_amp"}
    found = [
        step_row("vanilla", 100.0, 20, 24, "r", **own, kernels_ms=80.0, host_ms=50.0),
        step_row("int8", 112.0, 5, 12, "r", **own, kernels_ms=84.0, host_ms=150.0, saved_tensors=4000, grad_error=0.01),
        step_row("ckpt", 125.0, 4, 6, "r", **own),
        step_row("vanilla", 90.0, 20, 24, "other", **own, kernels_ms=70.0, host_ms=10.0),
        {**step_row("vanilla", 1.0, 1, 1, "r"), "workload": "gatv2_fp32", "status": "unavailable", "reason": "No PyG"},
    ]
    drawn = untuned_report.untuned_table(found)
    line = (
        "| Whisper medium | NVIDIA H200 | 100 ms, 20.0 GiB | **1.12** | 0.25 | 0.50 | 1.05 | 25 | 4000 | 1.00% "
        "| 1.25, 0.20, 0.25 | 0.90 |"
    )
    assert line in drawn
    assert "No PyG" in drawn
    assert frontier_report.latest_rows(found) == []
    assert untuned_report.untuned_table([step_row("vanilla", 1.0, 1, 1, "r")]) == ""


def test_every_untuned_model_has_a_title() -> None:
    assert list(untuned_report.TITLES) == list(frontier.UNTUNED)


def test_report_fills_the_blocks_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write(tmp_path, "frontier", [
        step_row("vanilla", 100.0, 20, 24, "r"),
        step_row("int8", 108.0, 9, 15, "r", grad_error=0.0123, grad_error_vanilla=3e-4),
        step_row("ckpt", 130.0, 5, 6, "r"),
        step_row("save_on_cpu", 900.0, 0, 5, "r"),
        {**step_row("ckpt2", 1.0, 1, 1, "r"), "status": "oom", "reason": "OutOfMemoryError: full"},
        {**step_row("liger", 1.0, 1, 1, "r"), "status": "not applicable", "reason": "no patch"},
    ])  # fmt: skip
    write(tmp_path, "batch", [
        {**step_row("int8", 1.0, 1, 1, "b"), "batch": size, "samples_per_s": 3.0 * size, "memory_gib": 24.0,
         "status": "ok" if size < 16 else "oom"}
        for size in (8, 12, 16)
    ])  # fmt: skip
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- bench:frontier -->\nold\n<!-- /bench:frontier -->\nafter\n")
    report.run(tmp_path, readme, tmp_path / "docs")
    text = readme.read_text()
    assert text.startswith("before\n<!-- bench:frontier -->\n| workload | method |")
    assert text.endswith("<!-- /bench:frontier -->\nafter\n")
    assert "old" not in text
    assert "| int8 | 108.0 | 1.08 | 9.00 | 0.45 | 15.00 | 0.62 | 1.23% (vanilla 3.0e-04) |" in text
    assert "- bert_large_amp ckpt2: oom (OutOfMemoryError: full)" in text
    assert "- bert_large_amp liger: not applicable (no patch)" in text
    assert "| liger |" not in text
    assert "NVIDIA H200; driver 580; torch 2.11.0; commit c0ffee; 2026-01-02" in text
    assert "| `bert_large_amp` | int8 | 12 | 16 | 36.0 | 12 |" in report.batch_table(report.load(tmp_path, "batch"))
    for name in ("frontier.png", "throughput_vs_batch.png"):
        assert (tmp_path / "docs" / name).read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "docs" / "frontier.svg").read_bytes()
    assert b"<svg" in drawn
    report.run(tmp_path, readme, tmp_path / "docs")
    assert readme.read_text() == text
    assert (tmp_path / "docs" / "frontier.svg").read_bytes() == drawn


def test_report_shows_no_step_measured_on_a_cpu_or_at_tiny_size() -> None:
    on_cpu = step_row("vanilla", 1.0, 1, 1, "r", origin=ORIGIN)
    tiny = step_row("vanilla", 1.0, 1, 1, "r", scale="tiny")
    assert frontier_report.steps_table([on_cpu, tiny]) == ""
    assert frontier_report.bars_table([on_cpu, tiny]) == ""
    assert frontier_report.summary_table([on_cpu, tiny]) == ""


def test_the_front_page_has_the_quickest_peer_and_ratios_to_plain_of_the_same_run() -> None:
    found = [
        step_row("vanilla", 100.0, 20, 24, "r"),
        step_row("int8", 90.0, 5, 6, "r"),
        step_row("ckpt", 130.0, 4, 12, "r"),
        step_row("compile", 80.0, 18, 24, "r"),
        step_row("compile0.5", 120.0, 10, 12, "r"),
    ]
    table = frontier_report.summary_table(found)
    assert (
        "| BERT-large | 100 ms, 20, 24 GiB | 0.90, 0.25, 0.25 | 1.30, 0.20, 0.50 | 0.80, 0.90, 1.00 (compile) |"
        in table
    )
    assert "NVIDIA H200, torch 2.11.0" in table
    assert "| BERT-large | 100 ms, 20, 24 GiB | 0.90, 0.25, 0.25 |  |  |" in frontier_report.summary_table(found[:2])


def test_the_first_page_shows_the_models_measured_at_one_commit_beside_plain_of_their_run() -> None:
    def at(commit: str, method: str, workload: str, ms: float, act: int, peak: int) -> rows.Row:
        row = step_row(method, ms, act, peak, commit + workload, workload=workload, grad_error=ms / 10_000)
        return {**row, "origin": {**row["origin"], "commit": commit}}

    found = [
        *(at("older", method, "resnet50_tf32", 80.0, 20, 20) for method in ("vanilla", "int8")),
        at("newer", "vanilla", "bert_large_amp", 118.0, 20, 24),
        at("newer", "int8", "bert_large_amp", 59.0, 5, 6),
        at("newer", "vanilla", "swin_base_amp", 100.0, 16, 16),
        at("newer", "int8", "swin_base_amp", 80.0, 4, 5),
        at("last", "vanilla", "swin_base_amp", 90.0, 16, 16),
    ]
    table = frontier_report.front_table(found)
    assert "| BERT-large | 20.0 -> 5.0 GiB | 24.0 -> 6.0 GiB | 118 -> 59 ms (0.50x) |" in table
    assert "| Swin-B | 16.0 -> 4.0 GiB | 16.0 -> 5.0 GiB | 100 -> 80 ms (0.80x) |" in table
    assert "ResNet" not in table
    assert "by 0.6% to 0.8% of their norm" in table
    assert "at commit newer" in table
    assert frontier_report.front_table(found[:1]) == ""


def test_compiled_methods_stand_against_the_same_compilation_of_their_run_commit_or_gpu() -> None:
    other = {**ORIGIN, "device": "NVIDIA H100", "torch": "2.11.0", "driver": "580"}
    found = [
        step_row("compile", 100.0, 20, 24, "h100", origin=other, first_step_s=50.0),
        step_row("compile+int8", 110.0, 8, 12, "h100", origin=other, grad_error=0.01, first_step_s=60.0),
        step_row("compile", 80.0, 20, 20, "first"),
        step_row("compile+int8", 88.0, 10, 12, "second"),
        step_row("compile", 50.0, 20, 24, "third", origin={**other, "device": "NVIDIA H200", "commit": "beef"}),
        step_row("compile-blocks+int8", 40.0, 5, 6, "third"),
    ]
    table = frontier_report.compiled_table(found)
    assert "| NVIDIA H100 | `bert_large_amp` | compile+int8 | 1.100 | 0.400 | 0.500 | 1.00% | 60 / 50 |" in table
    # No run has both: the row of the same commit counts, not the newest.
    assert "| NVIDIA H200 | `bert_large_amp` | compile+int8 | 1.100 | 0.500 | 0.600 |  |  |" in table
    assert "blocks+int8" not in table  # nothing was compiled by blocks without compression
    later = {**other, "commit": "cafe"}
    found += [
        step_row("vanilla", 200.0, 40, 48, "h100", origin=other),
        step_row("vanilla", 400.0, 40, 48, "slow", origin=later),
        step_row("compile-fp8-e4m3", 240.0, 10, 18, "slow", origin=later),
    ]
    # Nothing of that commit was compiled alone; its host needed twice the time for plain training.
    assert "| compile-fp8-e4m3 | 1.200 | 0.500 | 0.750 |" in frontier_report.compiled_table(found)
    assert frontier_report.compiled_table(found[:1]) == ""


def test_frontier_is_what_nothing_beats_in_both() -> None:
    points = [(1.0, 1.0), (0.3, 1.3), (0.5, 1.1), (0.3, 1.4), (0.6, 1.1), (0.1, 9.0)]
    assert frontier_plot.frontier(points) == [(0.1, 9.0), (0.3, 1.3), (0.5, 1.1), (1.0, 1.0)]
    for x, y in points:
        beaten = any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)
        assert ((x, y) in frontier_plot.frontier(points)) is not beaten


def test_plot_moves_what_is_beyond_the_axes_to_their_edge() -> None:
    row = {"method": "save_on_cpu", "peak_x": 0.2, "time_x": 8.3}
    slow = frontier_plot.place(row)
    assert (slow.name, slow.marker, slow.x) == ("save_on_cpu 8.3x", "^", 0.2)
    assert slow.y < frontier_plot.TOP
    large = frontier_plot.place({"method": "compile", "peak_x": 1.54, "time_x": 1.06})
    assert (large.name, large.marker, large.y) == ("compile 154%", ">", 1.06)
    assert large.x < frontier_plot.RIGHT


def test_bars_are_held_against_the_rows() -> None:
    found = [
        step_row("vanilla", 100.0, 20, 24, "r"),
        step_row("int8", 104.0, 6, 6, "r", grad_error=0.021),
        step_row("ckpt", 130.0, 5, 8, "r"),
        step_row("int8+ckpt", 131.0, 2, 6, "r"),
        {**step_row("exact", 1.0, 1, 1, "r"), "differing": 2, "vanilla_differing": 0, "nondeterministic": "put_"},
    ]
    table = frontier_report.bars_table(found)
    cells = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in table.splitlines() if "|" in line}
    assert cells["lossless: gradient tensors that differ in any bit"] == "**2 > 0, missed**"
    assert cells["lossless: act, x vanilla"] == "not measured"
    assert cells["int8: act, x vanilla"] == "**0.300 > 0.270, missed**"
    assert cells["int8: step, x vanilla"] == "1.040 <= 1.040, met"
    assert cells["int8: gradient error"] == "**2.10% > 2.00%, missed**"
    assert cells["int8+ckpt: peak - base, x ckpt (llama: x liger+ckpt)"] == "0.750 <= 0.750, met"
    assert cells["int8+ckpt: step, x ckpt (llama: x liger+ckpt)"] == "**1.008 > 1.000, missed**"
    assert "- bert_large_amp, with warnings only: put_" in table
    # Where vanilla itself does not repeat, there is nothing to be equal to.
    found[-1]["vanilla_differing"] = 3
    assert "two vanilla runs differ in 3" in frontier_report.bars_table(found)


def test_report_codec_table_has_a_column_for_each_size() -> None:
    def row(method: str, size: int, phase: str, share: float, device: str) -> rows.Row:
        return {
            "suite": "codec", "workload": f"bf16/{size}MiB", "method": method, "phase": phase, "nbytes": size << 20,
            "scale": "full", "status": "ok", "share_of_copy": share, "time_over_copy": 1 / share, "contended": False,
            "bytes_moved": 4e6, "median_us": 1.0, "time": "2026-01-02", "origin": {**ORIGIN, "device": device},
        }  # fmt: skip

    found = [
        row(method, size, phase, 1.0 if method == "copy" else size / 100, "NVIDIA H200")
        for size in (64, 80)
        for method in ("copy", "pyactcomp-cuda")
        for phase in ("quantise", "dequantise")
    ]
    table = report.codec_table(found)
    assert "| bf16, share of copy |  | 64MiB | 80MiB | time / copy at 64MiB |" in table
    assert "| pyactcomp-cuda | quantise | 0.64 | 0.80 | 1.56 |" in table
    assert "The copy moves 4.00 TB/s at 80MiB." in table
    on_cpu = report.codec_table([{**row, "origin": ORIGIN} for row in found])
    assert "| pyactcomp-cuda | quantise | 0.64 | 0.80 | 1.56 |" in on_cpu
    assert "TB/s" not in on_cpu
    assert report.codec_table([{**row, "scale": "tiny"} for row in found]) == ""


def test_fill_leaves_a_text_without_the_block() -> None:
    assert report.fill("no block here", "step", "table") is None
    assert report.fill("<!-- bench:frontier -->never closed", "step", "table") is None
