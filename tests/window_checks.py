"""What the tests of window attention share: inputs, the float64 attention, and how far results may be off."""

from __future__ import annotations

import torch
from functional_checks import EPS, SEED, assert_within, normal
from torch import Tensor

from pyactcomp import codec
from pyactcomp.codec import Impl
from pyactcomp.engine.marks import RECIPE
from pyactcomp.engine.saved import Recipe
from pyactcomp.functional import Codes
from pyactcomp.functional.windows.window_attention import window_attention


def inputs(
    windows: int, tokens: int, heads: int, head: int, dtype: torch.dtype, masked: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return qkv, bias and a mask of two parts, or None, in which about half of the scores are shut out."""
    mask = torch.where(normal(2, tokens, tokens, seed=8) > 0, -100.0, 0.0) if masked else None
    return normal(windows, tokens, 3 * heads * head).to(dtype), normal(heads, tokens, tokens, seed=1), mask


def probabilities(qkv: Tensor, bias: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    """Return q, k, v [windows, heads, tokens, head_dim] and the probabilities, written out window by window."""
    windows, tokens, width = qkv.shape
    heads = len(bias)
    q, k, v = (t.reshape(windows, tokens, heads, -1).transpose(1, 2) for t in qkv.split(width // 3, 2))
    scores = q @ k.mT * q.shape[-1] ** -0.5 + bias
    if mask is not None:
        scores = scores + torch.stack([mask[i % len(mask)] for i in range(windows)])[:, None].to(scores)
    return q, k, v, scores.softmax(-1)


def attention(qkv: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
    """Return what window attention computes, by torch's own derivatives."""
    _, _, v, p = probabilities(qkv, bias, mask)
    return (p @ v).transpose(1, 2).flatten(2)


def recipe_of(out: Tensor) -> Recipe:
    """Return what an output offers to operators that save it."""
    recipe = RECIPE.get(out)
    assert recipe is not None
    assert recipe.serves(out.view(-1))
    return recipe


def restored(qkv: Tensor, bits: int | None, group_size: int = 64) -> Tensor:
    """Return what backward has of ``qkv``."""
    if bits is None or (bits == 16 and qkv.itemsize == 2):
        return qkv
    if bits == 16:
        # Rounded to the 11 digits of float16, whose exponents the largest magnitude is scaled to the upper end of.
        scale = 2.0 ** (15 - int(torch.frexp(qkv.abs().max()).exponent))
        return (qkv * scale).half().to(qkv.dtype) / scale
    return codec.dequantize(codec.quantize(qkv, bits=bits, group_size=group_size))


def check_window_attention(
    qkv: Tensor, bias: Tensor, mask: Tensor | None, grad: Tensor, bits: int | None, group_size: int, impl: Impl
) -> None:
    """Assert that output and gradients are the float64 ones, the gradients at the restored ``qkv``, up to rounding."""
    heads = len(bias)
    leaves = qkv.clone().requires_grad_(), bias.clone().requires_grad_()
    codes = Codes(bits=bits, group_size=group_size, seed=SEED, impl=impl)
    out = window_attention(*leaves[:1], heads, leaves[1], mask, codes=codes)
    out.backward(grad)
    assert out.dtype == qkv.dtype
    points = [t.detach().cpu().double() for t in (qkv, restored(qkv, bits, group_size), bias)]
    wide_mask = None if mask is None else mask.cpu().double()
    g = grad.detach().cpu().double()

    # Of the roundings of a probability and of a score's gradient to the dtype, relative.
    unit = torch.finfo(qkv.dtype).eps / 2

    def relative(q: Tensor, k: Tensor) -> Tensor:
        """Bound the relative error of the probabilities: twice that of a score, and of exp, sum and quotient."""
        terms = q.shape[-1] + 4
        score = terms * EPS * (q.abs() @ k.abs().mT * q.shape[-1] ** -0.5 + points[2].abs() + 100 * (mask is not None))
        return 2 * score.amax(-1, keepdim=True) + (bias.shape[-1] + 8) * EPS

    def merged(t: Tensor) -> Tensor:
        return t.transpose(1, 2).flatten(2)

    tokens = qkv.shape[1]
    q, k, v, p = probabilities(points[0], points[2], wide_mask)
    bound = p * (relative(q, k) + unit + tokens * EPS)
    assert_within(out, attention(points[0], points[2], wide_mask), merged(bound @ v.abs()))

    exact = [t.clone().requires_grad_() for t in points[1:]]
    attention(*exact, wide_mask).backward(g)
    q, k, v, p = (t.detach() for t in probabilities(*(t.detach() for t in exact), wide_mask))
    split = g.unflatten(2, (heads, -1)).transpose(1, 2)
    error = relative(q, k)
    of_v = (p * (error + unit + tokens * EPS)).mT @ split.abs()
    dp, dp_error = split @ v.mT, (q.shape[-1] + 2) * EPS * (split.abs() @ v.abs().mT)
    along = (p * dp).sum(-1, keepdim=True)
    along_error = (p * ((error + (tokens + 2) * EPS) * dp.abs() + dp_error)).sum(-1, keepdim=True)
    ds = p * (dp - along)
    ds_error = p * ((error + 4 * EPS) * (dp.abs() + along.abs()) + dp_error + along_error)
    narrow = ds_error + (unit + tokens * EPS) * (ds.abs() + ds_error)
    of_q, of_k = (t * q.shape[-1] ** -0.5 for t in (narrow @ k.abs(), narrow.mT @ q.abs()))
    assert_within(leaves[0].grad, exact[0].grad, torch.cat([merged(t) for t in (of_q, of_k, of_v)], 2))
    assert_within(leaves[1].grad, exact[1].grad, (ds_error + len(qkv) * EPS * (ds.abs() + ds_error)).sum(0))
