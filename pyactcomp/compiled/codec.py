"""The packed format inside graphs: an operator packs, operators of aten restore, which Inductor fuses into readers.

Packing is the library's kernel. Inductor fuses the reduction to a group's minimum and maximum with no row's, and its
code is bound by arithmetic: on an H200, 157 us for 16384 x 4096 bfloat16, where the kernel takes 52. Codes and
parameters of the groups leave as two views of one buffer, codes in the tensor's own shape, so the backward graph needs
no sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..codec import format as fmt
from ..codec import ops as _ops  # registers the operator

_HALF = 0x7FFF0000


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def _number(bits: Tensor) -> Tensor:
    return bits.view(torch.float32)


def quantize(x: Tensor, group_size: int, keep_positive: bool = False) -> tuple[Tensor, Tensor]:
    """Pack a contiguous tensor.

    Parameters
    ----------
    x : Tensor, any shape, float32 | bfloat16 | float16
    group_size : {64, 128, 256}
    keep_positive : bool
        Give an element above zero in a group with minimum zero a code of at least 1.

    Returns
    -------
    codes : Tensor, uint8, the shape of ``x``
    groups : Tensor, int32, [ceil(numel / group_size)]
        Minimum (lower half) and step of each group, bfloat16 each.
    """
    # In its own shape: as one dimension it would not fuse with the row that a norm reduces.
    return parts_of(_ops.quantize(x, 8, group_size, False, 0, "auto", keep_positive), x)


def parts_of(packed: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the codes and of the parameters in the packed form of a tensor."""
    elements = x.numel()
    return packed[:elements].view(x.shape), packed[fmt.parameters_offset(elements, 8) :].view(torch.int32)


def dequantize(codes: Tensor, groups: Tensor, group_size: int, dtype: torch.dtype) -> Tensor:
    """Restore a tensor packed by :func:`quantize`, contiguous."""
    # Elements in the order of the codes: loops over groups and their elements would not fuse with the readers' loops.
    parameters = groups.unsqueeze(-1).expand(-1, group_size).reshape(-1)
    parameters = parameters[: codes.numel()].view(codes.shape)
    numbers = codes.to(torch.float32)
    values = numbers * _number(parameters & _HALF) + _number(parameters << 16)
    first = fmt.flagged_levels(8)
    # -inf, inf and NaN for the next three codes.
    special = (numbers - (first + 1.5)) * (first + 3 - numbers) * float("inf")
    values = torch.where((parameters < 0) & (codes > first), special, values)
    if dtype is torch.float16:
        values = saturate(values)
    return values.to(dtype)


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
