"""Residuals beside learnt precisions, and squared distances of which a softmax passes the smallest alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from exactness_checks import BAR, error
from torch import Tensor
from torch.nn import functional as F


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


RESIDUALS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "power": lambda m, y: (y - m) ** 2,
    "half a power": lambda m, y: 0.5 * (y - m) ** 2,
    "sum of squares": lambda m, y: (y - m).pow(2).sum(-1, keepdim=True),
    "magnitude": lambda m, y: (y - m).abs(),
    "other power": lambda m, y: ((y - m).abs() + 1e-6) ** 1.5,
    "log1p": lambda m, y: torch.log1p((y - m) ** 2),
    "mse_loss": lambda m, y: F.mse_loss(m, y, reduction="none"),
    "l1_loss": lambda m, y: F.l1_loss(m, y, reduction="none"),
    "smooth_l1_loss": lambda m, y: F.smooth_l1_loss(m, y, reduction="none"),
    "huber_loss": lambda m, y: F.huber_loss(m, y, reduction="none"),
    "binary_cross_entropy_with_logits": lambda m, y: F.binary_cross_entropy_with_logits(
        m - 12 * (y - m).abs(), torch.zeros_like(m), reduction="none"
    ),
}


@pytest.mark.parametrize("precision_first", [False, True])
@pytest.mark.parametrize("name", RESIDUALS)
def test_a_residual_times_a_learnt_precision(name: str, precision_first: bool) -> None:
    # The likelihood of noise whose deviation differs by 20 from row to row, where it is learnt.
    deviation = torch.empty(256, 1).uniform_(-1.5, 1.5).exp()
    y = torch.randn(256, 16)
    mean = (y + deviation * torch.randn(256, 16)).requires_grad_()
    residual = RESIDUALS[name]
    fitted = residual(mean.detach(), y).mean(-1, keepdim=True).log()
    s = (fitted + 0.1 * torch.randn(256, 1)).requires_grad_()

    def loss(mean: Tensor, s: Tensor) -> Tensor:
        r, precision = residual(mean, y), torch.exp(-s)
        return ((precision * r if precision_first else r * precision) + s).mean()

    assert error(loss, mean, s) <= BAR


CLASSES, SPREAD = 16, 0.15


def diagonal(scale: Tensor) -> Tensor:
    return scale.diagonal(dim1=-2, dim2=-1)


# Of differences [points, classes, 2], and the inverse root of each class's covariance.
FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "square times a rate": lambda d, scale: (d**2 * (2 * diagonal(scale).log()).exp()).sum(-1),
    "square of a product": lambda d, scale: ((d * diagonal(scale)) ** 2).sum(-1),
    "square of a matrix product": lambda d, scale: ((d @ scale.mean(0)) ** 2).sum(-1),
    "square of one product each": lambda d, scale: (torch.einsum("nkd,kde->nke", d, scale) ** 2).sum(-1),
    "squeezed": lambda d, scale: ((d.unsqueeze(-2) @ scale).squeeze(-2) ** 2).sum(-1),
    "quadratic form": lambda d, scale: torch.einsum("nki,kij,nkj->nk", d, scale @ scale.mT, d),
    "quadratic form of products": lambda d, scale: (d.unsqueeze(-2) @ (scale @ scale.mT) @ d.unsqueeze(-1)).flatten(1),
}
READERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "logsumexp": lambda scores, t: -scores.logsumexp(-1).mean(),
    "cross_entropy": lambda scores, t: F.cross_entropy(scores, t),
    "softmax": lambda scores, t: (scores.softmax(-1) * torch.linspace(0, 1, CLASSES)).sum(-1).mean(),
    "exp": lambda scores, t: -(scores.exp().sum(-1) + 1e-6).log().mean(),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("form", FORMS)
def test_squared_distances_of_which_the_nearest_gets_the_gradient(form: str, reader: str) -> None:
    # Points near the centres of a mixture: other centres are a hundred times farther than a point's own.
    centres = 3 * torch.randn(CLASSES, 2)
    t = torch.randint(0, CLASSES, (1024,))
    x = centres[t] + SPREAD * torch.randn(1024, 2)
    moved = (centres + 0.3 * SPREAD * torch.randn(CLASSES, 2)).requires_grad_()
    scale = (torch.eye(2) / SPREAD + 0.1 * torch.randn(CLASSES, 2, 2)).requires_grad_()

    def loss(moved: Tensor, scale: Tensor) -> Tensor:
        scores = diagonal(scale).log().sum(-1) - 0.5 * FORMS[form](x[:, None] - moved, scale)
        return READERS[reader](scores, t)

    assert error(loss, moved, scale) <= BAR
