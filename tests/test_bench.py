"""Every suite of the bench runs on the CPU at sizes that say nothing, and its rows are held against the schema.

``test_bench_figures.py`` has the arithmetic of the rows, ``test_bench_report.py`` and ``test_bench_tables.py`` what is
drawn from them.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_cases import ORIGIN, options, small_workload
from torch import nn

from bench import __main__ as command_line
from bench import (
    alloc,
    alloc_methods,
    alloc_pairs,
    alloc_share,
    breadth,
    codec,
    context,
    context_worker,
    estimate,
    frontier,
    frontier_report,
    methods,
    pairs,
    rows,
    training,
    worker,
)
from bench.breadth_models import Pair
from bench.overhead import CHAIN
from bench.workloads import WORKLOADS

STATUSES = {*rows.FINAL, "error", "unavailable", "not built"}
# Suite -> its arguments, and its methods in the order of their rows.
SUITES: dict[str, tuple[list[str], set[str]]] = {
    "codec": (["--only", "fp32/16KiB"], {"copy", "pyactcomp-cpu", "reference"}),
    "overhead": ([], {"int8", "python hook"}),
    "mlp": ([], {"plain", "checkpoint"}),
    "scaling": ([], set()),
    "alloc": (["--parts", "traces"], {"pyactcomp", "pyactcomp-malloc"}),
    "context": (["--only", "llama8b-full-64", "--methods", "plain,int8"], {"plain", "int8"}),
    "holds": (["--only", "memorise", "--methods", "vanilla,int8", "--seeds", "1"], {"vanilla", "int8"}),
    "pairs": (["--before", str(rows.ROOT), "--only", CHAIN], {"int8"}),
    "sharded": ([], {"vanilla", "int8"}),
    "plan": (["--only", "llama_1b_bf16"], {"keep", "int8", "checkpoint", "int8+checkpoint", "0.5"}),
    "frontier": (["--only", "llama_1b_bf16", "--methods", "int8,exact"], {"vanilla", "int8", "exact"}),
    "breadth": (["--only", "transformers/llama,torch_geometric/SAGEConv(mean),transformers/timm_backbone"], set()),
}
SLOW = {"plan", "sharded", "frontier", "breadth", "pairs"}
# Of what the rows of a suite promise, by their method: vanilla is exact, codes are off by less than 2 percent.
ERRORS = {"plain": (0.0, 0.0), "checkpoint": (0.0, 0.0), "int8": (0.0, 0.02)}


def numbers(value: Any) -> list[float]:
    """Return the numbers in a row, at any depth."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for part in value for number in numbers(part)]
    return [value] if isinstance(value, (int, float)) else []


def assert_rows_fit_the_schema(path: Path) -> list[rows.Row]:
    assert json.loads(path.read_text())["schema"] == rows.SCHEMA
    found = rows.read(path)
    assert found
    for row in found:
        assert row["status"] in STATUSES
        assert (row["status"] == "ok") is ("reason" not in row), row
        assert row["time"].endswith("+00:00")
        assert row["origin"].keys() >= {"commit", "dirty", "sources", "device", "command", "torch"}
        assert row["origin"]["device"] == "cpu"
        if row["status"] == "ok":
            assert numbers({name: value for name, value in row.items() if name != "origin"})
            assert all(math.isfinite(number) for number in numbers(row))
    return found


@pytest.mark.filterwarnings("ignore:nothing was compressed:UserWarning")
@pytest.mark.parametrize(
    "suite", [pytest.param(suite, marks=[pytest.mark.slow] if suite in SLOW else []) for suite in SUITES]
)
def test_suite_writes_rows_once(suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if suite in ("mlp", "context", "holds", *SLOW):
        pytest.importorskip("transformers", reason="builds the models")
    # Otherwise a process for each row.
    monkeypatch.setattr(context, "_measure", lambda job, limit_s: {"status": "ok", **context_worker.measure(job)})
    arguments, expected = SUITES[suite]
    command = [suite, "--tiny", "--device", "cpu", "--out", str(tmp_path), *arguments]
    assert command_line.main(command) == 0
    found = assert_rows_fit_the_schema(tmp_path / f"{suite}.json")
    done = [row for row in found if row["status"] == "ok"]
    assert {row.get("method") for row in done} >= expected
    for row in done:
        if "grad_error" in row and row["method"] in ERRORS:
            least, most = ERRORS[row["method"]]
            assert least <= row["grad_error"] <= most
    assert command_line.main(command) == 0
    assert [row for row in rows.read(tmp_path / f"{suite}.json") if row["status"] == "ok"] == done


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frontier", "--methods", "vanila"], "known: vanilla"),
        (["frontier", "--only", "bert"], "bert_large_amp"),
        (["alloc", "--parts", "pairs"], "unknown part ['pairs']; known: pair, threads, share, pause, training, traces"),
        (["alloc", "--methods", "cuda"], "unknown method ['cuda']; known: native"),
        (["alloc", "--only", "sft"], "unknown workload ['sft']; known: pair, threads, share, pause_drop"),
        (["alloc", "--parts", "prediction"], "only traces can be measured without a GPU"),
        (["holds", "--methods", "int4"], "nearest2"),
        (["holds", "--only", "bert"], "byte_lm"),
        (["context", "--only", "llama8b-full-65"], "unknown workload"),
        (["context", "--methods", "int9"], "unknown method"),
        (["context", "--only", "llama8b-full-16384"], "needs a GPU"),
        (["breadth", "--only", "transformers/no_such_model"], "no pair is named transformers/no_such_model"),
        (["pairs", "--before", "/nowhere"], "no checkout of this project"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_name_what_is_known(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.main([*arguments, "--device", "cpu", "--out", str(tmp_path)])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suite", ["codec", "mlp", "alloc", "holds", "plan"])
def test_a_used_up_budget_starts_nothing(suite: str, tmp_path: Path) -> None:
    command = [suite, "--tiny", "--device", "cpu", "--out", str(tmp_path), "--budget-s", "0"]
    assert command_line.main(command) == 0
    assert list(tmp_path.iterdir()) == []


def test_store_knows_results_of_the_same_sources_only(tmp_path: Path) -> None:
    store = rows.Store(tmp_path / "frontier.json", ORIGIN)
    store.append({"workload": "a", "method": "int8", "status": "ok"})
    store.append({"workload": "b", "method": "int8", "status": "unavailable"})
    assert store.has(workload="a", method="int8")
    assert not store.has(workload="a", method="ckpt")
    assert not store.has(workload="b", method="int8")
    for name in ("commit", "sources", "device"):
        assert not rows.Store(store.path, {**ORIGIN, name: "other"}).has(workload="a")


def test_budget_allows_what_ends_before_it_is_used_up() -> None:
    now = 100.0
    budget = rows.Budget(10.0, clock=lambda: now)
    now = 104.0
    assert budget.allows(5.5)
    assert not budget.allows(6.5)
    assert rows.Budget(None).allows(1e9)


def test_reasons_name_files_without_the_folders_of_a_machine(tmp_path: Path) -> None:
    store = rows.Store(tmp_path / "rows.json", {})
    store.append(
        {"status": "error", "reason": f"in {rows.ROOT}/bench/a.py:1, /x/lib/python3/site-packages/torch/b.py:2"}
    )
    [row] = store.rows()
    assert row["reason"] == "in bench/a.py:1, torch/b.py:2"


def test_provenance_names_sources_and_command_without_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = ["--out", "/somewhere/else", "--before", "/earlier", "--out=/there", "--before=/earlier"]
    monkeypatch.setattr(sys, "argv", ["bench", "codec", *paths[:4], "--tiny", *paths[4:]])
    monkeypatch.setenv("PYACTCOMP_BENCH_COMMIT", "abc123")
    origin = rows.provenance("cpu")
    assert origin["command"] == "python -m bench codec --tiny"
    assert origin["commit"] == "abc123"
    assert origin["torch"] == torch.__version__
    assert len(origin["sources"]) == 16


def test_failure_tells_missing_from_broken_and_from_out_of_memory() -> None:
    assert rows.failure(ModuleNotFoundError("No module named 'x'"))["status"] == "unavailable"
    assert rows.failure(torch.OutOfMemoryError("no memory"))["status"] == "oom"
    assert rows.failure(RuntimeError("wrong"))["status"] == "error"
    assert "No module named 'x'" in rows.failure(ModuleNotFoundError("No module named 'x'"))["reason"]


def codec_makers(*names: str) -> dict[str, Any]:
    every = {"copy": codec._copy, "reference": codec._ours("reference"), "eager-absmax": codec._eager}
    return {name: every[name] for name in names}


def test_codec_rejects_a_wrong_byte_before_timing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def corrupted(case: codec.Case, device: torch.device) -> codec.Provider:
        right = codec._ours("reference")(case, device)

        def encode(x: torch.Tensor) -> torch.Tensor:
            packed: torch.Tensor = right.encode(x)
            packed[-1] ^= 1
            return packed

        return replace(right, name="corrupted", encode=encode)

    monkeypatch.setattr(codec, "makers", lambda device: {**codec_makers("copy"), "corrupted": corrupted})
    found = list(codec.measure(codec.Case("bf16", 8 << 10), ["corrupted"], options(tmp_path)))
    broken = rows.select(found, method="corrupted")
    assert [row["status"] for row in broken] == ["error"]
    assert "differs from the reference's bytes" in broken[0]["reason"]
    assert [row["status"] for row in rows.select(found, method="copy")] == ["ok", "ok"]


def specification(tmp_path: Path, suite: str, *names: str) -> worker.Spec:
    return worker.Spec(suite, "small", names, "run-1", str(tmp_path / f"{suite}.json"), ORIGIN, "cpu", True)


def test_worker_turns_every_outcome_into_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(module: nn.Module, blocks: list[nn.Module]) -> Any:
        raise RuntimeError("broken on purpose")

    def full(module: nn.Module, blocks: list[nn.Module]) -> Any:
        raise torch.OutOfMemoryError("full on purpose")

    monkeypatch.setitem(WORKLOADS, "small", small_workload())
    monkeypatch.setitem(methods.METHODS, "fails", methods.Method("fails", fails))
    monkeypatch.setitem(methods.METHODS, "full", methods.Method("full", full))
    spec = specification(tmp_path, "frontier", "vanilla", "full", "fails", "ckpt")
    assert worker.work(spec) == worker.RESTART
    found = json.loads(Path(spec.path).read_text())["rows"]
    assert [(row["method"], row["status"]) for row in found] == [
        ("vanilla", "ok"), ("full", "oom"), ("fails", "error")
    ]  # fmt: skip
    assert all(row["run"] == "run-1" and row["scale"] == "tiny" for row in found)


def test_supervise_goes_on_after_a_crash_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def process(command: list[str], cwd: Path, env: dict[str, str]) -> SimpleNamespace:
        spec = json.loads(command[-1])
        started.append(spec["methods"])
        store = rows.Store(Path(spec["path"]), spec["origin"])
        for method in spec["methods"]:
            if method == "int8":
                return SimpleNamespace(returncode=-11)
            store.append({"suite": "frontier", "run": spec["run"], "method": method, "status": "ok"})
            if method == "ckpt":
                return SimpleNamespace(returncode=worker.RESTART)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", process)
    spec = specification(tmp_path, "frontier", "vanilla", "int8", "ckpt", "ckpt2")
    worker.supervise(spec, rows.Budget(None))
    assert started == [["vanilla", "int8", "ckpt", "ckpt2"], ["ckpt", "ckpt2"], ["ckpt2"]]
    found = {row["method"]: row for row in json.loads(Path(spec.path).read_text())["rows"]}
    assert {method: row["status"] for method, row in found.items()} == {
        "vanilla": "ok", "int8": "error", "ckpt": "ok", "ckpt2": "ok"
    }  # fmt: skip
    assert "-11" in found["int8"]["reason"]


def test_supervise_gives_a_process_of_its_own_to_what_changes_more_than_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], str | None]] = []

    def process(command: list[str], cwd: Path, env: dict[str, str]) -> SimpleNamespace:
        names = json.loads(command[-1])["methods"]
        started.append((names, env.get("CUBLAS_WORKSPACE_CONFIG")))
        return SimpleNamespace(returncode=worker.STOP if names == ["ckpt2"] else 0)

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(subprocess, "run", process)
    names = ("vanilla", "int8", "liger", "liger+ckpt", "vanilla-again", "exact", "ckpt2", "ckpt", "compile")
    worker.supervise(specification(tmp_path, "frontier", *names), rows.Budget(None))
    assert started == [
        (["vanilla", "int8"], None), (["liger"], None), (["liger+ckpt"], None), (["vanilla-again"], None),
        (["exact"], ":4096:8"), (["ckpt2", "ckpt"], None), (["compile"], None),
    ]  # fmt: skip
    started.clear()
    worker.supervise(specification(tmp_path, "frontier", "ckpt2", "compile"), rows.Budget(None))
    assert started == [(["ckpt2"], None)]


def test_batch_ends_where_the_memory_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def throughput(trainer: training.Trainer, size: int, steps: int) -> rows.Row:
        if size == 3:
            raise torch.OutOfMemoryError("full on purpose")
        return {"batch": size, "samples_per_s": 10.0 * size}

    monkeypatch.setitem(WORKLOADS, "small", small_workload())
    monkeypatch.setattr(training, "throughput", throughput)
    spec = specification(tmp_path, "batch", "vanilla", "ckpt")
    assert worker.work(spec) == 0
    found = json.loads(Path(spec.path).read_text())["rows"]
    assert [(row["method"], row["batch"], row["status"]) for row in found] == [
        (method, size, status) for method in ("vanilla", "ckpt") for size, status in ((1, "ok"), (2, "ok"), (3, "oom"))
    ]
    assert [worker.ends_method(row) for row in found[:3]] == [False, False, True]


def test_frontier_says_what_does_not_apply_without_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, ...]] = []
    monkeypatch.setattr(frontier, "supervise", lambda spec, budget: started.append(spec.methods))
    for workload in ("resnet50_tf32", "llama_1b_bf16"):
        frontier.run(options(tmp_path, only=(workload,)), ("liger", "int8-nohead", "exact"))
    assert started == [("exact",), ("vanilla", "liger", "int8-nohead", "vanilla-again", "exact")]
    found = json.loads((tmp_path / "frontier.json").read_text())["rows"]
    assert [(row["workload"], row["method"], row["status"]) for row in found] == [
        ("resnet50_tf32", "liger", "not applicable"), ("resnet50_tf32", "int8-nohead", "not applicable")
    ]  # fmt: skip
    assert all(row["reason"] for row in found)
    frontier.run(options(tmp_path, only=("resnet50_tf32",)), ("liger",))
    assert len(json.loads((tmp_path / "frontier.json").read_text())["rows"]) == 2


def test_stages_measure_every_method_once() -> None:
    staged = [method for stage in methods.STAGES for method in stage]
    assert sorted([*staged, methods.VANILLA_AGAIN]) == sorted(methods.METHODS)
    assert set(staged) - {"exact"} <= set(frontier_report.METHOD_ORDER)


def test_a_newer_row_replaces_the_older_one_and_origins_are_written_once(tmp_path: Path) -> None:
    store = rows.Store(tmp_path / "breadth.json", ORIGIN, breadth.KEY)
    for architecture, value in (("a", 1), ("b", 2), ("a", 3)):
        store.append({"library": "l", "architecture": architecture, "head": "h", "value": value})
    assert [(row["architecture"], row["value"], row["origin"]) for row in store.rows()] == [
        ("b", 2, ORIGIN), ("a", 3, ORIGIN)
    ]  # fmt: skip
    assert json.loads(store.path.read_text())["origins"] == [ORIGIN]


def test_only_what_is_missing_is_measured(tmp_path: Path) -> None:
    store = rows.Store(tmp_path / "breadth.json", ORIGIN, breadth.KEY)
    for architecture, status in (("built", "ok"), ("unbuilt", "not built"), ("slow", "timeout")):
        store.append({"library": "l", "architecture": architecture, "head": "h", "status": status})
    assert breadth.measured(store) == {Pair("l", "built", "h"), Pair("l", "unbuilt", "h")}
    other = rows.Store(store.path, {**ORIGIN, "sources": "s2"}, breadth.KEY)
    assert breadth.measured(other) == set()


def test_pairs_that_no_commit_has_measured_come_first_and_the_oldest_after_them() -> None:
    everything = estimate.in_turn([])
    assert everything == [(pair, name) for pair in estimate.PAIRS for name in estimate.ALLOCATORS]
    times = {each: f"2026-11-{1 + i % 28:02}" for i, each in enumerate(reversed(everything))}
    failed, never = everything[5], everything[-4]
    found = [
        {"kind": "measured", **pair.key, "allocator": name, "status": "error" if (pair, name) == failed else "ok",
         "time": times[pair, name]}
        for pair, name in everything if (pair, name) != never
    ]  # fmt: skip
    found.insert(0, {**found[0], "time": "2026-10-01"})  # measured again since
    ordered = estimate.in_turn(found)
    assert ordered[0] == never
    assert [times[each] for each in ordered[1:]] == sorted(times[each] for each in everything if each != never)


def test_a_pair_that_needs_more_than_is_left_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Any] = []
    monkeypatch.setattr(
        estimate, "_row_of", lambda pair, name, limit: measured.append((pair.mode, limit)) or {"status": "ok"}
    )
    estimate._measure(options(tmp_path, budget=rows.Budget((estimate.PAIR_S + estimate.COMPILING_S) / 2)))
    assert set(measured) == {(pair.mode, estimate.PAIR_S) for pair in estimate.PAIRS if "int8" not in pair.mode}
    assert len(measured) == 3 * sum("int8" not in pair.mode for pair in estimate.PAIRS)


def test_only_selects_by_library_architecture_and_head() -> None:
    everything = [Pair("a", "x", "1"), Pair("a", "x", "2"), Pair("a", "y", "1"), Pair("b", "x", "1")]
    assert breadth.selected((), everything) == everything
    assert breadth.selected(("a/x",), everything) == everything[:2]
    assert breadth.selected(("a/x/2", "b"), everything) == [everything[1], everything[3]]
    with pytest.raises(breadth.UnknownPairError, match="a/z"):
        breadth.selected(("a/z",), everything)


def test_a_side_that_fails_makes_a_row(tmp_path: Path) -> None:
    with pairs.side("before", rows.ROOT) as one, pytest.raises(pairs.SideError, match="KeyError") as failed:
        one.ask(workload_name="no such workload", method_name="int8", device="cpu", tiny=True)
    assert failed.value.row["status"] == "error"
    (tmp_path / "pyactcomp").mkdir()
    (tmp_path / "pyactcomp" / "__init__.py").write_text("raise SystemExit(3)")
    with pairs.side("before", tmp_path) as other, pytest.raises(pairs.SideError, match="exit code 3"):
        other.ask(steps=1)


@pytest.mark.gpu
@pytest.mark.slow
def test_suite_measures_every_part_on_a_gpu(tmp_path: Path) -> None:
    chosen = options(tmp_path, device="cuda")
    alloc.run(chosen, ("pair", "threads", "share"), ("native", "pyactcomp"))
    alloc.run(replace(chosen, only=("graphs",)), ("training",), ("native", "expandable", "pyactcomp"))
    found = rows.read(tmp_path / "alloc.json")
    assert {row["status"] for row in found} == {"ok"}, [row.get("reason") for row in found]
    cases = {(row.get("call"), row.get("nbytes"), row.get("threads")) for row in found if row["workload"] != "graphs"}
    expected = {(call, size, 0) for call in ("raw", "empty") for size in alloc_pairs.SIZES}
    expected |= {("native", size, threads) for size in alloc_pairs.SIZES for threads in alloc_pairs.THREADS}
    expected |= {(call, 1 << 20, 0) for call in alloc_share.CALLS}
    assert cases == expected
    for row in rows.select(found, workload="graphs"):
        assert row["peak_reserved_bytes"] >= row["peak_allocated_bytes"] > 0
        assert row["growth_bytes"] >= 0
        assert (row["driver_s"] is None) == (row["method"] == "expandable")


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.slow
def test_part_predicts_real_runs_on_a_gpu(tmp_path: Path) -> None:
    chosen = rows.Options(tmp_path, "cuda", rows.Budget(None), only=("prediction/moe",), tiny=True)
    alloc.run(chosen, ("prediction",))
    found = {row["method"]: row for row in rows.read(tmp_path / "alloc.json")}
    assert {method: row["status"] for method, row in found.items()} == dict.fromkeys(alloc_methods.TRAINING, "ok"), [
        row.get("reason") for row in found.values()
    ]
    native = found["native"]
    assert native["predicted_reserved_bytes"] == native["peak_reserved_bytes"]
    assert native["predicted_allocated_bytes"] == native["peak_allocated_bytes"]
    assert not any("from before the recording:" in note for note in native["notes"])
    for row in found.values():
        assert row["predicted_reserved_bytes"] >= row["predicted_allocated_bytes"] > 0
        assert row["events"] == native["events"]


JOB = context_worker.Job("llama8b", "full", 128, "unsloth", "cuda", tiny=True, memory_gib=1000.0)


@pytest.mark.gpu
def test_peaks_and_pinned_memory_of_each_timed_step_are_noted() -> None:
    row = context_worker.measure(JOB)
    assert len(row["samples_peak_bytes"]) == len(row["samples_ms"])
    assert row["peak_bytes"] == max(row["samples_peak_bytes"]) > row["base_bytes"]
    assert row["reserved_bytes"] >= row["peak_bytes"]
    assert row["host_bytes"] >= 2 * 128 * 64 * 2  # two of three blocks' inputs


def test_a_first_step_that_takes_long_is_the_one_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_worker, "step_clock", lambda step, device: step() or 2e3 * context_worker.LONG_S)
    row = context_worker.measure(replace(JOB, device="cpu", method="plain"))
    assert row["samples_ms"] == [2e3 * context_worker.LONG_S]
    assert row["tokens_per_s"] == JOB.tokens / (2 * context_worker.LONG_S)
