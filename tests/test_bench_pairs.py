"""The bench that compares two trees, with a tree against itself on the CPU, and its tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_cases import ORIGIN

from bench import __main__ as command_line
from bench import pairs, pairs_report, rows
from bench.overhead import CHAIN

CHAIN_FIGURES = ("us", "pack_us", "unpack_us", "nothing_ns")


def turns(*medians: float) -> list[rows.Row]:
    return [{"ms": [median - 0.5, median, median + 3.0]} for median in medians]


def measured(tmp_path: Path, *arguments: str) -> list[rows.Row]:
    shared = ["pairs", "--before", str(rows.ROOT), "--tiny", "--device", "cpu", "--out", str(tmp_path)]
    assert command_line.main([*shared, *arguments]) == 0
    return rows.read(tmp_path / "pairs.json")


def test_ratios_are_those_of_turns_of_one_pair() -> None:
    row = pairs.compared({"before": turns(10.0, 20.0, 10.0), "after": turns(5.0, 30.0, 10.0)})
    assert (row["unit"], row["ratios"], row["ratio"]) == ("ms", [0.5, 1.5, 1.0], 1.0)
    assert (row["spread"], row["itself"]) == (2.0, 0.5)


def test_a_tree_stores_as_much_as_itself(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="builds the workload")
    (row,) = measured(tmp_path, "--only", "gpt2_medium_amp")
    assert (row["status"], row["method"], row["before_method"]) == ("ok", "int8", "int8")
    assert len(row["ratios"]) == len(row["before_turns"]["ms"]) == 2
    assert min(row["ratios"]) > 0  # of times, not of differences
    for name in ("stored_bytes", "grad_error", "codec", "fused_modules"):
        assert row["before"][name] == row["after"][name]
    assert row["before"]["stored_bytes"] > 0
    assert row["earlier"] == {name: row["origin"][name] for name in ("commit", "dirty", "sources")}


def test_the_chains_have_host_times_of_both_trees(tmp_path: Path) -> None:
    (row,) = measured(tmp_path, "--only", CHAIN)
    assert (row["status"], row["unit"]) == ("ok", "us")
    for side in pairs.SIDES:
        series = row[f"{side}_turns"]
        assert {name: len(samples) for name, samples in series.items()} == dict.fromkeys(CHAIN_FIGURES, 2)
        # A tiny turn has two samples, whose median is their mean: those of the parts add up but for rounding.
        for both, pack, unpack in zip(series["us"], series["pack_us"], series["unpack_us"], strict=True):
            assert both == pytest.approx(pack + unpack, abs=2**-40 * (abs(pack) + abs(unpack)))


def test_odd_sizes_store_as_much_as_themselves(tmp_path: Path) -> None:
    (row,) = measured(tmp_path, "--only", pairs.ODD, "--pairs", "3")
    assert (row["status"], row["unit"]) == ("ok", "ms")
    assert row["before"]["stored_bytes"] == row["after"]["stored_bytes"] > 0


def test_commits_before_and_gpus_are_compared_apart(tmp_path: Path) -> None:
    first, second, third = (row_of("bert_large_amp", ratio=ratio) for ratio in (1.0, 1.5, 2.0))
    second["earlier"] = {"commit": "fedcba9876", "dirty": False, "sources": "s1"}
    third["origin"] = {**third["origin"], "device": "NVIDIA H100"}
    steps = pairs_report.steps_table([first, second, third])
    assert "| 0123456 | NVIDIA H200 | `bert_large_amp` | int8 | 1.000 (" in steps
    assert "| fedcba9 | NVIDIA H200 | `bert_large_amp` | int8 | 1.500 (" in steps
    assert "| 0123456 | NVIDIA H100 | `bert_large_amp` | int8 | 2.000 (" in steps


def test_a_tree_without_the_package_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        command_line.main(["pairs", "--before", str(tmp_path), "--out", str(tmp_path)])


def test_a_side_that_fails_makes_a_row(tmp_path: Path) -> None:
    with pairs.side("before", rows.ROOT) as one, pytest.raises(pairs.SideError, match="KeyError") as failed:
        one.ask(workload_name="no such workload", method_name="int8", device="cpu", tiny=True)
    assert failed.value.row["status"] == "error"
    (tmp_path / "pyactcomp").mkdir()
    (tmp_path / "pyactcomp" / "__init__.py").write_text("raise SystemExit(3)")
    with pairs.side("before", tmp_path) as other, pytest.raises(pairs.SideError, match="exit code 3"):
        other.ask(steps=1)


def row_of(workload: str, **fields: Any) -> rows.Row:
    figures = {"act_bytes": 2 * 2**30, "peak_minus_base_bytes": 3 * 2**30, "vanilla_act_bytes": 8 * 2**30}
    return {
        "suite": "pairs", "workload": workload, "method": "int8", "before_method": "int8", "scale": "full",
        "status": "ok", "ratios": [0.9, 1.1, 1.0], "ratio": 1.0, "spread": 1.02, "itself": 1.001,
        "before": {**figures, "grad_error": 0.01}, "after": {**figures, "act_bytes": 2**30, "grad_error": 0.02},
        "earlier": {"commit": "0123456789abcdef", "dirty": False, "sources": "s0"},
        "time": "2026-01-02T03:04:05+00:00", "origin": {**ORIGIN, "device": "NVIDIA H200"}, **fields,
    }  # fmt: skip


def test_tables_show_both_sides(tmp_path: Path) -> None:
    series = {name: [1.0, 3.0, 4.0] for name in CHAIN_FIGURES}
    found = [
        row_of("bert_large_amp"),
        row_of("llama_1b_bf16", status="error", reason="before: broken"),
        row_of(CHAIN, **{f"{side}_turns": series for side in pairs.SIDES}),
    ]
    (tmp_path / "pairs.json").write_text(json.dumps({"schema": 1, "rows": found}))
    steps = pairs_report.steps_table(rows.read(tmp_path / "pairs.json"))
    cells = "1.000 (0.900 to 1.100) | 1.020, 1.001 | 0.250 / 0.125 | 3.00 / 3.00 | 1.00% / 2.00% |"
    assert f"| 0123456 | NVIDIA H200 | `bert_large_amp` | int8 | {cells}" in steps
    assert "llama_1b_bf16 int8: error (before: broken)" in steps
    assert "Before: 0123456." in steps
    assert f"| {CHAIN} | NVIDIA H200 | nothing ns | 1.0 | 3.0 | 1.0 | 3.0 |" in pairs_report.overhead_table(found)
