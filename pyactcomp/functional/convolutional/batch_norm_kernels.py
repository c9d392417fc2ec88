"""Triton kernels of batch norm over channels-last tensors, seen as rows of channels.

A tile has GROUPS groups of GROUP channels: SPAN neighbouring groups in each of GROUPS // SPAN rows. A program walks
down its SPAN groups of channels, taking every ``splits``-th tile, so the values of a channel (statistics, weight, sums)
stay in registers. A tile is read in SWEEPS sweeps, each one 16-byte access per thread; sums over the sweeps stay within
a thread. Codes have 8 bits, and a group lies within a row.

The codes are of the normalised input: all channels have deviation 1 there, whereas a channel of ``x`` may be a thousand
times smaller than the channels that share its groups.

Bytes moved per float32 element. Forward: 4 for the statistics, 4 + 4 + 1.06 + 1/8 for the output, with a residual
4 + 1.06 more. Backward: 4 + 1.06 + 1/8 for the sums, the same plus 4 for the gradient, with a residual 4 more.
Recompute: 1.06 + 1/8 + 4.

The functions are Triton's language, not Python.

Longer than 400 lines: six kernels of one operator, with the same tiles and order of codes.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from ...codec.kernels.triton_ops import (
    any_flagged,
    decode_tile,
    element_index,
    encode_tile,
    load_float,
    restore_escapes,
    to_raw,
)


@triton.jit
def _place(numel, width, GROUP: tl.constexpr, GROUPS: tl.constexpr, SPAN: tl.constexpr):
    """Return the program's first group of channels and first tile, the step from tile to tile, all rows, all tiles."""
    blocks = width // SPAN
    rows = numel // (width * GROUP)
    tiles = ((rows + GROUPS // SPAN - 1) // (GROUPS // SPAN)).to(tl.int32)
    return (tl.program_id(0) % blocks) * SPAN, tl.program_id(0) // blocks, tl.num_programs(0) // blocks, rows, tiles


@triton.jit
def _tile_at(tile, first, rows, row_of, width, GROUP: tl.constexpr, GROUPS: tl.constexpr, SPAN: tl.constexpr):
    """Return where a tile begins, the number of its rows and the mask of its groups."""
    row = tile.to(tl.int64) * (GROUPS // SPAN)
    left = tl.minimum(rows - row, GROUPS // SPAN).to(tl.int32)
    return (row * width + first) * GROUP, left, row_of < left


@triton.jit
def _tile(width, GROUP: tl.constexpr, GROUPS: tl.constexpr, SPAN: tl.constexpr):
    """Return the offsets of a tile's groups and elements, and the rows of the groups: [GROUPS, 1 or GROUP]."""
    group = tl.arange(0, GROUPS)[:, None]
    row = group // SPAN
    groups = row * width + group % SPAN
    return groups, groups * GROUP + tl.arange(0, GROUP)[None, :], row


@triton.jit
def _channels(first, GROUP: tl.constexpr, GROUPS: tl.constexpr, SPAN: tl.constexpr):
    """Return the channels of GROUPS groups of a tile, [GROUPS, GROUP]."""
    return (first + tl.arange(0, GROUPS)[:, None] % SPAN) * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def _sweeps(x, SWEEPS: tl.constexpr):
    return tl.reshape(x, [SWEEPS, x.shape[0] // SWEEPS, x.shape[1]])


@triton.jit
def _for_tile(lanes, SWEEPS: tl.constexpr):
    """Repeat the per-channel values of one sweep, [lanes, GROUP], for all sweeps of a tile."""
    LANES: tl.constexpr = lanes.shape[0]
    GROUP: tl.constexpr = lanes.shape[1]
    return tl.reshape(tl.broadcast_to(lanes[None, :, :], [SWEEPS, LANES, GROUP]), [SWEEPS * LANES, GROUP])


@triton.jit
def _fold(lanes, SPAN: tl.constexpr):
    """Sum the lanes of each channel: [SPAN, GROUP]."""
    return tl.sum(tl.reshape(lanes, [lanes.shape[0] // SPAN, SPAN, lanes.shape[1]]), 0)


@triton.jit
def _parameters_at(packed, numel):
    """Return a pointer to the parameters, right after the codes: one byte per element, whole groups."""
    return (packed + numel).to(tl.pointer_type(tl.uint32), bitcast=True)


@triton.jit
def _store_codes(
    packed, codes, parameters, start, groups, offsets, present, numel, GROUP: tl.constexpr, RUN: tl.constexpr
):
    # A thread stores the codes of the elements that it loads, 16 bytes at a time: no exchange through shared memory.
    tl.store(tl.max_contiguous(packed + start + offsets, [1, RUN]), codes, mask=present)
    tl.store(_parameters_at(packed, numel) + start // GROUP + groups, parameters, mask=present)


@triton.jit
def _restore(packed, start, groups, offsets, present, numel, GROUP: tl.constexpr, RUN: tl.constexpr):
    codes = tl.load(tl.max_contiguous(packed + start + offsets, [1, RUN]), mask=present, other=0)
    parameters = tl.load(_parameters_at(packed, numel) + start // GROUP + groups, mask=present, other=0)
    x = decode_tile(codes, parameters)
    if any_flagged(parameters):
        x = restore_escapes(x, codes, parameters, float("-inf"), float("inf"), float("nan"), 8)
    return x


@triton.jit
def store_rounded(out, x, start, offsets, present):
    """Store float32 values, rounded to the dtype of ``out``, where ``present``."""
    raw = to_raw(x, out.dtype.element_ty)
    tl.store(out.to(tl.pointer_type(raw.dtype), bitcast=True) + start + offsets, raw, mask=present)


@triton.jit
def _store_signs(signs, positive, word, SWEEPS: tl.constexpr, RUN: tl.constexpr):
    LANES: tl.constexpr = positive.shape[0] // SWEEPS
    RUNS: tl.constexpr = positive.shape[1] // RUN
    bit = tl.arange(0, SWEEPS)[:, None, None, None] * RUN + tl.arange(0, RUN)[None, None, None, :]
    bits = tl.reshape(positive.to(tl.int32), [SWEEPS, LANES, RUNS, RUN]) << bit
    words = tl.sum(tl.sum(bits, 3), 0)
    tl.store(signs + word + tl.arange(0, LANES)[:, None] * RUNS + tl.arange(0, RUNS)[None, :], words.to(tl.int16))


@triton.jit
def _load_signs(signs, word, GROUP: tl.constexpr, GROUPS: tl.constexpr, SWEEPS: tl.constexpr, RUN: tl.constexpr):
    LANES: tl.constexpr = GROUPS // SWEEPS
    RUNS: tl.constexpr = GROUP // RUN
    words = tl.load(signs + word + tl.arange(0, LANES)[:, None] * RUNS + tl.arange(0, RUNS)[None, :])
    bit = tl.arange(0, SWEEPS)[:, None, None, None] * RUN + tl.arange(0, RUN)[None, None, None, :]
    bits = (words.to(tl.int32)[None, :, :, None] >> bit) & 1
    return tl.reshape(bits, [GROUPS, GROUP]) != 0


@triton.jit(do_not_specialize=["numel", "width"])
def batch_norm_statistics_kernel(
    x,
    means,
    spreads,
    numel: tl.int64,
    width: tl.int32,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SPAN: tl.constexpr,
    SWEEPS: tl.constexpr,
    RUN: tl.constexpr,
):
    """Write each program's means and sums of squared deviations, [splits, channels], of rows of ``width`` groups.

    Sums are over the differences from a channel's first element in the program: no cancellation, whatever the mean.
    """
    LANES: tl.constexpr = GROUPS // SWEEPS
    first, split, splits, rows, tiles = _place(numel, width, GROUP, GROUPS, SPAN)
    _, offsets, row_of = _tile(width, GROUP, GROUPS, SPAN)
    tile = tiles - 1 - split
    begin = tile.to(tl.int64) * (GROUPS // SPAN) * width * GROUP
    shift = load_float(x + begin, _channels(first, GROUP, LANES, SPAN))
    total = tl.zeros([LANES, GROUP], tl.float32)
    squares = tl.zeros([LANES, GROUP], tl.float32)
    count = 0
    while tile >= 0:
        start, left, present = _tile_at(tile, first, rows, row_of, width, GROUP, GROUPS, SPAN)
        values = load_float(x + start, offsets, present)
        centred = _sweeps(tl.where(present, values - _for_tile(shift, SWEEPS), 0.0), SWEEPS)
        total += tl.sum(centred, 0)
        squares += tl.sum(centred * centred, 0)
        count += left
        tile -= splits
    number = count.to(tl.float32)
    sums = _fold(total, SPAN)
    spread = _fold(squares, SPAN) - sums * tl.div_rn(sums, number)
    channel = _channels(first, GROUP, SPAN, SPAN)
    at = split.to(tl.int64) * width * GROUP + channel
    tl.store(means + at, load_float(x + begin, channel) + tl.div_rn(sums, number))
    tl.store(spreads + at, tl.where(spread < 0.0, 0.0, spread))


@triton.jit(do_not_specialize=["numel", "width", "splits", "momentum", "eps"])
def batch_norm_finish_kernel(
    means,
    spreads,
    running_mean,
    running_var,
    mean,
    rstd,
    numel: tl.int64,
    width: tl.int32,
    splits: tl.int32,
    momentum: tl.float32,
    eps: tl.float32,
    RUNNING: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Combine the partial results of ``batch_norm_statistics_kernel`` (Chan et al.), CHANNELS channels a program."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    rows = numel // (width * GROUP)
    tiles = ((rows + ROWS - 1) // ROWS).to(tl.int32)
    absent = (tiles.to(tl.int64) * ROWS - rows).to(tl.int32)
    number = rows.to(tl.float32)
    shift = tl.load(means + channel)
    total = tl.zeros([CHANNELS], tl.float32)
    squares = tl.zeros([CHANNELS], tl.float32)
    begin = 0
    while begin < splits:
        split = begin + tl.arange(0, SPLITS)[:, None]
        present = split < splits
        # Split 0 has the last tile, possibly a partial one.
        count = ((tiles - 1 - split) // splits + 1) * ROWS - tl.where(split == 0, absent, 0)
        count = count.to(tl.float32)
        at = split.to(tl.int64) * width * GROUP + channel[None, :]
        apart = tl.where(present, tl.load(means + at, mask=present, other=0.0) - shift[None, :], 0.0)
        total += tl.sum(count * apart, 0)
        squares += tl.sum(tl.load(spreads + at, mask=present, other=0.0) + count * apart * apart, 0)
        begin += SPLITS
    apart = tl.div_rn(total, number)
    average = shift + apart
    spread = squares - total * apart
    variance = tl.div_rn(tl.where(spread < 0.0, 0.0, spread), number)
    tl.store(mean + channel, average)
    tl.store(rstd + channel, tl.div_rn(1.0, tl.sqrt_rn(variance + eps)))
    if RUNNING:
        unbiased = variance * tl.div_rn(number, number - 1.0)
        old_mean, old_var = load_float(running_mean, channel), load_float(running_var, channel)
        kept = 1.0 - momentum
        tl.store(running_mean + channel, (kept * old_mean + momentum * average).to(running_mean.dtype.element_ty))
        tl.store(running_var + channel, (kept * old_var + momentum * unbiased).to(running_var.dtype.element_ty))


@triton.jit
def _affine(normal, weight, bias, channel, SWEEPS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Return normal * weight + bias."""
    y = normal
    if HAS_WEIGHT:
        y = y * _for_tile(load_float(weight, channel), SWEEPS)
    if HAS_BIAS:
        y = y + _for_tile(load_float(bias, channel), SWEEPS)
    return y


@triton.jit
def _pack(
    packed,
    x,
    start,
    groups,
    offsets,
    present,
    numel,
    key0,
    key1,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    RUN: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    _, high = element_index(start, key1, GROUP, GROUPS)
    index = start.to(tl.uint32) + offsets.to(tl.uint32)
    codes, parameters = encode_tile(x, index, high, key0.to(tl.uint32), 8, STOCHASTIC, False)
    _store_codes(packed, codes, parameters, start, groups, offsets, present, numel, GROUP, RUN)


@triton.jit(do_not_specialize=["numel", "width", "key0", "key1", "second0", "second1"])
def batch_norm_apply_kernel(
    # Tensors read. Another tensor takes the place of an absent residual, weight or bias.
    x,
    residual,
    mean,
    rstd,
    weight,
    bias,
    # Tensors written: the output, a bit for each element above zero (RELU), the codes of the normalised images, and of
    # the output (HAS_RESIDUAL).
    out,
    signs,
    packed,
    packed_out,
    # Elements; groups of channels in a row.
    numel: tl.int64,
    width: tl.int32,
    # Keys of stochastic rounding: of packed, and of packed_out.
    key0: tl.uint32,
    key1: tl.uint32,
    second0: tl.uint32,
    second1: tl.uint32,
    # Which tensors are present, and whether a ReLU follows.
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
    # The tile, as the module describes it, and rounding.
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SPAN: tl.constexpr,
    SWEEPS: tl.constexpr,
    RUN: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Normalise, pack, add the residual, apply ReLU; write the signs, and with a residual the codes of the output.

    The first tile is first: ``batch_norm_statistics_kernel`` has read it last.
    """
    LANES: tl.constexpr = GROUPS // SWEEPS
    first, tile, splits, rows, tiles = _place(numel, width, GROUP, GROUPS, SPAN)
    groups, offsets, row_of = _tile(width, GROUP, GROUPS, SPAN)
    channel = _channels(first, GROUP, LANES, SPAN)
    average, inverse = _for_tile(tl.load(mean + channel), SWEEPS), _for_tile(tl.load(rstd + channel), SWEEPS)
    while tile < tiles:
        start, _, present = _tile_at(tile, first, rows, row_of, width, GROUP, GROUPS, SPAN)
        normal = (load_float(x + start, offsets, present) - average) * inverse
        _pack(packed, normal, start, groups, offsets, present, numel, key0, key1, GROUP, GROUPS, RUN, STOCHASTIC)
        y = _affine(normal, weight, bias, channel, SWEEPS, HAS_WEIGHT, HAS_BIAS)
        if HAS_RESIDUAL:
            y = y + load_float(residual + start, offsets, present)
        if RELU:
            # NaN stays and has a gradient, as in torch.
            y = tl.where(y <= 0.0, 0.0, y)
            word = (tile.to(tl.int64) * (width // SPAN) + first // SPAN) * (LANES * GROUP // RUN)
            _store_signs(signs, y != 0.0, word, SWEEPS, RUN)
        if HAS_RESIDUAL:
            _pack(
                packed_out, y, start, groups, offsets, present, numel, second0, second1, GROUP, GROUPS, RUN,
                STOCHASTIC,
            )  # fmt: skip
        store_rounded(out, y, start, offsets, present)
        tile += splits


@triton.jit(do_not_specialize=["numel", "width"])
def batch_norm_recompute_kernel(
    packed,
    weight,
    bias,
    out,
    signs,
    numel: tl.int64,
    width: tl.int32,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RELU: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SPAN: tl.constexpr,
    SWEEPS: tl.constexpr,
    RUN: tl.constexpr,
):
    """Recompute the output from the codes of the normalised input; positive exactly where forward's output was."""
    LANES: tl.constexpr = GROUPS // SWEEPS
    first, split, splits, rows, tiles = _place(numel, width, GROUP, GROUPS, SPAN)
    groups, offsets, row_of = _tile(width, GROUP, GROUPS, SPAN)
    channel = _channels(first, GROUP, LANES, SPAN)
    tile = tiles - 1 - split
    while tile >= 0:
        start, _, present = _tile_at(tile, first, rows, row_of, width, GROUP, GROUPS, SPAN)
        normal = _restore(packed, start, groups, offsets, present, numel, GROUP, RUN)
        y = _affine(normal, weight, bias, channel, SWEEPS, HAS_WEIGHT, HAS_BIAS)
        if RELU:
            word = (tile.to(tl.int64) * (width // SPAN) + first // SPAN) * (LANES * GROUP // RUN)
            positive = _load_signs(signs, word, GROUP, GROUPS, SWEEPS, RUN)
            # The smallest normal float16, positive in every dtype.
            y = tl.where(positive, tl.where(y < 6.103515625e-05, 6.103515625e-05, y), 0.0)
        store_rounded(out, y, start, offsets, present)
        tile -= splits


@triton.jit(do_not_specialize=["numel", "width"])
def batch_norm_sums_kernel(
    packed,
    grad,
    signs,
    sums,
    products,
    numel: tl.int64,
    width: tl.int32,
    RELU: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SPAN: tl.constexpr,
    SWEEPS: tl.constexpr,
    RUN: tl.constexpr,
):
    """Write each program's sums of the gradient, and of the gradient times the normalised input, [splits, channels]."""
    LANES: tl.constexpr = GROUPS // SWEEPS
    first, split, splits, rows, tiles = _place(numel, width, GROUP, GROUPS, SPAN)
    groups, offsets, row_of = _tile(width, GROUP, GROUPS, SPAN)
    total = tl.zeros([LANES, GROUP], tl.float32)
    along = tl.zeros([LANES, GROUP], tl.float32)
    tile = tiles - 1 - split
    while tile >= 0:
        start, _, present = _tile_at(tile, first, rows, row_of, width, GROUP, GROUPS, SPAN)
        g = load_float(grad + start, offsets, present)
        normal = _restore(packed, start, groups, offsets, present, numel, GROUP, RUN)
        if RELU:
            word = (tile.to(tl.int64) * (width // SPAN) + first // SPAN) * (LANES * GROUP // RUN)
            g = tl.where(_load_signs(signs, word, GROUP, GROUPS, SWEEPS, RUN), g, 0.0)
        total += tl.sum(_sweeps(g, SWEEPS), 0)
        along += tl.sum(_sweeps(g * normal, SWEEPS), 0)
        tile -= splits
    at = split.to(tl.int64) * width * GROUP + _channels(first, GROUP, SPAN, SPAN)
    tl.store(sums + at, _fold(total, SPAN))
    tl.store(products + at, _fold(along, SPAN))


@triton.jit(do_not_specialize=["numel", "width"])
def batch_norm_backward_kernel(
    packed,
    grad,
    signs,
    rstd,
    weight,
    sums,
    products,
    out,
    grad_residual,
    numel: tl.int64,
    width: tl.int32,
    HAS_WEIGHT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SPAN: tl.constexpr,
    SWEEPS: tl.constexpr,
    RUN: tl.constexpr,
):
    """Write the gradients of the input and the residual, given the sums over all rows."""
    LANES: tl.constexpr = GROUPS // SWEEPS
    first, tile, splits, rows, tiles = _place(numel, width, GROUP, GROUPS, SPAN)
    groups, offsets, row_of = _tile(width, GROUP, GROUPS, SPAN)
    channel = _channels(first, GROUP, LANES, SPAN)
    number = rows.to(tl.float32)
    scale = tl.load(rstd + channel)
    if HAS_WEIGHT:
        scale = scale * load_float(weight, channel)
    scale = _for_tile(scale, SWEEPS)
    slope = _for_tile(tl.div_rn(tl.load(products + channel), number), SWEEPS)
    level = _for_tile(tl.div_rn(tl.load(sums + channel), number), SWEEPS)
    while tile < tiles:
        start, _, present = _tile_at(tile, first, rows, row_of, width, GROUP, GROUPS, SPAN)
        g = load_float(grad + start, offsets, present)
        normal = _restore(packed, start, groups, offsets, present, numel, GROUP, RUN)
        if RELU:
            word = (tile.to(tl.int64) * (width // SPAN) + first // SPAN) * (LANES * GROUP // RUN)
            g = tl.where(_load_signs(signs, word, GROUP, GROUPS, SWEEPS, RUN), g, 0.0)
        if HAS_RESIDUAL:
            store_rounded(grad_residual, g, start, offsets, present)
        store_rounded(out, (g - level - normal * slope) * scale, start, offsets, present)
        tile += splits
