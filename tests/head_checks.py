"""What the tests of ``linear_cross_entropy`` share: inputs, and how far a result in float32 may be off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from functional_checks import EPS, assert_within, normal
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from pyactcomp.functional import linear_cross_entropy


def inputs(
    rows: int, width: int, vocabulary: int, dtype: torch.dtype, bias: bool, device: str | torch.device = "cpu"
) -> tuple[list[Tensor | None], Tensor]:
    """Return x, weight and bias that want gradients, and labels of which every fifth is ignored."""
    tensors = [normal(rows, width), normal(vocabulary, width, seed=1) / 4, normal(vocabulary, seed=2) if bias else None]
    labels = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(3))
    labels[::5] = -100
    return [None if t is None else t.to(device, dtype).requires_grad_() for t in tensors], labels.to(device)


def wide_copies(leaves: list[Tensor | None]) -> list[Tensor | None]:
    return [None if t is None else t.detach().cpu().double().requires_grad_() for t in leaves]


def capped(scores: Tensor, cap: float | None) -> Tensor:
    return scores if cap is None else torch.tanh(scores / cap) * cap


def check(
    leaves: list[Tensor | None], labels: Tensor, reduction: str = "mean", softcap: float | None = None, **options: Any
) -> None:
    """Compare loss and gradients of float32 leaves with float64, each element with a bound of its own."""
    x, weight, bias = leaves
    loss = linear_cross_entropy(x, weight, labels, bias, reduction=reduction, softcap=softcap, **options)
    loss.backward()
    wide = wide_copies(leaves)
    scores = capped(F.linear(*wide), softcap)
    target = labels.cpu()
    exact = F.cross_entropy(scores, target, reduction=reduction)
    exact.backward()

    counted = (target != -100).double()[:, None]
    by = counted.sum() if reduction == "mean" else 1.0
    a, b, scores = wide[0].detach(), wide[1].detach(), scores.detach()
    width, vocabulary = a.shape[1], b.shape[0]
    magnitude = F.linear(a.abs(), b.abs(), None if bias is None else wide[2].detach().abs())
    # A logit is a sum of width + 1 products. An error of d in all of them changes a softmax by a factor of up to
    # exp(2 d); its own sum has vocabulary terms, each within a few ulp of what the exponent's size leaves.
    d = ((width + 1) * EPS * magnitude).amax(1, keepdim=True)
    # Capping is a contraction of a few roundings, of an exponential and a quotient; its slope is 1 - tanh**2.
    slope, slope_off = torch.ones_like(scores), torch.zeros_like(scores)
    if softcap is not None:
        d = d + 8 * EPS * softcap
        slope, slope_off = 1 - (scores / softcap) ** 2, 2 * (scores / softcap).abs() * d / softcap + 8 * EPS
    spread = scores.amax(1, keepdim=True) - scores.amin(1, keepdim=True)
    relative = 2 * d + (vocabulary + 16 + 2 * spread) * EPS
    g = (scores.softmax(1) - F.one_hot(target.clamp(min=0), vocabulary)) * counted / by
    g_off = scores.softmax(1) * counted / by * relative + 4 * EPS * g.abs()
    g, g_off = g * slope, g_off * slope + g.abs() * slope_off
    terms = torch.logsumexp(scores, 1, keepdim=True).abs() + magnitude.amax(1, keepdim=True)
    loss_off = (counted * (relative + 8 * EPS * terms)).sum() / by + len(a) * EPS * exact.detach().abs()
    assert loss.dtype is torch.float32
    assert_within(loss, exact.detach(), loss_off)
    offs = (
        g_off @ b.abs() + (vocabulary + 2) * EPS * g.abs() @ b.abs(),
        g_off.t() @ a.abs() + (len(a) + 2) * EPS * g.abs().t() @ a.abs(),
        g_off.sum(0) + (len(a) + 2) * EPS * g.abs().sum(0),
    )
    for leaf, reference, off in zip(leaves, wide, offs, strict=True):
        if leaf is not None and leaf.requires_grad:
            assert leaf.grad is not None
            assert reference is not None
            assert reference.grad is not None
            assert_within(leaf.grad, reference.grad, off)


def relative_errors(
    leaves: list[Tensor | None], labels: Tensor, softcap: float | None = None, **options: Any
) -> list[tuple[float, float]]:
    """Return the relative L2 errors of our gradients and of the unchunked functions' against float64."""
    given = [t for t in leaves if t is not None]
    x, weight, bias = leaves
    ours = torch.autograd.grad(linear_cross_entropy(x, weight, labels, bias, softcap=softcap, **options), given)
    scores = capped(F.linear(x, weight, bias), softcap)
    torchs = torch.autograd.grad(F.cross_entropy(scores.float(), labels), given)
    wide = wide_copies(leaves)
    scores = capped(F.linear(*wide), softcap)
    exact = torch.autograd.grad(F.cross_entropy(scores, labels.cpu()), [t for t in wide if t is not None])
    return [
        tuple(float((t.cpu().double() - e).norm() / e.norm()) for t in pair)
        for *pair, e in zip(ours, torchs, exact, strict=True)
    ]


class Largest(TorchDispatchMode):
    """The largest number of elements that an operator returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for part in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(part, Tensor):
                self.numel = max(self.numel, part.numel())
        return out


def largest_numel(compute: Callable[[], Tensor]) -> int:
    with Largest() as mode:
        compute().backward()
    return mode.numel
