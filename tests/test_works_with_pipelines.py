"""Works with: torch's pipelines whose schedules split backward, and any backward that asks for some gradients alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import distributed_worker as worker
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from works_with import GRADIENT_BOUND, gradients, relative_error

import pyactcomp
from pyactcomp import functional
from pyactcomp.engine.saved import library
from pyactcomp.functional.saving import Saving
from pyactcomp.readers.table import FACTORS

WORLD = 2
WIDTH = 64
STAGES, BLOCKS, MICROBATCHES = 2, 2, 4


class Restored:
    """Counts what is restored from codes, by hooks and by functions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._by_functions = 0
        pack = Saving._pack_bits

        def packed(saving: Saving, x: Tensor, bits: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
            kept, restore = pack(saving, x, bits)

            def again(buffer: Tensor) -> Tensor:
                self._by_functions += 1
                return restore(buffer)

            return kept, again

        monkeypatch.setattr(Saving, "_pack_bits", packed)
        self.clear()

    def clear(self) -> None:
        self._by_functions, self._before = 0, library().counts()[1]

    def __len__(self) -> int:
        return self._by_functions + library().counts()[1] - self._before


@pytest.fixture
def restores(monkeypatch: pytest.MonkeyPatch) -> Restored:
    return Restored(monkeypatch)


class Block(nn.Module):
    """Saves four activations: the inputs of norm, GELU and both Linears."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def pipeline(rank: int, backend: str) -> dict[str, Any]:
    """Take a step of each schedule, exactly and compressed, and count what was restored."""
    from torch.distributed import pipelining

    device = torch.device(worker.device_of(backend, rank))
    results: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        restored = Restored(monkeypatch)
        for name, depth_first in (("ScheduleInterleavedZeroBubble", False), ("ScheduleZBVZeroBubble", True)):
            places = (rank, 2 * WORLD - 1 - rank) if depth_first else (rank, WORLD + rank)
            for mode in (None, "int8", "lossless"):
                torch.manual_seed(0)
                every = [nn.Sequential(*[Block() for _ in range(BLOCKS)]) for _ in range(STAGES * WORLD)]
                mine = [every[place].to(device) for place in places]
                for module in mine if mode is not None else ():
                    pyactcomp.compress(module, min_bytes=256, group_size=WIDTH, mode=mode)
                stages = [
                    pipelining.PipelineStage(module, place, STAGES * WORLD, device)
                    for module, place in zip(mine, places, strict=True)
                ]
                schedule = getattr(pipelining, name)(stages, MICROBATCHES, loss_fn=F.mse_loss)
                torch.manual_seed(1)
                x, target = torch.randn(2, 2 * MICROBATCHES, 16, WIDTH).to(device)
                last = STAGES * WORLD - 1 in places
                for _ in range(2):  # the first step also runs the stages to learn shapes
                    restored.clear()
                    for module in mine:
                        module.zero_grad()
                    schedule.step(*((x,) if 0 in places else ()), **({"target": target} if last else {}))
                found = {f"{i}.{n}": g.cpu() for i, m in enumerate(mine) for n, g in gradients(m).items()}
                results[f"{name} {mode}"] = found, len(restored)
    return results


@pytest.mark.parametrize("backend", worker.BACKENDS)
def test_schedules_that_split_backward_restore_each_tensor_once(backend: str, tmp_path: Path) -> None:
    worker.need_devices(backend, WORLD)
    for results in worker.run(pipeline, backend, WORLD, tmp_path):
        for name, (found, count) in results.items():
            exact, _ = results[f"{name.split()[0]} None"]
            error = relative_error(found, exact)
            if "int8" in name:
                assert 0 < error <= GRADIENT_BOUND, name
                # On a GPU the kernels of fused functions read codes, and restore nothing.
                assert (backend == "gloo") <= count <= 4 * BLOCKS * STAGES * MICROBATCHES, name
            else:
                assert error == 0, name


class Product(nn.Module):
    """Multiplies results of operators: both factors are stored in codes."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.product = product
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x * 1, self.weight * 1)


PRODUCTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "MmBackward0": (torch.mm, (64, 64), (64, 64)),
    "AddmmBackward0": (lambda x, w: torch.addmm(torch.zeros(64), x, w), (64, 64), (64, 64)),
    "BmmBackward0": (torch.bmm, (2, 64, 64), (2, 64, 64)),
    "BaddbmmBackward0": (lambda x, w: torch.baddbmm(torch.zeros(64), x, w), (2, 64, 64), (2, 64, 64)),
    "MvBackward0": (torch.mv, (64, 4096), (4096,)),
    "MulBackward0": (torch.mul, (64, 64), (64, 64)),
    "ConvolutionBackward0": (F.conv2d, (2, 64, 8, 8), (64, 64, 3, 3)),
}


@pytest.mark.parametrize("name", FACTORS)
def test_a_factor_is_restored_for_the_gradient_that_reads_it_alone(name: str, restores: Restored) -> None:
    product, of_x, of_weight = PRODUCTS[name]
    torch.manual_seed(0)
    model, x = Product(product, *of_weight), torch.randn(of_x)
    x.requires_grad_()
    out = model(x)
    grad = torch.randn_like(out)
    exact = torch.autograd.grad(out, (x, model.weight), grad)
    pyactcomp.compress(model, min_bytes=0, fuse=False)
    out = model(x)
    assert out.grad_fn.name() == name
    for asked, expected in zip((x, model.weight), exact, strict=True):
        restores.clear()
        (found,) = torch.autograd.grad(out, asked, grad, retain_graph=True)
        assert len(restores) == 1
        assert 0 < relative_error({"": found}, {"": expected}) <= GRADIENT_BOUND


NORMS = {
    "layer_norm": lambda x, w: functional.layer_norm(x, w.shape, w, codes=functional.Codes(group_size=64)),
    "rms_norm": lambda x, w: functional.rms_norm(x, w, 1e-6, codes=functional.Codes(group_size=64)),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("other", [False, True], ids=["the same gradient", "another gradient"])
def test_small_gradients_are_computed_with_the_input_s(name: str, other: bool, restores: Restored) -> None:
    """But those of one incoming gradient are not those of another."""
    torch.manual_seed(0)
    x, weight = torch.randn(32, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    out, again = NORMS[name](x, weight), NORMS[name](x, weight)
    first = torch.randn_like(out)
    second = torch.randn_like(out) if other else first
    torch.autograd.grad(out, x, first, retain_graph=True)
    restores.clear()
    (found,) = torch.autograd.grad(out, weight, second)
    assert len(restores) == other
    _, expected = torch.autograd.grad(again, (x, weight), second)
    assert torch.equal(found, expected)


def test_an_incoming_gradient_that_was_written_to_is_another(restores: Restored) -> None:
    x, weight = torch.randn(32, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    out, again = NORMS["rms_norm"](x, weight), NORMS["rms_norm"](x, weight)
    grad = torch.ones_like(out)
    torch.autograd.grad(out, x, grad, retain_graph=True)
    (found,) = torch.autograd.grad(out, weight, grad.mul_(3))
    assert torch.equal(found, torch.autograd.grad(again, weight, grad)[0])
