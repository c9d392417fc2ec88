"""Triton kernels of ReLU and of dropout's backward: one bit per element.

The functions are Triton's language, not Python.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from ...codec.kernels.triton_ops import load_tile, store_raw, tile_offsets, to_raw
from ..kernel_parts import FLAT_TILE, place

_BYTES = tl.constexpr(1024 // 8)


@triton.jit(do_not_specialize=["numel"])
def relu_kernel(x, out, positive, numel: tl.int64, UNIT: tl.constexpr, COMPILED: tl.constexpr):
    """Compute relu and pack one bit per result, set if not zero, in the order of ``encode_bool_kernel``."""
    PARTIAL: tl.constexpr = UNIT != FLAT_TILE
    start, left = place(numel, FLAT_TILE, UNIT)
    values = load_tile(x + start, left, 8, _BYTES, PARTIAL)
    # NaN goes through and has a gradient, as in torch.
    zero = values <= 0.0
    store_raw(out + start, to_raw(tl.where(zero, 0.0, values), out.dtype.element_ty, COMPILED), left, PARTIAL)
    bits = tl.where(zero, 0, 1 << tl.arange(0, 8)[None, :])
    if PARTIAL:
        bits = tl.where(tile_offsets(8, _BYTES) < left, bits, 0)
    byte = tl.arange(0, _BYTES)
    tl.store(positive + start // 8 + byte, tl.sum(bits, 1).to(tl.uint8), mask=byte * 8 < left if PARTIAL else None)


@triton.jit(do_not_specialize=["numel", "scale"])
def masked_kernel(
    bits,
    grad,
    out,
    numel: tl.int64,
    scale: tl.float32,
    SCALED: tl.constexpr,
    UNIT: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Compute the gradient of relu from bits; SCALED, the gradient of dropout."""
    PARTIAL: tl.constexpr = UNIT != FLAT_TILE
    start, left = place(numel, FLAT_TILE, UNIT)
    g = load_tile(grad + start, left, 8, _BYTES, PARTIAL)
    byte = tl.arange(0, _BYTES)
    packed = tl.load(bits + start // 8 + byte, mask=byte * 8 < left if PARTIAL else None)
    passes = (packed[:, None].to(tl.int32) >> tl.arange(0, 8)[None, :]) & 1
    # As in torch's dropout, a dropped element becomes a zero of the gradient's sign.
    result = g * passes.to(tl.float32) * scale if SCALED else tl.where(passes == 1, g, 0.0)
    store_raw(out + start, to_raw(result, out.dtype.element_ty, COMPILED), left, PARTIAL)
