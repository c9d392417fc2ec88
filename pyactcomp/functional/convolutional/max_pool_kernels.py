"""Triton kernels of max-pool over channels-last tensors; each program takes GROUP channels of PIXELS pixels.

Bytes moved per float32 input element for windows that halve height and width: 4 + (4 + 1) / 4 each way.

The functions are Triton's language, not Python.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from ...codec.kernels.triton_ops import load_float
from .batch_norm_kernels import store_rounded


@triton.jit
def _pixels(numel, width, GROUP: tl.constexpr, PIXELS: tl.constexpr):
    """Return the program's pixels [PIXELS, 1], the mask of existing pixels, and the channels [1, GROUP]."""
    first = (tl.program_id(0) % width) * GROUP
    pixel = (tl.program_id(0) // width).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)[:, None]
    return pixel, pixel < numel // (width * GROUP), first + tl.arange(0, GROUP)[None, :]


@triton.jit(do_not_specialize=["numel", "width", "in_height", "in_width", "out_height", "out_width"])
def max_pool_forward_kernel(
    x,
    out,
    positions,
    numel: tl.int64,
    width: tl.int32,
    in_height: tl.int32,
    in_width: tl.int32,
    out_height: tl.int32,
    out_width: tl.int32,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    TOP: tl.constexpr,
    LEFT: tl.constexpr,
    GROUP: tl.constexpr,
    PIXELS: tl.constexpr,
):
    """Write [numel] maxima of HEIGHT x WIDTH windows, channels-last, and their positions in the windows."""
    RUN: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    pixel, present, channel = _pixels(numel, width, GROUP, PIXELS)
    row = (pixel // out_width % out_height).to(tl.int32) * DOWN - TOP
    column = (pixel % out_width).to(tl.int32) * ACROSS - LEFT
    image = pixel // out_width // out_height * in_height
    best = tl.full([PIXELS, GROUP], float("-inf"), tl.float32)
    # Start at the window's first pixel inside the input, as torch does.
    begin = tl.maximum(-row, 0) * WIDTH + tl.maximum(-column, 0)
    position = tl.broadcast_to(begin, [PIXELS, GROUP])
    for down in tl.static_range(HEIGHT):
        for across in tl.static_range(WIDTH):
            h, w = row + down, column + across
            inside = present & (h >= 0) & (h < in_height) & (w >= 0) & (w < in_width)
            at = ((image + h) * in_width + w) * (width * GROUP)
            value = load_float(x, at + channel, inside)
            larger = inside & ((value > best) | (value != value))
            best = tl.where(larger, value, best)
            position = tl.where(larger, down * WIDTH + across, position)
    at = pixel * (width * GROUP) + channel
    store_rounded(out, best, 0, at, present)
    tl.store(tl.max_contiguous(positions + at, [1, RUN]), position.to(tl.uint8), mask=present)


@triton.jit(do_not_specialize=["numel", "width", "in_height", "in_width", "out_height", "out_width"])
def max_pool_backward_kernel(
    grad,
    positions,
    out,
    numel: tl.int64,
    width: tl.int32,
    in_height: tl.int32,
    in_width: tl.int32,
    out_height: tl.int32,
    out_width: tl.int32,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    TOP: tl.constexpr,
    LEFT: tl.constexpr,
    GROUP: tl.constexpr,
    PIXELS: tl.constexpr,
):
    """Sum, for each of the [numel] inputs, the gradients of windows with this input as maximum, in torch's order."""
    RUN: tl.constexpr = 128 // out.dtype.element_ty.primitive_bitwidth
    pixel, present, channel = _pixels(numel, width, GROUP, PIXELS)
    row = (pixel // in_width % in_height).to(tl.int32) + TOP
    column = (pixel % in_width).to(tl.int32) + LEFT
    image = pixel // in_width // in_height * out_height
    total = tl.zeros([PIXELS, GROUP], tl.float32)
    # Visit the windows over a pixel from first to last; the last one begins at or before the pixel.
    for above in tl.static_range((HEIGHT - 1) // DOWN, -1, -1):
        for before in tl.static_range((WIDTH - 1) // ACROSS, -1, -1):
            h, w = row // DOWN - above, column // ACROSS - before
            down, across = row - h * DOWN, column - w * ACROSS
            reached = present & (h >= 0) & (h < out_height) & (w >= 0) & (w < out_width)
            reached = reached & (down < HEIGHT) & (across < WIDTH)
            at = ((image + h) * out_width + w) * (width * GROUP) + channel
            chosen = tl.load(tl.max_contiguous(positions + at, [1, RUN]), mask=reached, other=255).to(tl.int32)
            value = load_float(grad, at, reached)
            total += tl.where(reached & (chosen == down * WIDTH + across), value, 0.0)
    store_rounded(out, total, 0, pixel * (width * GROUP) + channel, present)
