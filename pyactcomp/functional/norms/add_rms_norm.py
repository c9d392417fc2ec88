"""``add_rms_norm``, the norm of a sum and the sum, for blocks that normalise what comes in and add to it."""

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
from .launch import Norm, norm_of, serves
from .rms_norm import check_rows, rms_norm


def _keeps_itself(x: Tensor, residual: Tensor | None) -> bool:
    """Return whether to keep what is normalised as it is, and no codes of it.

    A sum is written for what adds to it next. Under torch.utils.checkpoint what is kept lives for one block only: to
    pack half of 16 bits costs more than it brings.
    """
    return residual is not None or (under_checkpoint() and x.dtype.itemsize == 2)


def _dtype_of(*tensors: Tensor | None) -> torch.dtype:
    """Return what torch promotes tensors to."""
    return functools.reduce(torch.promote_types, (t.dtype for t in tensors if t is not None))


class _AddRmsNorm(torch.autograd.Function):
    """The fused form alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, how: Saving
    ) -> tuple[Tensor, Tensor]:
        # A sum is kept itself, and of a narrower row the chain of operators saves a cast.
        begin(ctx, x if residual is None and x.dtype.itemsize >= 4 else None)
        gamma = stable_copy(weight)
        itself = _keeps_itself(x, residual)
        total = x if residual is None else torch.empty_like(x, dtype=_dtype_of(x, residual))
        ctx.norm = norm = norm_of(tuple(x.shape[-1:]), False, eps, how, total.dtype if itself else None)
        dtype = _dtype_of(total, weight)
        out, packed, rstd = norm.forward(x, residual, gamma, None, None, dtype, total if itself else None)
        ctx.dtypes = tuple(None if t is None else t.dtype for t in (x, residual, weight))
        # torch.utils.checkpoint does not look whether what it keeps was written to.
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

    The two halves of a pre-norm block begin so: what a branch returned is added to what went past it, the sum goes on
    past the next branch and its norm into that. The kernels add and normalise in one pass, and backward adds the
    gradients of the sum and of the norm in the pass that computes the latter.

    Parameters
    ----------
    x : Tensor, [..., features], floating point
    residual : Tensor, the shape of ``x``, floating point, or None
        None stands for zero: the sum is ``x`` itself, without a copy.
    weight : Tensor, [features], or None
    eps : float
        Added to the mean square.
    codes : Codes
        How to store ``x`` without a residual. With ``bits=None`` outputs and gradients are those of the separate
        operators to the bit.

    Returns
    -------
    Tensor, the shape of ``x``
        The norm.
    Tensor, the shape of ``x``
        The sum, of the dtype that torch gives it. Do not write to it: it is what is kept for backward. Where
        ``residual`` is None, ``x`` is kept in codes, except under torch.utils.checkpoint in 16 bits.

    Raises
    ------
    RuntimeError
        In backward, autograd's own, if the sum was written to.

    Notes
    -----
    Differentiable once where the kernels serve it: backward with ``create_graph=True`` raises PyactcompError. The
    numerical bound is that of :func:`rms_norm`, with ``e = 0`` where the sum is kept. Both gradients are rounded before
    they are added, as autograd adds them.

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
    fused = serves(x, residual, x.shape[-1:], _dtype_of(x, residual, weight), how)
    if fused and recorded(x, residual, weight):
        sums: Any = _AddRmsNorm.apply(x, residual, weight, eps, how)  # type: ignore[no-untyped-call]
        return cast("tuple[Tensor, Tensor]", sums)
    total = x if residual is None else x + residual
    return rms_norm(total, weight, eps, copy=residual is not None and how.bits is not None, codes=how), total
