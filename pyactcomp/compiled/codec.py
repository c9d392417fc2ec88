"""The packed format in aten operators, which Inductor fuses into producers and consumers.

The numbers are those of ``codec/reference.py``, in two tensors: codes in the tensor's own shape and one int32 a group,
bfloat16 minimum in the upper half and bfloat16 step in the lower half.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..codec import format as fmt

_UPPER = -65536


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def _number(bits: Tensor) -> Tensor:
    return bits.view(torch.float32)


def quantize(x: Tensor, group_size: int, keep_positive: bool = False) -> tuple[Tensor, Tensor]:
    """Pack a contiguous tensor whose innermost size is a multiple of ``group_size``.

    Parameters
    ----------
    x : Tensor, [..., n], float32 | bfloat16 | float16
    group_size : {64, 128, 256}
    keep_positive : bool
        Give an element above zero in a group with minimum zero a code of at least 1.

    Returns
    -------
    codes : Tensor, uint8, [..., n]
    groups : Tensor, int32, [..., n / group_size]
        Minimum and step of each group.
    """
    shape = x.shape
    values = x.to(torch.float32).view(*shape[:-1], shape[-1] // group_size, group_size)
    magnitude = values.abs()
    # Also true of NaN; a reduction to the largest magnitude may drop NaN.
    flagged = (~(magnitude <= fmt.MAX_FINITE)).any(dim=-1, keepdim=True)
    inf = float("inf")
    finite = magnitude < inf
    clamped = values.clamp(-fmt.MAX_FINITE, fmt.MAX_FINITE)
    lowest = torch.where(finite, clamped, inf).amin(dim=-1, keepdim=True)
    highest = torch.where(finite, clamped, -inf).amax(dim=-1, keepdim=True)
    empty = lowest > highest
    lowest, highest = torch.where(empty, 0.0, lowest), torch.where(empty, 0.0, highest)
    largest = torch.where(flagged, float(fmt.flagged_levels(8)), float(fmt.levels(8)))
    low = _bits(lowest + 0.0)
    # Towards minus infinity; the step towards plus infinity.
    low = (low + torch.where(low < 0, 0xFFFF, 0).to(torch.int32)) & _UPPER
    minimum = _number(low)
    width = (_bits((highest - minimum) / largest) + 0xFFFF) & _UPPER
    step = _number(width).clamp(min=fmt.MIN_STEP)
    codes = ((clamped - minimum) / step).round()
    if keep_positive:
        codes = torch.where((minimum == 0.0) & (clamped > 0.0), codes.clamp(min=1.0), codes)
    codes = torch.minimum(codes.clamp(min=0.0), largest)
    codes = torch.where(values == -inf, largest + 1, codes)
    codes = torch.where(values == inf, largest + 2, codes)
    codes = torch.where(values.isnan(), largest + 3, codes)
    upper = torch.where(empty, 0, _bits(step)) | torch.where(flagged, -(2**31), 0).to(torch.int32)
    groups = low | ((upper >> 16) & 0xFFFF)
    return codes.to(torch.uint8).view(shape), groups.squeeze(-1)


def dequantize(codes: Tensor, groups: Tensor, group_size: int, dtype: torch.dtype) -> Tensor:
    """Restore a tensor packed by :func:`quantize`, contiguous."""
    shape = codes.shape
    parameters = groups.unsqueeze(-1)
    upper = parameters << 16
    flagged = upper < 0
    step, minimum = _number(upper & 0x7FFFFFFF), _number(parameters & _UPPER)
    numbers = codes.view(*shape[:-1], shape[-1] // group_size, group_size)
    values = numbers.to(torch.float32) * step + minimum
    first = fmt.flagged_levels(8)
    values = torch.where(flagged & (numbers == first + 1), -float("inf"), values)
    values = torch.where(flagged & (numbers == first + 2), float("inf"), values)
    values = torch.where(flagged & (numbers == first + 3), float("nan"), values)
    if dtype is torch.float16:
        values = saturate(values)
    return values.to(dtype).view(shape)


def saturate(x: Tensor) -> Tensor:
    """Clamp finite values to the range of float16."""
    return torch.where(x.abs() < float("inf"), x.clamp(-65504.0, 65504.0), x)


def scale(x: Tensor) -> tuple[Tensor, Tensor]:
    """Store float32 as float16 times a power of two; return the halves and the exponent, one int32."""
    exponent = ((_bits(x.abs().amax().view(1)) >> 23) & 0xFF).clamp(15, 254)
    # 2**(141 - exponent) takes the largest magnitude to [2**14, 2**15).
    return (x * _number((268 - exponent) << 23)).to(torch.float16), exponent


def unscale(halves: Tensor, exponent: Tensor) -> Tensor:
    """Restore a tensor stored by :func:`scale`."""
    return halves.to(torch.float32) * _number((exponent - 14) << 23)


def pack_bits(x: Tensor) -> Tensor:
    """Pack booleans eight to a byte, lowest bit first; the innermost size is a multiple of 8."""
    eights = x.view(*x.shape[:-1], x.shape[-1] // 8, 8).to(torch.uint8)
    packed = eights[..., 0]
    for bit in range(1, 8):
        packed = packed | (eights[..., bit] << bit)
    return packed


def unpack_bits(packed: Tensor) -> Tensor:
    """Restore booleans packed by :func:`pack_bits`."""
    shifts = torch.arange(8, device=packed.device, dtype=torch.uint8)
    bits = (packed.unsqueeze(-1) >> shifts) & 1
    return bits.view(*packed.shape[:-1], packed.shape[-1] * 8).to(torch.bool)
