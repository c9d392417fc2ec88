"""``gelu``: saves the input in codes."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn.functional import gelu as gelu_of_torch

from ....engine import recompute
from ...codes import INT8, Codes, one_option
from ...saving import Saving, begin, check_float_tensor, differentiable_once, recorded, saving
from .launch import gelu_of

Approximate = Literal["none", "tanh"]


class _Gelu(torch.autograd.Function):
    """GELU as an autograd function, computed by torch's operators."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, approximate: Approximate, how: Saving) -> Tensor:
        begin(ctx, None if how.bits is None else x)
        ctx.approximate = approximate
        kept, restore = how.pack(x)
        ctx.restore = restore
        ctx.save_for_backward(kept)
        out = gelu_of_torch(x, approximate=approximate)

        def compute(source: Tensor, dtype: torch.dtype) -> Tensor:
            return gelu_of_torch(restore(source), approximate=approximate).to(dtype)

        recompute.offer(ctx, out, compute, stored=(kept.detach(),))
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = ctx.saved_tensors
        grad_x = torch.ops.aten.gelu_backward(grad, ctx.restore(kept), approximate=ctx.approximate)
        return grad_x, None, None


@one_option
def gelu(
    x: Tensor,
    approximate: Approximate = "none",
    *,
    codes: Codes = INT8,
) -> Tensor:
    """Apply the Gaussian error linear unit and save ``x`` for backward in codes.

    Parameters
    ----------
    x : Tensor, any shape, floating point
    approximate : {"none", "tanh"}
        As in :func:`torch.nn.functional.gelu`.
    codes : Codes
        How to store ``x``.

    Returns
    -------
    Tensor, the shape and dtype of ``x``

    Raises
    ------
    TypeError
        If ``x`` is not a floating-point tensor.
    ValueError
        If ``approximate`` is not one of the two.

    Notes
    -----
    The second derivative of GELU is at most 2 / sqrt(2 pi) (0.8) in magnitude: an error of at most ``e`` in ``x``
    (:func:`pyactcomp.codec.reference.error_bound`) changes the gradient by at most 0.8 ``e |grad|``.

    Examples
    --------
    >>> import torch
    >>> from pyactcomp import functional
    >>> x = torch.randn(1000, requires_grad=True)
    >>> functional.gelu(x).sum().backward()
    >>> exact = torch.autograd.grad(torch.nn.functional.gelu(x).sum(), x)[0]
    >>> bool((x.grad - exact).abs().max() < 0.02)
    True
    """
    how = saving(codes)
    check_float_tensor("x", x)
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
    return gelu_unchecked(x, approximate, how)


def gelu_unchecked(x: Tensor, approximate: Approximate, how: Saving) -> Tensor:
    """Return :func:`gelu` of arguments that are known to be right."""
    if not recorded(x):
        return gelu_of_torch(x, approximate=approximate)
    if how.fuses(x):
        return gelu_of(approximate == "tanh", how).apply(x)
    return cast(Tensor, _Gelu.apply(x, approximate, how))  # type: ignore[no-untyped-call]
