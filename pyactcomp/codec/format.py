"""The packed format in numbers: sizes, ranges, escape codes and the random keys.

``reference.py`` defines the meaning of the numbers. Only the standard library is imported here, so every
implementation, the policy and the report can import this module.
"""

from __future__ import annotations

import struct

GROUP_SIZES = (64, 128, 256)
BITS = (8, 4, 2)

MIN_STEP = 2.0**-118
"""Smallest step of a group with a finite value.

With a step of at least 2**-118 the remainder of the division ``(x - minimum) / step`` is a multiple of
2**-149, the smallest float32, wherever the quotient is at least 1/2: a division by Newton's method with fused
multiply-adds then gives the rounded quotient, and a smaller quotient has code 0 either way.
"""

MAX_FINITE = 2.0**126
"""Largest magnitude of an ordinary group.

A group with a larger or a non-finite value is *flagged*: finite values saturate here, to keep ``maximum - minimum``,
``code * step`` and ``code * step + minimum`` finite in float32.
"""

PARAMETER_BYTES = 4
"""Bytes of one group's parameters: minimum, then step, bfloat16 each, little-endian."""

ALIGNMENT = 16
"""The parameters begin at the first multiple of this many bytes after the codes."""


def levels(bits: int) -> int:
    """Return the largest code of an ordinary group."""
    return (1 << bits) - 1


def flagged_levels(bits: int) -> int:
    """Return the largest code of a finite value in a flagged group.

    The next three codes are -inf, +inf and NaN, in this order. With 2 bits only code 0 is left for finite values, so
    every finite value of a flagged group is restored as the group's minimum.
    """
    return (1 << bits) - 4


def group_count(numel: int, group_size: int) -> int:
    """Return the number of groups of ``numel`` elements; the last may be partial."""
    return -(-numel // group_size)


def parameters_offset(numel: int, bits: int) -> int:
    """Return the offset in bytes of the groups' parameters."""
    codes = -(-numel * bits // 8)
    return -(-codes // ALIGNMENT) * ALIGNMENT


def packed_nbytes(numel: int, bits: int, group_size: int) -> int:
    """Return the size of the packed buffer in bytes; 1 bit means booleans, packed without parameters."""
    if bits == 1:
        return packed_bool_nbytes(numel)
    return parameters_offset(numel, bits) + PARAMETER_BYTES * group_count(numel, group_size)


def packed_bool_nbytes(numel: int) -> int:
    """Return the size in bytes of ``numel`` packed booleans, eight to a byte, lowest bit first."""
    return -(-numel // 8)


def float32_bits(value: float) -> int:
    """Return the bit pattern of ``value`` as a float32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def random_keys(seed: int) -> tuple[int, int]:
    """Spread a 64-bit seed over the two 32-bit keys of the generator (SplitMix64's finaliser)."""
    mask = (1 << 64) - 1
    z = (seed + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return z & 0xFFFFFFFF, z >> 32
