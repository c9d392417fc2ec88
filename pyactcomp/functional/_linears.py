"""``linears``: products of one input with several matrices, whose gradients for it are added as they are computed."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..torch_private import has_no_memory
from ._saving import differentiable_once


class _Link(torch.autograd.Function):
    """One of several, each of which hands on the input that the next one reads in the graph."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, weight: Tensor, of: tuple[Tensor]) -> tuple[Tensor, Tensor]:
        (x,) = of  # in a tuple, so that it is no second way for gradients
        ctx.set_materialize_grads(False)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.device = x.device.type
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return F.linear(x, weight), link

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor | None, of_rest: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if grad is None:
            return of_rest, None, None
        of_x, of_weight = of_rest, None
        flat = grad.reshape(-1, grad.shape[-1])
        # The forward ran without autocast; backward may be called within it.
        with torch.autocast(ctx.device, enabled=False):
            if weight is not None:
                of_x = _plus(of_rest, flat, weight).view(*grad.shape[:-1], weight.shape[1])
            if x is not None:
                of_weight = flat.t() @ x.reshape(-1, x.shape[-1])
        return of_x, of_weight, None


def _plus(rest: Tensor | None, grad: Tensor, weight: Tensor) -> Tensor:
    """Return ``rest + grad @ weight``, written over ``rest``, which the node of the next product made."""
    if rest is None:
        return grad @ weight
    rest = rest.reshape(-1, rest.shape[-1])
    if has_no_memory(rest) or has_no_memory(grad):
        return torch.addmm(rest, grad, weight)
    return torch.addmm(rest, grad, weight, out=rest)


def linears(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Return ``x @ weight.T`` for each weight, all of one dtype, with gradients but no second derivatives.

    Where torch adds the gradients for ``x`` in passes of their own, a matrix product here takes up the sum of those
    after it, and rounds it once less. Each product is a node of its own, as torch's is: the gradient of one weight is
    handed on before that of another is computed.

    Examples
    --------
    >>> import torch
    >>> from pyactcomp.functional._linears import linears
    >>> x, a, b = torch.randn(3, 4, requires_grad=True), torch.randn(2, 4), torch.randn(5, 4)
    >>> [tuple(product.shape) for product in linears(x, a, b)]
    [(3, 2), (3, 5)]
    """
    link, products = x, []
    for weight in weights:
        product, link = cast("tuple[Tensor, Tensor]", _Link.apply(link, weight, (x,)))  # type: ignore[no-untyped-call]
        products.append(product)
    return tuple(products)
