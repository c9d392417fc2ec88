"""Losses, and logits for which a loss is as high or as low as asked for."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

CLASSES = 512
ROWS = 64


def smoothed(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z, t, label_smoothing=0.1)


def ignoring(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z, t.masked_fill(torch.arange(len(t)) % 3 == 0, -100), ignore_index=-100)


def weighted(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z, t, weight=torch.linspace(0.1, 2, z.shape[1]), reduction="sum")


def of_probabilities(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z, 0.999 * F.one_hot(t, z.shape[1]) + 0.001 / z.shape[1])


def nll_of_log_softmax(z: Tensor, t: Tensor) -> Tensor:
    return F.nll_loss(z.log_softmax(-1), t)


def gathered(z: Tensor, t: Tensor) -> Tensor:
    return -z.log_softmax(-1).gather(1, t[:, None]).mean()


def nll_of_probabilities(z: Tensor, t: Tensor) -> Tensor:
    return F.nll_loss(z.softmax(-1).log(), t)


def gathered_probabilities(z: Tensor, t: Tensor) -> Tensor:
    return -z.softmax(-1).gather(1, t[:, None]).log().mean()


def written_out(z: Tensor, t: Tensor) -> Tensor:
    exponentials = (z - z.detach().amax(-1, keepdim=True)).exp()
    return F.nll_loss((exponentials / exponentials.sum(-1, keepdim=True)).log(), t)


def chosen_exponentials(z: Tensor, t: Tensor) -> Tensor:
    exponentials = z.exp()
    return -(exponentials.gather(1, t[:, None]).squeeze(1) / exponentials.sum(-1)).log().mean()


def log_of_sum(z: Tensor, t: Tensor) -> Tensor:
    return (z.exp().sum(-1).log() - z.gather(1, t[:, None]).squeeze(1)).mean()


def log_of_masked_sum(z: Tensor, t: Tensor) -> Tensor:
    mask = (torch.arange(z.shape[1]) != (t[:, None] + 1) % z.shape[1]).to(z)
    return ((z.exp() * mask).sum(-1).log() - z.gather(1, t[:, None]).squeeze(1)).mean()


def two_exponentials(z: Tensor, t: Tensor) -> Tensor:
    return F.nll_loss((z.exp() / z.exp().sum(-1, keepdim=True)).log(), t)


def divergence(z: Tensor, t: Tensor) -> Tensor:
    return F.kl_div(z.log_softmax(-1), F.one_hot(t, z.shape[1]).float(), reduction="batchmean")


def divergence_of_logs(z: Tensor, t: Tensor) -> Tensor:
    target = (6 * F.one_hot(t, z.shape[1])).float().log_softmax(-1)
    return F.kl_div(z.log_softmax(-1), target, log_target=True, reduction="batchmean")


def two_dimensional(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z.T[None, :, :, None], t[None, :, None])


def categorical(z: Tensor, t: Tensor) -> Tensor:
    return -torch.distributions.Categorical(logits=z).log_prob(t).mean()


LOSSES = [
    *(F.cross_entropy, ignoring, weighted, nll_of_log_softmax, gathered, divergence, two_dimensional, categorical),
    *(nll_of_probabilities, gathered_probabilities, written_out, chosen_exponentials, log_of_sum),
    *(log_of_masked_sum, two_exponentials),
]
# Of these the least is no zero.
SMOOTH_LOSSES = [smoothed, of_probabilities, divergence_of_logs]
SIZES = [8.0, 1.0, 0.1, 1e-2, 1e-3, 1e-4]


def near_a_distribution(loss: float) -> tuple[Tensor, Tensor]:
    """Return logits, and probabilities from which their own diverge by ``loss`` at most: half the square of a logit."""
    targets = torch.randn(ROWS, CLASSES)
    logits = targets + math.sqrt(2 * loss) * torch.randn(ROWS, CLASSES)
    return logits.requires_grad_(), targets.softmax(-1)


def near_smoothed_classes(loss: float) -> tuple[Tensor, Tensor]:
    """Return logits and classes, with a smoothed loss above its minimum by ``loss`` at most."""
    t = torch.randint(0, CLASSES, (ROWS,))
    least = torch.full((ROWS, CLASSES), 0.1 / CLASSES).scatter(1, t[:, None], 0.9 + 0.1 / CLASSES).log()
    return (least + math.sqrt(2 * loss) * torch.randn(ROWS, CLASSES)).requires_grad_(), t


def classes(loss: float) -> tuple[Tensor, Tensor]:
    """Return logits and classes of which cross entropy is ``loss``."""
    t = torch.randint(0, CLASSES, (ROWS,))
    base = torch.randn(ROWS, CLASSES)
    # The others' probability is 1 - exp(-loss), so the true class leads by this.
    others = base.scatter(1, t[:, None], -math.inf).logsumexp(-1)
    return base.scatter(1, t[:, None], (others - math.log(math.expm1(loss)))[:, None]).requires_grad_(), t


def with_logits(z: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(z, y)


def with_weights(z: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(z, y, weight=1 + y, pos_weight=torch.tensor(3.0))


def of_sigmoid(z: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy(z.sigmoid(), y)


def log_sigmoid(z: Tensor, y: Tensor) -> Tensor:
    return -F.logsigmoid(z * (2 * y - 1)).mean()


def softplus(z: Tensor, y: Tensor) -> Tensor:
    return F.softplus(z * (1 - 2 * y)).mean()


def soft_margin(z: Tensor, y: Tensor) -> Tensor:
    return F.soft_margin_loss(z, 2 * y - 1)


def focal(z: Tensor, y: Tensor) -> Tensor:
    p = torch.sigmoid(z)
    right = p * y + (1 - p) * (1 - y)
    return ((1 - right).square() * F.binary_cross_entropy_with_logits(z, y, reduction="none")).mean()


BINARY_LOSSES = [with_logits, with_weights, of_sigmoid, log_sigmoid, softplus, soft_margin, focal]


def answers(loss: float) -> tuple[Tensor, Tensor]:
    """Return logits and answers of which binary cross entropy is about ``loss``."""
    y = torch.rand(ROWS, CLASSES).round()
    # A spread of half a nat around the logits of this loss.
    return ((2 * y - 1) * -math.log(math.expm1(loss)) + torch.randn(ROWS, CLASSES) / 2).requires_grad_(), y


def divergence_from(z: Tensor, p: Tensor) -> Tensor:
    return F.kl_div(z.log_softmax(-1), p, reduction="batchmean")


def written_out_against(z: Tensor, p: Tensor) -> Tensor:
    return -(p * z.softmax(-1).log()).sum(-1).mean()


# Losses whose gradient is the difference of two distributions, with what gives logits so near the least.
NEAR = [
    *((loss, near_a_distribution) for loss in (F.cross_entropy, divergence_from, written_out_against)),
    (smoothed, near_smoothed_classes),
]
