"""``rms_norm``: saves the input in codes."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ...engine.recompute import offer, stable_copies
from ..codes import INT8, Codes, one_option
from ..saving import (
    Restore,
    Saving,
    begin,
    check_dtype,
    check_float_tensor,
    differentiable_once,
    recorded,
    same,
    saving,
)
from .launch import norm_of, serves
from .own_forward import OwnForward


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.to(torch.float32)


def _reciprocal_deviation(wide: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def _scaled(wide: Tensor, rstd: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    row = (wide * rstd).to(dtype)
    return row if weight is None else weight * row


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    wide = _wide(x)  # once: its gradients are summed before they are rounded
    return _scaled(wide, _reciprocal_deviation(wide, eps), weight, x.dtype)


class _RmsNorm(torch.autograd.Function):
    """RMS norm as an autograd function, computed by torch's operators."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        eps: float,
        dtype: torch.dtype,
        copy: bool,
        how: Saving,
        own: OwnForward | None,
    ) -> Tensor:
        result = None if own is None else own.result(x)
        # Check x only where torch's chain of operators saves it: for 16-bit rows torch saves a float32 cast.
        begin(ctx, x if how.bits is not None and _wide(x) is x and own is None else None)
        (gamma,) = stable_copies(weight)
        ctx.eps = eps
        ctx.dtypes = x.dtype, None if weight is None else weight.dtype
        if _keeps_itself(x, own):
            kept, ctx.restore = x.detach(), same
        else:
            kept, ctx.restore = how.copy_as_bytes(x) if copy else how.pack_rows(x.detach(), x.shape[-1])
        wide = _wide(x)
        rstd = _reciprocal_deviation(wide, eps)
        # With bits=None backward differentiates torch's chain of operators, rstd included.
        ctx.exact = how.bits is None
        # Only the gradient of x reads the weight: without it torch lets the weight change before backward.
        read = weight if ctx.needs_input_grad[0] else None
        ctx.save_for_backward(kept, None if ctx.exact else rstd, read)
        out = _scaled(wide, rstd, weight, x.dtype).to(dtype) if result is None else result
        if out.is_contiguous():
            parameters = () if gamma is None else (gamma,)
            restore = ctx.restore

            def compute(kept: Tensor, dtype: torch.dtype) -> Tensor:
                return _recompute(kept, restore, rstd, gamma, dtype)

            offer(ctx, out, compute, *parameters, stored=(kept,))
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, rstd, weight = ctx.saved_tensors
        needs = tuple(ctx.needs_input_grad[:2])
        if ctx.exact:
            if weight is None and needs[1]:
                weight = kept.new_ones(kept.shape[-1:], dtype=ctx.dtypes[1])
            grad_x, grad_weight = _differentiated(kept, weight, ctx.eps, grad, needs)
        else:
            row, g = _wide(ctx.restore(kept)) * rstd, _wide(grad)
            grad_weight = (g * row).sum_to_size(row.shape[-1:]) if needs[1] else None
            g = g if weight is None else g * _wide(weight)
            grad_x = (g - row * (g * row).mean(-1, keepdim=True)) * rstd
        grads = (None if g is None else g.to(d) for g, d in zip((grad_x, grad_weight), ctx.dtypes, strict=True))
        return *grads, *(None,) * 5


def _differentiated(
    x: Tensor, weight: Tensor | None, eps: float, grad: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x and weight by autograd."""
    leaves = [
        None if t is None else t.detach().requires_grad_(need) for t, need in zip((x, weight), needs, strict=True)
    ]
    with torch.enable_grad():
        out = _rms_norm(cast(Tensor, leaves[0]), leaves[1], eps)
    wanted = iter(
        torch.autograd.grad(out, [t for t in leaves if t is not None and t.requires_grad], grad.to(out.dtype))
    )
    return tuple(next(wanted) if need else None for need in needs)


def _recompute(kept: Tensor, restore: Restore, rstd: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    x = restore(kept)
    return _scaled(_wide(x), rstd, weight, x.dtype).to(dtype)


def check_rows(name: str, x: Tensor, weight: Tensor | None) -> None:
    """Raise unless the function ``name`` got floating-point rows and a weight of their length."""
    check_float_tensor("x", x)
    if weight is not None:
        check_float_tensor("weight", weight)
    if x.dim() == 0 or (weight is not None and weight.shape != x.shape[-1:]):
        got = "None" if weight is None else tuple(weight.shape)
        raise ValueError(
            f"{name} expects x of [..., features] and weight of [features], got {tuple(x.shape)} and {got}"
        )


@one_option
def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    dtype: torch.dtype | None = None,
    copy: bool = False,
    codes: Codes = INT8,
) -> Tensor:
    """Divide rows by their root mean square, multiply them by a weight, and save ``x`` for backward in codes.

    Formula and roundings are those of Llama's norm: the row is divided in float32 (float64 for float64), rounded to the
    dtype of ``x``, and multiplied by the weight in torch's promoted dtype. :func:`torch.nn.functional.rms_norm` over
    the last dimension multiplies before rounding, so the two differ by an ulp or two of the dtype of ``x``; where torch
    takes ``eps=None``, pass the machine epsilon. Under :func:`pyactcomp.compress`, operators saving the output keep no
    copy: backward recomputes the output.

    Parameters
    ----------
    x : Tensor, [..., features], floating point
    weight : Tensor, [features], or None
        Factor of normalised elements.
    eps : float
        Added to the mean square.
    dtype : torch.dtype, optional
        The dtype of the output; by default the promoted one.
    copy : bool
        Whether to save a copy of ``x`` in its own dtype instead of codes. Everything backward computes from the copy,
        including the recomputed output, then has rounding errors only. Worth the memory if the output is the input of
        large weights, whose gradients read the recomputed output.
    codes : Codes
        How to store ``x``. With ``bits=None``, output and gradients equal those of the separate operators to the bit.

    Returns
    -------
    Tensor, the shape of ``x``

    Raises
    ------
    TypeError
        If ``x``, ``weight`` or ``dtype`` is not floating point.
    ValueError
        If ``x`` has no dimension or ``weight`` not the length of its rows, or if ``copy=True`` is given with
        ``bits=None``, where ``x`` is saved unpacked.

    Notes
    -----
    ``rstd``, the reciprocal of the root, is saved in float32 (float64 for float64). The gradients depend on ``x`` only
    through the normalised row: an error of at most ``e`` in ``x`` (:func:`pyactcomp.codec.reference.error_bound`)
    becomes one of at most ``e * rstd`` there. The fused kernels serve rows of whole groups, or longer than a group and
    a multiple of 32, up to 8192 elements; other rows take more passes.

    Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467).

    Examples
    --------
    >>> import torch
    >>> from pyactcomp import functional
    >>> x, weight = torch.randn(8, 128), torch.ones(128, requires_grad=True)
    >>> functional.rms_norm(x, weight, 1e-6).sum().backward()
    >>> exact = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).sum(0)
    >>> bool(torch.allclose(weight.grad, exact, atol=0.2))
    True
    """
    how = saving(codes)
    check_rows("rms_norm", x, weight)
    check_dtype("rms_norm", dtype)
    if copy and how.bits is None:
        raise ValueError("copy=True stands in place of codes, and bits=None keeps x itself; leave one of them out")
    return rms_norm_unchecked(x, weight, eps, dtype, copy, how)


def _keeps_itself(x: Tensor, own: OwnForward | None) -> bool:
    """Return whether to save ``x`` itself: a program often holds an input that needs no gradient.

    It is the batch, or comes from embeddings that are not trained.
    """
    return not x.requires_grad and own is None and _wide(x) is x


def rms_norm_unchecked(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype | None,
    copy: bool,
    how: Saving,
    own: OwnForward | None = None,
) -> Tensor:
    """Return :func:`rms_norm` of arguments that are known to be right.

    ``own`` computes the result in the way of a program's own code.
    """
    if own is None and not recorded(x, weight):
        out = _rms_norm(x, weight, eps)
        return out if dtype is None else out.to(dtype)
    shape = x.shape[-1:]
    if dtype is None:
        dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    if x.is_contiguous() and serves(x, None, shape, dtype, how):
        itself = _keeps_itself(x, own)
        norm = norm_of(shape, False, eps, how, x.dtype if copy or itself else None)
        result = None if own is None else own.result(x)
        dtype = dtype if result is None else result.dtype
        # Torch's chain of operators saves x only in float32: for 16-bit rows it saves a cast.
        reads_x = own is None and x.dtype is torch.float32
        return norm.apply(x, None, weight, None, None, dtype, x if itself else None, None, result, reads_x, False)
    return cast(Tensor, _RmsNorm.apply(x, weight, eps, dtype, copy, how, own))  # type: ignore[no-untyped-call]
