"""The arithmetic of the benches: what decides a published number, on figures whose answer is known."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_cases import options, small_workload
from replay_cases import Program
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from works_with import GRADIENT_BOUND

import pyactcomp
from bench import (
    alloc_methods,
    alloc_pairs,
    alloc_pausing,
    alloc_prediction,
    alloc_traces,
    alloc_training,
    breadth_measure,
    codec,
    context_models,
    holds_data,
    holds_training,
    measure,
    methods,
    overhead,
    pairs,
    rows,
    scaling,
    training,
)
from bench.breadth_models import Step
from bench.context_peers import HostInputs
from bench.workload import LanguageModelLoss
from bench.workloads import WORKLOADS
from pyactcomp.allocator import AllocatorConfig, CachingAllocator
from pyactcomp.codec import reference


def test_summary_has_the_samples_median_and_percentiles() -> None:
    samples = [random.Random(1).uniform(1, 9) for _ in range(11)] + [0.5, 30.0, 2.25]
    row = rows.summary(samples, "us")
    assert row["median_us"] == pytest.approx(statistics.median(samples), rel=1e-12)
    fifths = statistics.quantiles(samples, n=5, method="inclusive")
    assert [row["p20_us"], row["p80_us"]] == pytest.approx([fifths[0], fifths[3]], rel=1e-12)
    assert row["samples_us"] == [round(sample, 4) for sample in samples]


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


def test_throughput_is_samples_over_the_median_step() -> None:
    trainer = training.build(small_workload(), 2, "cpu", True)
    row = training.throughput(trainer, 3, 5)
    assert trainer.batch[0].shape[0] == 3 * 512
    assert row["samples_per_s"] == pytest.approx(3 / statistics.median(row["samples_ms"]) * 1e3, rel=1e-3)


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


@pytest.mark.parametrize("name", methods.METHODS)
def test_head_is_fused_where_the_method_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._functorch import config

    heads: list[bool] = []
    monkeypatch.setattr(pyactcomp, "compress", lambda module, fuse_head, **_: heads.append(fuse_head))
    # A method may set torch's budget, which is the whole process's.
    with config.patch(activation_memory_budget=1.0):
        if methods.METHODS[name].ours:
            for module in (LanguageModelLoss(nn.Linear(2, 2)), nn.Linear(2, 2)):
                methods.METHODS[name].apply(module, [])
    fused = name in ("int8", "int8-attention", "int8+offload", "int8-g128", "int8+ckpt", "compile-blocks+int8")
    # A graph takes any module's loss in chunks.
    expected = [True, True] if name == "compile+int8+head" else [fused, False]
    assert heads == (expected if methods.METHODS[name].ours else [])


def test_measure_reports_the_gradient_error_of_a_lossy_method() -> None:
    row = training.measure(small_workload(), methods.METHODS["int8"], "cpu", True, None)
    assert 0 < row["grad_error"] <= GRADIENT_BOUND
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


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", WORKLOADS)
def test_workload_has_a_loss_and_checkpointing(name: str) -> None:
    workload = WORKLOADS[name]
    try:
        trainer = training.build(workload, 2, "cpu", True)
    except ModuleNotFoundError as missing:
        pytest.skip(str(missing))
    blocks = workload.blocks(trainer.module)
    assert workload.checkpoints_itself or len(blocks) >= 2
    ran: list[int] = []
    for module in trainer.module.modules():
        module.register_forward_hook(lambda *_: ran.append(1))
    exact = trainer.gradients()
    once = len(ran)
    assert all(gradient.isfinite().all() for gradient in exact)
    for block in blocks:
        block.register_forward_hook(lambda *_: ran.append(len(blocks)))
    methods.METHODS["ckpt"].apply(trainer.module, blocks)
    ran.clear()
    found = trainer.gradients()
    assert ran.count(len(blocks)) == len(blocks) or not blocks
    assert len(ran) > once + len(blocks)  # modules inside blocks run again
    assert training.differing(found, exact) == 0


def test_kernels_are_summed_without_the_ranges_around_them() -> None:
    from torch.autograd import DeviceType

    def event(device: DeviceType, microseconds: float, **more: bool) -> SimpleNamespace:
        time_range = SimpleNamespace(elapsed_us=lambda: microseconds)
        # A profile's events hold an object of their own, equal to the name in DeviceType.
        return SimpleNamespace(device_type=DeviceType(device.value), time_range=time_range, **more)

    events = [
        event(DeviceType.CUDA, 1500.0, is_user_annotation=False),
        event(DeviceType.CUDA, 250.0),
        event(DeviceType.CUDA, 9000.0, is_user_annotation=True),
        event(DeviceType.CPU, 7.0),
    ]
    assert training.kernels_of(events) == {"kernels": 2, "kernels_ms": 1.75}


def test_host_time_is_that_of_the_middle_step(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = training.build(small_workload(), 2, "cpu", True)
    clock = iter([0.0, 0.004, 1.0, 1.009, 2.0, 2.005])
    monkeypatch.setattr(training, "on_quick_cpu", nullcontext)
    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert training.host_ms(trainer, 3) == pytest.approx(5.0)


def test_measure_counts_what_a_compressed_step_saves() -> None:
    row = training.measure(small_workload(), methods.METHODS["int8"], "cpu", True, None)
    # Four layers: the input of each Linear and of each GELU, and the loss's operand; 1024 x 64 floats each, of which
    # the first is the batch itself.
    assert row["saved_bytes"] == row["saved_tensors"] * 1024 * 64 * 4
    assert row["stored_bytes"] < 0.4 * row["saved_bytes"]
    assert row["host_ms"] > 0
    assert "kernels_ms" not in row  # there is no GPU


def test_overhead_reports_the_difference_per_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, warm_up = (1.0, 2.0, 0.0), [(0.0, 0.0, 0.0)] * 2
    compressed = [(8.0, 6.0, 0.5), (9.0, 7.0, 0.5), (10.0, 8.0, 0.5)]
    calls = iter(warm_up + [figures for ours in compressed for figures in (plain, ours)])
    real_chain = overhead.chain

    def chain(operator: Any, x: torch.Tensor, length: int, context: Any, device: str) -> overhead.Times:
        if length == 4:
            return real_chain(operator, x, length, context, device)
        return next(calls)

    monkeypatch.setattr(overhead, "chain", chain)
    monkeypatch.setattr(overhead, "launches", lambda x, calls, device: {"encode_us": 1.0})
    row = overhead.measure(options(tmp_path))
    assert (row["pack_us"], row["unpack_us"], row["sum_us"], row["drain_us"]) == (8.0, 5.0, 13.0, 0.5)
    assert row["encode_us"] == 1.0


def turns(*medians: float) -> list[rows.Row]:
    return [{"ms": [median - 0.5, median, median + 3.0]} for median in medians]


def test_ratios_are_those_of_turns_of_one_pair() -> None:
    row = pairs.compared({"before": turns(10.0, 20.0, 10.0), "after": turns(5.0, 30.0, 10.0)})
    assert (row["unit"], row["ratios"], row["ratio"]) == ("ms", [0.5, 1.5, 1.0], 1.0)
    assert (row["spread"], row["itself"]) == (2.0, 0.5)


def test_exponents_come_from_times_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = dict.fromkeys(("linear", "quadratic"), (4096, 65536))
    cost = {"linear": lambda size: 1e-6 * size, "quadratic": lambda size: 1e-9 * size**2}
    cases = {name: (cost[name], each) for name, each in sizes.items()}
    monkeypatch.setattr(scaling, "CASES", cases)
    monkeypatch.setattr(scaling, "seconds", lambda prepare, size: prepare(size))
    assert scaling.measure("linear", tiny=False)["exponent"] == pytest.approx(1)
    assert scaling.measure("quadratic", tiny=True)["exponent"] == pytest.approx(2)
    assert scaling.measure("quadratic", tiny=True)["sizes"] == [64, 1024]


def test_resized_tensors_are_freed_with_their_own_size() -> None:
    events = [("alloc", 1, 3 << 20), ("alloc", 2, 1 << 20), ("free_completed", 1, 3 << 20)]
    larger = alloc_traces.resized(alloc_traces.Trace("any", events, {}), 2.0)
    assert larger.events == [("alloc", 1, 6 << 20), ("alloc", 2, 1 << 20), ("free_completed", 1, 6 << 20)]


def test_traces_add_up_to_their_recorded_peak() -> None:
    paths = sorted(alloc_traces.FOLDER.glob("*.npz"))
    assert paths
    for path in paths:
        trace = alloc_traces.load(path)
        assert max(alloc_traces.requested(trace)) == trace.meta["peak_requested"]


def test_training_averages_the_steps_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 9.0, 9.0, 18.0, 20.0, 23.0, 30.0, 31.0])
    monkeypatch.setattr(alloc_training, "WARM_UP", 2)
    monkeypatch.setattr(alloc_training.time, "perf_counter", lambda: next(clock))
    losses = iter([1.0, 2.0, 3.0, 6.0])
    row = alloc_training.train(lambda: torch.tensor(next(losses)), 4, "cpu")
    assert row["samples_ms"] == [3000.0, 1000.0]
    assert (row["mean_ms"], row["run_s"]) == (2000.0, 22.0)
    assert (row["mean_loss"], row["final_loss"]) == (3.0, 6.0)


def test_pairs_are_timed_per_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0, 5000, 10_000, 13_000])
    monkeypatch.setattr(alloc_pairs.time, "perf_counter_ns", lambda: next(clock))
    made: list[int] = []
    row = alloc_pairs.time_pairs(made.append, 100, 2)
    assert made == [100, 100, 100]
    assert (row["samples_ns"], row["best_ns"], row["median_ns"]) == ([50.0, 30.0], 30.0, 40.0)


# Fewer events than the host runs ahead of a stream, so that only what the recording completes is complete.
STEPS = 380


def core(method: str, seed: int) -> CachingAllocator:
    """Run one program on the simulated device, under the decisions of native or of this package."""
    growth = "malloc" if method == "native" else "vmm"
    return Program(seed, STEPS).run(AllocatorConfig(growth=growth), 64 * rows.GIB)[0]


def peaks(allocator: CachingAllocator) -> rows.Row:
    names = ("allocated", "reserved")
    return {f"peak_{name}_bytes": allocator.counters()[f"{name}_bytes.all.peak"] for name in names}


@pytest.mark.parametrize(("method", "seed"), [("native", 0), ("pyactcomp", 1)])
def test_prediction_is_what_a_run_under_the_method_takes(method: str, seed: int, tmp_path: Path) -> None:
    recording = tmp_path / "snapshot.json"
    recorded = core("native", seed).snapshot()
    recording.write_text(json.dumps(recorded))
    real = {**peaks(core(method, seed)), "steps": STEPS, "samples_ms": [1.0]}
    row = alloc_prediction.predict(recording, method, real)
    assert row["predicted_reserved_bytes"] == row["peak_reserved_bytes"] == real["peak_reserved_bytes"]
    assert row["predicted_allocated_bytes"] == row["peak_allocated_bytes"] == real["peak_allocated_bytes"]
    assert (row["error"], row["steps"]) == (0.0, STEPS)
    assert row["events"] == len(recorded["device_traces"][0])
    assert row["replay_s"] > 0
    assert "samples_ms" not in row


def test_error_is_signed_and_relative_to_the_real_run(tmp_path: Path) -> None:
    recording = tmp_path / "snapshot.json"
    event = {"action": "alloc", "addr": 4096, "size": 600, "stream": 0, "time_us": 7, "frames": []}
    recording.write_text(json.dumps({"segments": [], "device_traces": [[event]]}))
    # 600 bytes take a segment, a page or a handle of 2 MiB.
    for real, error in ((2 << 20, 0.0), (4 << 20, -0.5), (1 << 20, 1.0)):
        figures = {"peak_reserved_bytes": real, "peak_allocated_bytes": 1024}
        for method in alloc_methods.TRAINING:
            assert alloc_prediction.predict(recording, method, figures)["error"] == error


def test_contents_that_do_not_come_back_are_an_error() -> None:
    class Forgetful(alloc_pausing.ByHand):
        def resume(self, tag: str) -> None:
            super().resume(tag)
            self._tags[tag][1][0].data.zero_()

    alloc_pausing.measure_state(alloc_pausing.ByHand("cpu"), alloc_pausing.TINY, "cpu")
    with pytest.raises(RuntimeError, match="the contents are not those from before the pauses"):
        alloc_pausing.measure_state(Forgetful("cpu"), alloc_pausing.TINY, "cpu")


def test_a_loop_computes_with_pauses_what_it_computes_without() -> None:
    resident, paused = alloc_pausing.measure("pause_loop", "native", tiny=True, device="cpu")
    assert (resident["paused"], paused["paused"]) == (False, True)
    assert resident["mean_result"] == paused["mean_result"]
    assert [half for _, _, half in paused["samples"]] == [0, 1] * alloc_pausing.TINY.cycles


def package(folder: Path, name: str, size: int) -> bytes:
    text = (f"# {name}\n".encode() * size)[:size]
    (folder / name / "inner").mkdir(parents=True)
    (folder / name / "inner" / "b.py").write_bytes(text)
    (folder / name / "a.py").write_bytes(text[:10])
    (folder / name / "data.txt").write_bytes(b"no source")
    return text[:10] + text


def test_held_out_packages_are_not_trained_on(tmp_path: Path) -> None:
    held_out = b"".join(package(tmp_path, name, 50) for name in holds_data.HELD_OUT)
    first, second = package(tmp_path, "zebra", 100), package(tmp_path, "ant", 80)
    text = holds_data.installed_sources(tmp_path)
    assert bytes(text.training.tolist()) == second + first
    assert bytes(text.validation.tolist()) == held_out
    limited = holds_data.installed_sources(tmp_path, limit=100, package_limit=60)
    assert bytes(limited.training.tolist()) == second[:60] + first[:40]


def test_arms_start_from_the_same_weights_and_see_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    task = holds_training.Memorise("cpu", True)
    seen: dict[str, list[str]] = {}
    arms = dict(holds_training.ARMS)

    def watched(arm: str) -> Callable[[nn.Module], Any]:
        def apply(module: nn.Module) -> Any:
            own = seen.setdefault(arm, [holds_training.fingerprint(module.state_dict().values())])
            module.register_forward_pre_hook(
                lambda module, batch: own.append(holds_training.fingerprint(batch)) if module.training else None
            )
            return arms[arm](module)

        return apply

    for arm in arms:
        monkeypatch.setitem(holds_training.ARMS, arm, watched(arm))
    found = {arm: holds_training.train(task, arm, 3) for arm in ("vanilla", "lossless", "nearest2")}
    assert len(seen["vanilla"]) == 1 + task.steps
    assert len(set(seen["vanilla"])) == 1 + task.steps
    assert seen["vanilla"] == seen["lossless"] == seen["nearest2"]
    assert len({row["pair"] for row in found.values()}) == 1
    other = holds_training.train(task, "vanilla", 4)
    assert other["pair"] != found["vanilla"]["pair"]
    # What must differ does: without it the arm would be vanilla, and nothing could fail.
    assert found["nearest2"]["loss"] != found["vanilla"]["loss"]


def test_recall_is_the_share_of_bytes_above_the_bar() -> None:
    task = holds_training.Memorise("cpu", True)
    module = task.build()
    right = nn.functional.one_hot(task.sequences[:, 1:], 256).float()
    # The right byte's logit is a and all others are 0: it has e^a / (e^a + 255), in the first sequence 1 / 256.
    for probability, recalled in ((0.9899, 0.0), (0.9901, 15 / 16)):
        right[0] = 0.0
        logits = right * math.log(255 * probability / (1 - probability))
        module.logits = lambda _, logits=logits: logits  # type: ignore[method-assign]
        loss, recall = task.evaluate(module)
        assert recall == recalled
        assert loss == pytest.approx((math.log(256) - 15 * math.log(probability)) / 16, rel=1e-4)


def _gradients(*values: float) -> dict[str, Tensor]:
    return {str(number): torch.tensor([value, 1.0]) for number, value in enumerate(values)}


def test_error_is_over_all_gradients_together() -> None:
    exact = _gradients(3.0, 4.0)
    assert breadth_measure.error(exact, exact) == 0
    # |(1, 2)| over |(3, 1, 4, 1)|
    assert breadth_measure.error(exact, _gradients(4.0, 6.0)) == pytest.approx(math.sqrt(5 / 27))
    assert breadth_measure.error(exact, _gradients(3.0, math.nan)) == math.inf
    assert breadth_measure.error(exact, _gradients(3.0, math.inf)) == math.inf
    assert breadth_measure.error(exact, _gradients(3.0)) == math.inf
    assert breadth_measure.rounded(math.inf) == "inf"
    assert breadth_measure.rounded(0.0123456) == 0.01235


def test_differing_looks_at_bits() -> None:
    exact = _gradients(0.0, 4.0)
    assert breadth_measure.differing(exact, _gradients(0.0, 4.0)) == 0
    assert breadth_measure.differing(exact, _gradients(-0.0, 4.0)) == 1
    assert breadth_measure.differing(exact, _gradients(0.0)) == 1
    nan = _gradients(math.nan)
    assert breadth_measure.differing(nan, nan) == 0


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def step() -> Step:
    return Step(Layers(), {"x": torch.randn(64, 64, generator=torch.Generator().manual_seed(0))}).train()


def test_a_step_that_compression_spoils_shows_as_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = breadth_measure.measure_steps(step(), step)
    assert sound["lossless"] == sound["lossless_dropout"] == 0
    assert 0 < sound["int8"] < GRADIENT_BOUND
    assert "problems" not in sound

    compressed = breadth_measure._compressed

    def spoilt(step: Step, **options: Any) -> Any:
        if options.get("mode") == "lossless":
            raise RuntimeError("backward failed")
        found, saved = compressed(step, **options)
        return {name: gradient * math.nan for name, gradient in found.items()}, saved

    monkeypatch.setattr(breadth_measure, "_compressed", spoilt)
    row = breadth_measure.measure_steps(step(), step)
    assert row["int8"] == "inf"
    assert row["lossless"] == row["tensors"] == 4
    assert row["problems"]["lossless"] == "RuntimeError: backward failed"


def test_what_does_not_repeat_itself_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = breadth_measure.gradients
    calls = iter(range(1, 100))

    def noisy(step: Step, **options: Any) -> Any:
        factor = 1 + next(calls) * 2.0**-20
        return {name: gradient * factor for name, gradient in exact(step, **options).items()}

    monkeypatch.setattr(breadth_measure, "gradients", noisy)
    row = breadth_measure.measure_steps(step(), step)
    assert row["lossless"] is None
    assert row["problems"]["lossless"] == "plain torch does not repeat itself bit by bit"


def test_the_loss_in_chunks_is_that_of_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_models, "CHUNK", 24)  # 100 tokens end in a part of a chunk
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(100, 32, generator=generator, dtype=torch.double).requires_grad_()
    weight = torch.randn(50, 32, generator=generator, dtype=torch.double).requires_grad_()
    labels = torch.randint(50, (100,), generator=generator)
    exact = F.cross_entropy(hidden @ weight.t(), labels)
    wanted = torch.autograd.grad(3 * exact, (hidden, weight))
    loss = context_models.ChunkedLoss.apply(hidden, weight, labels)
    found = torch.autograd.grad(3 * loss, (hidden, weight))
    # Softmax and loss are in float32, each element of a gradient is a sum over at most 100 of its products.
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)
    for a, b in zip(found, wanted, strict=True):
        assert float((a - b).norm() / b.norm()) < 100 * 2**-24


@pytest.mark.parametrize("name", context_models.SHAPES)
def test_shapes_are_those_of_the_published_models(name: str) -> None:
    shape = context_models.TINY[name]
    model = context_models.build(shape, 64, "cpu")
    matrices = sum(p.numel() for p in model.model.layers.parameters() if p.ndim == 2)
    assert matrices == shape.block_weights
    full = context_models.SHAPES[name]
    # meta-llama/Llama-3.1-8B has 8,030,261,248 weights, Qwen/Qwen3-8B 8,190,735,360.
    norms = full.width * (2 * full.layers + 1) + (2 * full.layers * full.head_width if name == "qwen8b" else 0)
    published = {"llama8b": 8_030_261_248, "qwen8b": 8_190_735_360}[name]
    assert full.block_weights + 2 * full.width * full.vocabulary + norms == published


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_inputs_on_the_host_give_the_gradients_of_checkpointing(device: str) -> None:
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)).to(device)
    inputs = HostInputs(len(blocks), torch.device(device))

    def gradients(length: int, run: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
        blocks.zero_grad()
        x = torch.randn(length, 64, generator=torch.Generator().manual_seed(length)).to(device).requires_grad_()
        out = x
        for block in blocks:
            out = run(block, out)
        out.square().sum().backward()
        return [each.grad.clone() for each in (x, *blocks.parameters()) if each.grad is not None]

    for length in (128, 128, 32, 256, 128):  # host memory is used again, in part, and grows
        exact = gradients(length, lambda block, x: checkpoint(block, x, use_reentrant=False))
        found = gradients(length, inputs)
        assert len(found) == 1 + 2 * len(blocks)
        assert all(torch.equal(a, b) for a, b in zip(found, exact, strict=True))
    assert [buffer.numel() for buffer in inputs.host] == [256 * 64] * 3  # the last block's input stays
