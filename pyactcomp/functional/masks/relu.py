"""``relu``, which stores one bit an element."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ...codec import Impl
from ...codec.layouts import layout_of
from ..codes import one_option
from ..saving import Saving, begin, check_float_tensor, differentiable_once, kernels_of, recorded


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


@one_option
def relu(
    x: Tensor,
    inplace: bool = False,
    *,
    impl: Impl = "auto",
) -> Tensor:
    """Return ``max(x, 0)`` and keep for backward, in one bit an element, where it is not zero.

    Parameters
    ----------
    x : Tensor, any shape, floating point
    inplace : bool
        Whether to write the result over ``x``.
    impl : {"auto", "cuda", "triton", "cpu", "reference"}
        All give the same. A named one never falls back.

    Returns
    -------
    Tensor, the shape and dtype of ``x``
        Differentiable once: backward with ``create_graph=True`` raises PyactcompError. It and the gradients are those
        of :func:`torch.nn.functional.relu` to the bit.

    Raises
    ------
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
    how = kernels_of(impl)
    check_float_tensor("x", x)
    if not recorded(x):
        return F.relu(x, inplace=inplace)
    return cast(Tensor, _Relu.apply(x, inplace, how))  # type: ignore[no-untyped-call]
