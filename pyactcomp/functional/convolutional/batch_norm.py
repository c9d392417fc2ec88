"""``batch_norm``, fused with a residual block's addition and ReLU: saves the input in codes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ...codec.layouts import arranged, layout_of, overlaps, suggested_layout
from ...engine.recompute import mark_as_packed, offer, stable_copies
from ...engine.saved import PLAIN
from ...torch_private import normalises_by_cudnn
from ..codes import INT8, Codes, one_option
from ..saving import Restore, Saving, begin, check_float_tensor, differentiable_once, recorded, same, saving, wide

if TYPE_CHECKING:
    from .launch import BatchNormKernels

# The smallest normal float16: recomputed positive outputs are at least this, so positive in every dtype.
_SMALLEST = 2.0**-14


def _to(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if t is None else t.to(dtype)


def _as_torch_takes_it(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return ``x`` with the strides that torch's kernel sees; output and gradient have the same strides.

    cuDNN gets a copy in one of torch's memory formats. Torch's own kernels, on the GPU and the CPU, take ``x`` itself.
    """
    if not x.is_cuda or type(x) not in PLAIN or torch.compiler.is_compiling() or weight is None or bias is None:
        return x
    layout = layout_of(x)
    suggested = suggested_layout(layout)
    if layout == suggested or not normalises_by_cudnn(x, weight, bias, eps):
        return x
    return arranged(x, suggested)


def _normalise(
    x: Tensor,
    running: tuple[Tensor | None, Tensor | None],
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised ``x``, mean and rstd, all in float32 (float64 for float64), and update ``running``."""
    exact = wide(x.dtype)
    mean, var = (_to(t, exact) for t in running)
    result = torch.native_batch_norm(x.to(exact), _to(weight, exact), _to(bias, exact), mean, var, True, momentum, eps)
    for own, updated in zip(running, (mean, var), strict=True):
        if own is not None and updated is not None and own is not updated:
            own.copy_(updated)
    return result


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        running: tuple[Tensor | None, Tensor | None],
        momentum: float,
        eps: float,
        relu: bool,
        how: Saving,
    ) -> Tensor:
        ctx.eps = eps
        ctx.dtypes = tuple(None if t is None else t.dtype for t in (x, weight, bias, residual))
        recomputes = residual is None and how.bits is not None
        gamma, beta = stable_copies(weight, bias) if recomputes else (None, None)
        operands = [t for t in (gamma, beta) if t is not None]
        y, mean, rstd = _normalise(x, running, weight, bias, momentum, eps)
        out = y.to(x.dtype)
        if residual is not None:
            out = out + residual
        signs = None
        restore_signs: Restore = same
        if relu:
            out = torch.relu(out)
            # NaN has a gradient, as in torch's ReLU.
            signs = ~(out <= 0)
            if how.bits is not None:
                signs, restore_signs = how.pack_mask(signs)
        channels = (1, -1) + (1,) * (x.dim() - 2)
        if how.bits is None:
            kept, restore = how.pack(x)
        else:
            # Channels of x may lie orders of magnitude apart, and share groups unless a channel fills them. All
            # channels of the normalised x have deviation 1.
            kept, restore = how.pack((x.to(mean.dtype) - mean.view(channels)) * rstd.view(channels))
            mark_as_packed(kept, x)
        ctx.restore, ctx.restore_mask, ctx.layout = restore, restore_signs, layout_of(x)
        if recomputes:

            def compute(kept: Tensor, *rest: Any) -> Tensor:
                *signs, dtype = rest
                y = restore(kept)
                if gamma is not None:
                    y = y * gamma.view(channels)
                if beta is not None:
                    y = y + beta.view(channels)
                if signs:
                    y = torch.where(restore_signs(signs[0]), y.clamp_min(_SMALLEST), 0.0)
                return y.to(dtype)

            offer(ctx, out, compute, *operands, stored=(kept,) if signs is None else (kept, signs))
        ctx.save_for_backward(kept, mean if how.bits is None else None, rstd, weight, signs)
        begin(ctx, None if how.bits is None else x, out if relu else None)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, mean, rstd, weight, kept_mask = ctx.saved_tensors
        needs = ctx.needs_input_grad[:4]
        if kept_mask is not None:
            grad = torch.where(ctx.restore_mask(kept_mask), grad, 0.0)
        x = ctx.restore(kept).to(rstd.dtype)
        # The restored x is dense. Give it the input's strides, which decide the strides of the gradient.
        x = x if overlaps(ctx.layout) else arranged(x, ctx.layout)
        # The CUDA operator allocates the gradients of weight and bias like the weight, so it needs one.
        one = torch.ones_like(rstd)
        gamma = one if weight is None else weight.to(rstd.dtype)
        if mean is None:
            # The restored x is normalised: the gradient is that of a norm with mean 0 and deviation 1.
            mean, rstd, gamma = torch.zeros_like(rstd), one, gamma * rstd
        grads = list(
            torch.ops.aten.native_batch_norm_backward(
                grad.to(rstd.dtype), x, gamma, None, None, mean, rstd, True, ctx.eps, [True, True, True]
            )
        )
        grads.append(grad)
        wanted = (g.to(d) if need else None for g, d, need in zip(grads, ctx.dtypes, needs, strict=True))
        return *wanted, None, None, None, None, None


def kernels_for(x: Tensor, how: Saving) -> BatchNormKernels | None:
    """Return the fused kernels of batch norms like that of ``x``, if there are; they do not serve every call."""
    if how.bits != 8 or x.shape[1] % how.group_size != 0 or not how.fuses(x):
        return None
    from .launch import batch_norm_of

    return batch_norm_of(x.shape[1], x.itemsize, how)


@one_option
def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    relu: bool = False,
    residual: Tensor | None = None,
    codes: Codes = INT8,
) -> Tensor:
    """Normalise channels by the batch's statistics, add ``residual``, apply ReLU; save ``x`` for backward in codes.

    Computes ``relu(batch_norm(x) + residual)`` in training mode. Saves the codes of the normalised ``x``, the
    reciprocal deviation of each channel, one bit per element for ReLU and, with a residual, codes of the output. If
    another operator saved the output, backward recomputes the output from these.

    Parameters
    ----------
    x : Tensor, [N, C, ...], floating point
        Statistics are over all dimensions but C.
    running_mean, running_var : Tensor, [C], or None
        Updated in place to ``momentum * batch + (1 - momentum) * running``; the batch's variance is the unbiased one.
    weight, bias : Tensor, [C], optional
        Factor and offset of normalised elements.
    momentum : float
        Weight of the batch in the running statistics.
    eps : float
        Added to the variance.
    relu : bool
        Whether to apply ReLU.
    residual : Tensor, the shape and dtype of ``x``, optional
        Added before ReLU.
    codes : Codes
        How to store the normalised ``x`` and, with a residual, the output.

    Returns
    -------
    Tensor, the shape and dtype of ``x``

    Raises
    ------
    ValueError
        If channels have one element only.

    Notes
    -----
    The gradients depend on ``x`` only through the normalised elements, which are stored: an element is off by at most
    :func:`pyactcomp.codec.reference.error_bound` of the normalised elements, whatever the magnitudes of the channels
    that share a group. The fused kernels serve channels-last [N, C, H, W] with 8-bit codes and C a multiple of the
    group size; other inputs take a few more passes. Partial means and variances are combined after Chan, Golub and
    LeVeque (1983).

    Examples
    --------
    >>> import torch
    >>> from pyactcomp.functional.convolutional.batch_norm import batch_norm
    >>> x, mean, var = torch.randn(8, 4, 5, 5).requires_grad_(), torch.zeros(4), torch.ones(4)
    >>> y = batch_norm(x, mean, var, relu=True)
    >>> bool(torch.allclose(y, torch.nn.functional.batch_norm(x, None, None, training=True).relu()))
    True
    """
    how = saving(codes)
    check_float_tensor("x", x)
    if x.dim() < 2:
        raise ValueError(f"batch_norm expects x of [N, C, ...], got {tuple(x.shape)}")
    channels = x.shape[1:2]
    if x.numel() == channels.numel():
        raise ValueError(f"batch_norm expects more than one element a channel, got {tuple(x.shape)}")
    named = (("running_mean", running_mean), ("running_var", running_var), ("weight", weight), ("bias", bias))
    for name, t in named:
        if t is not None:
            check_float_tensor(name, t)
            if t.shape != channels:
                raise ValueError(f"batch_norm expects {name} of {tuple(channels)}, got {tuple(t.shape)}")
    if (running_mean is None) != (running_var is None):
        raise ValueError("batch_norm expects both of running_mean and running_var, or neither")
    if residual is not None:
        check_float_tensor("residual", residual)
        if residual.shape != x.shape or residual.dtype is not x.dtype:
            got = f"{tuple(residual.shape)} and {residual.dtype}"
            raise ValueError(f"batch_norm expects a residual of {tuple(x.shape)} and {x.dtype}, got {got}")
    running = (running_mean, running_var)
    x = _as_torch_takes_it(x, weight, bias, eps)
    if not recorded(x, weight, bias, residual):
        out = _normalise(x, running, weight, bias, momentum, eps)[0].to(x.dtype)
        out = out if residual is None else out + residual
        return torch.relu(out) if relu else out
    kernels = kernels_for(x, how)
    if kernels is not None:
        made = kernels.apply_where_served(x, residual, weight, bias, *running, momentum, eps, relu)
        if made is not None:
            return made
    return cast(
        Tensor,
        _BatchNorm.apply(x, weight, bias, residual, running, momentum, eps, relu, how),  # type: ignore[no-untyped-call]
    )
