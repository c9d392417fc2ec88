"""``max_pool2d``: saves the position of each maximum within its window, one byte each."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ...codec import Impl
from ..codes import one_option
from ..saving import Saving, begin, check_float_tensor, differentiable_once, kernels_of, recorded

Pair = tuple[int, int]
_POSITIONS = 256


def _corners(out: torch.Size, stride: Pair, padding: Pair, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the first input row [height, 1] and column [width] of each window."""
    row, column = (
        torch.arange(size, device=device) * step - pad for size, step, pad in zip(out[2:], stride, padding, strict=True)
    )
    return row[:, None], column


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, window: Pair, stride: Pair, padding: Pair, how: Saving) -> Tensor:
        begin(ctx, x)
        ctx.geometry, ctx.form, ctx.fused = (window, stride, padding), (x.shape, x.stride()), None
        if how.runs_kernels(x):
            from . import launch

            if launch.max_pool_serves(x):
                ctx.fused = launch.MaxPool(window, stride, padding)
                out, positions = ctx.fused.forward(x)
                ctx.save_for_backward(positions)
                return cast(Tensor, out)
        out, indices = torch.ops.aten.max_pool2d_with_indices(x, window, stride, padding)
        row, column = _corners(out.shape, stride, padding, x.device)
        positions = (indices // x.shape[3] - row) * window[1] + (indices % x.shape[3] - column)
        # In a window of -inf only, torch's index on CUDA may lie outside the window.
        ctx.save_for_backward(positions.clamp_(0, window[0] * window[1] - 1).to(torch.uint8))
        return cast(Tensor, out)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (positions,) = ctx.saved_tensors
        window, stride, padding = ctx.geometry
        shape, strides = ctx.form
        if ctx.fused is not None:
            grad_x = ctx.fused.backward(positions, grad, shape)
        else:
            row, column = _corners(positions.shape, stride, padding, grad.device)
            place = positions.long()
            row = (row + place // window[1]).clamp_(0, shape[2] - 1)
            column = (column + place % window[1]).clamp_(0, shape[3] - 1)
            # Torch's backward reads the strides of the input, not the values.
            x = torch.empty_strided(shape, strides, dtype=grad.dtype, device=grad.device)
            grad_x = torch.ops.aten.max_pool2d_with_indices_backward(
                grad, x, window, stride, padding, (1, 1), False, row * shape[3] + column
            )
        return grad_x, None, None, None, None


def _pair(name: str, value: int | tuple[int, int]) -> Pair:
    pair = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) != 2 or not all(isinstance(v, int) for v in pair):
        raise TypeError(f"max_pool2d expects an integer or two for {name}, got {value!r}")
    return pair


@one_option
def max_pool2d(
    x: Tensor,
    kernel_size: int | tuple[int, int],
    stride: int | tuple[int, int] | None = None,
    padding: int | tuple[int, int] = 0,
    *,
    impl: Impl = "auto",
) -> Tensor:
    """Take the maximum of each window and save its position in the window, one byte, instead of the input.

    Output and gradient equal those of :func:`torch.nn.functional.max_pool2d`: nothing is quantised.

    Parameters
    ----------
    x : Tensor, [N, C, H, W], floating point
    kernel_size, stride, padding : int or (int, int)
        As in :func:`torch.nn.functional.max_pool2d`. Windows of more than 256 elements run torch's function.
    impl : {"auto", "cuda", "triton", "cpu", "reference"}
        Implementation; all give the same results. A named one never falls back to another.

    Returns
    -------
    Tensor, [N, C, H_out, W_out]

    Raises
    ------
    TypeError
        If a size is neither an integer nor a pair of integers.
    RuntimeError
        Torch's own error, if the sizes do not fit.

    Notes
    -----
    In a window of -inf only, the gradient goes to the first element, as in torch; only torch's channels-last kernel on
    CUDA loses the gradient there.

    Examples
    --------
    >>> import torch
    >>> from pyactcomp.functional.convolutional.max_pool import max_pool2d
    >>> x = torch.randn(2, 3, 8, 8, requires_grad=True)
    >>> max_pool2d(x, 3, 2, 1).sum().backward()
    >>> float(x.grad.sum())
    96.0
    """
    how = kernels_of(impl)
    check_float_tensor("x", x)
    if x.dim() != 4:
        raise ValueError(f"max_pool2d expects x of [N, C, H, W], got {tuple(x.shape)}")
    window = _pair("kernel_size", kernel_size)
    step = window if stride is None else _pair("stride", stride)
    pad = _pair("padding", padding)
    sizes = zip(x.shape[2:], window, step, pad, strict=True)
    fits = all(k >= 1 and s >= 1 and 0 <= 2 * p <= k <= size + 2 * p for size, k, s, p in sizes)
    # Torch names sizes that do not fit.
    if not recorded(x) or not fits or window[0] * window[1] > _POSITIONS:
        return F.max_pool2d(x, window, step, pad)
    return cast(Tensor, _MaxPool.apply(x, window, step, pad, how))  # type: ignore[no-untyped-call]
