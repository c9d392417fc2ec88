"""Launches of the kernels of layer norm and the root mean square norm."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...codec.kernels import triton as codec_kernels
from ..launch import argument, buffer, bytes_of, copy_buffer, keys, launcher, processors, written_bits
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
        all(t is None or how.fuses(t) for t in (x, residual))
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
        numel = x.numel()
        # As torch's operator copies the rows of a permuted image, or of a sequence that convolutions made.
        source, x = x, x.contiguous()
        out = torch.empty_like(x, dtype=dtype)
        if total is not None:
            packed = bytes_of(total)
            bits = 0 if residual is None else self._form.bits
        else:
            packed = buffer(source, self.how, self._stored(numel)) if self.copied is None else copy_buffer(source)
            bits = written_bits(self._form.bits)
        rstd = x.new_empty(numel // self.length, dtype=torch.float32)
        flags = (residual is not None, weight is not None, bias is not None, indices is not None, noise.quads)
        form = self._form._replace(bits=bits)
        # With dropout the compiler takes 125 registers a thread, though 16-bit elements need no more than without. No
        # limit for float32 or stochastic rounding: both would spill.
        most = codec_kernels.REGISTERS if noise.quads == 2 and not self.how.stochastic else None
        plan = _plan(form, "norm_forward_kernel", numel, _FORWARD, flags, (self.how.stochastic,), x.device, most)
        given = (argument(residual, x), argument(weight, x), argument(bias, x), argument(indices, x))
        tensors = (x, *given, out, self._elements(packed), rstd)
        plan.launch(plan.tiles, tensors, (self._stored(numel), self.eps, *keys(self.how), *noise.arguments(False)))
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
        numel = out.numel()
        plan = _plan(
            self._form, "norm_redo_kernel", numel, _RECOMPUTE, (weight is not None, bias is not None), (), out.device
        )
        tensors = (self._elements(packed), rstd, argument(weight, rstd), argument(bias, rstd), out)
        plan.launch(plan.tiles, tensors, (self._stored(numel),))
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
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and residual in ``dtypes`` (None for None) and the needed ones of weight and bias.

        ``beside``, of the same dtype, is added to the gradients of x and residual. ``noise`` is the forward's.
        """
        grad = grad.contiguous()
        numel = grad.numel()
        noise = QUIET if dtypes[0] is None else noise
        # x and residual share a gradient if they have one dtype and x has no dropout.
        kinds = (dtypes[0], noise.quads > 0), (dtypes[1], False)
        inputs = {kind: torch.empty_like(grad, dtype=kind[0]) for kind in kinds if kind[0] is not None}
        out, *other = inputs.values() or (grad,)
        added = beside is not None
        flags = (weight is not None, bool(inputs), *needs, bool(other), indices is not None, added, noise.quads)
        plan = _plan(self._form, "norm_backward_kernel", numel, _BACKWARD, flags, (), grad.device)
        sums = grad.new_empty((sum(needs), plan.resident, *self.shape), dtype=torch.float32)
        # Sums of the weight are first, sums of the bias last; rstd stands in if neither is needed.
        parameters = (sums[0], sums[-1]) if any(needs) else (rstd, rstd)
        results = (out, other[0] if other else out, *parameters)
        tensors = (
            self._elements(packed),
            rstd,
            argument(weight, rstd),
            grad,
            argument(beside, grad),
            argument(indices, rstd),
            *results,
        )
        plan.launch(plan.resident, tensors, (self._stored(numel), *noise.arguments(True)))
        of_parameters = iter(sums.sum(1))
        of_inputs = (inputs.get(kind) for kind in kinds)
        return *of_inputs, *(next(of_parameters) if need else None for need in needs)

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
