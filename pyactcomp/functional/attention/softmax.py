"""``softmax`` of scores with a bias and a mask: saves the output in codes."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ...engine.recompute import offer
from ..codes import INT8, Codes, one_option
from ..saving import Saving, begin, check_float_tensor, differentiable_once, recorded, saving, wide


def probabilities(x: Tensor, dim: int, bias: Tensor | None, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the softmax of ``x + bias + mask``, computed in float32 or wider, in ``dtype``."""
    with torch.autocast(x.device.type, enabled=False):
        scores = x.to(wide(x.dtype))
        if bias is not None:
            scores = scores + bias
        if mask is not None:
            scores = (torch.unflatten(scores, 0, (-1, len(mask))) + mask[:, None]).flatten(0, 1)
        return scores.softmax(dim).to(dtype)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, bias: Tensor | None, mask: Tensor | None, dtype: torch.dtype, how: Saving
    ) -> Tensor:
        ctx.dim, ctx.dtype = dim, x.dtype
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        out = probabilities(x, dim, bias, mask, dtype)
        # Check the output for writes only where torch saves it too; else torch saves the softmax before its cast.
        saved = how.bits is not None and (dtype is wide(x.dtype) or (bias is None and mask is None))
        begin(ctx, out if saved else None)
        kept, restore = how.keep(out)
        ctx.restore = restore
        ctx.save_for_backward(kept)
        if how.bits is not None:
            # The product with the values saves the output too: let it share these codes.
            offer(ctx, out, lambda kept, dtype: restore(kept).to(dtype), stored=(kept,))
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = ctx.saved_tensors
        exact = wide(ctx.dtype)
        p = ctx.restore(kept).to(exact)
        grad_scores = torch._softmax_backward_data(grad.to(exact), p, ctx.dim, exact)
        grad_bias = None
        if ctx.bias is not None and ctx.needs_input_grad[2]:
            shape, dtype = ctx.bias
            grad_bias = grad_scores.sum_to_size(shape).to(dtype)
        return grad_scores.to(ctx.dtype), None, grad_bias, None, None, None


@one_option
def softmax(
    x: Tensor,
    dim: int = -1,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    dtype: torch.dtype | None = None,
    codes: Codes = INT8,
) -> Tensor:
    """Apply softmax to ``x + bias + mask`` and save the result for backward in codes.

    Sum and softmax are computed in float32 (float64 for float64). In a compressed model, the attention's product with
    the values also saves the result, and shares the codes.

    Parameters
    ----------
    x : Tensor, any shape, floating point
    dim : int
        The dimension along which the result sums to 1.
    bias : Tensor, optional
        Broadcast to ``x``; for example [heads, tokens, tokens] for scores [windows, heads, tokens, tokens].
    mask : Tensor, [n, tokens, tokens], optional
        For scores [windows, heads, tokens, tokens]: ``mask[i]`` is added to the windows i, n + i, 2 n + i, ... The
        mask gets no gradient.
    dtype : torch.dtype, optional
        The dtype of the output. By default float32 (float64 for float64) under autocast, else the dtype of ``x``.
    codes : Codes
        How to store the result.

    Returns
    -------
    Tensor, the shape of ``x``

    Raises
    ------
    TypeError
        If ``dtype`` is not a floating-point dtype.

    Notes
    -----
    The gradient is p * (g - sum(g * p)). An error of at most ``e`` in the probabilities p
    (:func:`pyactcomp.codec.reference.error_bound`) changes the gradient by at most
    ``e * |g - sum(g p)| + (p + e) * sum(|g| e)``. In attention, ``g`` is a product with the values and the error is
    small. If the loss takes the logarithm of a probability or divides by one, ``g`` grows as the probability shrinks:
    use ``bits=None`` there.

    Examples
    --------
    >>> import torch
    >>> from pyactcomp import functional
    >>> functional.softmax(torch.zeros(1, 2), bias=torch.tensor([0.0, float("-inf")]))
    tensor([[1., 0.]])
    """
    how = saving(codes)
    for name, tensor in (("x", x), ("bias", bias), ("mask", mask)):
        if tensor is not None:
            check_float_tensor(name, tensor)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"softmax expects dim to be one of the {x.dim()} dimensions of x, got {dim}")
    if bias is not None and not _broadcasts(bias, x):
        raise ValueError(f"softmax expects a bias that broadcasts to x of {(*x.shape,)}, got {(*bias.shape,)}")
    if mask is not None and (
        x.dim() != 4 or mask.dim() != 3 or mask.shape[1:] != x.shape[2:] or not len(mask) or len(x) % len(mask)
    ):
        raise ValueError(
            f"softmax expects a mask of [n, rows, columns] for x of [windows, heads, rows, columns] with windows a "
            f"multiple of n, got {(*mask.shape,)} for {(*x.shape,)}"
        )
    if dtype is None:
        dtype = wide(x.dtype) if torch.is_autocast_enabled(x.device.type) else x.dtype
    elif not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point torch.dtype, got {dtype!r}")
    if not recorded(x, bias):
        return probabilities(x, dim, bias, mask, dtype)
    return cast(Tensor, _Softmax.apply(x, dim, bias, mask, dtype, how))  # type: ignore[no-untyped-call]


def _broadcasts(bias: Tensor, x: Tensor) -> bool:
    extents = zip(reversed(bias.shape), reversed(x.shape), strict=False)
    return bias.dim() <= x.dim() and all(b in (1, n) for b, n in extents)
