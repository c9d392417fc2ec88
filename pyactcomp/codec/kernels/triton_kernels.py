"""The kernels of the codec in Triton.

No kernel is specialised on the value of an integer: ``Launcher`` caches compiled kernels by pointers and dtypes alone.
The functions are Triton's language, not Python.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from .. import probability
from .triton_ops import (
    any_flagged,
    decode_tile,
    element_index,
    encode_any_tile,
    encode_tile,
    load_codes,
    load_float,
    load_tile,
    restore_escapes,
    store_codes,
    store_raw,
    to_raw,
)

_LOWEST = tl.constexpr(probability.LOWEST)
_MIDDLE = tl.constexpr(probability.MIDDLE)
_COARSE = tl.constexpr(probability.COARSE)
_FINE = tl.constexpr(probability.FINE)
_ZERO = tl.constexpr(probability.ZERO)
_SPLIT = tl.constexpr(probability.SPLIT)
_ONE = tl.constexpr(probability.ONE)
_NAN = tl.constexpr(probability.NAN)
_BIAS = tl.constexpr(probability.BIAS)
_NEAREST_TO_ONE = tl.constexpr(probability.NEAREST_TO_ONE)
_LOG_OF_ZERO = tl.constexpr(probability.LOG_OF_ZERO)


@triton.jit(do_not_specialize=["numel", "key0", "key1"])
def encode_kernel(
    source,
    out,
    numel: tl.int64,
    key0: tl.uint32,
    key1: tl.uint32,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    KEEP_POSITIVE: tl.constexpr,
):
    """Pack [numel] elements; a program packs GROUPS groups, the first program the last groups of the tensor.

    The tensor's producer wrote the end last, so the end is still in the cache. This kernel reads the start last, so the
    start is in the cache for the next reader.
    """
    TILE: tl.constexpr = GROUPS * GROUP
    start = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * TILE
    index, high = element_index(start, key1, GROUP, GROUPS)
    key = key0.to(tl.uint32)
    if numel - start >= TILE:
        x = load_tile(source + start, TILE, GROUP, GROUPS, False)
        codes, parameters = encode_tile(x, index, high, key, BITS, STOCHASTIC, KEEP_POSITIVE)
        store_codes(out, codes, parameters, start, TILE, numel, BITS, 16, False)
    else:
        left = (numel - start).to(tl.int32)
        x = load_tile(source + start, left, GROUP, GROUPS, True)
        codes, parameters = encode_any_tile(x, index, high, key, BITS, STOCHASTIC, KEEP_POSITIVE)
        store_codes(out, codes, parameters, start, left, numel, BITS, 16, True)


@triton.jit
def _decode(
    packed,
    out,
    start,
    left,
    numel,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    DTYPE: tl.constexpr = out.dtype.element_ty
    RUN: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    codes, parameters = load_codes(packed, start, left, numel, BITS, GROUP, GROUPS, RUN, PARTIAL)
    values = decode_tile(codes, parameters)
    if DTYPE == tl.float16:
        # Finite values must stay finite.
        values = tl.minimum(tl.maximum(values, -65504.0), 65504.0)
    raw = to_raw(values, DTYPE)
    if any_flagged(parameters):
        if DTYPE == tl.bfloat16:
            raw = restore_escapes(raw, codes, parameters, 0xFF80, 0x7F80, 0x7FC0, BITS)
        elif DTYPE == tl.float16:
            raw = restore_escapes(raw, codes, parameters, 0xFC00, 0x7C00, 0x7E00, BITS)
        else:
            raw = restore_escapes(raw, codes, parameters, 0xFF800000, 0x7F800000, 0x7FC00000, BITS)
    store_raw(out + start, raw, left, PARTIAL)


@triton.jit(do_not_specialize=["numel"])
def decode_kernel(
    packed,
    out,
    numel: tl.int64,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Restore [numel] elements, last tile first."""
    TILE: tl.constexpr = GROUPS * GROUP
    start = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * TILE
    if numel - start >= TILE:
        _decode(packed, out, start, TILE, numel, BITS, GROUP, GROUPS, False)
    else:
        _decode(packed, out, start, (numel - start).to(tl.int32), numel, BITS, GROUP, GROUPS, True)


@triton.jit(do_not_specialize=["numel"])
def encode_bool_kernel(source, out, numel: tl.int64, BYTES: tl.constexpr):
    """Pack [numel] booleans, BYTES bytes of eight a program."""
    start = tl.program_id(0).to(tl.int64) * BYTES
    byte = tl.arange(0, BYTES)
    offsets = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    left = tl.minimum(numel - start * 8, BYTES * 8).to(tl.int32)
    flags = tl.load(
        source.to(tl.pointer_type(tl.uint8), bitcast=True) + start * 8 + offsets, mask=offsets < left, other=0
    )
    packed = tl.sum((flags != 0).to(tl.uint32) << tl.arange(0, 8)[None, :].to(tl.uint32), 1).to(tl.uint8)
    tl.store(out + start + byte, packed, mask=byte * 8 < left)


@triton.jit(do_not_specialize=["numel"])
def decode_bool_kernel(packed, out, numel: tl.int64, BYTES: tl.constexpr):
    """Restore [numel] booleans, BYTES bytes of eight a program."""
    start = tl.program_id(0).to(tl.int64) * BYTES
    byte = tl.arange(0, BYTES)
    offsets = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    left = tl.minimum(numel - start * 8, BYTES * 8).to(tl.int32)
    bits = tl.load(packed + start + byte, mask=byte * 8 < left, other=0)
    flags = (bits[:, None].to(tl.uint32) >> tl.arange(0, 8)[None, :].to(tl.uint32)) & 1
    tl.store(
        out.to(tl.pointer_type(tl.uint8), bitcast=True) + start * 8 + offsets, flags.to(tl.uint8), mask=offsets < left
    )


@triton.jit(do_not_specialize=["numel"])
def widen_kernel(source, out, numel: tl.int64, TILE: tl.constexpr):
    """Cast [numel] elements to float32, TILE a program."""
    start = tl.program_id(0).to(tl.int64) * TILE
    offsets = tl.arange(0, TILE)
    # Without a mask each thread loads 16 bytes at once.
    if numel - start >= TILE:
        tl.store(out + start + offsets, load_float(source + start, offsets))
    else:
        left = (numel - start).to(tl.int32)
        tl.store(out + start + offsets, load_float(source + start, offsets, offsets < left), mask=offsets < left)


@triton.jit
def _probability_codes(x, LOG: tl.constexpr):
    """Return the codes of float32 probabilities, or of their logarithms; see ``codec.probability``."""
    if LOG:
        log = tl.minimum(x, 0.0)
        # 1 - exp(log) where the difference would cancel: the next term of the series is below 2**-26 of the sum.
        series = -log * (1.0 + log * (0.5 + log * (1.0 / 6 + log * (1.0 / 24))))
        rest = tl.where(log > -0.03125, series, 1.0 - tl.exp(log))
        logit = log - tl.log(tl.maximum(rest, _NEAREST_TO_ONE))
    else:
        # Take the logarithm of one quotient: a second logarithm would take longer than the reads and writes.
        logit = tl.log(x / tl.maximum(1.0 - x, _NEAREST_TO_ONE))
    fine = (logit - _MIDDLE) * (1 / _FINE) + (_SPLIT + 0.5)
    coarse = (logit - _LOWEST) * (1 / _COARSE) + 1.5
    code = tl.minimum(tl.maximum(tl.where(logit < _MIDDLE, coarse, fine), _ZERO), _ONE + 0.5).to(tl.int32)
    return (tl.where(x == x, code, _NAN) - _BIAS).to(tl.int16)


@triton.jit
def _probabilities(codes, LOG: tl.constexpr):
    """Return the float32 probabilities, or their logarithms, of codes."""
    code = codes.to(tl.float32) + _BIAS
    logit = tl.where(code < _SPLIT, (code - 1.0) * _COARSE + _LOWEST, (code - _SPLIT) * _FINE + _MIDDLE)
    small = tl.exp(-tl.abs(logit))
    if LOG:
        # log(1 + small) = 2 atanh(z), as 1 + small would round: the next term of the series is below 2**-19 of it.
        z = small / (2.0 + small)
        w = z * z
        log1p = 2.0 * z * (1.0 + w * (1.0 / 3 + w * (1.0 / 5 + w * (1.0 / 7 + w * (1.0 / 9)))))
        x = tl.minimum(logit, 0.0) - log1p
        x = tl.where(code == _ZERO, _LOG_OF_ZERO, tl.where(code == _ONE, 0.0, x))
    else:
        x = tl.where(logit < 0, small, 1.0) / (1.0 + small)
        x = tl.where(code == _ZERO, 0.0, tl.where(code == _ONE, 1.0, x))
    return tl.where(code == _NAN, float("nan"), x)


@triton.jit(do_not_specialize=["numel"])
def encode_probability_kernel(source, out, numel: tl.int64, TILE: tl.constexpr, LOG: tl.constexpr):
    """Store [numel] float32 probabilities, or their logarithms, as int16 codes, TILE a program."""
    start = tl.program_id(0).to(tl.int64) * TILE
    offsets = tl.arange(0, TILE)
    # Without a mask each thread loads 16 bytes at once.
    if numel - start >= TILE:
        tl.store(out + start + offsets, _probability_codes(tl.load(source + start + offsets), LOG))
    else:
        present = offsets < (numel - start).to(tl.int32)
        x = tl.load(source + start + offsets, mask=present, other=0.0)
        tl.store(out + start + offsets, _probability_codes(x, LOG), mask=present)


@triton.jit(do_not_specialize=["numel"])
def decode_probability_kernel(codes, out, numel: tl.int64, TILE: tl.constexpr, LOG: tl.constexpr):
    """Store the float32 probabilities, or their logarithms, of [numel] int16 codes, TILE a program."""
    start = tl.program_id(0).to(tl.int64) * TILE
    offsets = tl.arange(0, TILE)
    if numel - start >= TILE:
        tl.store(out + start + offsets, _probabilities(tl.load(codes + start + offsets), LOG))
    else:
        present = offsets < (numel - start).to(tl.int32)
        x = tl.load(codes + start + offsets, mask=present, other=0)
        tl.store(out + start + offsets, _probabilities(x, LOG), mask=present)
