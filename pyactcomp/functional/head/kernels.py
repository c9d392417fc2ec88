"""The Triton kernel of ``linear_cross_entropy``: computes the loss of a row of logits and, in place, the gradient.

The functions are Triton's language, not Python.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from ...codec.kernels.triton_ops import load_float, tile_offsets, to_raw

# The lowest finite float32, not -inf: -inf - (-inf) would be NaN in a part of a row beyond the vocabulary.
_LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _capped(x, cap, CAPPED: tl.constexpr):
    # tanh by exp: for large elements the quotient is zero.
    return cap * (1.0 - 2.0 / (tl.exp(2.0 * x / cap) + 1.0)) if CAPPED else x


@triton.jit
def _load(row, columns, VOCABULARY: tl.constexpr, STRIDE: tl.constexpr, cap, CAPPED: tl.constexpr):
    # Mask by the stride, a multiple of a 16-byte access: a mask by the vocabulary would load element by element.
    x = _capped(load_float(row, columns, columns < STRIDE), cap, CAPPED)
    return tl.where(columns < VOCABULARY, x, float("-inf"))


@triton.jit(do_not_specialize=["ignore_index", "cap"])
def cross_entropy_kernel(
    logits,
    labels,
    losses,
    scale,
    ignore_index: tl.int64,
    cap: tl.float32,
    VOCABULARY: tl.constexpr,
    STRIDE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    GRADIENT: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Compute the cross-entropy of one row of [rows, STRIDE] logits per program; program 0 takes the last row.

    With GRADIENT, (softmax - one-hot) * scale overwrites the row and zeros overwrite the padding. The row is read
    twice, the second time backwards and from the cache, and written once. With CAPPED, logits are cap * tanh(x / cap).
    """
    DTYPE: tl.constexpr = logits.dtype.element_ty
    BLOCKS: tl.constexpr = (STRIDE + BLOCK - 1) // BLOCK
    # VECTOR consecutive elements belong to one thread: the sums in the loop stay within threads.
    offsets = tile_offsets(VECTOR, BLOCK // VECTOR)
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row = logits + program.to(tl.int64) * STRIDE
    label = tl.load(labels + program)
    counted = label != ignore_index
    known = (label >= 0) & (label < VOCABULARY)
    column = tl.where(known, label, 0).to(tl.int32)
    # Load before the first exchange among warps: after the last one, another warp may overwrite the label's logit.
    at_label = _capped(load_float(row, column), cap, CAPPED)

    largest = tl.full([BLOCK // VECTOR, 1], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK // VECTOR, 1], tl.float32)
    for block in range(BLOCKS):
        x = _load(row, block * BLOCK + offsets, VOCABULARY, STRIDE, cap, CAPPED)
        larger = tl.maximum(largest, tl.max(x, 1, keep_dims=True))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), 1, keep_dims=True)
        largest = larger
    top = tl.max(largest)
    total = tl.sum(total * tl.exp(largest - top))
    loss = top + tl.log(total) - at_label
    tl.store(losses + program, tl.where(counted, tl.where(known, loss, float("nan")), 0.0))

    if GRADIENT:
        factor = tl.where(counted, tl.where(known, tl.load(scale), float("nan")), 0.0)
        share = factor / total
        target = row.to(tl.pointer_type(to_raw(share, DTYPE).dtype), bitcast=True)
        for block in range(BLOCKS):
            columns = (BLOCKS - 1 - block) * BLOCK + offsets
            x = _load(row, columns, VOCABULARY, STRIDE, cap, CAPPED)
            gradient = tl.exp(x - top) * share
            gradient = tl.where(columns == column, gradient - factor, gradient)
            if CAPPED:
                # The padding holds -inf.
                gradient *= tl.where(columns < VOCABULARY, 1.0 - (x / cap) * (x / cap), 0.0)
            tl.store(target + columns, to_raw(gradient, DTYPE), mask=columns < STRIDE)
