"""``window_attention``: saves the projected queries, keys and values, and no probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from ...engine.recompute import offer
from ..codes import INT8, Codes, one_option
from ..saving import Saving, begin, check_float_tensor, differentiable_once, recorded, saving, wide


def _split(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Return q, k and v as views [windows, heads, tokens, head_dim]."""
    count, tokens, width = qkv.shape
    return qkv.view(count, tokens, 3, heads, width // (3 * heads)).permute(2, 0, 3, 1, 4).unbind(0)


def _merge(x: Tensor) -> Tensor:
    """Return [windows, heads, tokens, head_dim] as [windows, tokens, heads * head_dim], never as a view."""
    return torch.cat(x.unbind(1), -1)


def _probabilities(q: Tensor, k: Tensor, bias: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    exact = wide(q.dtype)
    scores = ((q * scale) @ k.transpose(-2, -1)).to(exact) + bias
    if mask is not None:
        scores = (torch.unflatten(scores, 0, (-1, len(mask))) + mask[:, None]).flatten(0, 1)
    return scores.softmax(-1).to(exact)


def _attend(qkv: Tensor, heads: int, bias: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    with torch.autocast(qkv.device.type, enabled=False):
        q, k, v = _split(qkv, heads)
        return _merge(_probabilities(q, k, bias, mask, scale).to(v.dtype) @ v)


def _attend_backward(
    qkv: Tensor, heads: int, bias: Tensor, mask: Tensor | None, scale: float, grad: Tensor
) -> tuple[Tensor, Tensor]:
    q, k, v = _split(qkv, heads)
    p = _probabilities(q, k, bias, mask, scale)
    g = torch.unflatten(grad, 2, (heads, -1)).transpose(1, 2)
    grad_v = p.to(v.dtype).transpose(-2, -1) @ g
    grad_p = (g @ v.transpose(-2, -1)).to(p.dtype)
    grad_scores = p * (grad_p - (grad_p * p).sum(-1, keepdim=True))
    narrow = grad_scores.to(q.dtype)
    grad_q, grad_k = (narrow @ k) * scale, (narrow.transpose(-2, -1) @ q) * scale
    return torch.cat([_merge(t) for t in (grad_q, grad_k, grad_v)], 2), grad_scores.sum(0)


class _WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, heads: int, bias: Tensor, mask: Tensor | None, scale: float, half: bool, how: Saving
    ) -> Tensor:
        begin(ctx, None if how.bits is None else qkv)
        # A detached bias is not packed by the engine: the bias is small, and backward needs the exact values.
        exact = bias.detach()
        ctx.heads, ctx.scale, ctx.bias_dtype = heads, scale, bias.dtype
        ctx.fused_backward = None
        recompute: Callable[[Tensor], Tensor]
        if how.runs_kernels(qkv):
            from . import launch

            if launch.attention_serves(qkv, heads, how):
                out, kept, recompute, ctx.fused_backward = launch.window_attention(qkv, heads, exact, mask, scale, how)
        if ctx.fused_backward is None:
            kept, restore = how.pack_half(qkv) if half else how.pack(qkv)
            ctx.restore = restore
            out = _attend(qkv, heads, exact, mask, scale)

            def recompute(kept: Tensor) -> Tensor:
                return _attend(restore(kept), heads, exact, mask, scale)

        ctx.save_for_backward(kept, exact, mask)
        source = kept.detach()
        operands = (exact,) if mask is None else (exact, mask)
        offer(ctx, out, lambda source, dtype: recompute(source).to(dtype), *operands, stored=(source,))
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, bias, mask = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            if ctx.fused_backward is not None:
                grad_qkv, grad_bias = ctx.fused_backward(kept, bias, mask, grad)
            else:
                grad_qkv, grad_bias = _attend_backward(ctx.restore(kept), ctx.heads, bias, mask, ctx.scale, grad)
        return grad_qkv, None, grad_bias.to(ctx.bias_dtype), None, None, None, None


@one_option
def window_attention(
    qkv: Tensor,
    heads: int,
    bias: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    codes: Codes = INT8,
) -> Tensor:
    """Attend within windows, softmax(scale * q k^T + bias + mask) v, and save only ``qkv`` for backward.

    Probabilities are computed in float32 and rounded to the dtype of ``qkv``. Backward recomputes the probabilities,
    and recomputes the output if the next projection needs it.

    Parameters
    ----------
    qkv : Tensor, [windows, tokens, 3 * heads * head_dim], floating point
        The output of one projection: the queries of all heads, then the keys, then the values.
    heads : int
        The number of heads.
    bias : Tensor, [heads, tokens, tokens], floating point
        Added to the scores of every window; for example a relative position bias.
    mask : Tensor, [n, tokens, tokens], optional
        ``mask[i]`` is added to the scores of the windows i, n + i, 2 n + i, ... The mask gets no gradient.
    scale : float, optional
        Default: 1 / sqrt(head_dim).
    codes : Codes
        How to store ``qkv``; ``bits=16`` is allowed.

    Returns
    -------
    Tensor, [windows, tokens, heads * head_dim], the dtype of ``qkv``

    Notes
    -----
    Gradients are the exact ones at the restored ``qkv``. With errors of at most ``e_q`` and ``e_k`` in queries and keys
    (:func:`pyactcomp.codec.reference.error_bound`), a score is off by at most
    ``scale * (|q| e_k + |k| e_q + e_q e_k)``, summed over the head. With d the largest such error in a row of scores,
    a probability is off by a factor between exp(-2 d) and exp(2 d), so errors grow with the logits. The fused kernels
    serve bfloat16 and float16, windows of at most 64 tokens, head dimensions of 16, 32 and 64 and, with codes, 8 bits
    in groups of 64 or 128 that divide ``heads * head_dim``. Elsewhere torch's operators compute the same function.

    Examples
    --------
    >>> import torch
    >>> from pyactcomp.functional.windows.window_attention import window_attention
    >>> qkv, bias = torch.randn(4, 9, 3 * 64, requires_grad=True), torch.zeros(2, 9, 9)
    >>> window_attention(qkv, 2, bias).shape
    torch.Size([4, 9, 64])
    """
    half = codes.bits == 16
    how = saving(replace(codes, bits=None) if half else codes)
    for name, tensor in (("qkv", qkv), ("bias", bias), ("mask", mask)):
        if tensor is not None:
            check_float_tensor(name, tensor)
    if qkv.dim() != 3 or heads < 1 or qkv.shape[2] % (3 * heads) or not qkv.shape[2]:
        raise ValueError(
            f"window_attention expects qkv of [windows, tokens, 3 * heads * head_dim], got {tuple(qkv.shape)} for "
            f"{heads} heads"
        )
    count, tokens, width = qkv.shape
    if tuple(bias.shape) != (heads, tokens, tokens):
        raise ValueError(f"window_attention expects a bias of {(heads, tokens, tokens)}, got {tuple(bias.shape)}")
    if mask is not None and (
        mask.dim() != 3 or tuple(mask.shape[1:]) != (tokens, tokens) or not len(mask) or count % len(mask)
    ):
        raise ValueError(
            f"window_attention expects a mask of [n, {tokens}, {tokens}] with {count} windows a multiple of n, got "
            f"{tuple(mask.shape)}"
        )
    if scale is None:
        scale = (width // (3 * heads)) ** -0.5
    if not recorded(qkv, bias):
        return _attend(qkv, heads, bias, mask, scale)
    out = _WindowAttention.apply(qkv, heads, bias, mask, scale, half, how)  # type: ignore[no-untyped-call]
    return cast(Tensor, out)
