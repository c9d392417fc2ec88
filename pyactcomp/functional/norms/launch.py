"""Launches of the kernels of layer norm and the root mean square norm."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...codec.kernels import triton as codec_kernels
from ...readers.observer import observer
from ..launch import buffer, bytes_of, copy_buffer, launcher, processors, written_bits
from ..masks.noise import QUIET, Noise
from ..saving import Saving

# A row stays in the registers of one program: 16 elements a thread, up to 512 threads.
LONGEST_ROW = 8192
_ALIGNED = 32
_MOST_WARPS = 16
# Elements of a program and of a thread, unless a row is longer. Forward and recompute move as many bytes as the codec's
# kernels and use the same tiles. Backward also holds two sums: with 8 elements a thread the kernel compiles to 64
# registers, or 80 to 93 with gradients of two dtypes, so 32 or 16 warps run on a multiprocessor; and all warps of a
# program share one row of sums.
_FORWARD = codec_kernels.TILE, 16
_RECOMPUTE = codec_kernels.DECODE_TILE, 16
_BACKWARD = 2048, 8
_RESIDENT_WARPS = 32


def serves(x: Tensor, residual: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, how: Saving) -> bool:
    """Return whether the kernels serve a norm of x, or x + residual, over ``shape`` with output dtype ``dtype``."""
    length = math.prod(shape)
    return (
        how.fuses(x)
        and (residual is None or how.fuses(residual))
        and dtype is not torch.float64
        # A row that ends inside a group is padded in the codes, a shorter one is not; threads read and write 64 bytes.
        and (length % how.group_size == 0 or (length > how.group_size and length % _ALIGNED == 0))
        and length <= LONGEST_ROW
        # A row may not straddle a multiple of 2**32, where the high half of an element's index changes.
        and (not how.stochastic or x.numel() <= 2**32)
    )


def are_contiguous(*tensors: Tensor | None) -> bool:
    """Return whether all given tensors are contiguous."""
    return all(t is None or t.is_contiguous() for t in tensors)


def draws_noise(x: Tensor, residual: Tensor | None, shape: tuple[int, ...], how: Saving) -> bool:
    """Return whether the kernels draw dropout of rows that they serve: in the order of memory, of whole groups."""
    return are_contiguous(x, residual) and math.prod(shape) % how.group_size == 0


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm over ``shape`` accepted by :func:`serves`; get one from :func:`norm_of`, which caches.

    ``centred`` is layer norm; otherwise rows are divided by their root mean square and rounded to their own dtype
    before the product with the weight. With ``copied``, the dtype of the rows, a copy is saved instead of codes.
    """

    shape: tuple[int, ...]
    centred: bool
    eps: float
    how: Saving
    copied: torch.dtype | None = None

    @functools.cached_property
    def length(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape)

    @functools.cached_property
    def _form(self) -> _Form:
        from ..kernel_parts import COPY

        bits = self.how.bits if self.copied is None else int(COPY.value)
        return _Form(self.length, self.centred, bits, self.how.group_size)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        indices: Tensor | None,
        dtype: torch.dtype,
        total: Tensor | None = None,
        noise: Noise = QUIET,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return normalised rows, their codes and rstd: of x, x + residual, or x in the order of ``indices``.

        ``total`` is saved instead of codes: x itself, or memory for the sum, always written. ``noise`` applies dropout
        to x first.
        """
        how, numel = self.how, x.numel()
        # As torch's operator copies the rows of a permuted image, or of a sequence that convolutions made.
        source, x = x, x.contiguous()
        out = observer().empty_like(x) if x.dtype is dtype else torch.empty_like(x, dtype=dtype)
        if total is not None:
            packed = bytes_of(total)
            bits = 0 if residual is None else self._form.bits
        else:
            packed = buffer(source, how, self._stored(numel)) if self.copied is None else copy_buffer(source)
            bits = written_bits(self._form.bits)
        rstd = x.new_empty(numel // self.length, dtype=torch.float32)
        flags = (residual is not None, weight is not None, bias is not None, indices is not None, noise.quads)
        # With dropout the compiler takes 125 registers a thread, though 16-bit elements need no more than without. No
        # limit for float32 or stochastic rounding: both would spill.
        most = codec_kernels.REGISTERS if noise.quads == 2 and not how.stochastic else None
        form = self._form if bits == self._form.bits else self._form._replace(bits=bits)
        plan = _plan(form, "norm_forward_kernel", numel, _FORWARD, flags, (how.stochastic,), x.device, most)
        tensors = (
            x,
            x if residual is None else residual.contiguous(),
            x if weight is None else weight.contiguous(),
            x if bias is None else bias.contiguous(),
            x if indices is None else indices.contiguous(),
            out,
            self._elements(packed),
            rstd,
        )
        plan.launch(plan.tiles, tensors, (self._stored(numel), self.eps, *how.keys, *noise.of_forward))
        return out, packed, rstd

    def recompute(
        self,
        packed: Tensor,
        rstd: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        shape: torch.Size,
        dtype: torch.dtype,
    ) -> Tensor:
        """Recompute the output from the ``packed`` and ``rstd`` of :meth:`forward`."""
        out = torch.empty(shape, dtype=dtype, device=packed.device)
        numel, flags = out.numel(), (weight is not None, bias is not None)
        plan = _plan(self._form, "norm_redo_kernel", numel, _RECOMPUTE, flags, (), out.device)
        weight = rstd if weight is None else weight.contiguous()
        bias = rstd if bias is None else bias.contiguous()
        plan.launch(plan.tiles, (self._elements(packed), rstd, weight, bias, out), (self._stored(numel),))
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
        beside: Tensor | None = None,
        noise: Noise = QUIET,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of x and residual in ``dtypes`` (None for None) and the needed ones of weight and bias.

        ``beside``, of the same dtype, is added to the gradients of x and residual. ``noise`` is the forward's.
        """
        grad = grad.contiguous()
        of_x, of_residual = dtypes
        noise = QUIET if of_x is None else noise
        grad_x = None if of_x is None else torch.empty_like(grad, dtype=of_x)
        # x and residual share a gradient if they have one dtype and x has no dropout.
        shared = of_residual is of_x and not noise.quads
        grad_residual = grad_x if of_residual is None or shared else torch.empty_like(grad, dtype=of_residual)
        first = grad_x if grad_x is not None else grad_residual
        second = grad_residual if grad_residual is not first else None
        flags = (
            weight is not None,
            first is not None,
            *needs,
            second is not None,
            indices is not None,
            beside is not None,
            noise.quads,
        )
        numel = grad.numel()
        plan = _plan(self._form, "norm_backward_kernel", numel, _BACKWARD, flags, (), grad.device)
        count = sum(needs)
        # Sums of the weight are first, sums of the bias last; rstd stands in if neither is needed.
        sums = grad.new_empty((count, plan.resident, *self.shape), dtype=torch.float32) if count else rstd
        parts = sums.unbind(0) if count else (rstd,)
        first = grad if first is None else first
        tensors = (
            self._elements(packed),
            rstd,
            rstd if weight is None else weight.contiguous(),
            grad,
            grad if beside is None else beside.contiguous(),
            rstd if indices is None else indices.contiguous(),
            first,
            first if second is None else second,
            parts[0],
            parts[-1],
        )
        plan.launch(plan.resident, tensors, (self._stored(numel), *noise.of_backward))
        found = sums.sum(1).unbind(0) if count else ()
        return (
            grad_x,
            None if of_residual is None else grad_residual,
            found[0] if needs[0] else None,
            found[-1] if needs[1] else None,
        )

    def _stored(self, numel: int) -> int:
        """Return the number of packed elements of ``numel``: rows of codes end with a whole group."""
        group = self.how.group_size if self.copied is None else 1
        return numel // self.length * -(-self.length // group) * group

    def _elements(self, packed: Tensor) -> Tensor:
        return packed if self.copied is None else packed.view(self.copied)


norm_of = functools.lru_cache(maxsize=256)(Norm)


class _Form(NamedTuple):
    """The parameters that select a norm's kernels; not the seed of stochastic rounding, new on each call."""

    length: int
    centred: bool
    bits: int | None
    group_size: int


class _Plan(NamedTuple):
    """The launcher of one kernel, the number of tiles, and the number of programs that are resident at a time."""

    launch: codec_kernels.Launcher
    tiles: int
    resident: int


@functools.lru_cache(maxsize=1024)
def _plan(
    form: _Form,
    kernel: str,
    numel: int,
    tile: tuple[int, int],
    flags: tuple[int, ...],
    last: tuple[bool, ...],
    device: torch.device,
    registers: int | None = None,
) -> _Plan:
    """Return how to launch a kernel over ``numel`` elements; ``tile`` has the elements of a program and of a thread."""
    from . import kernels

    elements, per_thread = tile
    groups = 1 << (-(-form.length // form.group_size) - 1).bit_length()
    padded = groups * form.group_size
    # The rows of a program divide the rows of the tensor: every program is full.
    rows = math.gcd(numel // form.length, max(elements // padded, 1)) if padded == form.length else 1
    warps = min(max(rows * padded // (32 * per_thread), 1), _MOST_WARPS)
    tiles = numel // form.length // rows
    constants = (form.length, rows, form.centred, *flags, form.bits, form.group_size, rows * groups, *last)
    launch = launcher(kernels, kernel, constants, warps, device, registers)
    return _Plan(launch, tiles, min(tiles, processors(device) * max(_RESIDENT_WARPS // warps, 1)))
