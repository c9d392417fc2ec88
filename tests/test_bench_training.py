"""How the benches train: what each method leaves alone, recomputes and changes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_cases import small_workload
from torch import nn

import pyactcomp
from bench import (
    methods,
    training,
)
from bench.workload import LanguageModelLoss
from bench.workloads import WORKLOADS


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


def test_blocks_are_compiled_each_for_its_own_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import config
    from torch._dynamo.testing import CompileCounter

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.dense = nn.Linear(width, width + 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(self.dense(x))

    counter = CompileCounter()
    compiled_with: list[dict[str, object]] = []
    compile_of = nn.Module.compile

    def compile(module: nn.Module, **options: object) -> None:
        compiled_with.append(options)
        compile_of(module, backend=counter, **options)

    monkeypatch.setattr(nn.Module, "compile", compile)
    blocks = [Block(width) for width in range(1, 13)]
    with config.patch(recompile_limit=8):
        methods.METHODS["compile-blocks"].apply(nn.Sequential(*blocks), blocks)
        for block in blocks:
            block(torch.zeros(2, block.dense.in_features))
    assert compiled_with == [{"dynamic": False}] * len(blocks)
    assert counter.frame_count == len(blocks)


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
    from torch._functorch import config

    heads: list[bool] = []
    monkeypatch.setattr(pyactcomp, "compress", lambda module, fuse_head, **_: heads.append(fuse_head))
    # A method may set torch's budget, which is the whole process's.
    with config.patch(activation_memory_budget=1.0):
        if methods.METHODS[name].ours:
            for module in (LanguageModelLoss(nn.Linear(2, 2)), nn.Linear(2, 2)):
                methods.METHODS[name].apply(module, [])
    fused = name in ("int8", "int8-attention", "int8-g128", "int8+ckpt", "compile-blocks+int8")
    # A graph takes any module's loss in chunks.
    expected = [True, True] if name == "compile+int8+head" else [fused, False]
    assert heads == (expected if methods.METHODS[name].ours else [])


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
