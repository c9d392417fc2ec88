"""``add_rms_norm``: a sum and its norm, for pre-norm blocks."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor

from ...codec.layouts import layout_of
from ...engine.recompute import offer, stable_copy
from ...engine.saved import Versioned
from ...torch_private import under_checkpoint
from ..codes import INT8, Codes, one_option
from ..saving import Saving, begin, check_float_tensor, differentiable_once, recorded, saving
from .launch import Norm, are_contiguous, norm_of, serves
from .rms_norm import check_rows, rms_norm


def _keeps_itself(x: Tensor, residual: Tensor | None) -> bool:
    """Return whether to save the normalised tensor unpacked.

    A sum is in memory anyway, for the next addition. Under torch.utils.checkpoint saved tensors live for one block
    only: packing 16-bit rows to half their size is not worth the time.
    """
    return residual is not None or (under_checkpoint() and x.dtype.itemsize == 2)


def _dtype_of(*tensors: Tensor | None) -> torch.dtype:
    """Return the dtype that torch promotes the tensors to."""
    return functools.reduce(torch.promote_types, (t.dtype for t in tensors if t is not None))


class _AddRmsNorm(torch.autograd.Function):
    """The fused path: :func:`serves` is true."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, how: Saving
    ) -> tuple[Tensor, Tensor]:
        # Check x only where torch saves it: for a sum torch saves the sum, for 16-bit rows a float32 cast.
        begin(ctx, x if residual is None and x.dtype.itemsize >= 4 else None)
        gamma = stable_copy(weight)
        itself = _keeps_itself(x, residual)
        total = x if residual is None else torch.empty_like(x, dtype=_dtype_of(x, residual))
        ctx.norm = norm = norm_of(tuple(x.shape[-1:]), False, eps, how, total.dtype if itself else None)
        dtype = _dtype_of(total, weight)
        out, packed, rstd = norm.forward(x, residual, gamma, None, None, dtype, total if itself else None)
        ctx.dtypes = tuple(None if t is None else t.dtype for t in (x, residual, weight))
        # torch.utils.checkpoint does not check saved tensors for writes.
        ctx.version = Versioned(total) if itself and under_checkpoint() else None
        ctx.save_for_backward(packed, rstd, weight)
        compute = functools.partial(Norm.recompute, norm, packed, rstd, gamma, None, layout_of(out).shape)
        read = packed if itself else None, gamma
        offer(ctx, out, compute, *(t for t in read if t is not None))
        if not any(ctx.needs_input_grad[:2]):
            ctx.mark_non_differentiable(total)
        return out, total

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor | None, beside: Tensor | None) -> tuple[Tensor | None, ...]:
        packed, rstd, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        dtypes = tuple(d if need else None for d, need in zip(ctx.dtypes, needs, strict=True))
        if grad is None:
            of_inputs = (None if d is None or beside is None else beside.to(d) for d in dtypes[:2])
            return *of_inputs, None, None, None
        if ctx.version is not None:
            ctx.version.check(grad.shape)
        if beside is not None:
            beside = beside.contiguous()
        grads = ctx.norm.backward(packed, rstd, weight, None, grad, dtypes[:2], (needs[2], False), beside)
        return *(None if g is None else g.to(d) for g, d in zip(grads[:3], dtypes, strict=True)), None, None


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
    >>> from pyactcomp import functional
    >>> x, residual = torch.randn(2, 8, 128, requires_grad=True)
    >>> normal, total = functional.add_rms_norm(x, residual, None, 1e-6)
    >>> torch.equal(total, x + residual)
    True
    >>> torch.equal(normal, functional.rms_norm(x + residual, None, 1e-6))
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
