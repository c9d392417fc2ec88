"""``relu``, which stores one bit an element."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ...codec import Impl, Rounding
from ...layouts import layout_of
from ..saving import Saving, begin, check_float_tensor, differentiable_once, recorded, saving


class _Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool, how: Saving) -> Tensor:
        if inplace:
            ctx.mark_dirty(x)
        if how.runs_kernels(x) and layout_of(x).dense:
            from . import launch

            out, bits, ctx.fused_backward = launch.relu(x, inplace)
        else:
            ctx.fused_backward = None
            out = F.relu_(x) if inplace else F.relu(x)
            # NaN is no zero: torch lets its gradient through.
            bits, ctx.restore = how.keep_mask(~(out <= 0))
        # What is marked dirty gets its version behind this.
        begin(ctx, None if inplace else out)
        ctx.save_for_backward(bits)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (bits,) = ctx.saved_tensors
        if ctx.fused_backward is not None:
            return ctx.fused_backward(bits, grad), None, None
        return torch.where(ctx.restore(bits), grad, 0), None, None


def relu(
    x: Tensor,
    inplace: bool = False,
    *,
    bits: int | None = 8,
    group_size: int = 64,
    rounding: Rounding | None = None,
    seed: int | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Return ``max(x, 0)`` and keep for backward, in one bit an element, where it is not zero.

    Parameters
    ----------
    x : Tensor, any shape, floating point
    inplace : bool
        Whether to write the result over ``x``.
    bits, group_size, rounding, seed, impl
        As in :func:`linear`, for calls in one form. What is kept is exact, and the same for all but ``impl``.

    Returns
    -------
    Tensor, the shape and dtype of ``x``
        Differentiable once: backward with ``create_graph=True`` raises PyactcompError. It and the gradients are those
        of :func:`torch.nn.functional.relu` to the bit.

    Raises
    ------
    TypeError
        If ``x`` is no floating-point tensor.
    ValueError
        If an option has no such value.
    ImplementationUnavailableError
        If ``impl`` cannot serve the device of ``x``.

    Examples
    --------
    >>> import torch
    >>> from pyactcomp import functional
    >>> x = torch.tensor([-1.0, 0.0, 2.0], requires_grad=True)
    >>> functional.relu(x).sum().backward()
    >>> x.grad
    tensor([0., 0., 1.])
    """
    how = saving(bits, group_size, rounding, seed, impl)
    check_float_tensor("x", x)
    if not recorded(x):
        return F.relu(x, inplace=inplace)
    return cast(Tensor, _Relu.apply(x, inplace, how))  # type: ignore[no-untyped-call]
