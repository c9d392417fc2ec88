"""The bench harness, on the CPU and at sizes that say nothing about speed."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import pyactcomp
from bench import __main__ as command_line
from bench import (
    batch,
    codec,
    frontier,
    frontier_plot,
    frontier_report,
    measure,
    methods,
    overhead,
    report,
    rows,
    training,
    worker,
)
from bench.workloads import WORKLOADS, LanguageModelLoss, Workload
from pyactcomp import reference

ORIGIN = {"commit": "c0ffee", "dirty": False, "sources": "s1", "device": "cpu", "command": "python -m bench frontier"}


def options(out: Path, **fields: Any) -> rows.Options:
    return replace(rows.Options(out, "cpu", rows.Budget(None), tiny=True), **fields)


def small_workload() -> Workload:
    def build(_: bool) -> nn.Module:
        class Loss(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for layer in self.layers:
                    x = layer(x)
                return x.square().mean()

        return Loss()

    def inputs(size: int, device: str, _: bool) -> tuple[torch.Tensor, ...]:
        return (torch.randn(512 * size, 64, device=device),)

    return Workload("small", build, inputs, lambda module: list(module.layers), 2, "four linear layers")


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


def test_provenance_names_sources_and_command_without_the_output_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "codec", "--out", "/somewhere/else", "--tiny", "--out=/there"])
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
    every = {"copy": codec._copy, "reference": codec._reference, "eager-absmax": codec._eager}
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


def test_codec_starts_nothing_without_budget(tmp_path: Path) -> None:
    codec.run(options(tmp_path, budget=rows.Budget(0.0)))
    assert not (tmp_path / "codec.json").exists()


def test_codec_rejects_a_wrong_byte_before_timing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def corrupted(case: codec.Case, device: torch.device) -> codec.Provider:
        right = codec._reference(case, device)

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
    right = codec._reference(case, torch.device("cpu"))
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


# Overhead


def test_overhead_reports_the_difference_per_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, warm_up = (1.0, 2.0, 0.0), [(0.0, 0.0, 0.0)] * 2
    compressed = [(8.0, 6.0, 0.5), (9.0, 7.0, 0.5), (10.0, 8.0, 0.5)]
    calls = iter(warm_up + [figures for ours in compressed for figures in (plain, ours)])
    real_chain = overhead.chain

    def chain(x: torch.Tensor, length: int, context: Any, device: str) -> tuple[float, float, float]:
        if length == 4:
            return real_chain(x, length, context, device)
        return next(calls)

    monkeypatch.setattr(overhead, "chain", chain)
    monkeypatch.setattr(overhead, "launches", lambda x, calls, device: {"encode_us": 1.0})
    row = overhead.measure(options(tmp_path))
    assert (row["pack_us"], row["unpack_us"], row["sum_us"], row["drain_us"]) == (8.0, 5.0, 13.0, 0.5)
    assert row["encode_us"] == 1.0


def test_overhead_refuses_to_time_what_is_not_compressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyactcomp, "compressed", nullcontext)
    overhead.run(options(tmp_path))
    found = json.loads((tmp_path / "overhead.json").read_text())["rows"]
    assert [row["status"] for row in found] == ["error"]
    assert "nothing was compressed" in found[0]["reason"]


# Training


def test_relative_error_is_over_all_gradients_as_one_vector() -> None:
    exact = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    lossy = [torch.tensor([3.0, 0.5]), torch.tensor([[4.0]])]
    assert training.relative_error(exact, exact) == 0.0
    assert training.relative_error(lossy, exact) == pytest.approx(0.5 / 5.0, rel=1e-12)


@pytest.mark.parametrize("name", ["vanilla", "ckpt", "ckpt2", "save_on_cpu", "lossless"])
def test_lossless_methods_leave_the_gradients_alone(name: str) -> None:
    exact = training.build(small_workload(), 2, "cpu", True).gradients()
    trainer = training.build(small_workload(), 2, "cpu", True)
    training.apply_and_compare(trainer, methods.METHODS[name])
    assert all(torch.equal(a, b) for a, b in zip(trainer.gradients(), exact, strict=True))


@pytest.mark.parametrize(("name", "recomputed"), [("vanilla", 0), ("ckpt", 4), ("ckpt2", 2), ("int8+ckpt", 4)])
def test_checkpointing_recomputes_every_or_every_second_block(name: str, recomputed: int) -> None:
    trainer = training.build(small_workload(), 2, "cpu", True)
    forwards = []
    for layer in trainer.module.layers:
        layer[0].register_forward_hook(lambda *_: forwards.append(1))
    trainer.context = methods.METHODS[name].apply(trainer.module, list(trainer.module.layers))
    trainer.gradients()
    assert len(forwards) == 4 + recomputed


def test_checkpointing_does_not_hide_blocks_from_compression() -> None:
    order = []

    class Patched(nn.Linear):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "forward":
                order.append("checkpoint")
            super().__setattr__(name, value)

    block = Patched(4, 4)
    methods._then_checkpoint(lambda *_: order.append("first"))(nn.Sequential(block), [block])
    assert order == ["first", "checkpoint"]


@pytest.mark.parametrize(("name", "budget"), [("compile", 1.0), ("compile0.5", 0.5)])
def test_compile_covers_the_whole_module_under_its_budget(
    name: str, budget: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._functorch import config

    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module: compiled.append(module))
    module = small_workload().build(True)
    with config.patch(activation_memory_budget=1.0):
        methods.METHODS[name].apply(module, [])
        assert config.activation_memory_budget == budget
    assert compiled == [module]


def test_liger_patches_the_model_inside_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    patched: list[nn.Module] = []
    package = SimpleNamespace(apply_liger_kernel_to_llama=lambda model: patched.append(model))
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace(transformers=package))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)
    model = nn.Linear(2, 2)
    methods.METHODS["liger"].apply(LanguageModelLoss(model), [])
    assert patched == [model]


@pytest.mark.parametrize("name", methods.METHODS)
def test_head_is_fused_where_the_method_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[bool] = []
    monkeypatch.setattr(pyactcomp, "compress", lambda module, fuse_head, **_: heads.append(fuse_head))
    if methods.METHODS[name].ours:
        for module in (LanguageModelLoss(nn.Linear(2, 2)), nn.Linear(2, 2)):
            methods.METHODS[name].apply(module, [])
    assert heads == {"int8": [True, False], "int8-g128": [True, False], "int8+ckpt": [True, False]}.get(
        name, [False, False] if methods.METHODS[name].ours else []
    )


def test_measure_reports_the_gradient_error_of_a_lossy_method() -> None:
    row = training.measure(small_workload(), methods.METHODS["int8"], "cpu", True, None)
    assert 0 < row["grad_error"] <= 0.02
    assert row["grad_error_vanilla"] == 0.0
    assert len(row["samples_ms"]) == 2
    assert row["codec"] in ("cpu", "reference")
    assert row["functions"] == "torch"
    vanilla = training.measure(small_workload(), methods.METHODS["vanilla"], "cpu", True, row["first_loss"])
    assert vanilla["first_loss"] == row["first_loss"]
    assert "grad_error" not in vanilla


def test_measure_refuses_a_method_that_changes_the_forward() -> None:
    def double_loss(module: nn.Module, _: list[nn.Module]) -> Any:
        module.register_forward_hook(lambda m, args, loss: 2 * loss)
        return nullcontext

    exact = training.measure(small_workload(), methods.METHODS["vanilla"], "cpu", True, None)["first_loss"]
    with pytest.raises(RuntimeError, match="first loss"):
        training.measure(small_workload(), methods.Method("wrong", double_loss), "cpu", True, exact)


@pytest.fixture
def algorithms() -> Iterator[None]:
    """Let a test ask for deterministic algorithms, and take that back."""
    yield
    torch.use_deterministic_algorithms(False)


def test_differing_counts_tensors_by_their_bits() -> None:
    exact = [torch.tensor([0.0, float("nan")]), torch.ones(3, dtype=torch.bfloat16), torch.ones(2, 2)]
    assert training.differing([x.clone() for x in exact], exact) == 0
    other = [torch.tensor([-0.0, float("nan")]), exact[1], torch.ones(2, 2).t().contiguous().t()]
    assert training.differing(other, exact) == 1
    assert training.differing([exact[0], exact[1].float(), exact[2] + 1e-6], exact) == 2


@pytest.mark.usefixtures("algorithms")
def test_exactness_counts_what_a_method_changes() -> None:
    exact = training.exactness(small_workload(), methods.METHODS["exact"], "cpu", True)
    tensors = 2 * 4  # weight and bias of four layers
    assert (exact["gradient_tensors"], exact["vanilla_differing"], exact["differing"]) == (tensors, 0, 0)
    assert exact["nondeterministic"] is None
    lossy = training.exactness(small_workload(), methods.METHODS["int8"], "cpu", True)
    assert (lossy["vanilla_differing"], lossy["differing"] > 0) == (0, True)


@pytest.mark.usefixtures("algorithms")
@pytest.mark.filterwarnings("ignore:put_ does not have a deterministic implementation")
def test_exactness_names_an_operator_that_has_no_deterministic_form() -> None:
    def build(_: bool) -> nn.Module:
        class Loss(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(4))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x[:4, 0].clone().put_(torch.arange(4), self.weight).square().sum()

        return Loss()

    workload = replace(small_workload(), build=build, blocks=lambda module: [])
    row = training.exactness(workload, methods.METHODS["exact"], "cpu", True)
    assert "put_" in row["nondeterministic"]
    assert (row["gradient_tensors"], row["vanilla_differing"], row["differing"]) == (1, 0, 0)


@pytest.mark.parametrize("name", WORKLOADS)
def test_workload_has_a_loss_and_blocks(name: str) -> None:
    pytest.importorskip("timm" if name in ("swin_base_amp", "resnet50_tf32") else "transformers")
    workload = WORKLOADS[name]
    trainer = training.build(workload, 2, "cpu", True)
    blocks = workload.blocks(trainer.module)
    assert len(blocks) >= 2
    forwards = []
    for block in blocks:
        block.register_forward_hook(lambda *_: forwards.append(1))
    assert trainer.forward().isfinite()
    assert len(forwards) == len(blocks)


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
    assert 0 < found[1]["grad_error"] <= 0.02
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


# Report


def step_row(method: str, ms: float, act: int, peak: int, run: str, **fields: Any) -> rows.Row:
    origin = {**ORIGIN, "device": "NVIDIA H200", "torch": "2.11.0", "driver": "580"}
    row = {
        "suite": "frontier", "run": run, "workload": "bert_large_amp", "method": method, "scale": "full",
        "status": "ok", "median_ms": ms, "act_bytes": act * 2**30, "peak_minus_base_bytes": peak * 2**30,
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
