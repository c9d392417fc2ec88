"""Launches of the kernels of layer norm and the root mean square norm."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from ...codec import format as fmt
from ...codec.kernels import triton as codec_kernels
from ...engine import saved
from ..launch import Plan, launcher, processors
from ..masks.noise import Noise
from ..saving import Saving

# A row stays in the registers of one program: 16 elements a thread, up to 512 threads.
LONGEST_ROW = 8192
_ALIGNED = 32
_MOST_WARPS = 16
# Elements of a program and of a thread, unless a row is longer. Forward and recompute move as many bytes as the codec's
# kernels and use the same tiles. Backward also holds two sums: with 8 elements a thread the kernel compiles to 64
# registers, or 80 to 93 with gradients of two dtypes, so 32 or 16 warps run on a multiprocessor; and all warps of a
# program share one row of sums.
_TILES = {
    "norm_forward_kernel": (codec_kernels.TILE, 16),
    "norm_recompute_kernel": (codec_kernels.DECODE_TILE, 16),
    "norm_backward_kernel": (2048, 8),
}
_RESIDENT_WARPS = 32


def serves(x: Tensor, residual: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, how: Saving) -> bool:
    """Return whether the kernels serve a norm of x, or x + residual, over ``shape`` with output dtype ``dtype``."""
    length = math.prod(shape)
    return (
        how.fuses(x)
        and (residual is None or how.fuses(residual))
        and dtype is not torch.float64
        and _serves_rows_of(length, how.group_size)
        # A row may not straddle a multiple of 2**32, where the high half of an element's index changes.
        and (not how.stochastic or x.numel() <= 2**32)
    )


@functools.lru_cache(maxsize=256)
def _serves_rows_of(length: int, group_size: int) -> bool:
    # A row that ends inside a group is padded in the codes, a shorter one is not; threads read and write 64 bytes.
    whole = length % group_size == 0 or (length > group_size and length % _ALIGNED == 0)
    return whole and length <= LONGEST_ROW


def are_contiguous(*tensors: Tensor | None) -> bool:
    """Return whether all given tensors are contiguous."""
    return all(t is None or t.is_contiguous() for t in tensors)


def draws_noise(x: Tensor, residual: Tensor | None, shape: tuple[int, ...], how: Saving) -> bool:
    """Return whether the kernels draw dropout of rows that they serve: in the order of memory, of whole groups."""
    return are_contiguous(x, residual) and math.prod(shape) % how.group_size == 0


class NormKernels(Protocol):
    """The kernels of a norm, and its autograd function: ``csrc/functions/norm.hpp``.

    ``rows`` is the order in which to take the rows of x. ``total``, if given, is saved in place of codes: x itself, or
    memory for the sum, which is written. ``noise`` applies dropout to x first.
    """

    def apply(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        rows: Tensor | None,
        dtype: torch.dtype,
        total: Tensor | None,
        noise: Noise | None,
        result: Tensor | None,
        watches_x: bool,
        watches_bias: bool,
        /,
    ) -> Tensor:
        """Return the norm of ``x``, recorded by autograd.

        If ``result`` is given, return it in place of the kernels' output; codes and gradients are the kernels' either
        way. A later write to ``x``, if ``watches_x``, to ``bias``, if ``watches_bias``, or to ``weight`` makes backward
        raise.
        """

    def apply_where_served(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype | None, /
    ) -> Tensor | None:
        """Return normalised rows of a tensor that ``ordinary_codes`` let through, as the module's function does.

        In ``dtype``, or in that of torch's function; None where the kernels do not serve it or more is to be asked.
        """

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        rows: Tensor | None,
        dtype: torch.dtype,
        total: Tensor | None,
        noise: Noise | None,
        /,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return normalised rows, what is saved of them, and their reciprocal deviations."""

    def recompute(
        self,
        packed: Tensor,
        rstd: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        shape: torch.Size,
        dtype: torch.dtype,
        /,
    ) -> Tensor:
        """Recompute the output from what :meth:`forward` saved."""

    def backward(
        self,
        packed: Tensor,
        rstd: Tensor,
        weight: Tensor | None,
        rows: Tensor | None,
        grad: Tensor,
        dtypes: tuple[torch.dtype | None, torch.dtype | None],
        needs: tuple[bool, bool],
        beside: Tensor | None,
        noise: Noise | None,
        /,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of x and residual in ``dtypes`` (None for None) and the needed ones of weight and bias.

        ``beside``, of the same dtype, is added to the gradients of x and residual. ``noise`` is the forward's.
        """


@functools.lru_cache(maxsize=256)
def norm_of(
    shape: tuple[int, ...], centred: bool, eps: float, how: Saving, copied: torch.dtype | None = None
) -> NormKernels:
    """Return the kernels of a norm over ``shape`` accepted by :func:`serves`.

    ``centred`` is layer norm; otherwise rows are divided by their root mean square and rounded to their own dtype
    before the product with the weight. With ``copied``, the dtype of the rows, a copy is saved instead of codes.
    """
    from ..kernel_parts import COPY

    bits = int(COPY.value) if copied is not None else how.bits
    assert bits is not None
    form = _Form(math.prod(shape), centred, bits, how.group_size, copied, how.stochastic)
    serves = _serves_rows_of(form.length, how.group_size)
    planner = functools.partial(_plan, form)
    made = saved.library().Norm(planner, how.runs_on, tuple(shape), centred, eps, how.keys, copied, serves)
    return cast(NormKernels, made)


class _Form(NamedTuple):
    """The parameters that select a norm's kernels; not the seed of stochastic rounding, new on each call."""

    length: int
    centred: bool
    bits: int
    group_size: int
    copied: torch.dtype | None
    stochastic: bool


@functools.lru_cache(maxsize=1024)
def _plan(form: _Form, kernel: str, numel: int, flags: tuple[int, ...], drops: bool, device: torch.device) -> Plan:
    """Return how to launch a kernel over ``numel`` elements; ``drops`` tells that it writes no codes.

    ``flags`` are the kernel's own, of which the last is a dropout's quads.
    """
    from . import kernels

    elements, per_thread = _TILES[kernel]
    last: tuple[bool, ...] = ()
    registers = None
    if kernel == "norm_forward_kernel":
        last = (form.stochastic,)
        # With dropout the compiler takes 125 registers a thread, though 16-bit elements need no more than without. No
        # limit for float32 or stochastic rounding: both would spill.
        registers = codec_kernels.REGISTERS if flags[-1] == 2 and not form.stochastic else None
    groups = 1 << (-(-form.length // form.group_size) - 1).bit_length()
    padded = groups * form.group_size
    # The rows of a program divide the rows of the tensor: every program is full.
    rows = math.gcd(numel // form.length, max(elements // padded, 1)) if padded == form.length else 1
    warps = min(max(rows * padded // (32 * per_thread), 1), _MOST_WARPS)
    tiles = numel // form.length // rows
    bits = 0 if drops else form.bits
    constants = (form.length, rows, form.centred, *flags, bits, form.group_size, rows * groups, *last)
    launch = launcher(kernels, kernel, constants, warps, device, registers)
    if kernel == "norm_backward_kernel":
        tiles = min(tiles, processors(device) * max(_RESIDENT_WARPS // warps, 1))
    if form.copied is not None:
        return Plan(((launch, tiles),), numel, numel * form.copied.itemsize)
    stored = numel // form.length * -(-form.length // form.group_size) * form.group_size
    return Plan(((launch, tiles),), stored, fmt.packed_nbytes(stored, form.bits, form.group_size))
