"""Linear maps of one input, whose gradients for it are added as they are computed."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..torch_private import has_no_memory
from ._saving import differentiable_once


class _NextLinear(torch.autograd.Function):
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
    """Return ``rest + grad @ weight``, written over ``rest``, which the node of another such product made."""
    if rest is None:
        return grad @ weight
    rest = rest.reshape(-1, rest.shape[-1])
    return torch.addmm(rest, grad, weight) if has_no_memory(grad) else torch.addmm(rest, grad, weight, out=rest)


class SharedInput:
    """The input of several linear maps.

    Where torch adds their gradients for it in passes of their own, a matrix product here takes up the sum of those
    after it, and rounds it once less. The tensor and the weights are saved as torch's linear saves them. There are no
    second derivatives.

    Parameters
    ----------
    x : Tensor, [..., features], floating point
        It must require a gradient.

    Examples
    --------
    >>> import torch
    >>> from pyactcomp.functional._linears import SharedInput
    >>> x, a, b = torch.randn(3, 4, requires_grad=True), torch.randn(2, 4), torch.randn(5, 4)
    >>> shared = SharedInput(x)
    >>> [tuple(shared.linear(weight).shape) for weight in (a, b)]
    [(3, 2), (3, 5)]
    """

    def __init__(self, x: Tensor) -> None:
        self.x = x
        # What the next map reads in the graph, so that its gradient comes to the one before.
        self._link = x

    def linear(self, weight: Tensor) -> Tensor:
        """Return ``x @ weight.T`` for a weight of ``[outputs, features]`` and the dtype of ``x``."""
        product, self._link = cast(
            "tuple[Tensor, Tensor]",
            _NextLinear.apply(self._link, weight, (self.x,)),  # type: ignore[no-untyped-call]
        )
        return product
