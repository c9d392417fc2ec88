"""Launches of kernels over all elements of dense operands, and the layout of what they write."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from ..codec.layouts import Layout, arranged, elementwise_layout, layout_of
from . import kernel_parts
from .launch import launcher

# Kernels of several operands: eight elements a thread, so one 16-byte access of bfloat16 to each operand. Measured on
# an H200 over tiles of 512 to 2048, 1 to 8 warps and limits of 64 to 96 registers, silu_mul of 134 million bfloat16, as
# a share of the copy's rate: forward 0.79 with 1024, 4, 64, the same with as many a thread in other tiles, and 0.47 to
# 0.80 with 16; backward 0.98.
_WARPS = 4
FLAT_TILE = int(kernel_parts.FLAT_TILE.value)


@dataclass(frozen=True, eq=False)
class Elementwise:
    """The layout of dense operands, by which results and gradients are laid out, and their device."""

    layout: Layout
    device: torch.device

    def empty(self, dtype: torch.dtype) -> Tensor:
        """Return memory for a result."""
        return torch.empty_strided(self.layout.shape, self.layout.stride, dtype=dtype, device=self.device)

    def arrange(self, x: Tensor) -> Tensor:
        """Return ``x``, of the same shape, in this layout."""
        return arranged(x, self.layout)

    def as_torch(self, result: Tensor, grad: Tensor, of: Layout | None = None) -> Tensor:
        """Return a gradient laid out as torch's operator does: by the incoming one first, then by its operand.

        How sums behind it are rounded depends on that. Kernels read and write in the layout of the operands; ``of`` is
        that of the operand where it is another.
        """
        if grad.stride() == self.layout.stride:
            return result
        return arranged(result, elementwise_layout(layout_of(grad), of or self.layout))

    def launch(
        self,
        kernels: ModuleType,
        name: str,
        constants: tuple[object, ...],
        tensors: tuple[Tensor, ...],
        scalars: tuple[int | float, ...] = (),
        *,
        tile: int = FLAT_TILE,
        warps: int = _WARPS,
        registers: int | None = None,
    ) -> None:
        """Launch a kernel over all elements: their number is its first scalar, what divides that its last constant.

        Where the tile does, kernels need no masks; where 16 does, a mask is constant over each access of 16 bytes.
        """
        numel = self.layout.shape.numel()
        unit = next(unit for unit in (tile, 16, 1) if numel % unit == 0)
        start = launcher(kernels, name, (*constants, unit), warps, self.device, registers)
        start(-(-numel // tile), tensors, (numel, *scalars))


_of = functools.lru_cache(maxsize=1024)(Elementwise)


def dense(x: Tensor) -> Tensor:
    """Return ``x`` without gaps and repeats, its dimensions in the order that torch gives an elementwise result."""
    return x if layout_of(x).dense else x.clone()


def elementwise(x: Tensor) -> Elementwise:
    """Return the layout and the device of a dense ``x``; one object for all that are alike."""
    return _of(layout_of(x), x.device)
