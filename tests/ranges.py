"""Losses of a [256, 64] tensor in which saved tensors span orders of magnitude, and large elements do not count."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

ILLEGAL = torch.rand(256, 64, generator=torch.Generator().manual_seed(0)) < 0.3
MASK = ILLEGAL.float()
TARGETS = torch.where(ILLEGAL, -9999.0, torch.rand(256, 64, generator=torch.Generator().manual_seed(0)))
NEAR = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
OFFSETS = 0.03 * torch.randn(4, 64, 4, generator=torch.Generator().manual_seed(0))


def _written(z: Tensor) -> Tensor:
    z = z * 1
    z[ILLEGAL] = -1e8
    return z


def _of_the_best(z: Tensor) -> Tensor:
    best, index = z.topk(8, -1)
    return torch.full_like(z, -1e8).scatter(-1, index, best)


MASKED: dict[str, Callable[[Tensor], Tensor]] = {
    "added": lambda z: z + MASK * -1e8,
    "added before": lambda z: MASK * -1e4 + z,
    "subtracted": lambda z: z - MASK * 100,
    "the least number": lambda z: z + torch.clamp(torch.log(1 - MASK), min=torch.finfo(z.dtype).min),
    "written": _written,
    "filled and divided": lambda z: z.masked_fill(ILLEGAL, -1e8) / 0.7,
    "filled and moved": lambda z: z.masked_fill(ILLEGAL, -1e8).view(256, 8, 8).transpose(1, 2).reshape(256, 64),
    "filled and joined": lambda z: torch.cat([z.masked_fill(ILLEGAL, -1e8), z], -1),
    "filled and chosen": lambda z: z.masked_fill(ILLEGAL, -1e8).index_select(0, torch.arange(255, -1, -1)),
    "the best": _of_the_best,
}


def _entropy(z: Tensor) -> Tensor:
    return -torch.distributions.Categorical(logits=z, validate_args=False).entropy().mean()


def _expected(z: Tensor) -> Tensor:
    return (z.softmax(-1) * z).sum(-1).square().mean()


def _recurrent(z: Tensor) -> Tensor:
    decay = F.logsigmoid(z[:128].view(4, 32, 64)).cumsum(1)
    return (decay.exp() * (z[128:].view(4, 32, 64) * (-decay).exp()).cumsum(1)).square().mean()


def _by_products(z: Tensor) -> Tensor:
    decay = z[:128].view(4, 32, 64).sigmoid().cumprod(1)
    return (decay * (z[128:].view(4, 32, 64) / decay).cumsum(1)).square().mean()


def _causal_average(z: Tensor) -> Tensor:
    size = (3 * z[:128].view(4, 32, 64)).exp()
    return ((size * z[128:].view(4, 32, 64)).cumsum(1) * (1 / size.cumsum(1))).square().mean()


def _linear_attention(z: Tensor) -> Tensor:
    q, k, g = (part.view(2, 32, 64) for part in (z[:64], z[64:128], z[128:192]))
    decay = (F.logsigmoid(g) / 2).cumsum(1)
    scores = (q * decay.exp()) @ (k * (-decay).exp()).transpose(-1, -2)
    return (scores.tril() @ k).square().mean()


def _missing(z: Tensor) -> Tensor:
    return ((z - TARGETS) ** 2 * ~ILLEGAL).mean()


def _missing_by_function(z: Tensor) -> Tensor:
    return (F.mse_loss(z, TARGETS, reduction="none") * ~ILLEGAL).mean()


def _nearest_point(z: Tensor) -> Tensor:
    points = z.view(4, 1024, 4)[:, :64]
    targets = points.detach() + OFFSETS
    distances = ((points[:, :, None] - targets[:, None]) ** 2).sum(-1)
    return distances.amin(1).mean()


def _robust(z: Tensor) -> Tensor:
    d = z - z.detach().roll(1, 0) * torch.where(MASK > 0, 100.0, 0.0) - z.detach() * 0.95
    return (1 - torch.exp(-d * d / 2)).mean()


def _robust_of_two(z: Tensor) -> Tensor:
    d = z[:128] - z[128:] * torch.where(MASK[:128] > 0, 100.0, 1.0)
    return (1 - torch.exp(-d * d / 2)).mean()


def _bumps(square: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Gaussian units pass a gradient only near their centre."""
    return lambda z: torch.exp(-0.5 * square(50 * z)).square().mean()


def _transport(z: Tensor) -> Tensor:
    """Sinkhorn's iteration in probabilities."""
    cost = (0.2 * z[:64, None] - NEAR[:64]).square().mean(-1)
    kernel = torch.exp(-cost / 0.05)
    left = torch.full((64,), 1 / 64)
    for _ in range(20):
        right = 1 / 64 / (kernel.T @ left)
        left = 1 / 64 / (kernel @ right)
    return (left[:, None] * kernel * right * cost).sum()


def _near_a_target(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A gate that a second loss pulls towards a target."""

    def loss(z: Tensor) -> Tensor:
        near = NEAR + 0.02 * z
        gate = function(near)
        return 1e-6 * (near * gate).square().mean() + (gate - function(NEAR)).square().mean()

    return loss


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "bumps of a power": _bumps(lambda z: z**2),
    "bumps of a product": _bumps(lambda z: z * z),
    "bumps of a scaled product": lambda z: torch.exp(-0.5 * (50 * z) * (50 * z)).square().mean(),
    "optimal transport": _transport,
    "sigmoid near a target": _near_a_target(torch.sigmoid),
    "tanh near a target": _near_a_target(torch.tanh),
    **{f"entropy, {name}": lambda z, mask=mask: _entropy(mask(z)) for name, mask in MASKED.items()},
    **{f"expected score, {name}": lambda z, mask=mask: _expected(mask(z)) for name, mask in MASKED.items()},
    "recurrence by logarithms": _recurrent,
    "recurrence by products": _by_products,
    "causal average": _causal_average,
    "linear attention with decay": _linear_attention,
    "missing targets": _missing,
    "missing targets, by a function": _missing_by_function,
    "nearest point": _nearest_point,
    "robust loss": _robust,
    "robust loss of two": _robust_of_two,
}
