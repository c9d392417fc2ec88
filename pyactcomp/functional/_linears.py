"""``linears``: products of one input with several matrices, whose gradients for it are added as they are computed."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ._saving import differentiable_once


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        needs_x, *needs = ctx.needs_input_grad
        ctx.shape, ctx.device = x.shape, x.device.type
        ctx.save_for_backward(x if any(needs) else None, *(weight if needs_x else None for weight in weights))
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_x, *needs = ctx.needs_input_grad
        flat = [None if g is None else g.reshape(-1, g.shape[-1]) for g in grads]
        grad_x: Tensor | None = None
        of_weights: list[Tensor | None] = [None] * len(weights)
        # The forward ran without autocast; backward may be called within it.
        with torch.autocast(ctx.device, enabled=False):
            for i, (g, weight) in enumerate(zip(flat, weights, strict=True)):
                if g is not None and needs_x:
                    grad_x = g @ weight if grad_x is None else torch.addmm(grad_x, g, weight, out=grad_x)
                if g is not None and needs[i]:
                    of_weights[i] = g.t() @ x.reshape(-1, x.shape[-1])
        return None if grad_x is None else grad_x.view(ctx.shape), *of_weights


def linears(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Return ``x @ weight.T`` for each weight, all of one dtype, with gradients but no second derivatives.

    Where torch adds the gradients for ``x`` in passes of their own, a matrix product here takes up the sum before it,
    and rounds it once less. ``x`` is saved as torch's linear saves it: hooks see it, once.

    Examples
    --------
    >>> import torch
    >>> from pyactcomp.functional._linears import linears
    >>> x, a, b = torch.randn(3, 4), torch.randn(2, 4), torch.randn(5, 4)
    >>> [tuple(product.shape) for product in linears(x, a, b)]
    [(3, 2), (3, 5)]
    """
    return cast("tuple[Tensor, ...]", _Linears.apply(x, *weights))  # type: ignore[no-untyped-call]
