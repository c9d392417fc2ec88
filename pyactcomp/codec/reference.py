"""The definition of the packed format, in plain torch.

The CPU, CUDA and Triton implementations produce the same bytes as this module, for round-to-nearest and,
with the same seed, for stochastic rounding. All arithmetic is IEEE float32 with one rounding for each
operation below: no contraction into a fused multiply-add, no approximate division, no flushing of
subnormal numbers.

A tensor is read in storage order as ``n`` elements in groups of ``group_size``; the last group may be
partial. For each group::

    ordinary (every |x| <= 2**126, so nothing is infinite or NaN)
        minimum = round_down_to_bfloat16(min(x) + 0.0)             # + 0.0 turns -0.0 into 0.0
        step    = max(round_up_to_bfloat16((max(x) - minimum) / levels), 2**-118)
        code    = clamp(round_half_even((x - minimum) / step), 0, levels)
        value   = (code * step) + minimum
    flagged (anything else): as above over the finite values clamped to +-2**126, with `flagged_levels` in
        place of `levels`; the three codes above are -inf, +inf and NaN; the stored step has its sign bit
        set; with no finite value at all, minimum = 0 and step = -0.0

With ``keep_positive``, an element above zero in a group with minimum zero gets a code of at least 1. The option is for
results of ReLU: backward passes the gradient where the result is positive. Rounding the few elements below half a step
to zero would drop their whole gradient; in a ResNet-50 this adds up to an error of a third of the gradient.

Stochastic rounding replaces ``round_half_even(q)`` by ``floor(q) + (uniform(seed, i) < q - floor(q))``,
``i`` being the element's index in the tensor.

The buffer holds the codes (``8 // bits`` to a byte, lowest bits first), zero bytes up to the next multiple
of 16, then minimum and step of each group, bfloat16, little-endian.

Values are converted to the output's dtype with round-half-even; a float16 output is clamped to +-65504
first, so a finite value never becomes infinite. NaN is restored as the canonical quiet NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import format as fmt

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _mix(x: Tensor) -> Tensor:
    """Return a hash of the 32-bit values in an int64 tensor.

    Chris Wellons' ``lowbias32`` with TheIronBorn's constants (hash-prospector, #19).
    """
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


def uniform(seed: int, index: Tensor) -> Tensor:
    """Return the generator's float32 numbers in [0, 1) at the given element indices.

    Parameters
    ----------
    seed : int
        Any 64-bit seed.
    index : Tensor, int64
        Element indices, at least 0.

    Returns
    -------
    Tensor, float32
        Multiples of 2**-24. A pure function of the arguments; torch's generators do not advance.
    """
    k0, k1 = fmt.random_keys(seed)
    low = index & 0xFFFFFFFF
    high = index >> 32
    hashed = _mix(_mix(low ^ k0) ^ ((high * 0x9E3779B9 + k1) & 0xFFFFFFFF))
    return (hashed >> 8).to(torch.float32) * 2.0**-24


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def _round_down_to_bfloat16(x: Tensor) -> Tensor:
    bits = _bits(x)
    bits = bits + torch.where(bits < 0, 0xFFFF, 0).to(torch.int32)
    return (bits & ~0xFFFF).view(torch.float32)


def _round_up_positive_to_bfloat16(x: Tensor) -> Tensor:
    return ((_bits(x) + 0xFFFF) & ~0xFFFF).view(torch.float32)


def _round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert float32 to ``dtype``, half to even; finite input gives finite output."""
    if dtype is torch.float16:
        clamped = x.clamp(-65504.0, 65504.0).to(torch.float16)
        clamped = torch.where(x.isnan(), torch.full_like(clamped, float("nan")), clamped)
        return torch.where(x.isinf(), x.to(torch.float16), clamped)
    if dtype is torch.bfloat16:
        bits = _bits(x)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = torch.where(x.isnan(), 0x7FC0, rounded)
        return rounded.to(torch.int16).view(torch.bfloat16)
    return x


def _check_bits_and_group(bits: int, group_size: int) -> None:
    if bits not in fmt.BITS:
        raise ValueError(f"bits must be one of {fmt.BITS}, got {bits!r}")
    if group_size not in fmt.GROUP_SIZES:
        raise ValueError(f"group_size must be one of {fmt.GROUP_SIZES}, got {group_size!r}")


def quantize(
    x: Tensor,
    *,
    bits: int = 8,
    group_size: int = 64,
    stochastic: bool = False,
    seed: int = 0,
    keep_positive: bool = False,
) -> Tensor:
    """Pack a flat tensor.

    Parameters
    ----------
    x : Tensor, [n], float32 | bfloat16 | float16
        The elements in storage order.
    bits : {8, 4, 2}
        Width of a code.
    group_size : {64, 128, 256}
        Elements with a common minimum and step.
    stochastic : bool
        Round up with a probability equal to the fraction, instead of half to even.
    seed : int
        64-bit seed of the stochastic rounding.
    keep_positive : bool
        Give an element above zero in a group with minimum zero a code of at least 1.

    Returns
    -------
    Tensor, uint8, [packed_nbytes(n, bits, group_size)]
        Codes, then the groups' parameters.

    Examples
    --------
    >>> import torch
    >>> from pyactcomp.codec import reference
    >>> packed = reference.quantize(torch.arange(128.0))
    >>> packed.numel()                       # 128 codes, two groups of 4 bytes
    136
    >>> round(float(reference.dequantize(packed, 128)[127]), 1)
    127.0
    """
    _check_bits_and_group(bits, group_size)
    if x.dtype not in _DTYPES or x.dim() != 1:
        raise TypeError(f"expected a flat tensor of {_DTYPES}, got {x.dtype} with shape {tuple(x.shape)}")
    n = x.numel()
    groups = fmt.group_count(n, group_size)
    padding = groups * group_size - n
    values = torch.nn.functional.pad(x.to(torch.float32), (0, padding)).view(groups, group_size)
    present = torch.nn.functional.pad(torch.ones_like(x, dtype=torch.bool), (0, padding)).view(groups, group_size)

    flagged = ~((values.abs() <= fmt.MAX_FINITE) | ~present).all(dim=1, keepdim=True)
    finite = values.isfinite() & present
    clamped = values.clamp(-fmt.MAX_FINITE, fmt.MAX_FINITE)
    inf = float("inf")
    lowest = torch.where(finite, clamped, inf).amin(dim=1, keepdim=True) if n else values
    highest = torch.where(finite, clamped, -inf).amax(dim=1, keepdim=True) if n else values
    empty = lowest > highest
    lowest, highest = lowest.masked_fill(empty, 0.0), highest.masked_fill(empty, 0.0)

    # Divisors are tensors: torch multiplies by the reciprocal of a scalar on the GPU.
    largest = torch.where(flagged, max(fmt.flagged_levels(bits), 0), fmt.levels(bits)).to(torch.float32)
    minimum = _round_down_to_bfloat16(lowest + 0.0)
    step = _round_up_positive_to_bfloat16((highest - minimum) / largest.clamp(min=1.0))
    step = step.clamp(min=fmt.MIN_STEP)

    quotient = (clamped - minimum) / step
    if stochastic:
        index = torch.arange(groups * group_size, device=x.device).view(groups, group_size)
        whole = quotient.floor()
        rounded = whole + (uniform(seed, index) < quotient - whole).to(torch.float32)
    else:
        rounded = quotient.round()
    if keep_positive:
        rounded = torch.where((minimum == 0.0) & (clamped > 0.0), rounded.clamp(min=1.0), rounded)
    codes = torch.minimum(rounded.clamp(min=0.0), largest)
    codes = torch.where(values == -inf, largest + 1, codes)
    codes = torch.where(values == inf, largest + 2, codes)
    codes = torch.where(values.isnan(), largest + 3, codes)
    codes = codes.to(torch.uint8).view(-1)[:n]

    per_byte = 8 // bits
    codes = torch.nn.functional.pad(codes, (0, -n % per_byte)).view(-1, per_byte)
    shifts = torch.arange(0, 8, bits, device=x.device)
    packed_codes = (codes.to(torch.int64) << shifts).sum(dim=1).to(torch.uint8)
    packed_codes = torch.nn.functional.pad(packed_codes, (0, -packed_codes.numel() % fmt.ALIGNMENT))

    step_bits = torch.where(empty, 0, _bits(step)) | torch.where(flagged, -(2**31), 0).to(torch.int32)
    parameters = torch.cat([_bits(minimum), step_bits], dim=1) >> 16
    return torch.cat([packed_codes, parameters.to(torch.int16).contiguous().view(torch.uint8).view(-1)])


def dequantize(
    packed: Tensor, numel: int, *, dtype: torch.dtype = torch.float32, bits: int = 8, group_size: int = 64
) -> Tensor:
    """Restore a flat tensor packed by :func:`quantize`.

    Parameters
    ----------
    packed : Tensor, uint8, [packed_nbytes(numel, bits, group_size)]
    numel : int
        Number of elements.
    dtype : torch.dtype
        float32, bfloat16 or float16.
    bits, group_size : int
        As given to :func:`quantize`.

    Returns
    -------
    Tensor, [numel], dtype
    """
    _check_bits_and_group(bits, group_size)
    groups = fmt.group_count(numel, group_size)
    offset = fmt.parameters_offset(numel, bits)
    shifts = torch.arange(0, 8, bits, device=packed.device)
    codes = ((packed[:offset].to(torch.int64).unsqueeze(1) >> shifts) & ((1 << bits) - 1)).view(-1)[:numel]
    codes = torch.nn.functional.pad(codes, (0, groups * group_size - numel)).view(groups, group_size)

    parameters = packed[offset:].clone().view(torch.int16).view(groups, 2).to(torch.int32) << 16
    minimum = parameters[:, :1].contiguous().view(torch.float32)
    flagged = parameters[:, 1:] < 0
    step = (parameters[:, 1:] & 0x7FFFFFFF).contiguous().view(torch.float32)

    values = (codes.to(torch.float32) * step) + minimum
    escape = torch.where(flagged, codes - fmt.flagged_levels(bits), 0)
    values = torch.where(escape == 1, -float("inf"), values)
    values = torch.where(escape == 2, float("inf"), values)
    values = torch.where(escape == 3, float("nan"), values)
    return _round_to(values.view(-1)[:numel], dtype)


def pack_bool(x: Tensor) -> Tensor:
    """Pack a flat boolean tensor, eight elements to a byte, lowest bit first, the rest zero."""
    bits = torch.nn.functional.pad(x.to(torch.int64), (0, -x.numel() % 8)).view(-1, 8)
    return (bits << torch.arange(8, device=x.device)).sum(dim=1).to(torch.uint8)


def unpack_bool(packed: Tensor, numel: int) -> Tensor:
    """Restore a flat tensor packed by :func:`pack_bool`."""
    bits = (packed.to(torch.int64).unsqueeze(1) >> torch.arange(8, device=packed.device)) & 1
    return bits.view(-1)[:numel].to(torch.bool)


def error_bound(
    x: Tensor,
    *,
    bits: int = 8,
    group_size: int = 64,
    stochastic: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return, for each element, a bound on the error of packing and restoring.

    Half a step (stochastic: one step) plus 2 ulp of the group's largest magnitude, for the roundings of
    ``x - minimum``, of the quotient and of the restored value; a 16-bit output adds half an ulp of the output's
    dtype. The bound holds for finite values of at most 2**126 (float16 output: 65504), with 2 bits in ordinary groups
    only. With ``keep_positive``, an element lifted from code 0 to 1 is off by at most one step.

    Parameters
    ----------
    x : Tensor, [n]
    bits, group_size, stochastic
        As given to :func:`quantize`.
    dtype : torch.dtype
        Dtype of the restored tensor.

    Returns
    -------
    Tensor, float64, [n]
    """
    n = x.numel()
    packed = quantize(x, bits=bits, group_size=group_size)
    parameters = packed[fmt.parameters_offset(n, bits) :].clone().view(torch.bfloat16).view(-1, 2)
    step = parameters[:, 1].abs().to(torch.float64).repeat_interleave(group_size)[:n]
    magnitude = x.to(torch.float64).abs().nan_to_num(0.0, 0.0, 0.0)
    padded = torch.nn.functional.pad(magnitude, (0, -n % group_size)).view(-1, group_size)
    largest = padded.amax(dim=1).repeat_interleave(group_size)[:n]
    bound = step * (1.0 if stochastic else 0.5) + 2 * largest * 2.0**-23
    if dtype is not torch.float32:
        # Half an ulp of the restored value, at most the original plus the bound so far.
        bound = bound + (magnitude + bound) * torch.finfo(dtype).eps / 2 + torch.finfo(dtype).tiny
    return bound
