"""Triton kernels of window attention and of the residual addition after it.

A window has at most 64 tokens, so the scores stay in registers and are never written. Rows are tokens, padded to a
power of two; rows beyond the last token are read as zeros and not written. The functions are Triton's language, not
Python.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from ...codec.kernels.triton_ops import (
    COMPILED,
    _parameter_pointer,
    any_flagged,
    decode_tile,
    encode_tile,
    load_float,
    restore_escapes,
    to_raw,
)


@triton.jit
def _narrow(x, DTYPE: tl.constexpr):
    """Round to DTYPE."""
    return to_raw(x, DTYPE).to(DTYPE, bitcast=True)


@triton.jit
def _dot(a, b):
    """Return the product a b. In the interpreter cast first: tl.dot would multiply the bits of bfloat16."""
    if COMPILED:
        c = tl.dot(a, b)
    else:
        c = tl.dot(a.to(tl.float32), b.to(tl.float32))
    return c


@triton.jit
def _store(pointer, x, offsets, mask):
    raw = to_raw(x, pointer.dtype.element_ty)
    tl.store(pointer.to(tl.pointer_type(raw.dtype), bitcast=True) + offsets, raw, mask=mask)


@triton.jit
def _tile(WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the offsets of the first COLUMNS elements of ROWS rows of WIDTH."""
    return tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _load(
    kept,
    start,
    numel,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return COLUMNS elements of each of N rows of WIDTH from ``start`` on, in DTYPE.

    With GROUP = 0, ``kept`` is the tensor itself; else codes, with the COLUMNS elements of a row in one group.
    """
    row = tl.arange(0, ROWS)[:, None]
    present = row < N
    stored = tl.load(kept + start + _tile(WIDTH, ROWS, COLUMNS), mask=present, other=0)
    if GROUP == 0:
        y = stored
    else:
        parameters = tl.load(_parameter_pointer(kept, start + row * WIDTH, numel, 8, GROUP), mask=present, other=0)
        x = decode_tile(stored, parameters)
        if DTYPE == tl.float16:
            x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
        if any_flagged(parameters):
            x = restore_escapes(x, stored, parameters, float("-inf"), float("inf"), float("nan"), 8)
        y = _narrow(x, DTYPE)
    return y


@triton.jit
def _probabilities(
    q,
    k,
    bias,
    mask,
    scale,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """Return softmax(scale * q k^T + bias + mask), float32 [ROWS, ROWS], zero in the padding's columns."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, ROWS)[None, :]
    offsets = row * N + column
    present = (row < N) & (column < N)
    scores = _dot(q, tl.trans(k)) * scale + load_float(bias, offsets, present)
    if HAS_MASK:
        scores += load_float(mask, offsets, present)
    scores = tl.where(column < N, scores, float("-inf"))
    exponential = tl.exp(scores - tl.max(scores, 1, keep_dims=True))
    return exponential * tl.div_rn(1.0, tl.sum(exponential, 1, keep_dims=True))


@triton.jit
def _attend(
    q,
    k,
    v,
    bias,
    mask,
    out,
    scale,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    p = _probabilities(q, k, bias, mask, scale, N, ROWS, HAS_MASK)
    y = _dot(_narrow(p, v.dtype), v)
    _store(out, y, _tile(WIDTH, ROWS, HEAD), tl.arange(0, ROWS)[:, None] < N)


@triton.jit(do_not_specialize=["numel", "windows", "key0", "key1"])
def window_attention_forward_kernel(
    # Tensors read: qkv [windows, N, 3, HEADS, HEAD], bias [HEADS, N, N], mask [windows of an image, N, N].
    qkv,
    bias,
    mask,
    # Tensors written: out [windows, N, HEADS, HEAD], and the codes of qkv.
    out,
    packed,
    # Elements of qkv, windows of an image, and the factor of the scores.
    numel: tl.int64,
    windows: tl.int32,
    scale: tl.float32,
    # Keys of stochastic rounding.
    key0: tl.uint32,
    key1: tl.uint32,
    # Tokens of a window, and the power of two from there on; heads and their width.
    N: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HAS_MASK: tl.constexpr,
    # Elements of a group, and rounding.
    GROUP: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Pack qkv and attend; one window and the heads of one group per program, the last ones first."""
    WIDTH: tl.constexpr = HEADS * HEAD
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    window = program // (WIDTH // GROUP)
    first = program % (WIDTH // GROUP) * GROUP
    present = tl.arange(0, ROWS)[:, None] < N
    start = window.to(tl.int64) * (3 * N * WIDTH) + first
    offsets = _tile(3 * WIDTH, ROWS, GROUP)
    for part in tl.static_range(3):
        begin = start + part * WIDTH
        values = load_float(qkv + begin, offsets, present)
        # Indices are below 2**32: their high halves are zero, with the keyed hash key1.
        index = begin.to(tl.uint32) + offsets.to(tl.uint32)
        codes, parameters = encode_tile(values, index, key1.to(tl.uint32), key0.to(tl.uint32), 8, STOCHASTIC, False)
        tl.store(packed + begin + offsets, codes, mask=present)
        row_start = begin + tl.arange(0, ROWS)[:, None] * (3 * WIDTH)
        tl.store(_parameter_pointer(packed, row_start, numel, 8, GROUP), parameters, mask=present)
    tile = _tile(3 * WIDTH, ROWS, HEAD)
    for i in tl.static_range(GROUP // HEAD):
        # Load again, from the cache: registers cannot be sliced from a group's tile to a head's tile.
        source = qkv + start + i * HEAD
        q = tl.load(source + tile, mask=present, other=0)
        k = tl.load(source + WIDTH + tile, mask=present, other=0)
        v = tl.load(source + 2 * WIDTH + tile, mask=present, other=0)
        head = first // HEAD + i
        target = out + window.to(tl.int64) * (N * WIDTH) + first + i * HEAD
        head_bias, window_mask = bias + head * (N * N), mask + window % windows * (N * N)
        _attend(q, k, v, head_bias, window_mask, target, scale, N, WIDTH, ROWS, HEAD, HAS_MASK)


@triton.jit(do_not_specialize=["numel", "windows"])
def window_attention_recompute_kernel(
    kept,
    bias,
    mask,
    out,
    numel: tl.int64,
    windows: tl.int32,
    scale: tl.float32,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HAS_MASK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Attend from the saved qkv, in the dtype of ``out``; one window and head per program, the last ones first."""
    WIDTH: tl.constexpr = HEADS * HEAD
    DTYPE: tl.constexpr = out.dtype.element_ty
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    window = program // HEADS
    head = program % HEADS
    start = window.to(tl.int64) * (3 * N * WIDTH) + head * HEAD
    q = _load(kept, start, numel, N, 3 * WIDTH, ROWS, HEAD, GROUP, DTYPE)
    k = _load(kept, start + WIDTH, numel, N, 3 * WIDTH, ROWS, HEAD, GROUP, DTYPE)
    v = _load(kept, start + 2 * WIDTH, numel, N, 3 * WIDTH, ROWS, HEAD, GROUP, DTYPE)
    target = out + window.to(tl.int64) * (N * WIDTH) + head * HEAD
    head_bias, window_mask = bias + head * (N * N), mask + window % windows * (N * N)
    _attend(q, k, v, head_bias, window_mask, target, scale, N, WIDTH, ROWS, HEAD, HAS_MASK)


@triton.jit(do_not_specialize=["numel", "windows"])
def window_attention_backward_kernel(
    kept,
    bias,
    mask,
    grad,
    grad_qkv,
    grad_bias,
    numel: tl.int64,
    windows: tl.int32,
    scale: tl.float32,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HAS_MASK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute the gradients of window attention from the saved qkv.

    Program p takes head p % HEADS of the windows p // HEADS, p // HEADS + programs // HEADS, ... and writes the sum
    for the bias to row p of the [programs, N * N] result.
    """
    WIDTH: tl.constexpr = HEADS * HEAD
    DTYPE: tl.constexpr = grad.dtype.element_ty
    head = tl.program_id(0) % HEADS
    present = tl.arange(0, ROWS)[:, None] < N
    tile = _tile(3 * WIDTH, ROWS, HEAD)
    sum_bias = tl.zeros([ROWS, ROWS], tl.float32)
    count = (numel // (3 * N * WIDTH)).to(tl.int32)
    window = tl.program_id(0) // HEADS
    while window < count:
        start = window.to(tl.int64) * (3 * N * WIDTH) + head * HEAD
        q = _load(kept, start, numel, N, 3 * WIDTH, ROWS, HEAD, GROUP, DTYPE)
        k = _load(kept, start + WIDTH, numel, N, 3 * WIDTH, ROWS, HEAD, GROUP, DTYPE)
        v = _load(kept, start + 2 * WIDTH, numel, N, 3 * WIDTH, ROWS, HEAD, GROUP, DTYPE)
        g_start = window.to(tl.int64) * (N * WIDTH) + head * HEAD
        g = tl.load(grad + g_start + _tile(WIDTH, ROWS, HEAD), mask=present, other=0)
        head_bias, window_mask = bias + head * (N * N), mask + window % windows * (N * N)
        p = _probabilities(q, k, head_bias, window_mask, scale, N, ROWS, HAS_MASK)
        grad_v = _dot(tl.trans(_narrow(p, DTYPE)), g)
        _store(grad_qkv + start + 2 * WIDTH, grad_v, tile, present)
        dp = _dot(g, tl.trans(v))
        ds = p * (dp - tl.sum(p * dp, 1, keep_dims=True))
        sum_bias += ds
        ds = _narrow(ds, DTYPE)
        _store(grad_qkv + start, _dot(ds, k) * scale, tile, present)
        _store(grad_qkv + start + WIDTH, _dot(tl.trans(ds), q) * scale, tile, present)
        window += tl.num_programs(0) // HEADS
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, ROWS)[None, :]
    tl.store(grad_bias + tl.program_id(0) * (N * N) + row * N + column, sum_bias, mask=present & (column < N))


@triton.jit
def _segments(
    rows,
    numel,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):
    """Return, for the program's tile of a branch [n, WIDTH]: offsets, offsets in the sum, rows of the sum, mask."""
    segment = tl.program_id(0).to(tl.int64) * SEGMENTS + tl.arange(0, SEGMENTS)[:, None]
    present = segment * COLUMNS < numel
    row = segment // (WIDTH // COLUMNS)
    if HAS_ROWS:
        target = tl.load(rows + row, mask=present, other=0).to(tl.int64)
    else:
        target = row
    column = tl.arange(0, COLUMNS)[None, :]
    place = target * WIDTH + segment % (WIDTH // COLUMNS) * COLUMNS + column
    return segment * COLUMNS + column, place, target, present


@triton.jit(do_not_specialize=["numel", "sample"])
def residual_add_forward_kernel(
    x,
    branch,
    scale,
    rows,
    out,
    numel: tl.int64,
    sample: tl.int32,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):
    """Compute out[rows[i]] = x[rows[i]] + scale[rows[i] // sample] * branch[i], rounding the product as the branch."""
    DTYPE: tl.constexpr = branch.dtype.element_ty
    offsets, place, target, present = _segments(rows, numel, WIDTH, COLUMNS, SEGMENTS, HAS_ROWS)
    y = load_float(branch, offsets, present)
    if HAS_SCALE:
        y = _narrow(y * load_float(scale, target // sample, present), DTYPE).to(tl.float32)
    _store(out, load_float(x, place, present) + y, place, present)


@triton.jit(do_not_specialize=["numel", "sample"])
def residual_add_backward_kernel(
    grad,
    scale,
    rows,
    grad_branch,
    numel: tl.int64,
    sample: tl.int32,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):
    """Compute grad_branch[i] = scale[rows[i] // sample] * grad[rows[i]], rounding before and after the product."""
    DTYPE: tl.constexpr = grad_branch.dtype.element_ty
    offsets, place, target, present = _segments(rows, numel, WIDTH, COLUMNS, SEGMENTS, HAS_ROWS)
    g = load_float(grad, place, present)
    if HAS_SCALE:
        g = _narrow(g, DTYPE).to(tl.float32) * load_float(scale, target // sample, present)
    _store(grad_branch, g, offsets, present)
