"""Triton kernels of ReLU and of the backward of dropout: one bit an element.

The functions are Triton's language, not Python.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.triton_ops import load_tile, store_raw, tile_offsets, to_raw
from ..kernel_parts import FLAT_TILE


@triton.jit
def _relu(x, out, positive, start, left, COMPILED: tl.constexpr, PARTIAL: tl.constexpr):
    BYTES: tl.constexpr = FLAT_TILE // 8
    values = load_tile(x + start, left, 8, BYTES, PARTIAL)
    # NaN is no zero: it goes through, as in torch.
    zero = values <= 0.0
    store_raw(out + start, to_raw(tl.where(zero, 0.0, values), out.dtype.element_ty, COMPILED), left, PARTIAL)
    bits = tl.where(zero, 0, 1 << tl.arange(0, 8)[None, :])
    if PARTIAL:
        bits = tl.where(tile_offsets(8, BYTES) < left, bits, 0)
    byte = tl.arange(0, BYTES)
    target = positive + start // 8 + byte
    if PARTIAL:
        tl.store(target, tl.sum(bits, 1).to(tl.uint8), mask=byte * 8 < left)
    else:
        tl.store(target, tl.sum(bits, 1).to(tl.uint8))


@triton.jit(do_not_specialize=["numel"])
def relu_kernel(x, out, positive, numel: tl.int64, COMPILED: tl.constexpr):
    """Compute relu and pack which results are not zero, as ``encode_bool_kernel``."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * FLAT_TILE
    if numel - start >= FLAT_TILE:
        _relu(x, out, positive, start, FLAT_TILE, COMPILED, False)
    else:
        _relu(x, out, positive, start, (numel - start).to(tl.int32), COMPILED, True)


@triton.jit
def _masked(bits, grad, out, start, left, scale, SCALED: tl.constexpr, COMPILED: tl.constexpr, PARTIAL: tl.constexpr):
    BYTES: tl.constexpr = FLAT_TILE // 8
    g = load_tile(grad + start, left, 8, BYTES, PARTIAL)
    byte = tl.arange(0, BYTES)
    if PARTIAL:
        packed = tl.load(bits + start // 8 + byte, mask=byte * 8 < left, other=0)
    else:
        packed = tl.load(bits + start // 8 + byte)
    passes = (packed[:, None].to(tl.int32) >> tl.arange(0, 8)[None, :]) & 1
    # As torch's dropout does: what it drops becomes a zero of the gradient's sign.
    result = g * passes.to(tl.float32) * scale if SCALED else tl.where(passes == 1, g, 0.0)
    store_raw(out + start, to_raw(result, out.dtype.element_ty, COMPILED), left, PARTIAL)


@triton.jit(do_not_specialize=["numel", "scale"])
def masked_kernel(bits, grad, out, numel: tl.int64, scale: tl.float32, SCALED: tl.constexpr, COMPILED: tl.constexpr):
    """Compute the gradient of relu from bits, or that of dropout, which scales what it lets through."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * FLAT_TILE
    if numel - start >= FLAT_TILE:
        _masked(bits, grad, out, start, FLAT_TILE, scale, SCALED, COMPILED, False)
    else:
        _masked(bits, grad, out, start, (numel - start).to(tl.int32), scale, SCALED, COMPILED, True)
