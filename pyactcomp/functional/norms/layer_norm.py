"""``layer_norm`` and ``add_layer_norm``: save the normalised tensor in codes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ...engine.recompute import offer, stable_copies
from ..codes import INT8, Codes, one_option
from ..masks.dropout import check_probability, dropout_unchecked
from ..masks.noise import QUIET, draw
from ..saving import Saving, begin, check_dtype, check_float_tensor, differentiable_once, recorded, same, saving, wide
from .launch import draws_noise, norm_of, serves
from .own_forward import OwnForward


def _to(t: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return t if t is None or dtype is None else t.to(dtype)


def _normalised(x: Tensor, residual: Tensor | None, rows: Tensor | None) -> Tensor:
    """Return the tensor to normalise."""
    x = x if residual is None else x + residual
    return x if rows is None else x.index_select(0, rows)


def _under_autocast(x: Tensor) -> bool:
    return x.is_cuda and torch.is_autocast_enabled("cuda") and x.dtype is not torch.float64


def _keeps_itself(x: Tensor, residual: Tensor | None, rows: Tensor | None, own: OwnForward | None) -> bool:
    """Return whether to save ``x`` itself: a program often holds an input that needs no gradient.

    It is the batch, or comes from embeddings that are not trained. Nobody holds the casts that autocast makes.
    """
    if x.requires_grad or residual is not None or rows is not None or own is not None:
        return False
    return x.dtype is torch.float32 or not _under_autocast(x)


def _reads(x: Tensor, tensor: Tensor | None) -> bool:
    """Return whether torch's layer norm of ``x`` reads a tensor itself: nobody writes to what autocast makes."""
    return tensor is not None and (tensor.dtype is torch.float32 or not _under_autocast(x))


class _LayerNorm(torch.autograd.Function):
    """Layer norm as an autograd function, computed by torch's operators."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        rows: Tensor | None,
        shape: tuple[int, ...],
        eps: float,
        dtype: torch.dtype,
        how: Saving,
        own: OwnForward | None,
    ) -> Tensor:
        result = None if own is None else own.result(x)
        dtype = dtype if result is None else result.dtype
        exact = how.bits is None
        ctx.shape = shape
        ctx.dtypes = tuple(None if t is None else t.dtype for t in (x, residual, weight, bias))
        # The bias's gradient does not read x, but with bits=None only torch's operator has torch's rounding of it.
        ctx.keeps = any(ctx.needs_input_grad[: 4 if exact else 3])
        gamma, beta = stable_copies(weight, bias)
        itself = _keeps_itself(x, residual, rows, own)
        read = x if residual is None and not (exact and ctx.keeps) else None
        begin(ctx, *[t for t in (read, None if ctx.keeps else weight, bias) if own is None and _reads(x, t)])
        x = _normalised(x.detach(), None if residual is None else residual.detach(), rows)
        # bits=None follows torch; else statistics are float32 also for 16-bit x, where torch on the CPU has bfloat16.
        ctx.wide = None if exact and not _under_autocast(x) else wide(x.dtype)
        exactly, wide_gamma, wide_beta = (_to(t, ctx.wide) for t in (x, gamma, beta))
        out, mean, rstd = torch.native_layer_norm(cast(Tensor, exactly), shape, wide_gamma, wide_beta, eps)
        out = out.to(dtype) if result is None else result
        if ctx.keeps:
            kept, restore = (x, same) if itself else how.pack_rows(x, math.prod(shape))
            ctx.restore = restore
            ctx.save_for_backward(kept, mean if exact else None, rstd, weight, rows)
            wider, deviation = ctx.wide, None if exact else rstd

            def compute(kept: Tensor, wanted: torch.dtype) -> Tensor:
                made = _recompute(kept, restore, deviation, gamma, beta, shape, eps, wider)
                return made.to(dtype).to(wanted)

            parameters = [t for t in (gamma, beta) if t is not None]
            if out.is_contiguous():
                offer(ctx, out, compute, *parameters, stored=(kept,))
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs = tuple(ctx.needs_input_grad[:4])
        grads: tuple[Tensor | None, ...]
        if not ctx.keeps:
            grads = None, None, None, grad.reshape(-1, *ctx.shape).sum(0, dtype=ctx.wide)
        else:
            kept, mean, rstd, weight, rows = ctx.saved_tensors
            x, gamma = _to(ctx.restore(kept), ctx.wide), _to(weight, ctx.wide)
            assert x is not None
            if mean is None:
                mean = _mean(x, ctx.shape)
            # Torch's backward needs a bias but does not read it.
            beta = (x if gamma is None else gamma).new_empty(ctx.shape) if needs[3] else None
            mask = needs[0] or needs[1], *needs[2:]
            grad_x, *of_parameters = torch.ops.aten.native_layer_norm_backward(
                grad.to(x.dtype), x, ctx.shape, mean, rstd, gamma, beta, mask
            )
            if rows is not None and grad_x is not None:
                grad_x = torch.empty_like(grad_x).index_copy_(0, rows.long(), grad_x)
            grads = grad_x, grad_x, *of_parameters
        wanted = (
            g.to(d) if g is not None and need else None for g, d, need in zip(grads, ctx.dtypes, needs, strict=True)
        )
        return *wanted, *(None,) * 6


def _mean(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.mean(tuple(range(-len(shape), 0)), keepdim=True)


def _recompute(
    kept: Tensor,
    restore: Any,
    rstd: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    shape: tuple[int, ...],
    eps: float,
    wide: torch.dtype | None,
) -> Tensor:
    """Recompute the output: by torch's operator, or from restored rows and their reciprocal deviations."""
    x, gamma, beta = cast(Tensor, _to(restore(kept), wide)), _to(weight, wide), _to(bias, wide)
    if rstd is None:
        return torch.native_layer_norm(x, shape, gamma, beta, eps)[0]
    out = (x - _mean(x, shape)) * rstd
    if gamma is not None:
        out = out * gamma
    return out if beta is None else out + beta


def _checked_shape(
    function: str, x: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None, bias: Tensor | None
) -> tuple[int, ...]:
    check_float_tensor("x", x)
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not shape or tuple(x.shape[-len(shape) :]) != shape:
        raise ValueError(f"{function} expects x to end with normalized_shape {shape}, got {tuple(x.shape)}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            check_float_tensor(name, parameter)
            if tuple(parameter.shape) != shape:
                raise ValueError(f"{function} expects a {name} of {shape}, got {tuple(parameter.shape)}")
    return shape


def _checked_rows(rows: Tensor, count: int) -> None:
    if not isinstance(rows, Tensor) or rows.dtype not in (torch.int32, torch.int64):
        got = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
        raise TypeError(f"rows must be an int32 or int64 torch.Tensor, got {got}")
    if tuple(rows.shape) != (count,):
        raise ValueError(f"rows must name each of the {count} rows of x once, got indices of {tuple(rows.shape)}")


def _dtype_of(x: Tensor, residual: Tensor | None) -> torch.dtype:
    """Return the output dtype of torch's function."""
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    return torch.float32 if dtype is not torch.float64 and _under_autocast(x) else dtype


def layer_norm_unchecked(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    rows: Tensor | None,
    shape: tuple[int, ...],
    eps: float,
    dtype: torch.dtype | None,
    how: Saving,
    p: float = 0.0,
    own: OwnForward | None = None,
) -> Tensor:
    """Return :func:`layer_norm` of x, or :func:`add_layer_norm`, of arguments that are known to be right.

    ``own`` computes the result in the way of a program's own code.
    """
    wanted = _dtype_of(x, residual) if dtype is None else dtype
    fused = recorded(x, residual, weight) and serves(x, residual, shape, wanted, how)
    noise = QUIET
    if p > 0:
        if p < 1 and fused and draws_noise(x, residual, shape, how):
            noise = draw(x, p)
        if not noise.quads:
            x = dropout_unchecked(x, p)
            fused = fused and serves(x, residual, shape, wanted, how)
    itself = not noise.quads and _keeps_itself(x, residual, rows, own)
    if fused and (x.is_contiguous() or not itself):
        norm = norm_of(shape, True, eps, how, x.dtype if itself else None)
        total, drawn = x if itself else None, noise if noise.quads else None
        result = None if own is None else own.result(x)
        wanted = wanted if result is None else result.dtype
        # Backward reads the weight itself, whatever torch's own would.
        reads_x, reads_bias = (own is None and _reads(x, t) for t in (None if residual is not None else x, bias))
        return norm.apply(x, residual, weight, bias, rows, wanted, total, drawn, result, reads_x, reads_bias)
    if own is None and not recorded(x, residual, weight, bias):
        out = F.layer_norm(_normalised(x, residual, rows), shape, weight, bias, eps)
        return out if dtype is None else out.to(dtype)
    out = _LayerNorm.apply(x, residual, weight, bias, rows, shape, eps, wanted, how, own)  # type: ignore[no-untyped-call]
    return cast(Tensor, out)


@one_option
def layer_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
    rows: Tensor | None = None,
    codes: Codes = INT8,
) -> Tensor:
    """Apply layer normalisation and save ``x`` for backward in codes.

    The reciprocal deviation of each row is saved in float32 (float64 for float64), the weight unpacked. Under CUDA
    autocast the output is float32, like the output of :func:`torch.nn.functional.layer_norm`, and the codes are those
    of the uncast ``x``. Under :func:`pyactcomp.compress`, operators saving the output keep no copy: backward recomputes
    the output.

    Parameters
    ----------
    x : Tensor, [..., *normalized_shape], floating point
    normalized_shape : int or sequence of int
        The trailing dimensions to normalise over.
    weight, bias : Tensor, normalized_shape, optional
        Factor and offset of normalised elements.
    eps : float
        Added to the variance.
    dtype : torch.dtype, optional
        The dtype of the output; by default that of torch's function.
    rows : Tensor, [n], int32 or int64, optional
        A permutation of the n rows of ``x``: row i of the output [n, *normalized_shape] is the norm of row ``rows[i]``.
        Not checked to be a permutation: the check would wait for the device.
    codes : Codes
        How to store ``x``. With ``bits=None``, output and gradients equal those of torch's function to the bit.

    Returns
    -------
    Tensor, the shape of ``x``, or [n, *normalized_shape]

    Raises
    ------
    TypeError
        If ``rows`` is not an int32 or int64 tensor, or ``dtype`` is not floating point.

    Notes
    -----
    The gradients depend on ``x`` only through the normalised row: an error of at most ``e`` in ``x``
    (:func:`pyactcomp.codec.reference.error_bound`) becomes one of at most ``2 * e * rstd`` there, as the mean is
    recomputed from the restored row. The fused kernels serve rows of whole groups, or longer than a group and a
    multiple of 32, up to 8192 elements; other rows take one more pass.

    Examples
    --------
    >>> import torch
    >>> from pyactcomp import functional
    >>> x, weight = torch.randn(8, 128), torch.ones(128, requires_grad=True)
    >>> functional.layer_norm(x, 128, weight).sum().backward()
    >>> bool(torch.allclose(weight.grad, torch.nn.functional.layer_norm(x, [128]).sum(0), atol=0.2))
    True
    """
    how = saving(codes)
    shape = _checked_shape("layer_norm", x, normalized_shape, weight, bias)
    check_dtype("layer_norm", dtype)
    if rows is not None:
        _checked_rows(rows, x.shape[: -len(shape)].numel())
        x = x.reshape(-1, *shape)
    return layer_norm_unchecked(x, None, weight, bias, rows, shape, eps, dtype, how)


@one_option
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    p: float = 0.0,
    dtype: torch.dtype | None = None,
    codes: Codes = INT8,
) -> Tensor:
    """Apply layer normalisation to ``dropout(x, p) + residual`` and save the sum for backward in codes.

    The sum is rounded to torch's promoted dtype, like that of a separate addition. The fused kernels write neither the
    sum nor the output of dropout to memory, and save no mask: backward redraws the random numbers from torch's seed.

    Parameters
    ----------
    x : Tensor, [..., *normalized_shape], floating point
    residual : Tensor, the shape of ``x``, floating point
    normalized_shape, weight, bias, eps, dtype
        As in :func:`layer_norm`.
    p : float
        Probability of dropping an element, from 0 to 1. Given the same state of torch's generator, the same elements
        as in :func:`dropout` are dropped.
    codes : Codes
        How to store the sum.

    Returns
    -------
    Tensor, the shape of ``x``

    Raises
    ------
    TypeError
        If ``dtype`` is not floating point.
    ValueError
        If ``p`` is not from 0 to 1.

    Notes
    -----
    The error bound is the one of :func:`layer_norm`, with ``e`` the error of the sum.

    Examples
    --------
    >>> import torch
    >>> from pyactcomp.functional.norms.layer_norm import add_layer_norm
    >>> x, residual = torch.randn(8, 128, requires_grad=True), torch.randn(8, 128)
    >>> out = add_layer_norm(x, residual, 128)
    >>> bool(torch.equal(out, torch.nn.functional.layer_norm(x + residual, [128])))
    True
    """
    how = saving(codes)
    shape = _checked_shape("add_layer_norm", x, normalized_shape, weight, bias)
    check_dtype("add_layer_norm", dtype)
    check_float_tensor("residual", residual)
    if residual.shape != x.shape:
        raise ValueError(f"add_layer_norm expects a residual of {tuple(x.shape)}, got {tuple(residual.shape)}")
    check_probability(p)
    return layer_norm_unchecked(x, residual, weight, bias, None, shape, eps, dtype, how, float(p))
