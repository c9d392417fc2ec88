"""The text of the packed format, an element at a time, in exact fractions: what the tests of it compare with.

A float32 is a Fraction (-0.0 is 0); an operation is exact and then rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from pyactcomp.codec import format as fmt

# A test whose outcome is random fails by chance once in a million choices of its (fixed) seeds.
CHANCE = 1e-6

LARGEST = Fraction(2) ** 126


def rounded(value: Fraction, precision: int, mode: Callable[[Fraction], int]) -> Fraction:
    """Round to ``precision`` significant bits and float32's range of exponents, subnormal numbers included."""
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    quantum = Fraction(2) ** max(exponent + 1 - precision, -125 - precision)
    return mode(value / quantum) * quantum


def float32(value: Fraction) -> Fraction:
    return rounded(value, 24, round)


def bfloat16_bits(value: Fraction) -> int:
    bits = fmt.float32_bits(float(value))
    assert bits & 0xFFFF == 0
    return bits >> 16


class Group(NamedTuple):
    codes: list[int]
    minimum: Fraction
    step: Fraction
    parameters: bytes
    flagged: bool


def oracle_uniform(seed: int, index: int) -> Fraction:
    """SplitMix64's finaliser for the keys, then twice a 32-bit integer hash, in plain integers."""
    z = (seed + 0x9E3779B97F4A7C15) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> shift)) * factor % 2**64
    z ^= z >> 31

    def mix(x: int) -> int:
        for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
            x = (x ^ (x >> shift)) * factor % 2**32
        return x ^ (x >> 15)

    high = (index >> 32) * 0x9E3779B9 + (z >> 32)
    return Fraction(mix(mix(index % 2**32 ^ z % 2**32) ^ high % 2**32) >> 8, 2**24)


def oracle_group(values: list[float], bits: int, seed: int | None, first: int, keep_positive: bool) -> Group:
    flagged = not all(abs(v) <= 2.0**126 for v in values)
    finite = [max(-LARGEST, min(LARGEST, Fraction(v))) for v in values if math.isfinite(v)]
    levels = 2**bits - 4 if flagged else 2**bits - 1
    if not finite:
        minimum, step, step_bits = Fraction(0), Fraction(1), 0
    else:
        minimum = rounded(min(finite), 8, math.floor)
        step = float32(float32(max(finite) - minimum) / max(levels, 1))
        step = max(rounded(step, 8, math.ceil), Fraction(2) ** -118)
        step_bits = bfloat16_bits(step)
    codes = []
    for i, v in enumerate(values, first):
        if math.isnan(v):
            codes.append(levels + 3)
        elif math.isinf(v):
            codes.append(levels + (2 if v > 0 else 1))
        else:
            quotient = float32(float32(max(-LARGEST, min(LARGEST, Fraction(v))) - minimum) / step)
            if seed is None:
                code = round(quotient)
            else:
                code = math.floor(quotient)
                code += oracle_uniform(seed, i) < float32(quotient - code)
            if keep_positive and minimum == 0 and v > 0:
                code = max(1, code)
            codes.append(max(0, min(levels, code)))
    step_bits |= 0x8000 if flagged else 0
    parameters = bfloat16_bits(minimum).to_bytes(2, "little") + step_bits.to_bytes(2, "little")
    return Group(codes, minimum, step, parameters, flagged)


def oracle_groups(x: Tensor, bits: int, group_size: int, seed: int | None, keep_positive: bool = False) -> list[Group]:
    values = x.to(torch.float64).tolist()
    return [
        oracle_group(values[i : i + group_size], bits, seed, i, keep_positive)
        for i in range(0, len(values), group_size)
    ]


def oracle_bytes(groups: list[Group], bits: int) -> bytes:
    codes = [code for group in groups for code in group.codes]
    number = sum(code << (bits * i) for i, code in enumerate(codes))
    used = -(-len(codes) * bits // 8)
    return number.to_bytes(-(-used // 16) * 16, "little") + b"".join(group.parameters for group in groups)


def oracle_values(groups: list[Group], bits: int) -> list[float]:
    values: list[float] = []
    for group in groups:
        escapes = {2**bits - 3: -math.inf, 2**bits - 2: math.inf, 2**bits - 1: math.nan} if group.flagged else {}
        for code in group.codes:
            values.append(escapes.get(code, float(float32(float32(code * group.step) + group.minimum))))
    return values


def contents(packed: Tensor) -> bytes:
    return bytes(packed.tolist())


def parameters(packed: Tensor, n: int, bits: int) -> tuple[Tensor, Tensor]:
    """Return the groups' minima and steps as they are stored, sign of the step included, as float32."""
    stored = packed[fmt.parameters_offset(n, bits) :].clone().view(torch.bfloat16).float().view(-1, 2)
    return stored[:, 0], stored[:, 1]


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(1e-3), b.nan_to_num(1e-3)) and torch.equal(a.isnan(), b.isnan())


def randn(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def special(n: int, seed: int) -> Tensor:
    """Random numbers among which every kind of group occurs: ordinary, constant, tiny, huge, non-finite."""
    x = randn(n, seed)
    pick = torch.randint(0, n, (8,), generator=torch.Generator().manual_seed(seed)).tolist()
    kind = seed % 8
    if kind == 1:
        x = torch.full((n,), float(x[0]))
    elif kind == 2:
        x = (x * 2.0**-126).where(x > 0, x * 2.0**-148)
    elif kind == 3:
        x[pick[0]], x[pick[1]] = math.inf, -math.inf
        x[pick[2]] = math.nan
    elif kind == 4:
        x = (x * 2.0**125).clamp(-3.4e38, 3.4e38)
    elif kind == 5:
        x = x * 1e-3 + 300
    elif kind == 6:
        x = -x.abs().relu() * 0
        x[pick[3]] = -math.nan
    elif kind == 7:
        x = x.relu() * 2.0**-110
    return x
