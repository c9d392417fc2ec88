"""Launches of the norms' kernels."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels import triton as codec_kernels
from ._launch import buffer, copy_buffer, keys, launcher
from ._saving import Saving

# A row stays in the registers of one program: 16 elements a thread, at most 512 threads.
LONGEST_ROW = 8192
_MOST_WARPS = 16
# Elements of a program and of a thread, where a row is not longer. Forward and redo move what the codec's kernels move,
# and take over their tiles. Backward holds two sums beside: with 8 elements a thread it compiles to 64 registers, or 80
# to 93 where gradients are of two types, so that 32 warps run on a multiprocessor, or 16; and those that share a
# program leave one row of sums between them.
_FORWARD = codec_kernels.TILE, 16
_REDO = codec_kernels.DECODE_TILE, 16
_BACKWARD = 2048, 8
_RESIDENT_WARPS = 32


def serves(x: Tensor, residual: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, how: Saving) -> bool:
    """Return whether the kernels serve a norm of x, or x + residual, over ``shape``, with an output of ``dtype``."""
    length = math.prod(shape)
    return (
        all(t is None or (how.fuses(t) and t.is_contiguous()) for t in (x, residual))
        and dtype is not torch.float64
        and length % how.group_size == 0
        and length <= LONGEST_ROW
        # A row may not straddle a multiple of 2**32, where the high half of an element's index changes.
        and (not how.stochastic or x.numel() <= 2**32)
    )


@functools.lru_cache(maxsize=64)
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _dense(t: Tensor | None, stand_in: Tensor) -> Tensor:
    return stand_in if t is None else t.contiguous()


@dataclass(frozen=True)
class Norm:
    """A norm over ``shape`` that :func:`serves` allows.

    A layer norm if ``centred``; else rows are divided by their root mean square, and rounded to their own type before
    they are multiplied by the weight. Of rows of type ``copied`` bytes of a copy stand where those of codes would.
    """

    shape: tuple[int, ...]
    centred: bool
    eps: float
    how: Saving
    copied: torch.dtype | None = None

    @property
    def length(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape)

    def _tiling(self, numel: int, elements: int, per_thread: int) -> tuple[int, int, int]:
        """Return rows and groups of a program that takes about so many elements, and its warps.

        The rows divide those of the tensor, so that no program has fewer.
        """
        groups = 1 << (self.length // self.how.group_size - 1).bit_length()
        padded = groups * self.how.group_size
        rows = math.gcd(numel // self.length, max(elements // padded, 1)) if padded == self.length else 1
        return rows, rows * groups, min(max(rows * padded // (32 * per_thread), 1), _MOST_WARPS)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        indices: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return normalised rows, their codes and rstd: of x, x + residual, or x in the order of ``indices``."""
        rows, groups, warps = self._tiling(x.numel(), *_FORWARD)
        out = torch.empty_like(x, dtype=dtype)
        packed = buffer(x, self.how) if self.copied is None else copy_buffer(x)
        rstd = x.new_empty(x.numel() // self.length, dtype=torch.float32)
        given = (residual, weight, bias, indices)
        constants = (rows, *(t is not None for t in given), *self._codes(groups), self.how.stochastic)
        launch = self._launcher("norm_forward_kernel", constants, warps, x.device)
        tensors = (x, *(_dense(t, x) for t in given), out, self._elements(packed), rstd)
        launch(rstd.numel() // rows, tensors, (x.numel(), self.eps, *keys(self.how)))
        return out, packed, rstd

    def redo(
        self,
        packed: Tensor,
        rstd: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        shape: torch.Size,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the output again, from what ``forward`` returned with it."""
        out = torch.empty(shape, dtype=dtype, device=packed.device)
        rows, groups, warps = self._tiling(out.numel(), *_REDO)
        constants = (rows, weight is not None, bias is not None, *self._codes(groups))
        launch = self._launcher("norm_redo_kernel", constants, warps, out.device)
        tensors = (self._elements(packed), rstd, _dense(weight, rstd), _dense(bias, rstd), out)
        launch(rstd.numel() // rows, tensors, (out.numel(),))
        return out

    def backward(
        self,
        packed: Tensor,
        rstd: Tensor,
        weight: Tensor | None,
        indices: Tensor | None,
        grad: Tensor,
        dtypes: tuple[torch.dtype | None, torch.dtype | None],
        needs: tuple[bool, bool],
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and residual in ``dtypes``, None for None, and those that weight and bias need."""
        grad = grad.contiguous()
        rows, groups, warps = self._tiling(grad.numel(), *_BACKWARD)
        tiles = rstd.numel() // rows
        programs = min(tiles, _processors(grad.device) * max(_RESIDENT_WARPS // warps, 1))
        # One for both where they are of one type.
        inputs = {d: torch.empty_like(grad, dtype=d) for d in dtypes if d is not None}
        out, *other = inputs.values() or (grad,)
        sums = grad.new_empty((sum(needs), programs, self.length), dtype=torch.float32)
        flags = (weight is not None, bool(inputs), *needs, bool(other), indices is not None)
        launch = self._launcher("norm_backward_kernel", (rows, *flags, *self._codes(groups)), warps, grad.device)
        # The weight's are first, the bias's last; where neither is wanted, something stands in.
        parameters = (sums[0], sums[-1]) if any(needs) else (rstd, rstd)
        results = (out, other[0] if other else out, *parameters)
        tensors = (self._elements(packed), rstd, _dense(weight, rstd), grad, _dense(indices, rstd), *results)
        launch(programs, tensors, (grad.numel(),))
        of_parameters = iter(sums.sum(1))
        of_inputs = (None if d is None else inputs[d] for d in dtypes)
        return *of_inputs, *(next(of_parameters).view(self.shape) if need else None for need in needs)

    def _elements(self, packed: Tensor) -> Tensor:
        return packed if self.copied is None else packed.view(self.copied)

    def _codes(self, groups: int) -> tuple[int | None, int, int]:
        from . import _norm_kernels

        bits = self.how.bits if self.copied is None else int(_norm_kernels.COPY.value)
        return bits, self.how.group_size, groups

    def _launcher(
        self, kernel: str, constants: tuple[Any, ...], warps: int, device: torch.device
    ) -> codec_kernels.Launcher:
        from . import _norm_kernels

        rows, *others = constants
        return launcher(_norm_kernels, kernel, (self.length, rows, self.centred, *others), warps, device)
