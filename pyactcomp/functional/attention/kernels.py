"""The Triton kernel of rotary position embeddings.

The functions are Triton's language, not Python.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from ...codec.kernels.triton_ops import load_float, to_raw
from ..kernel_parts import rounded


@triton.jit
def _store(pointer, values, mask):
    raw = to_raw(values, pointer.dtype.element_ty)
    tl.store(pointer.to(tl.pointer_type(raw.dtype), bitcast=True), raw, mask=mask)


@triton.jit(
    do_not_specialize=["numel", "heads", "tokens", "x0", "x1", "x2", "out0", "out1", "out2", "table0", "table1"]
)
def rope_kernel(
    # Tensors read, and the one written.
    x,
    cos,
    sin,
    out,
    # Elements of x, and two of its sizes.
    numel: tl.int64,
    heads: tl.int32,
    tokens: tl.int32,
    # Strides of batch, tokens and heads, then of batch and tokens of cos and sin; in units of eight elements, so that
    # the compiler knows accesses to be aligned.
    x0: tl.int64,
    x1: tl.int64,
    x2: tl.int64,
    out0: tl.int64,
    out1: tl.int64,
    out2: tl.int64,
    table0: tl.int64,
    table1: tl.int64,
    # Half a head, the power of two from there on, and the heads of a program.
    HALF: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """Rotate x [batch, tokens, heads, 2 HALF] by cos and sin [batch, tokens, 2 HALF], or a gradient backwards.

    It rounds where torch's operators do.
    """
    X: tl.constexpr = out.dtype.element_ty if BACKWARD else x.dtype.element_ty
    # The promoted dtype of a product of x and cos.
    C: tl.constexpr = X if X == cos.dtype.element_ty else tl.float32
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)[None, :]
    head = (row % heads).to(tl.int64)
    position = row // heads
    token = (position % tokens).to(tl.int64)
    batch = (position // tokens).to(tl.int64)
    mask = (row < (numel // (2 * HALF)).to(tl.int32))[:, None]
    if LANES != HALF:
        mask = mask & (lane < HALF)
    source = x + ((batch * x0 + token * x1 + head * x2) * 8)[:, None] + lane
    target = out + ((batch * out0 + token * out1 + head * out2) * 8)[:, None] + lane
    table = ((batch * table0 + token * table1) * 8)[:, None] + lane

    low = load_float(source, 0, mask)
    high = load_float(source, HALF, mask)
    cos_low = rounded(low * load_float(cos, table, mask), C)
    cos_high = rounded(high * load_float(cos, table + HALF, mask), C)
    sin_low = load_float(sin, table, mask)
    sin_high = load_float(sin, table + HALF, mask)
    if BACKWARD:
        # Add zero, as autograd does to the gradient of a slice: -0 becomes 0.
        turned_low = rounded(rounded(high * sin_high, C), X) + 0.0
        turned_high = 0.0 - rounded(rounded(low * sin_low, C), X)
        _store(target, rounded(cos_low, X) + turned_low, mask)
        _store(target + HALF, rounded(cos_high, X) + turned_high, mask)
    else:
        turned_low = rounded(-high * sin_low, C)
        turned_high = rounded(low * sin_high, C)
        _store(target, rounded(cos_low + turned_low, C), mask)
        _store(target + HALF, rounded(cos_high + turned_high, C), mask)
