"""The bench harness, on the CPU and at sizes that say nothing about speed."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_cases import ORIGIN, options, small_workload
from torch import Tensor, nn

from bench import __main__ as command_line
from bench import (
    batch,
    codec,
    frontier,
    frontier_report,
    measure,
    methods,
    rows,
    sharded,
    training,
    worker,
)
from bench.workloads import WORKLOADS
from pyactcomp.codec import reference

# Rows


def test_summary_has_the_samples_median_and_percentiles() -> None:
    samples = [random.Random(1).uniform(1, 9) for _ in range(11)] + [0.5, 30.0, 2.25]
    row = rows.summary(samples, "us")
    assert row["median_us"] == pytest.approx(statistics.median(samples), rel=1e-12)
    fifths = statistics.quantiles(samples, n=5, method="inclusive")
    assert [row["p20_us"], row["p80_us"]] == pytest.approx([fifths[0], fifths[3]], rel=1e-12)
    assert row["samples_us"] == [round(sample, 4) for sample in samples]


def test_store_appends_rows_with_time_and_origin(tmp_path: Path) -> None:
    store = rows.Store(tmp_path / "new" / "codec.json", ORIGIN)
    store.append({"workload": "a", "status": "ok"})
    store.append({"workload": "b", "status": "oom"})
    content = json.loads(store.path.read_text())
    assert content["schema"] == rows.SCHEMA
    assert [(row["workload"], row["origin"]) for row in content["rows"]] == [("a", ORIGIN), ("b", ORIGIN)]
    assert all(row["time"].endswith("+00:00") for row in content["rows"])
    assert [path.name for path in store.path.parent.iterdir()] == ["codec.json"]


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


# Timing


def test_interleave_runs_every_task_once_a_round_in_changing_order() -> None:
    calls: list[str] = []

    def task(name: str) -> Any:
        return lambda: float(calls.append(name) or len(calls))

    tasks = {name: task(name) for name in "abc"}
    samples = measure.interleave(tasks, rounds=20)
    rounds = [tuple(calls[i : i + 3]) for i in range(0, 60, 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len(set(rounds)) > 1
    assert {name: len(values) for name, values in samples.items()} == {"a": 20, "b": 20, "c": 20}
    again = list(calls)
    calls.clear()
    measure.interleave(tasks, rounds=20)
    assert calls == again


def test_steps_are_timed_on_a_quick_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs a system that lets a process choose between two CPUs")
    allowed = os.sched_getaffinity(0)
    tried: dict[int, float] = {}

    def loop(length: int, times: int) -> float:
        (cpu,) = os.sched_getaffinity(0)
        return tried.setdefault(cpu, -float(len(tried)))

    monkeypatch.setattr(measure, "host_loop_ms", loop)
    begun, over = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: (begun.set(), over.wait()))
    other.start()
    begun.wait()
    try:
        with measure.on_quick_cpu():
            quickest = {list(tried)[-1]}
            assert [os.sched_getaffinity(thread) for thread in (0, other.native_id)] == [quickest] * 2
        assert [os.sched_getaffinity(thread) for thread in (0, other.native_id)] == [allowed] * 2
        assert 2 <= len(tried) <= measure.CPUS_TRIED
    finally:
        over.set()
        other.join()


@pytest.mark.parametrize("nbytes", [1 << 10, 1 << 20, 100 << 20, 1 << 30])
def test_buffer_sets_exceed_the_cache(nbytes: int) -> None:
    l2 = 60 << 20
    sets = measure.buffer_sets(nbytes, l2)
    assert sets >= 2
    assert sets * nbytes >= measure.L2_MULTIPLE * l2
    assert sets == 2 or (sets - 1) * nbytes < measure.L2_MULTIPLE * l2


def test_share_of_copy_is_the_ratio_of_rates() -> None:
    assert codec.share_of_copy(2 << 20, 7.0, 2 << 20, 7.0) == 1.0
    assert codec.share_of_copy(1 << 20, 7.0, 2 << 20, 7.0) == 0.5
    assert codec.share_of_copy(2 << 20, 14.0, 2 << 20, 7.0) == 0.5


# Codec


def codec_makers(*names: str) -> dict[str, Any]:
    every = {"copy": codec._copy, "reference": codec._ours("reference"), "eager-absmax": codec._eager}
    return {name: every[name] for name in names}


def test_codec_writes_both_phases_and_skips_them_the_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "makers", lambda device: codec_makers("copy", "reference", "eager-absmax"))
    codec.run(options(tmp_path))
    path = tmp_path / "codec.json"
    found = json.loads(path.read_text())["rows"]
    cases = [case.name for case in codec.cases(True, "cpu")]
    expected = {
        (case, method, phase)
        for case in cases
        for method in ("copy", "reference", "eager-absmax")
        for phase in ("quantise", "dequantise")
    }
    assert {(row["workload"], row["method"], row["phase"]) for row in found} == expected
    for row in found:
        copy = rows.select(found, workload=row["workload"], method="copy", phase=row["phase"])[0]
        rate = row["bytes_moved"] / statistics.median(row["samples_us"])
        copy_rate = copy["bytes_moved"] / statistics.median(copy["samples_us"])
        # Samples are stored with 4 decimals: half of that over the few microseconds of the smallest one.
        assert row["share_of_copy"] == pytest.approx(rate / copy_rate, rel=1e-3)
        assert copy["bytes_moved"] == 2 * row["nbytes"]
    exact = rows.select(found, workload="bf16/8KiB", method="reference")[0]
    numel = 4096
    assert exact["bytes_moved"] == 2 * numel + numel + 4 * numel // codec.GROUP

    codec.run(options(tmp_path))
    assert len(json.loads(path.read_text())["rows"]) == len(found)
    codec.run(options(tmp_path, again=True, only=(cases[0], "reference")))
    assert len(json.loads(path.read_text())["rows"]) == len(found) + 4


def test_codec_measures_the_forms_between_codes_and_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = codec.Case("fp32", 4 << 10, "probabilities").draw(torch.Generator().manual_seed(0))
    assert 0 <= values.min() < 1e-7
    assert values.max() == 1
    cases = [codec.Case("fp32", 4 << 10, form) for form in codec.FORMS]
    monkeypatch.setattr(codec, "cases", lambda tiny, device: cases)
    makers = {"pyactcomp-cpu": codec._ours("cpu"), "cast-bfloat16": codec._cast, **codec_makers("copy", "reference")}
    monkeypatch.setattr(codec, "makers", lambda device: {**makers, **codec_makers("eager-absmax")})
    codec.run(options(tmp_path))
    found = json.loads((tmp_path / "codec.json").read_text())["rows"]
    for case in cases:
        stored = {"scaled": (2 << 10) + 2 * 4, "above-zero": 1 << 7}.get(case.form, 2 << 10)
        expected = {"copy": 8 << 10, "pyactcomp-cpu": (4 << 10) + stored, "reference": (4 << 10) + stored}
        if case.form != "above-zero":
            expected["cast-bfloat16"] = 6 << 10
        assert {row["method"]: row["bytes_moved"] for row in rows.select(found, workload=case.name)} == expected


def test_codec_starts_nothing_without_budget(tmp_path: Path) -> None:
    codec.run(options(tmp_path, budget=rows.Budget(0.0)))
    assert not (tmp_path / "codec.json").exists()


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


def test_codec_checks_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "CHECK_CHUNK", 256)
    case = codec.Case("fp32", 4 * 1000)
    right = codec._ours("reference")(case, torch.device("cpu"))
    source = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    bound = reference.error_bound(source).norm() / source.double().norm()
    assert 0 < codec.check(right, source) <= bound
    for wrong_byte in (0, 300, 999, 1008, 1008 + 4 * 15):
        encoded = right.encode(source)
        encoded[wrong_byte] ^= 4
        with pytest.raises(RuntimeError, match="differs"):
            codec.check(replace(right, encode=lambda _, encoded=encoded: encoded), source)


def test_codec_makes_a_row_of_a_missing_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    monkeypatch.setattr(codec, "makers", lambda device: {**codec_makers("copy"), "bitsandbytes": codec._bitsandbytes})
    codec.run(options(tmp_path, only=("bf16/8KiB",)))
    found = rows.select(json.loads((tmp_path / "codec.json").read_text())["rows"], method="bitsandbytes")
    assert [row["status"] for row in found] == ["unavailable"]
    assert "bitsandbytes" in found[0]["reason"]


# Sharded steps


def test_sharded_steps_have_the_gradients_of_one_process(tmp_path: Path) -> None:
    sharded.run(options(tmp_path, tiny=True))
    found = json.loads((tmp_path / "sharded.json").read_text())["rows"]
    assert [(row["method"], row["status"], row["ranks"]) for row in found] == [("vanilla", "ok", 2), ("int8", "ok", 2)]
    # Two processes add the same gradients in another order at most.
    assert found[0]["grad_error"] <= torch.finfo(torch.bfloat16).eps
    assert found[1]["grad_error"] <= 0.02
    sharded.run(options(tmp_path, tiny=True))
    assert len(json.loads((tmp_path / "sharded.json").read_text())["rows"]) == 2


def test_sharded_steps_stand_beside_the_same_without_us() -> None:
    origin = {"commit": "c0ffee", "device": "NVIDIA H200", "command": "python -m bench sharded", "dirty": False}
    base = {
        "workload": sharded.WORKLOAD,
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
    assert sharded.sharded_table([]) == ""


# Workers


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


def test_worker_stops_where_the_next_row_would_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKLOADS, "small", small_workload())
    monkeypatch.setitem(methods.METHODS, "ckpt", replace(methods.METHODS["ckpt"], cost=1e9))
    spec = replace(specification(tmp_path, "frontier", "vanilla", "ckpt"), budget_s=600.0)
    assert worker.work(spec) == worker.STOP
    assert [row["method"] for row in json.loads(Path(spec.path).read_text())["rows"]] == ["vanilla"]


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


def test_batch_sizes_double_with_one_step_between() -> None:
    assert list(batch.sizes(8, limit=6)) == [8, 12, 16, 24, 32, 48]
    assert list(batch.sizes(1, limit=6)) == [1, 2, 3, 4, 6, 8]


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


def test_throughput_is_samples_over_the_median_step() -> None:
    trainer = training.build(small_workload(), 2, "cpu", True)
    row = training.throughput(trainer, 3, 5)
    assert trainer.batch[0].shape[0] == 3 * 512
    assert row["samples_per_s"] == pytest.approx(3 / statistics.median(row["samples_ms"]) * 1e3, rel=1e-3)


@pytest.mark.slow
def test_frontier_runs_in_processes_and_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    chosen = options(tmp_path, only=("llama_1b_bf16",))
    names = ("int8", "exact")
    frontier.run(chosen, names)
    found = json.loads((tmp_path / "frontier.json").read_text())["rows"]
    assert [row["method"] for row in found] == ["vanilla", "int8", "vanilla-again", "exact"]
    assert {row["status"] for row in found} == {"ok"}
    assert len({row["run"] for row in found}) == 1
    # At this size only the loss head differs, on machines whose matrix products round a part of the rows otherwise.
    assert 0 <= found[1]["grad_error"] <= 0.02
    assert found[1]["fused_modules"]["GatedMLP"] == 2
    assert (found[-1]["vanilla_differing"], found[-1]["differing"]) == (0, 0)

    def process(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing was left to measure")

    monkeypatch.setattr(frontier, "supervise", process)
    frontier.run(chosen, names)


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


def test_untuned_workloads_are_measured_by_their_own_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, tuple[str, ...]]] = []
    monkeypatch.setattr(frontier, "supervise", lambda spec, budget: started.append((spec.workload, spec.methods)))
    frontier.run(options(tmp_path), chosen="untuned")
    plain = ("vanilla", "int8", "ckpt", "vanilla-again")
    assert started == [(name, plain) for name in frontier.UNTUNED]
    started.clear()
    frontier.run(options(tmp_path, only=("unet3d_amp",)), ("lossless",))
    assert started == [("unet3d_amp", ("vanilla", "lossless", "vanilla-again"))]


def test_stages_measure_every_method_once() -> None:
    staged = [method for stage in methods.STAGES for method in stage]
    assert sorted([*staged, methods.VANILLA_AGAIN]) == sorted(methods.METHODS)
    assert set(staged) - {"exact"} <= set(frontier_report.METHOD_ORDER)


@pytest.mark.parametrize("wrong", [["--methods", "vanila"], ["--only", "bert"]])
def test_command_line_names_what_it_knows(wrong: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.main(["frontier", "--device", "cpu", "--out", str(tmp_path), *wrong])
    assert ended.value.code == 2
    assert "vanilla" in (text := capsys.readouterr().err) or "bert_large_amp" in text


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.nn.functional.gelu(self.first(x)))
        return y


def test_the_fp8_pass_runs_after_the_compilation_that_gave_the_reference() -> None:
    import torch._functorch.config
    import torch._inductor.config
    from torch._dynamo.utils import counters

    method = methods.METHODS["compile-fp8-e4m3"]
    assert method.reference is not None
    model, x = TwoLayers(), torch.randn(1024, 16)
    quantised = []
    with (
        torch._inductor.config.patch(post_grad_fusion_options={}),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        for apply in (method.reference, method.apply):
            counters.clear()
            apply(model, [])
            model(x).square().mean().backward()
            quantised.append(counters["inductor"]["activation_quantization_fwd_aten_pass"])
    assert quantised == [0, 1]
