"""``layer_norm``, which stores its input in codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..codec import Impl, Rounding
from ._saving import Saving, check_float_tensor, differentiable_once, recorded, saving


def _to(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if t is None else t.to(dtype)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        shape: tuple[int, ...],
        eps: float,
        dtype: torch.dtype,
        how: Saving,
    ) -> Tensor:
        ctx.fused_backward, ctx.restore, ctx.shape = None, None, shape
        ctx.dtypes = tuple(None if t is None else t.dtype for t in (x, weight, bias))
        if any(ctx.needs_input_grad[:2]) and how.fuses(x):
            from . import _fused

            if _fused.layer_norm_serves(x, shape, how):
                out, saved, ctx.fused_backward = _fused.layer_norm(x, weight, bias, shape, eps, dtype, how)
                ctx.save_for_backward(*saved, weight)
                return out
        # Statistics in float32 whatever the dtype, which torch keeps in bfloat16 on the CPU.
        ctx.wide = torch.float64 if x.dtype is torch.float64 else torch.float32
        out, mean, rstd = torch.native_layer_norm(
            x.to(ctx.wide), shape, _to(weight, ctx.wide), _to(bias, ctx.wide), eps
        )
        if any(ctx.needs_input_grad[:2]):
            kept, ctx.restore = how.keep(x)
            ctx.save_for_backward(kept, mean, rstd, weight)
        return out.to(dtype)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs = tuple(ctx.needs_input_grad[:3])
        grads: tuple[Tensor | None, ...]
        if not any(needs[:2]):
            grads = None, None, grad.reshape(-1, *ctx.shape).sum(0, dtype=ctx.wide)
        elif ctx.fused_backward is not None:
            grads = ctx.fused_backward(*ctx.saved_tensors, grad, needs)
        else:
            kept, mean, rstd, weight = ctx.saved_tensors
            # Of the bias, backward reads no more than that there is one.
            bias = mean.new_empty(ctx.shape) if needs[2] else None
            x, gamma = ctx.restore(kept).to(ctx.wide), _to(weight, ctx.wide)
            grads = torch.ops.aten.native_layer_norm_backward(
                grad.to(ctx.wide), x, ctx.shape, mean, rstd, gamma, bias, needs
            )
        wanted = (
            g.to(d) if g is not None and need else None for g, d, need in zip(grads, ctx.dtypes, needs, strict=True)
        )
        return *wanted, None, None, None, None


def layer_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    bits: int | None = 8,
    group_size: int = 64,
    rounding: Rounding | None = None,
    seed: int = 0,
    impl: Impl = "auto",
) -> Tensor:
    """Apply layer normalisation and keep ``x`` for backward in codes.

    The mean and the reciprocal deviation of each row are kept in float32 (float64 for float64), the weight as it
    is. Under CUDA autocast the output is float32, as that of :func:`torch.nn.functional.layer_norm`; what is kept
    has the precision of ``x`` all the same.

    Parameters
    ----------
    x : Tensor, [..., *normalized_shape], floating point
    normalized_shape : int or sequence of int
    weight, bias : Tensor, normalized_shape, optional
    eps : float
        Added to the variance.
    bits, group_size, rounding, seed, impl
        As in :func:`linear`.

    Returns
    -------
    Tensor, the shape of ``x``
        Differentiable once: backward with ``create_graph=True`` raises PyactcompError.

    Raises
    ------
    TypeError
        If an argument is no floating-point tensor.
    ValueError
        If the shapes do not match or an option has no such value.
    ImplementationUnavailableError
        If ``impl`` cannot serve the device of ``x``.

    Notes
    -----
    An error of at most ``e`` in ``x`` (:func:`pyactcomp.reference.error_bound`) is one of ``e * rstd`` in the
    normalised row, which is all that the gradients see of ``x``. The fused kernels serve rows of whole groups, up
    to 8192 elements; other rows take a pass more.

    Examples
    --------
    >>> import torch
    >>> from pyactcomp import functional
    >>> x, weight = torch.randn(8, 128), torch.ones(128, requires_grad=True)
    >>> functional.layer_norm(x, 128, weight).sum().backward()
    >>> bool(torch.allclose(weight.grad, torch.nn.functional.layer_norm(x, [128]).sum(0), atol=0.2))
    True
    """
    how = saving(bits, group_size, rounding, seed, impl)
    check_float_tensor("x", x)
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not shape or tuple(x.shape[-len(shape) :]) != shape:
        raise ValueError(f"layer_norm expects x to end with normalized_shape {shape}, got {tuple(x.shape)}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            check_float_tensor(name, parameter)
            if tuple(parameter.shape) != shape:
                raise ValueError(f"layer_norm expects a {name} of {shape}, got {tuple(parameter.shape)}")
    if not recorded(x, weight, bias):
        return F.layer_norm(x, shape, weight, bias, eps)
    dtype = x.dtype
    if x.is_cuda and torch.is_autocast_enabled("cuda") and dtype is not torch.float64:
        dtype = torch.float32
    return cast(Tensor, _LayerNorm.apply(x, weight, bias, shape, eps, dtype, how))  # type: ignore[no-untyped-call]
