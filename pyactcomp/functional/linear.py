"""``linear``: saves the input in codes."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import linear as linear_of_torch

from .codes import INT8, Codes, one_option
from .saving import Saving, begin, check_float_tensor, differentiable_once, recorded, saving, wanted


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None, how: Saving
    ) -> Tensor:
        def cast_to(t: Tensor | None) -> Tensor | None:
            return t if t is None or dtype is None else t.to(dtype)

        needs_x, needs_weight = ctx.needs_input_grad[:2]
        source = cast(Tensor, cast_to(x))
        begin(ctx, x if needs_weight and source is x and how.bits is not None else None)
        kept, ctx.restore = how.keep(source) if needs_weight else (None, None)
        # Save the weight, not autocast's cast: a second cast is cheaper than a second copy.
        ctx.save_for_backward(kept, weight if needs_x else None)
        ctx.by_column = x.dim() == 2 and x.stride() == (1, x.shape[0])
        ctx.shape, ctx.dtypes = x.shape, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return linear_of_torch(source, cast(Tensor, cast_to(weight)), cast_to(bias))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        count = ctx.shape[:-1].numel()
        rows = grad.reshape(count, grad.shape[-1])
        grad_x = grad_weight = grad_bias = None
        wants = wanted(ctx)
        with torch.autocast(grad.device.type, enabled=False):
            if weight is not None and wants[0]:
                matrix = weight.to(grad.dtype)
                # As in torch, the gradient of a column-major matrix is column-major.
                grad_x = (matrix.t() @ rows.t()).t() if ctx.by_column else (rows @ matrix).view(ctx.shape)
                grad_x = grad_x.to(x_dtype)
            if kept is not None and wants[1]:
                grad_weight = (rows.t() @ ctx.restore(kept).reshape(count, ctx.shape[-1])).to(weight_dtype)
            if wants[2]:
                grad_bias = rows.sum(0).to(bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None


@one_option
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    codes: Codes = INT8,
) -> Tensor:
    """Apply ``x @ weight.T + bias`` and save ``x`` for backward in codes.

    The output and the gradients of ``x`` and ``bias`` equal those of :func:`torch.nn.functional.linear`. Only the
    gradient of ``weight`` reads the restored ``x``; if ``weight`` needs no gradient, ``x`` is not saved. Under
    autocast, the arguments are cast as torch casts them and the cast ``x`` is saved.

    Parameters
    ----------
    x : Tensor, [..., in], floating point
    weight : Tensor, [out, in]
        Never quantised. Saved once: under autocast, backward repeats the cast.
    bias : Tensor, [out], optional
    codes : Codes
        How to store ``x``.

    Returns
    -------
    Tensor, [..., out]

    Notes
    -----
    If each element of ``x`` is off by at most ``e`` (:func:`pyactcomp.codec.reference.error_bound`), element [o, i] of
    the gradient of ``weight`` is off by at most ``e * sum(|grad[:, o]|)``. The scheme is that of GACT (Liu et al.,
    2022).

    Examples
    --------
    >>> import torch
    >>> from pyactcomp import functional
    >>> x, weight = torch.randn(32, 64), torch.randn(16, 64, requires_grad=True)
    >>> functional.linear(x, weight).sum().backward()
    >>> bool(torch.allclose(weight.grad[0], x.sum(0), atol=0.5))
    True
    """
    how = saving(codes)
    check_float_tensor("x", x)
    check_float_tensor("weight", weight)
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear expects x of [..., in] and weight of [out, in], got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if bias is not None:
        check_float_tensor("bias", bias)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"linear expects a bias of {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")
    if not recorded(x, weight, bias):
        return linear_of_torch(x, weight, bias)
    dtype = None
    if torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
    return cast(Tensor, _Linear.apply(x, weight, bias, dtype, how))  # type: ignore[no-untyped-call]
