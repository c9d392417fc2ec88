"""``relu``: saves one bit per element."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import relu as relu_of_torch
from torch.nn.functional import relu_ as relu_in_place_of_torch

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
            out = relu_in_place_of_torch(x) if inplace else relu_of_torch(x)
            # ~(out <= 0), not out > 0: NaN has a gradient, as in torch.
            bits, ctx.restore = how.keep_mask(~(out <= 0))
        # A tensor marked dirty gets the new version after forward: do not check it.
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
    """Return ``max(x, 0)`` and save one bit per element for backward: whether the result is nonzero.

    Parameters
    ----------
    x : Tensor, any shape, floating point
    inplace : bool
        Whether to overwrite ``x`` with the result.
    impl : {"auto", "cuda", "triton", "cpu", "reference"}
        Implementation; all give the same results. A named one never falls back to another.

    Returns
    -------
    Tensor, the shape and dtype of ``x``
        Equal to :func:`torch.nn.functional.relu` to the bit, as are the gradients. Differentiable once: backward with
        ``create_graph=True`` raises PyactcompError.

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
        return relu_of_torch(x, inplace=inplace)
    return cast(Tensor, _Relu.apply(x, inplace, how))  # type: ignore[no-untyped-call]
