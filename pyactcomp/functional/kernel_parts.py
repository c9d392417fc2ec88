"""Triton functions used by several fused kernels, on tiles of shape [groups, group_size].

The functions are Triton's language, not Python.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from ..codec.kernels.triton_ops import (
    any_flagged,
    decode_tile,
    load_codes,
    load_tile,
    restore_escapes,
    tile_offsets,
    to_raw,
)

# Tiles of kernels without codes.
FLAT_TILE = tl.constexpr(1024)
FLAT_GROUP = tl.constexpr(64)
FLAT_GROUPS = tl.constexpr(1024 // 64)
# The value of BITS for elements in their own dtype instead of codes.
COPY = tl.constexpr(16)


@triton.jit
def place(numel, TILE: tl.constexpr, UNIT: tl.constexpr):
    """Return the first element of the program's tile (program 0 takes the last tile) and the tile's element count.

    The launch chooses UNIT, a divisor of ``numel``. UNIT = TILE: all tiles are full, and no load has a mask. UNIT = 1:
    a second launch, of one program, for the rest of the tensor. Between: the last tile may be partial, in multiples
    of UNIT, so that vector loads stay whole.
    """
    if UNIT == 1:
        start = numel // TILE * TILE
    else:
        start = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * TILE
    return start, tl.multiple_of(tl.minimum(numel - start, TILE).to(tl.int32), UNIT)


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
    """Return the float32 values of the packed tile beginning at element ``start``; arguments as for ``load_codes``."""
    if BITS == COPY:
        x = load_tile(packed + start, left, GROUP, GROUPS, PARTIAL)
    else:
        codes, parameters = load_codes(packed, start, left, numel, BITS, GROUP, GROUPS, RUN, PARTIAL)
        x = decode_tile(codes, parameters)
        if any_flagged(parameters):
            x = restore_escapes(x, codes, parameters, float("-inf"), float("inf"), float("nan"), BITS)
    return x


@triton.jit
def dropout_factors(
    start,
    seed,
    counter,
    threads,
    below,
    gain,
    QUADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Return, for the tile at element ``start``, ``gain`` where a :class:`.masks.noise.Noise` keeps an element, else 0.

    ``start`` is a multiple of a run, 4 * QUADS elements; a tile has at most ``threads`` runs.
    """
    # The interpreter ignores the types of annotations.
    threads, below = threads.to(tl.uint32), below.to(tl.uint32)
    quad = tile_offsets(GROUP // 4, GROUPS)
    first = (start // (4 * QUADS)).to(tl.uint32)
    turn = first // threads
    thread = first - turn * threads + (quad // QUADS).to(tl.uint32)
    next_turn = thread >= threads
    thread = tl.where(next_turn, thread - threads, thread)
    call = counter.to(tl.int64) + (turn + next_turn.to(tl.uint32)).to(tl.int64) * QUADS + quad % QUADS
    low, high = (call & 0xFFFFFFFF).to(tl.uint32), (call >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(seed, low, high, thread, tl.zeros_like(thread))
    even = tl.join((a < below).to(tl.int8), (c < below).to(tl.int8))
    odd = tl.join((b < below).to(tl.int8), (d < below).to(tl.int8))
    return tl.where(tl.reshape(tl.join(even, odd), [GROUPS, GROUP]) != 0, gain, 0.0)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """Return float32 values rounded half to even to DTYPE, as float32."""
    if DTYPE == tl.float32:
        y = x
    elif DTYPE == tl.bfloat16:
        y = (to_raw(x, DTYPE).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        y = x.to(DTYPE).to(tl.float32)
    return y
