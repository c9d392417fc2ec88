"""Parts that fused kernels share, as Triton functions on tiles of shape [groups, group_size].

The functions are Triton's language, not Python.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from ..kernels.triton_ops import any_flagged, decode_tile, load_codes, restore_escapes, to_raw

# Tiles of kernels that know no groups.
FLAT_TILE = tl.constexpr(1024)
FLAT_GROUP = tl.constexpr(64)
FLAT_GROUPS = tl.constexpr(1024 // 64)


@triton.jit
def restore(
    packed,
    start,
    left,
    numel,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    RUN: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Return the float32 values of the packed tile that begins at element ``start``; the rest as ``load_codes``."""
    codes, parameters = load_codes(packed, start, left, numel, BITS, GROUP, GROUPS, RUN, PARTIAL)
    x = decode_tile(codes, parameters)
    if any_flagged(parameters):
        x = restore_escapes(x, codes, parameters, float("-inf"), float("inf"), float("nan"), BITS)
    return x


@triton.jit
def rounded(x, DTYPE: tl.constexpr, COMPILED: tl.constexpr):
    """Return float32 values rounded half to even to DTYPE, as float32."""
    if DTYPE == tl.float32:
        y = x
    elif DTYPE == tl.bfloat16:
        y = (to_raw(x, DTYPE, COMPILED).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        y = x.to(DTYPE).to(tl.float32)
    return y
