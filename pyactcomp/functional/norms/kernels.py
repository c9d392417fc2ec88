"""Triton kernels of layer norm and of the root mean square norm: ROWS rows of N elements in a tile.

The codes of a tile are [GROUPS, GROUP] and the rows are [ROWS, elements]: the same elements in the same order. If N is
no power of two of groups, ROWS is 1 and the tile is longer than the row. Codes of a row that ends inside a group are
those of the row padded to whole groups with its last element, as ``Saving.pack_rows`` pads it.

Of a row's statistics, the reciprocal deviation is saved and the mean is recomputed from the restored row. With 8 bits
and 1024 normal numbers a row, the relative error of the gradient against float64 is then 2.4e-4, the same as with a
saved mean. Recomputing both gives 3.0e-4. With fewer bits, or in a row varying by less than a step, a recomputed
deviation would scale the whole gradient, since rounding to codes changes the deviation of a row.

The functions are Triton's language, not Python.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from ...codec.kernels.triton_ops import (
    COMPILED,
    element_index,
    encode_tile,
    load_float,
    load_tile,
    store_codes,
    store_raw,
    tile_offsets,
    to_raw,
)
from ..kernel_parts import COPY, dropout_factors, restore, rounded


@triton.jit
def _rows_from(
    pointer,
    indices,
    row,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    INDEXED: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Return the base pointer for a tile's offsets: of ROWS rows from ``row`` on, or of the rows in ``indices``."""
    if INDEXED:
        # One pointer per group; subtract the rows that the tile's offsets already count.
        within = tl.arange(0, GROUPS)[:, None] // (GROUPS // ROWS)
        pointer = pointer + (tl.load(indices + row + within).to(tl.int64) - within) * N
    else:
        pointer = pointer + row * N
    return pointer


@triton.constexpr_function
def _stored(N, BITS, GROUP):
    """Return the elements that a row of N takes in the packed tensor: whole groups of codes, or a copy."""
    return N if BITS == 16 else -(-N // GROUP) * GROUP


@triton.jit
def _centred(x, N: tl.constexpr, CENTRED: tl.constexpr):
    """Return rows, if CENTRED less their means, with 0 in the padding."""
    present = tl.arange(0, x.shape[1])[None, :] < N
    if CENTRED:
        x = x - tl.sum(tl.where(present, x, 0.0), 1, keep_dims=True) * (1.0 / N)
    return tl.where(present, x, 0.0)


@triton.jit
def _halves_added(x):
    # A sum of two has one order.
    return tl.sum(tl.reshape(x, [2, x.shape[0] // 2]), 0)


@triton.jit
def _sum_of_squares(x, residual, N: tl.constexpr, HAS_RESIDUAL: tl.constexpr, DTYPE: tl.constexpr):
    """Sum the squares of a row of N float32 or 16-bit elements in the order of torch's ``mean``, to the bit.

    In torch a warp takes a row: each lane adds every 32nd vector of four, element by element, then the four sums, and
    the lanes add in a tree. One bit of a reciprocal deviation changes roundings to bfloat16, and a deep model amplifies
    these: to 3.4 % of the gradient of a 16-layer Llama at initialisation, whose own noise is 1.3 %.
    """
    lanes = tl.arange(0, 128)
    total = tl.zeros([128], tl.float32)
    for k in tl.static_range(N // 128):
        v = load_float(x + k * 128, lanes)
        if HAS_RESIDUAL:
            v = rounded(v + load_float(residual + k * 128, lanes), DTYPE)
        total += v * v
    even, odd = tl.split(tl.reshape(total, [32, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    # In the order of a warp's shuffles: the longest distance first.
    sums = _halves_added(_halves_added(((first + second) + third) + fourth))
    return tl.sum(_halves_added(_halves_added(_halves_added(sums))))


@triton.jit
def _scaled(x, weight, bias, N: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    column = tl.arange(0, x.shape[1])[None, :]
    if HAS_WEIGHT:
        x = x * load_float(weight, column, column < N)
    if HAS_BIAS:
        x = x + load_float(bias, column, column < N)
    return x


@triton.jit(do_not_specialize=["numel", "eps", "key0", "key1", "seed", "counter", "threads", "below", "gain"])
def norm_forward_kernel(
    # Tensors read. Another tensor takes the place of an absent residual, weight, bias or indices.
    x,
    residual,
    weight,
    bias,
    indices,
    # Tensors written.
    out,
    packed,
    rstd,
    # Elements of the packed tensor; the term added to the variance.
    numel: tl.int64,
    eps: tl.float32,
    # Keys of stochastic rounding.
    key0: tl.uint32,
    key1: tl.uint32,
    # Dropout, as ``masks.noise.Noise`` describes it; read if QUADS > 0.
    seed: tl.int64,
    counter: tl.int64,
    threads: tl.uint32,
    below: tl.uint32,
    gain: tl.float32,
    # The length of a row, the rows of a tile, and layer norm (CENTRED) or root mean square norm.
    N: tl.constexpr,
    ROWS: tl.constexpr,
    CENTRED: tl.constexpr,
    # Which tensors are present, and the quads in a run of the dropout, 0 without dropout.
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INDEXED: tl.constexpr,
    QUADS: tl.constexpr,
    # Codes: bits of a code, elements of a group, groups of a tile, and rounding.
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Normalise rows and pack the norm's input (nothing if BITS is 0); ROWS rows a program, the last ones first.

    The input is x, or x + residual in torch's promoted dtype. QUADS > 0 applies dropout to x first: kept
    elements are multiplied by ``gain``. CENTRED is layer norm; otherwise rows are divided by their root mean square and
    rounded to the dtype of x before the product with the weight. N is the length of a row. INDEXED reads the rows of x
    in ``indices``. ``packed`` gets the codes, or a copy of the rows if BITS is COPY; ``rstd`` the reciprocal
    deviations. ``key0`` and ``key1`` are keys of stochastic rounding; ``seed``, ``counter``, ``threads``, ``below`` and
    ``gain`` draw the dropout.
    """
    TILE: tl.constexpr = GROUPS * GROUP
    PARTIAL: tl.constexpr = N * ROWS != TILE
    STORED: tl.constexpr = _stored(N, BITS, GROUP)
    SAME: tl.constexpr = x.dtype.element_ty == residual.dtype.element_ty
    DTYPE: tl.constexpr = x.dtype.element_ty if SAME else tl.float32
    RUN: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    tl.static_assert(QUADS == 0 or (CENTRED and not INDEXED), "dropout is drawn for layer norms of rows in order")
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * ROWS
    start = row * N
    values = load_tile(_rows_from(x, indices, row, N, ROWS, INDEXED, GROUPS), N, GROUP, GROUPS, PARTIAL)
    if QUADS != 0:
        factors = dropout_factors(start, seed, counter, threads, below, gain, QUADS, GROUP, GROUPS)
        values = rounded(values * factors, x.dtype.element_ty)
    if HAS_RESIDUAL:
        values = rounded(values + load_tile(residual + start, N, GROUP, GROUPS, PARTIAL), DTYPE)
    if BITS == COPY:
        store_raw(packed + start, to_raw(values, DTYPE), N, PARTIAL)
    elif BITS != 0:
        first = row * STORED
        index, high = element_index(first, key1, GROUP, GROUPS)
        codes, parameters = encode_tile(values, index, high, key0.to(tl.uint32), BITS, STOCHASTIC, False)
        store_codes(packed, codes, parameters, first, STORED, numel, BITS, RUN, PARTIAL)

    y = _centred(tl.reshape(values, [ROWS, TILE // ROWS]), N, CENTRED)
    AS_TORCH: tl.constexpr = not (CENTRED or INDEXED) and ROWS == 1 and N % 128 == 0
    if AS_TORCH:
        squares = _sum_of_squares(x + start, residual + start, N, HAS_RESIDUAL, DTYPE)
        variance = tl.full([1, 1], 0.0, tl.float32) + (squares * (1.0 / N) + eps)
    else:
        variance = tl.sum(y * y, 1, keep_dims=True) * (1.0 / N) + eps
    if AS_TORCH and COMPILED:
        scale = libdevice.rsqrt(variance)
    else:
        scale = tl.div_rn(1.0, tl.sqrt_rn(variance))
    tl.store(rstd + row + tl.arange(0, ROWS)[:, None], scale)
    y = y * scale
    if not CENTRED:
        y = rounded(y, DTYPE)
    y = tl.reshape(_scaled(y, weight, bias, N, HAS_WEIGHT, HAS_BIAS), [GROUPS, GROUP])
    store_raw(out + start, to_raw(y, out.dtype.element_ty), N, PARTIAL)


@triton.jit
def _normalised(
    packed,
    rstd,
    row,
    numel,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    CENTRED: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    RUN: tl.constexpr,
):
    """Return restored rows, normalised, and their reciprocal deviations."""
    TILE: tl.constexpr = GROUPS * GROUP
    scale = tl.load(rstd + row + tl.arange(0, ROWS)[:, None])
    PARTIAL: tl.constexpr = N * ROWS != TILE
    STORED: tl.constexpr = _stored(N, BITS, GROUP)
    x = restore(packed, row * STORED, STORED, numel, BITS, GROUP, GROUPS, RUN, PARTIAL)
    return _centred(tl.reshape(x, [ROWS, TILE // ROWS]), N, CENTRED) * scale, scale


@triton.jit(do_not_specialize=["numel"])
def norm_recompute_kernel(
    packed,
    rstd,
    weight,
    bias,
    out,
    numel: tl.int64,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    CENTRED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Recompute the output from codes, ROWS rows a program, the last ones first."""
    RUN: tl.constexpr = 128 // out.dtype.element_ty.primitive_bitwidth
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * ROWS
    x, _ = _normalised(packed, rstd, row, numel, N, ROWS, CENTRED, BITS, GROUP, GROUPS, RUN)
    y = tl.reshape(_scaled(x, weight, bias, N, HAS_WEIGHT, HAS_BIAS), [GROUPS, GROUP])
    store_raw(out + row * N, to_raw(y, out.dtype.element_ty), N, N * ROWS != GROUPS * GROUP)


@triton.jit(do_not_specialize=["numel", "seed", "counter", "threads", "below", "gain"])
def norm_backward_kernel(
    # Tensors read. Another tensor takes the place of an absent weight, beside or indices.
    packed,
    rstd,
    weight,
    grad,
    beside,
    indices,
    # Tensors written. Another tensor takes the place of a result nobody asked for.
    out,
    other,
    grad_weight,
    grad_bias,
    # Elements of the packed tensor.
    numel: tl.int64,
    # The forward's dropout, read if QUADS > 0.
    seed: tl.int64,
    counter: tl.int64,
    threads: tl.uint32,
    below: tl.uint32,
    gain: tl.float32,
    # The length of a row, the rows of a tile, and layer norm (CENTRED) or root mean square norm.
    N: tl.constexpr,
    ROWS: tl.constexpr,
    CENTRED: tl.constexpr,
    # Which tensors are present, which results are asked for, and the quads of the dropout.
    HAS_WEIGHT: tl.constexpr,
    NEEDS_INPUT: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    NEEDS_BIAS: tl.constexpr,
    TWICE: tl.constexpr,
    INDEXED: tl.constexpr,
    ADDED: tl.constexpr,
    QUADS: tl.constexpr,
    # Codes: bits of a code, elements of a group, groups of a tile.
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Compute the gradients from codes; TWICE also writes the input's gradient to ``other``, in the dtype of ``other``.

    QUADS > 0 applies the forward's dropout to ``out``, not to ``other``. ADDED adds ``beside`` to the input's gradient,
    with autograd's rounding of each.

    Program p takes the tiles p, p + programs, ... counted from the last one, and writes the sums for weight and bias to
    row p of the [programs, N] results.
    """
    TILE: tl.constexpr = GROUPS * GROUP
    ROW: tl.constexpr = TILE // ROWS
    PARTIAL: tl.constexpr = N * ROWS != TILE
    RUN: tl.constexpr = 128 // grad.dtype.element_ty.primitive_bitwidth
    offsets = tile_offsets(GROUP, GROUPS)
    column = tl.arange(0, ROW)[None, :]
    present = column < N
    sum_weight = tl.zeros([ROWS, ROW], tl.float32)
    sum_bias = tl.zeros([ROWS, ROW], tl.float32)
    tile = (numel // (_stored(N, BITS, GROUP) * ROWS)).to(tl.int32) - 1 - tl.program_id(0)
    while tile >= 0:
        row = tile.to(tl.int64) * ROWS
        if PARTIAL:
            g = load_float(grad + row * N, offsets, offsets < N)
        else:
            g = load_float(grad + row * N, offsets)
        g = tl.reshape(g, [ROWS, ROW])
        x, scale = _normalised(packed, rstd, row, numel, N, ROWS, CENTRED, BITS, GROUP, GROUPS, RUN)
        if NEEDS_WEIGHT:
            sum_weight += g * x
        if NEEDS_BIAS:
            sum_bias += g
        if NEEDS_INPUT:
            if HAS_WEIGHT:
                g = g * load_float(weight, column, present)
            common = x * (tl.sum(g * x, 1, keep_dims=True) * (1.0 / N))
            if CENTRED:
                common = common + tl.sum(g, 1, keep_dims=True) * (1.0 / N)
            dx = tl.reshape((g - common) * scale, [GROUPS, GROUP])
            if ADDED:
                dx = rounded(dx, beside.dtype.element_ty)
                dx = dx + load_tile(beside + row * N, N, GROUP, GROUPS, PARTIAL)
            if TWICE:
                store_raw(other + row * N, to_raw(dx, other.dtype.element_ty), N, PARTIAL)
            if QUADS != 0:
                factors = dropout_factors(row * N, seed, counter, threads, below, gain, QUADS, GROUP, GROUPS)
                dx = rounded(dx, out.dtype.element_ty) * factors
            target = _rows_from(out, indices, row, N, ROWS, INDEXED, GROUPS)
            store_raw(target, to_raw(dx, out.dtype.element_ty), N, PARTIAL)
        tile -= tl.num_programs(0)
    sums = tl.program_id(0).to(tl.int64) * N + column
    if NEEDS_WEIGHT:
        tl.store(grad_weight + sums, tl.sum(sum_weight, 0, keep_dims=True), mask=present)
    if NEEDS_BIAS:
        tl.store(grad_bias + sums, tl.sum(sum_bias, 0, keep_dims=True), mask=present)
