"""Launches of the kernels for channels-last tensors: batch norm and max-pool."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from ... import codec
from ...codec import format as fmt
from ...codec.kernels import triton as codec_kernels
from ...codec.layouts import Layout
from ...engine import saved
from ..launch import Plan, launcher, processors
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


def max_pool_serves(x: Tensor) -> bool:
    """Return whether the kernels serve a max-pool of ``x``."""
    return is_channels_last(x) and x.shape[1] % _POOL_CHANNELS == 0


class BatchNormKernels(Protocol):
    """The kernels of a batch norm, and its autograd function: ``csrc/functions/batch_norm.hpp``."""

    def serves(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
        relu: bool,
        /,
    ) -> bool:
        """Return whether the kernels serve a call: of tensors of torch's own class, the images in channels-last format.

        Parameters have the dtype of ``x``, or float32 beside 16 bits.
        """

    def apply_where_served(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
        relu: bool,
        /,
    ) -> Tensor | None:
        """Return the norm in the graph, and update the running statistics; None where :meth:`serves` says no.

        A write to ``x`` or the weight raises autograd's error in backward; under ReLU so does one to the result.
        """


class _Form(NamedTuple):
    """The parameters that select a batch norm's kernels; not the seed of stochastic rounding, new on each call."""

    channels: int
    itemsize: int
    group_size: int
    stochastic: bool

    @property
    def width(self) -> int:
        return self.channels // self.group_size

    @property
    def span(self) -> int:
        return math.gcd(self.width, max(_CHANNELS // self.group_size, 1))

    @property
    def blocks(self) -> int:
        return self.width // self.span

    @property
    def rows(self) -> int:
        return _TILE // self.group_size // self.span


@functools.lru_cache(maxsize=256)
def batch_norm_of(channels: int, itemsize: int, how: Saving) -> BatchNormKernels:
    """Return the kernels of a batch norm of elements of ``itemsize`` bytes, with 8-bit codes of whole groups."""
    form = _Form(channels, itemsize, how.group_size, how.stochastic)
    planner, restore = functools.partial(_plan, form), functools.partial(_restored, how)
    tiling, keys = (form.width, form.blocks, form.rows), (*how.keys, *how.second().keys)
    made = saved.library().BatchNorm(planner, how.runs_on, restore, channels, itemsize, tiling, keys, how.stochastic)
    return cast(BatchNormKernels, made)


@functools.lru_cache(maxsize=1024)
def _plan(form: _Form, kernel: str, numel: int, flags: tuple[int, ...], _: bool, device: torch.device) -> Plan:
    """Return how to launch a kernel over ``numel`` elements; ``flags`` are the kernel's own."""
    if kernel == "batch_norm_finish_kernel":
        constants = (*flags, form.group_size, form.rows, _FINISH_SPLITS, _FINISH_CHANNELS)
        finish = launcher(batch_norm_kernels, kernel, constants, _FINISH_WARPS, device)
        return Plan(((finish, form.channels // _FINISH_CHANNELS),), numel, 0)
    run = 16 // form.itemsize
    tiling = (form.group_size, _TILE // form.group_size, form.span, _TILE // (32 * _WARPS * run), run)
    last = (form.stochastic,) if kernel == "batch_norm_apply_kernel" else ()
    launch = launcher(batch_norm_kernels, kernel, (*flags, *tiling, *last), _WARPS, device, _REGISTERS)
    tiles = -(-numel // form.channels // form.rows)
    # Programs that share the rows of one block of channels.
    splits = min(-(-_PROGRAMS * processors(device) // form.blocks), tiles)
    return Plan(((launch, splits * form.blocks),), numel, fmt.packed_nbytes(numel, 8, form.group_size))


def _restored(how: Saving, packed: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """Restore a sum from its codes."""
    form = codec.Packed(packed, tuple(layout.shape), layout.stride, dtype, 8, how.group_size)
    return codec.dequantize(form, impl=how.impl)


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
