"""The packed format inside graphs: an operator packs, operators of aten restore, which Inductor fuses into readers.

Packing is the library's kernel. Inductor fuses the reduction to a group's minimum and maximum with no row's, and its
code is bound by arithmetic: on an H200, 157 us for 16384 x 4096 bfloat16, where the kernel takes 52. Codes and
parameters of the groups leave as two views of one buffer, codes in the tensor's own shape, so the backward graph needs
no sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..codec import format as fmt
from ..codec import ops as _ops  # registers the operator

_HALF = 0x7FFF0000


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def _number(bits: Tensor) -> Tensor:
    return bits.view(torch.float32)


def quantize(
    x: Tensor, group_size: int, keep_positive: bool = False, order: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Pack a dense tensor, or rows apart in memory.

    Parameters
    ----------
    x : Tensor, any shape, float32 | bfloat16 | float16
    group_size : {64, 128, 256}
    keep_positive : bool
        Give an element above zero in a group with minimum zero a code of at least 1.
    order : sequence of int, optional
        The dimensions from outermost to innermost in memory; by default those of a contiguous tensor.

    Returns
    -------
    codes : Tensor, uint8, the shape of ``x`` in storage order
        With four dimensions as from :func:`stored_shape`.
    groups : Tensor, int32, [ceil(numel / group_size)]
        Minimum (lower half) and step of each group, bfloat16 each.
    """
    shape = list(x.shape) if order is None else [x.shape[dim] for dim in order]
    return parts_of(_ops.quantize(x, 8, group_size, False, 0, "auto", keep_positive), shape)


def parts_of(packed: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return views of the codes and of the parameters in the packed form of a tensor of this shape."""
    elements = math.prod(shape)
    # In its own shape: as one dimension it would not fuse with the row that a norm reduces.
    codes = packed[:elements].view(stored_shape(shape))
    return codes, packed[fmt.parameters_offset(elements, 8) :].view(torch.int32)


def stored_shape(shape: Sequence[int]) -> list[int]:
    """Return the shape in which a part leaves the forward graph: four dimensions become five.

    In a graph with convolutions Inductor copies results of four dimensions to channels-last, codes too.
    """
    return [1, *shape] if len(shape) == 4 else list(shape)


def in_own_shape(stored: Tensor, dims: int) -> Tensor:
    """Undo :func:`stored_shape` for a tensor of so many dimensions."""
    return stored.squeeze(0) if dims == 4 else stored


def dequantize(codes: Tensor, groups: Tensor, group_size: int, dtype: torch.dtype, finite: bool = False) -> Tensor:
    """Restore a tensor packed by :func:`quantize`, contiguous; with ``finite``, infinities and NaN as finite numbers.

    Without the codes of infinities the expression has half the operators. Inductor writes out an expression of more
    than 30 before a reduction in several steps.
    """
    # Not `reference.dequantize`, which reads one flat buffer in loops over groups and their elements: these would not
    # fuse with the readers' loops. Here elements are in the order and shape of the codes. The two agree in
    # tests/test_compiled_codec.py::test_codes_and_parameters_are_those_of_the_reference.
    parameters = groups.unsqueeze(-1).expand(-1, group_size).reshape(-1)
    parameters = parameters[: codes.numel()].view(codes.shape)
    numbers = codes.to(torch.float32)
    values = numbers * _number(parameters & _HALF) + _number(parameters << 16)
    if not finite:
        first = fmt.flagged_levels(8)
        # -inf, inf and NaN for the next three codes.
        special = (numbers - (first + 1.5)) * (first + 3 - numbers) * float("inf")
        values = torch.where((parameters < 0) & (codes > first), special, values)
    if dtype is torch.float16:
        values = saturate(values)
    return values.to(dtype)


def saturate(x: Tensor) -> Tensor:
    """Clamp finite values to the range of float16."""
    # Three operators where the reference's rounding has seven: each counts towards Inductor's 30. The two agree in
    # tests/test_compiled_codec.py::test_float16_saturates_as_in_the_reference.
    return torch.where(x.abs() < float("inf"), x.clamp(-65504.0, 65504.0), x)


def scale(x: Tensor) -> tuple[Tensor, Tensor]:
    """Store float32 as float16 times a power of two; return the halves and the exponent, one int32."""
    exponent = (_bits(x.abs().amax().view(1)) >> 23) & 0xFF
    # 2**(141 - exponent) takes the largest magnitude to [2**14, 2**15). With a NaN or an infinity the power is one.
    exponent = torch.where(exponent == 255, 141, exponent).clamp(15, 254)
    return (x * _number((268 - exponent) << 23)).to(torch.float16), exponent


def unscale(halves: Tensor, exponent: Tensor) -> Tensor:
    """Restore a tensor stored by :func:`scale`."""
    return halves.to(torch.float32) * _number((exponent - 14) << 23)


# The smallest bfloat16 that is no subnormal: the distance of one itself keeps its sign.
_TINY = 2.0**-126


def to_distance(p: Tensor) -> Tensor:
    """Return the distance from zero of numbers that are not negative, or from one, negated, if they are nearer to one.

    In 16 bits both ends then have relative precision. Numbers above one are returned as they are.
    """
    return torch.where((p > 0.5) & (p <= 1), -(1 - p).clamp(min=_TINY), p)


def from_distance(distance: Tensor) -> Tensor:
    """Undo :func:`to_distance`."""
    return torch.where(distance < 0, 1 + distance, distance)


def pack_bits(x: Tensor) -> Tensor:
    """Pack the booleans of a dense tensor in storage order, eight to a byte, lowest bit first; one dimension.

    As operators of aten, packing read the operand of the comparison eight times in a kernel of its own.
    """
    packed: Tensor = _ops.quantize(x, 1, fmt.GROUP_SIZES[0], False, 0, "auto")
    return packed


def unpack_bits(packed: Tensor) -> Tensor:
    """Restore booleans packed by :func:`pack_bits`, with the innermost dimension eight times as long."""
    # Not `reference.unpack_bool`, which widens bytes to int64 and flattens rows; the reader would not fuse with it. The
    # two agree in tests/test_compiled_codec.py::test_bits_are_those_of_the_reference.
    shifts = torch.arange(8, device=packed.device, dtype=torch.uint8)
    bits = (packed.unsqueeze(-1) >> shifts) & 1
    return bits.view(*packed.shape[:-1], packed.shape[-1] * 8).to(torch.bool)
