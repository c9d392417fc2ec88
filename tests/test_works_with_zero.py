"""Works with: ZeRO-3, which gathers a module's parameters for its forward and its backward, and frees them between."""

from __future__ import annotations

import functools
import gc
import logging
import os
import weakref
from pathlib import Path
from typing import Any

import distributed_worker as worker
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from works_with import GRADIENT_BOUND, MIN_BYTES, assert_compressed, gradients, relative_error

import pyactcomp
from pyactcomp.engine import reasons
from pyactcomp.fusions import fused_modules

WORLD = 2
WIDTH = 64
LEARNING_RATE = 0.1
MODES = [None, "int8", "lossless"]


class Linear(nn.Linear):
    """Saves the weight itself, as DeepSpeed's Linear does; torch's saves a view, and with it the memory."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)

    def forward(self, x: Tensor) -> Tensor:
        return self.Function.apply(x, self.weight)


class Scale(nn.Module):
    """Multiplies by a parameter, and saves it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def frozen() -> nn.Module:
    return Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)


LAYERS = {
    "Linear": lambda: Linear(WIDTH, WIDTH, bias=False),
    "frozen Linear": frozen,
    "Conv1d": lambda: nn.Sequential(
        nn.Unflatten(-1, (WIDTH, 1)), nn.Conv1d(WIDTH, WIDTH, 1, bias=False), nn.Flatten(1)
    ),
}


class Freed:
    """Takes the memory of the weights of modules after their forward, and gives it back for their backward."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._gathered: list[weakref.ref[torch.UntypedStorage]] = []
        self._shards: dict[nn.Parameter, Tensor] = {}
        for module in modules:
            module.register_forward_pre_hook(self.gather)
            module.register_forward_hook(self.free)
            module.register_full_backward_pre_hook(self.gather)

    def shard(self, full: Tensor) -> Tensor:
        return full.clone()

    def full(self, shard: Tensor) -> Tensor:
        return shard.clone()

    def gather(self, module: nn.Module, *_: object) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter in self._shards:
                parameter.data = self.full(self._shards.pop(parameter))

    def free(self, module: nn.Module, *_: object) -> None:
        for parameter in module.parameters(recurse=False):
            self._gathered.append(weakref.ref(parameter.data.untyped_storage()))
            self._shards[parameter] = self.shard(parameter.data)
            parameter.data = parameter.data.new_empty(0)

    def alive(self) -> list[bool]:
        """Return of each weight gathered so far whether its memory is alive."""
        gc.collect()
        return [storage() is not None for storage in self._gathered]


class Sharded(Freed):
    """Splits the weights among the processes of the group."""

    def shard(self, full: Tensor) -> Tensor:
        return full.chunk(dist.get_world_size())[dist.get_rank()].clone()

    def full(self, shard: Tensor) -> Tensor:
        shards = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, shard)
        return torch.cat(shards)


def leaves(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]


# Dynamo warns of itself: it asks for gradients of what a module's hooks return, and makes an instance of the function.
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.*should not be instantiated")
@pytest.mark.filterwarnings("ignore:a graph compiled by torch.compile runs under pyactcomp's hooks")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("name", LAYERS)
def test_weights_freed_after_their_forward_are_not_held(name: str, mode: str, compiled: bool) -> None:
    found: dict[bool, tuple[list[bool], dict[str, Tensor]]] = {}
    for compressed in (False, True):
        torch.manual_seed(0)
        first = nn.Linear(WIDTH, WIDTH)
        layers = [LAYERS[name]() for _ in range(3)]
        model = nn.Sequential(first, *layers)
        sharded = [module for layer in layers for module in leaves(layer)]
        freed = Freed(sharded)
        for module in sharded if compiled else ():
            module.forward = torch.compile(module.forward, backend="aot_eager")  # type: ignore[method-assign]
        if compressed:
            pyactcomp.compress(model, mode=mode, min_bytes=0)
        loss = model(torch.randn(32, WIDTH)).square().mean()
        alive = freed.alive()
        loss.backward()
        found[compressed] = alive, gradients(model)
    assert found[True][0] == found[False][0]
    error = relative_error(found[True][1], found[False][1])
    assert error == 0 if mode == "lossless" else error <= GRADIENT_BOUND


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = Linear(WIDTH, 4 * WIDTH, bias=False)
        self.act = nn.GELU()
        self.down = Linear(4 * WIDTH, WIDTH, bias=False)
        self.scale = Scale()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale(self.down(self.act(self.up(self.norm(x)))))


def steps(rank: int, backend: str) -> dict[str, Any]:
    """Take a step in each mode, and note which gathered weights were alive between forward and backward."""
    device = worker.device_of(backend, rank)
    results: dict[str, Any] = {}
    for mode in MODES:
        for first in ("shard", "compress"):
            torch.manual_seed(0)
            model = nn.Sequential(*[Block() for _ in range(3)]).to(device)
            if mode is not None and first == "compress":
                pyactcomp.compress(model, mode=mode, min_bytes=MIN_BYTES, group_size=WIDTH)
            freed = Sharded(leaves(model))
            for module in model.modules():
                module.register_forward_hook(lambda *_: None)
            if mode is not None and first == "shard":
                pyactcomp.compress(model, mode=mode, min_bytes=MIN_BYTES, group_size=WIDTH)
            x = torch.randn(2 * WORLD, 32, WIDTH).chunk(WORLD)[rank].to(device)
            loss = model(x).square().mean()
            alive = freed.alive()
            loss.backward()
            fused = {kind for _, kind in fused_modules(model)}
            found = {name: gradient.cpu() for name, gradient in gradients(model).items()}
            results[f"{mode}, {first} first"] = alive, found, fused
    return results


@pytest.mark.parametrize("backend", worker.BACKENDS)
def test_sharded_weights_are_held_no_longer_than_without_compression(backend: str, tmp_path: Path) -> None:
    worker.need_devices(backend, WORLD)
    for results in worker.run(steps, backend, WORLD, tmp_path):
        alive, exact, _ = results["None, shard first"]
        assert not any(alive)
        assert len(alive) == 3 * (2 + 1 + 1 + 1)
        for name, (found_alive, found, fused) in results.items():
            assert found_alive == alive, name
            error = relative_error(found, exact)
            assert 0 < error <= GRADIENT_BOUND if "int8" in name else error == 0
            # Hooks of a module run around whatever its forward is.
            assert fused == ({"LayerNorm", "GELU"} if "int8" in name else set())


def deepspeed_steps(rank: int, backend: str, *, stage: int, offload: bool) -> dict[str, Any]:
    """Take a step of DeepSpeed's ZeRO in each mode and order, and note what was alive, stored and fused.

    With ``offload`` the optimizer, its state and the float32 weights are on the host.
    """
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_SIZE=str(WORLD), RANK=str(rank), WORLD_SIZE=str(WORLD))
    os.environ.update(MASTER_ADDR="127.0.0.1", DS_ACCELERATOR="cpu" if backend == "gloo" else "cuda")
    import deepspeed

    logging.disable(logging.WARNING)
    zero: dict[str, Any] = {
        f"stage3_{name}": 0 for name in ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance")
    }
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE}},
        "zero_optimization": {"stage": stage, "stage3_prefetch_bucket_size": 0, **zero},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    device = worker.device_of(backend, rank)
    results: dict[str, Any] = {}
    for mode in MODES:
        for first in ("initialize", "compress") if mode else ("initialize",):
            torch.manual_seed(0)
            model = nn.Sequential(*[nn.Sequential(*layers()) for _ in range(3)]).to(device)
            if first == "compress":
                pyactcomp.compress(model, mode=mode, min_bytes=MIN_BYTES, group_size=WIDTH)
            engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
            if mode is not None and first == "initialize":
                pyactcomp.compress(model, mode=mode, min_bytes=MIN_BYTES, group_size=WIDTH)
            gathered = []

            def note(module: Any, _: object, into: list[Any] = gathered) -> None:
                into.append(weakref.ref(module.weight.data.untyped_storage()))

            for linear in (module for module in model.modules() if isinstance(module, nn.Linear)):
                linear.register_forward_pre_hook(note)  # runs after DeepSpeed's own, which gathers
            torch.manual_seed(1)
            loss = engine(torch.randn(2 * WORLD, 32, WIDTH).chunk(WORLD)[rank].to(device)).square().mean()
            gc.collect()
            alive = [storage() is not None for storage in gathered]
            engine.backward(loss)
            full = {name: deepspeed.utils.safe_get_full_grad(p).cpu() for name, p in model.named_parameters()}
            engine.step()
            moved = {name: deepspeed.utils.safe_get_full_fp32_param(p).cpu() for name, p in model.named_parameters()}
            report = None if mode is None else pyactcomp.report(model)
            fused = {kind for _, kind in fused_modules(model)}
            results[f"{mode}, {first} first"] = alive, full, moved, fused, report
    return results


def layers() -> list[nn.Module]:
    return [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)]


@pytest.mark.slow
@pytest.mark.parametrize("backend", worker.BACKENDS)
@pytest.mark.parametrize(("stage", "offload"), [(3, False), (2, True), (3, True)])
def test_deepspeeds_zero(stage: int, offload: bool, backend: str, tmp_path: Path) -> None:
    """It compiles an operator of its own on first use."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    worker.need_devices(backend, WORLD)
    steps = functools.partial(deepspeed_steps, stage=stage, offload=offload)
    for results in worker.run(steps, backend, WORLD, tmp_path):
        alive, exact, weights, *_ = results["None, initialize first"]
        # Stage 2 leaves the weights whole.
        assert alive == [stage == 2] * 6
        for name, (found_alive, found, found_weights, fused, report) in results.items():
            assert found_alive == alive, name
            error = relative_error(found, exact)
            if "int8" not in name:
                assert error == 0, name
                assert relative_error(found_weights, weights) == 0, name
                continue
            assert 0 < error <= GRADIENT_BOUND, name
            # Each weight moved by its gradient, up to float32's rounding of the weight and of the sum.
            before, exact_before = (
                {each: weight + LEARNING_RATE * of[each] for each, weight in after.items()}
                for after, of in ((found_weights, found), (weights, exact))
            )
            assert relative_error(before, exact_before) <= 2 * 2.0**-24, name
            assert_compressed(report)
            if stage == 3:
                assert fused == {"LayerNorm", "GELU"}, name
                # Inputs of the model, small statistics and parameters are kept; the input of no Linear.
                kept = {None, reasons.NO_GRAD, reasons.SMALL, *reasons.ALIVE_ANYWAY}
                assert {tensor.kept for tensor in report.tensors} <= kept, name
