"""``dropout``: saves one bit per element on the CPU, where torch saves floats."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import dropout as dropout_of_torch

from ...codec import Impl
from ..codes import one_option
from ..saving import Saving, begin, check_float_tensor, kernels_of, recorded


class _Dropout(torch.autograd.Function):
    """On the CPU, where torch multiplies by scaled noise and saves the noise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, how: Saving) -> Tensor:
        begin(ctx)
        ctx.p, ctx.dtype = p, x.dtype
        # Dropout of ones is the same noise, drawn in the same way.
        noise = dropout_of_torch(torch.ones_like(x), p)
        kept, ctx.restore = how.keep_mask(noise != 0)
        ctx.save_for_backward(kept)
        return x * noise

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None
        (bits,) = ctx.saved_tensors
        noise = torch.ones((), dtype=ctx.dtype, device=grad.device).div_(1.0 - ctx.p)
        return grad * torch.where(ctx.restore(bits), noise, 0), None, None


def check_probability(p: float) -> None:
    """Raise ValueError unless ``p`` is a probability."""
    if not 0 <= p <= 1:
        raise ValueError(f"p must be from 0 to 1, got {p!r}")


@one_option
def dropout(
    x: Tensor,
    p: float = 0.5,
    *,
    impl: Impl = "auto",
) -> Tensor:
    """Zero elements of ``x`` with probability ``p``, scale the others by 1 / (1 - p), and save one bit per element.

    On a GPU this is torch's own function, which saves a boolean for each element: one bit under
    :func:`pyactcomp.compress`.

    Parameters
    ----------
    x : Tensor, any shape, floating point
    p : float
        Probability of zeroing an element, from 0 to 1.
    impl : {"auto", "cuda", "triton", "cpu", "reference"}
        Implementation; all give the same results. A named one never falls back to another.

    Returns
    -------
    Tensor, the shape and dtype of ``x``
        Equal to :func:`torch.nn.functional.dropout` in training to the bit, from the same state of torch's generator;
        so are the gradients. Differentiable any number of times.

    Raises
    ------
    ValueError
        If ``p`` is not from 0 to 1.
    ImplementationUnavailableError
        If ``impl`` cannot serve the device of ``x``.

    Examples
    --------
    >>> import torch
    >>> from pyactcomp import functional
    >>> x = torch.ones(1000, requires_grad=True)
    >>> out = functional.dropout(x, 0.25)
    >>> out.sum().backward()
    >>> torch.equal(x.grad, out)
    True
    """
    how = kernels_of(impl)
    check_float_tensor("x", x)
    check_probability(p)
    if not recorded(x) or p in (0, 1) or x.numel() == 0 or x.is_cuda:
        return dropout_of_torch(x, p)
    return cast(Tensor, _Dropout.apply(x, p, how))  # type: ignore[no-untyped-call]
