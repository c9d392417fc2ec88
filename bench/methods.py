"""What is done about saved activations: nothing, ours, and the peers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pyactcomp

Blocks = list[nn.Module]
Context = Callable[[], AbstractContextManager[object]]

VANILLA = "vanilla"
VANILLA_AGAIN = "vanilla-again"
NAIVE_MIN_BYTES = 1 << 16


@dataclass(frozen=True)
class Method:
    """``apply(module, blocks)`` changes the module and returns the context that each forward runs in."""

    name: str
    apply: Callable[[nn.Module, Blocks], Context]
    steps: int = 10
    cost: float = 1.5
    """Time of the row in times of the vanilla row, to judge whether it fits into what is left of a budget."""
    lossy: bool = False
    """Whether the gradients' error is measured too."""


def _vanilla(_: nn.Module, __: Blocks) -> Context:
    return nullcontext


def _checkpoint(every: int) -> Callable[[nn.Module, Blocks], Context]:
    def apply(_: nn.Module, blocks: Blocks) -> Context:
        for block in blocks[::every]:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        return nullcontext

    return apply


def _save_on_cpu(module: nn.Module, _: Blocks) -> Context:
    pinned = next(module.parameters()).is_cuda
    return lambda: torch.autograd.graph.save_on_cpu(pin_memory=pinned)


def _naive_pack(x: Tensor) -> Tensor | tuple[Tensor, Tensor, torch.dtype]:
    if isinstance(x, nn.Parameter) or not x.is_floating_point() or x.nbytes < NAIVE_MIN_BYTES:
        return x
    scale = x.abs().amax() / 127
    return (x / scale).round().to(torch.int8), scale, x.dtype


def _naive_unpack(packed: Tensor | tuple[Tensor, Tensor, torch.dtype]) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    codes, scale, dtype = packed
    return codes.to(dtype) * scale


def _naive(_: nn.Module, __: Blocks) -> Context:
    return lambda: torch.autograd.graph.saved_tensors_hooks(_naive_pack, _naive_unpack)


def _compress(module: nn.Module, _: Blocks) -> Context:
    # Named on a GPU, because a name never falls back: the row is about this implementation or says why not.
    impl: Literal["cuda", "auto"] = "cuda" if next(module.parameters()).is_cuda else "auto"
    pyactcomp.compress(module, mode="int8", impl=impl)
    return nullcontext


def _compress_in_groups_of_128(module: nn.Module, _: Blocks) -> Context:
    pyactcomp.compress(module, mode="int8", group_size=128)
    return nullcontext


def _compress_with_triton(module: nn.Module, _: Blocks) -> Context:
    pyactcomp.compress(module, mode="int8", impl="triton")
    return nullcontext


def _compress_and_checkpoint(module: nn.Module, blocks: Blocks) -> Context:
    _checkpoint(1)(module, blocks)
    return _compress(module, blocks)


METHODS = {
    method.name: method
    for method in (
        Method(VANILLA, _vanilla),
        Method("int8", _compress, cost=2.5, lossy=True),
        Method("ckpt", _checkpoint(1)),
        Method("ckpt2", _checkpoint(2)),
        Method("naive8", _naive, cost=2.5),
        Method("int8+ckpt", _compress_and_checkpoint, cost=2.0),
        Method("int8-g128", _compress_in_groups_of_128, cost=2.5, lossy=True),
        Method("int8-triton", _compress_with_triton, cost=2.5),
        Method("save_on_cpu", _save_on_cpu, steps=3, cost=8.0),
        Method(VANILLA_AGAIN, _vanilla),
    )
}
CORE = (VANILLA, "int8", "ckpt")
STAGES = (CORE, ("ckpt2", "naive8", "int8+ckpt", "int8-g128", "int8-triton"), ("save_on_cpu",))
"""What to measure first on all workloads, so that a budget that ends early keeps what tells most."""
