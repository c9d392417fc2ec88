"""Launches of the kernels for channels-last tensors: batch norm and max-pool."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import codec
from ...codec.kernels import triton as codec_kernels
from ...codec.layouts import elementwise_layout, layout_of
from ..launch import argument, buffer, launcher, processors
from ..saving import Saving
from . import batch_norm_kernels, max_pool_kernels

# Elements and warps of a program, as in the codec's kernels: four 16-byte accesses of each thread for float32.
_TILE, _WARPS = codec_kernels.TILE, codec_kernels.WARPS
# Registers of a thread, and the programs fitting on a multiprocessor then. By ptxas, the rare paths of the two packing
# kernels spill 12 registers, the others none; not measured yet.
_REGISTERS, _PROGRAMS = 80, 12
# Neighbouring channels of a program, 1 KiB of float32: fewer shorten the accesses, more need more kernel variants.
_CHANNELS = 256
# The finishing kernel: channels of a program, and partial results combined at a time.
_FINISH_CHANNELS, _FINISH_SPLITS, _FINISH_WARPS = 16, 512, 8

# Channels of a max-pool program: 256 bytes of float32 of each pixel.
_POOL_CHANNELS = 64


def is_channels_last(x: Tensor) -> bool:
    """Return whether ``x`` is [N, C, H, W] in channels-last format only: a single pixel is also contiguous."""
    if x.dim() != 4:
        return False
    _, channels, height, width = x.shape
    return height * width > 1 and x.stride() == (height * width * channels, 1, width * channels, channels)


def as_channels_last(x: Tensor) -> Tensor:
    """Return ``x`` in channels-last format."""
    return x.contiguous(memory_format=torch.channels_last)


def batch_norm_serves(x: Tensor, residual: Tensor | None, how: Saving) -> bool:
    """Return whether the kernels serve a batch norm of an ``x`` that ``how`` fuses; results are laid out as ``x``."""
    return (
        how.bits == 8
        and is_channels_last(x)
        and (residual is None or elementwise_layout(layout_of(x), layout_of(residual)).stride == x.stride())
        and x.shape[1] % how.group_size == 0
        # A tile may not straddle a multiple of 2**32, where the high half of an element's index changes.
        and (not how.stochastic or x.numel() <= 2**32)
    )


def max_pool_serves(x: Tensor) -> bool:
    """Return whether the kernels serve a max-pool of ``x``."""
    return is_channels_last(x) and x.shape[1] % _POOL_CHANNELS == 0


@dataclass(frozen=True, eq=False)
class BatchNorm:
    """A batch norm accepted by :func:`batch_norm_serves`; get one from :func:`batch_norm_of`, which caches."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    relu: bool
    how: Saving

    @functools.cached_property
    def _width(self) -> int:
        return self.shape[1] // self.how.group_size

    @functools.cached_property
    def _span(self) -> int:
        return math.gcd(self._width, max(_CHANNELS // self.how.group_size, 1))

    @functools.cached_property
    def _rows(self) -> int:
        return _TILE // self.how.group_size // self._span

    @functools.cached_property
    def _tiles(self) -> int:
        return -(-self.shape.numel() // self.shape[1] // self._rows)

    @functools.cached_property
    def _splits(self) -> int:
        """Programs that share the rows of one block of channels."""
        blocks = self._width // self._span
        return min(-(-_PROGRAMS * processors(self.device) // blocks), self._tiles)

    def _launch(
        self, name: str, constants: tuple[Any, ...], tensors: tuple[Tensor, ...], rounding: tuple[Any, ...] = ()
    ) -> None:
        run = 16 // self.dtype.itemsize
        groups = _TILE // self.how.group_size
        tiling = (self.how.group_size, groups, self._span, _TILE // (32 * _WARPS * run), run)
        stochastic = (self.how.stochastic,) if rounding else ()
        launch = launcher(batch_norm_kernels, name, (*constants, *tiling, *stochastic), _WARPS, self.device, _REGISTERS)
        programs = self._splits * (self._width // self._span)
        launch(programs, tensors, (self.shape.numel(), self._width, *rounding))

    def _like(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.shape, dtype=dtype, device=self.device, memory_format=torch.channels_last)

    def _sums(self) -> Tensor:
        return torch.empty((2, self._splits, self.shape[1]), dtype=torch.float32, device=self.device)

    def statistics(
        self,
        x: Tensor,
        running: tuple[Tensor | None, Tensor | None],
        momentum: float,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """Return the mean and the reciprocal deviation of the channels."""
        parts = self._sums()
        self._launch("batch_norm_statistics_kernel", (), (x, *parts))
        mean, rstd = torch.empty((2, self.shape[1]), dtype=torch.float32, device=self.device)
        constants = (running[0] is not None, self.how.group_size, self._rows, _FINISH_SPLITS, _FINISH_CHANNELS)
        finish = launcher(batch_norm_kernels, "batch_norm_finish_kernel", constants, _FINISH_WARPS, self.device)
        tensors = (*parts, *(argument(t, mean) for t in running), mean, rstd)
        scalars = (self.shape.numel(), self._width, self._splits, momentum, eps)
        finish(self.shape[1] // _FINISH_CHANNELS, tensors, scalars)
        return mean, rstd

    def apply(
        self,
        x: Tensor,
        residual: Tensor | None,
        mean: Tensor,
        rstd: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return the output, the codes of the normalised input, under ReLU the signs, the codes of a sum."""
        out, packed = self._like(self.dtype), buffer(x, self.how)
        signs = self._signs() if self.relu else None
        packed_out = None if residual is None else buffer(out, self.how)
        given = (weight, bias, residual)
        constants = (*(t is not None for t in given), self.relu)
        residual = None if residual is None else as_channels_last(residual)
        parameters = (argument(weight, mean), argument(bias, mean))
        kept = (mean if signs is None else signs, packed, mean if packed_out is None else packed_out)
        tensors = (x, x if residual is None else residual, mean, rstd, *parameters, out, *kept)
        self._launch("batch_norm_apply_kernel", constants, tensors, (*self.how.keys, *self.how.second().keys))
        return out, packed, signs, packed_out

    def _signs(self) -> Tensor:
        """Return memory for one bit per element of each tile, in 16-bit words: one word per thread."""
        words = self._tiles * self._rows * self.shape[1] // 16
        return torch.empty(words, dtype=torch.int16, device=self.device)

    def recompute(
        self,
        packed: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        signs: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """Recompute the output of a batch norm without a residual."""
        out = self._like(dtype)
        constants = (weight is not None, bias is not None, self.relu)
        tensors = (packed, argument(weight, out), argument(bias, out), out, argument(signs, out))
        self._launch("batch_norm_recompute_kernel", constants, tensors)
        return out

    def restore(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Restore the output of a batch norm with a residual from the output's codes."""
        stride = torch.empty(self.shape, device="meta").to(memory_format=torch.channels_last).stride()
        form = codec.Packed(packed, tuple(self.shape), stride, dtype, 8, self.how.group_size)
        return codec.dequantize(form, impl=self.how.impl)

    def backward(
        self,
        packed: Tensor,
        rstd: Tensor,
        weight: Tensor | None,
        signs: Tensor | None,
        grad: Tensor,
        masks_residual: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the gradients of the input, weight and bias and, under ReLU, of the residual."""
        grad, parts = as_channels_last(grad), self._sums()
        words = argument(signs, rstd)
        self._launch("batch_norm_sums_kernel", (self.relu,), (packed, grad, words, *parts))
        sums, products = parts.sum(1)
        out = self._like(self.dtype)
        grad_residual = self._like(self.dtype) if masks_residual else None
        constants = (weight is not None, masks_residual, self.relu)
        parameters = (rstd, argument(weight, rstd), sums, products)
        written = (out, out if grad_residual is None else grad_residual)
        self._launch("batch_norm_backward_kernel", constants, (packed, grad, words, *parameters, *written))
        return out, products, sums, grad_residual


batch_norm_of = functools.lru_cache(maxsize=256)(BatchNorm)


@dataclass(frozen=True)
class MaxPool:
    """A max-pool of channels-last tensors with whole groups of channels; the fields are (height, width)."""

    window: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    def _launch(self, name: str, tensors: tuple[Tensor, ...], x: torch.Size, out: torch.Size, writes: Tensor) -> None:
        pixels = _TILE // _POOL_CHANNELS
        constants = (*self.window, *self.stride, *self.padding, _POOL_CHANNELS, pixels)
        launch = launcher(max_pool_kernels, name, constants, _WARPS, writes.device)
        width = x[1] // _POOL_CHANNELS
        programs = -(-writes.numel() // (x[1] * pixels)) * width
        launch(programs, tensors, (writes.numel(), width, *x[2:], *out[2:]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the maxima, and their positions in the windows as uint8."""
        sizes = zip(x.shape[2:], self.window, self.stride, self.padding, strict=True)
        shape = torch.Size((*x.shape[:2], *((size + 2 * pad - k) // step + 1 for size, k, step, pad in sizes)))
        out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        positions = torch.empty_like(out, dtype=torch.uint8)
        self._launch("max_pool_forward_kernel", (x, out, positions), x.shape, shape, out)
        return out, positions

    def backward(self, positions: Tensor, grad: Tensor, shape: torch.Size) -> Tensor:
        """Return the gradient of the input of ``shape``."""
        grad = as_channels_last(grad)
        out = torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)
        self._launch("max_pool_backward_kernel", (grad, positions, out), shape, grad.shape, out)
        return out
