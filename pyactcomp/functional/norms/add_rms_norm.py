"""``add_rms_norm``: a sum and its norm, for pre-norm blocks."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor

from ...engine import saved
from ...engine.recompute import offer, stable_copies
from ...torch_private import under_checkpoint
from ..codes import INT8, Codes, one_option
from ..saving import Saving, begin, check_float_tensor, differentiable_once, recorded, saving
from .launch import are_contiguous, norm_of, serves
from .rms_norm import check_rows, rms_norm


def _keeps_itself(x: Tensor, residual: Tensor | None) -> bool:
    """Return whether to save the norm's input unpacked.

    A sum is in memory anyway, for the next addition. Under torch.utils.checkpoint saved tensors live for one block
    only: packing 16-bit rows to half their size is not worth the time.
    """
    return residual is not None or (under_checkpoint() and x.dtype.itemsize == 2)


def _dtype_of(*tensors: Tensor | None) -> torch.dtype:
    """Return the dtype that torch promotes the tensors to."""
    dtypes = [t.dtype for t in tensors if t is not None]
    return dtypes[0] if dtypes.count(dtypes[0]) == len(dtypes) else functools.reduce(torch.promote_types, dtypes)


class _AddRmsNorm(torch.autograd.Function):
    """The fused path: :func:`serves` is true."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, how: Saving
    ) -> tuple[Tensor, Tensor]:
        # Check x only where torch saves it: for a sum torch saves the sum, for 16-bit rows a float32 cast.
        begin(ctx, weight, x if residual is None and x.dtype.itemsize >= 4 else None)
        (gamma,) = stable_copies(weight)
        itself = _keeps_itself(x, residual)
        total = x if residual is None else torch.empty_like(x, dtype=_dtype_of(x, residual))
        ctx.norm = norm = norm_of(x.shape[-1:], False, eps, how, total.dtype if itself else None)
        dtype = _dtype_of(total, weight)
        out, packed, rstd = norm.forward(x, residual, gamma, None, None, dtype, total if itself else None, None)
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        # torch.utils.checkpoint does not check saved tensors for writes.
        ctx.version = saved.Versioned(total) if itself and under_checkpoint() else None
        ctx.weight = gamma
        ctx.save_for_backward(packed, rstd)
        size = out.size()

        def compute(packed: Tensor, rstd: Tensor, dtype: torch.dtype) -> Tensor:
            return norm.recompute(packed, rstd, gamma, None, size, dtype)

        offer(ctx, out, compute, *(() if gamma is None else (gamma,)), stored=(packed, rstd))
        if not any(ctx.needs_input_grad[:2]):
            ctx.mark_non_differentiable(total)
        return out, total

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor | None, beside: Tensor | None) -> tuple[Tensor | None, ...]:
        packed, rstd = ctx.saved_tensors
        of_x, of_residual, of_weight, *_ = ctx.needs_input_grad
        x_dtype, residual_dtype = ctx.dtypes
        dtypes = x_dtype if of_x else None, residual_dtype if of_residual else None
        if grad is None:
            of_inputs = [None if d is None or beside is None else beside.to(d) for d in dtypes]
            return *of_inputs, None, None, None
        if ctx.version is not None:
            ctx.version.check(grad.shape)
        needs = of_weight, False
        *grads, _ = ctx.norm.backward(packed, rstd, ctx.weight, None, grad, dtypes, needs, beside, None)
        return *grads, None, None


@one_option
def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    *,
    codes: Codes = INT8,
) -> tuple[Tensor, Tensor]:
    """Return :func:`rms_norm` of ``x + residual``, and the sum.

    Each half of a pre-norm block begins like this: a branch's output is added to the residual stream, and the norm of
    the sum enters the next branch. The kernels add and normalise in one pass. Backward computes the gradient through
    the norm and adds the gradient of the sum in one pass.

    Parameters
    ----------
    x : Tensor, [..., features], floating point
    residual : Tensor, the shape of ``x``, floating point, or None
        None means zero: the returned sum is ``x`` itself, without a copy.
    weight : Tensor, [features], or None
        Factor of normalised elements.
    eps : float
        Added to the mean square.
    codes : Codes
        How to store ``x`` if ``residual`` is None. With ``bits=None``, outputs and gradients equal those of the
        separate operators to the bit.

    Returns
    -------
    Tensor, the shape of ``x``
        The norm.
    Tensor, the shape of ``x``
        The sum, in torch's promoted dtype. Do not write to the sum: backward reads this memory. If ``residual`` is
        None, ``x`` is saved in codes instead, except 16-bit rows under torch.utils.checkpoint.

    Raises
    ------
    RuntimeError
        In backward, autograd's own error, if the sum was written to.

    Notes
    -----
    Differentiable once: backward with ``create_graph=True`` raises PyactcompError. The error bound is the one of
    :func:`rms_norm`, with ``e = 0`` where the sum is saved. Both gradients are rounded before they are added, as in
    autograd.

    Examples
    --------
    >>> import torch
    >>> from pyactcomp.functional import rms_norm
    >>> from pyactcomp.functional.norms.add_rms_norm import add_rms_norm
    >>> x, residual = torch.randn(2, 8, 128, requires_grad=True)
    >>> normal, total = add_rms_norm(x, residual, None, 1e-6)
    >>> torch.equal(total, x + residual)
    True
    >>> torch.equal(normal, rms_norm(x + residual, None, 1e-6))
    True
    """
    how = saving(codes)
    check_rows("add_rms_norm", x, weight)
    if residual is not None:
        check_float_tensor("residual", residual)
        if residual.shape != x.shape:
            got = tuple(x.shape), tuple(residual.shape)
            raise ValueError(f"add_rms_norm expects x and residual of one shape, got {got[0]} and {got[1]}")
    fused = are_contiguous(x, residual) and serves(x, residual, x.shape[-1:], _dtype_of(x, residual, weight), how)
    if fused and recorded(x, residual, weight):
        sums: Any = _AddRmsNorm.apply(x, residual, weight, eps, how)  # type: ignore[no-untyped-call]
        return cast("tuple[Tensor, Tensor]", sums)
    total = x if residual is None else x + residual
    return rms_norm(total, weight, eps, copy=residual is not None and how.bits is not None, codes=how), total
