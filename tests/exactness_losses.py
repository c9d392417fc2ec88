"""Rows of losses: low ones, masked ones, divergences, residuals, distances, hinges, similarities and shares.

Each has one cause of error: small elements of a saved tensor, which get the gradient, beside large ones, which do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from exactness_rows import Loss, Operands, Row, normal
from torch import Tensor
from torch import distributions as D
from torch.nn import functional as F

ROWS: dict[str, Row] = {}
EAGER = ("plain", "layers")

# Losses from 1 down to 1e-4, of logits times a learnt temperature.

COUNT, CLASSES = 32, 256


def classes(loss: float) -> Callable[[], Operands]:
    """Draw logits and classes of which cross entropy is ``loss``."""

    def draw() -> Operands:
        t = torch.randint(0, CLASSES, (COUNT,))
        base = torch.randn(COUNT, CLASSES)
        # The others' probability is 1 - exp(-loss), so the true class leads by this.
        others = base.scatter(1, t[:, None], -math.inf).logsumexp(-1)
        z = base.scatter(1, t[:, None], (others - math.log(math.expm1(loss)))[:, None])
        return Operands([z], [torch.ones(1)], [t])

    return draw


def near_a_distribution(loss: float) -> Callable[[], Operands]:
    """Draw logits, and probabilities from which their own diverge by ``loss`` at most: half the square of a logit."""

    def draw() -> Operands:
        targets = torch.randn(COUNT, CLASSES)
        z = targets + math.sqrt(2 * loss) * torch.randn(COUNT, CLASSES)
        return Operands([z], [torch.ones(1)], [targets.softmax(-1)])

    return draw


def answers(loss: float) -> Callable[[], Operands]:
    """Draw logits and answers of which binary cross entropy is about ``loss``, half a nat around."""

    def draw() -> Operands:
        y = torch.rand(COUNT, CLASSES).round()
        z = (2 * y - 1) * -math.log(math.expm1(loss)) + torch.randn(COUNT, CLASSES) / 2
        return Operands([z], [torch.ones(1)], [y])

    return draw


def tempered(loss: Loss) -> Loss:
    return lambda z, temperature, targets: loss(z * temperature, targets)


def written_out(z: Tensor, t: Tensor) -> Tensor:
    exponentials = (z - z.detach().amax(-1, keepdim=True)).exp()
    return F.nll_loss((exponentials / exponentials.sum(-1, keepdim=True)).log(), t)


def focal(z: Tensor, y: Tensor) -> Tensor:
    p = torch.sigmoid(z)
    right = p * y + (1 - p) * (1 - y)
    return ((1 - right).square() * F.binary_cross_entropy_with_logits(z, y, reduction="none")).mean()


OF_CLASSES: dict[str, Loss] = {
    "cross entropy": F.cross_entropy,
    "weighted and ignoring": lambda z, t: F.cross_entropy(
        z, t.masked_fill(torch.arange(len(t)) % 3 == 0, -100), torch.linspace(0.1, 2, z.shape[1]), reduction="sum"
    ),
    "smoothed": lambda z, t: F.cross_entropy(z, t, label_smoothing=0.1),
    "of two dimensions": lambda z, t: F.cross_entropy(z.T[None, :, :, None], t[None, :, None]),
    "gathered": lambda z, t: -z.log_softmax(-1).gather(1, t[:, None]).mean(),
    "of probabilities": lambda z, t: F.nll_loss(z.softmax(-1).log(), t),
    "written out": written_out,
    "log of a sum": lambda z, t: (z.exp().sum(-1).log() - z.gather(1, t[:, None]).squeeze(1)).mean(),
    "of logarithms": lambda z, t: F.kl_div(
        z.log_softmax(-1), (6 * F.one_hot(t, z.shape[1])).float().log_softmax(-1), log_target=True, reduction="sum"
    ),
}
OF_DISTRIBUTIONS: dict[str, Loss] = {
    "cross entropy": F.cross_entropy,
    "divergence": lambda z, p: F.kl_div(z.log_softmax(-1), p, reduction="batchmean"),
    "written out": lambda z, p: -(p * z.softmax(-1).log()).sum(-1).mean(),
}
OF_ANSWERS: dict[str, Loss] = {
    "with logits": lambda z, y: F.binary_cross_entropy_with_logits(z, y, 1 + y, pos_weight=torch.tensor(3.0)),
    "of a sigmoid": lambda z, y: F.binary_cross_entropy(z.sigmoid(), y),
    "log sigmoid": lambda z, y: -F.logsigmoid(z * (2 * y - 1)).mean(),
    "softplus": lambda z, y: F.softplus(z * (1 - 2 * y)).mean(),
    "soft margin": lambda z, y: F.soft_margin_loss(z, 2 * y - 1),
    "focal": focal,
}
for _size in (1.0, 1e-2, 1e-4):
    ROWS |= {f"classes, {name}, {_size:g}": Row(tempered(f), classes(_size)) for name, f in OF_CLASSES.items()}
for _size in (1e-2, 1e-4):
    ROWS |= {
        f"near, {name}, {_size:g}": Row(tempered(f), near_a_distribution(_size)) for name, f in OF_DISTRIBUTIONS.items()
    }
    ROWS |= {f"answers, {name}, {_size:g}": Row(tempered(f), answers(_size)) for name, f in OF_ANSWERS.items()}

# Masks of logits.

LEGAL = torch.rand(256, 64, generator=torch.Generator().manual_seed(0)) < 0.5
CHOSEN = LEGAL.int().argmax(-1)
MASK = (~LEGAL).float()
LEAST = torch.finfo(torch.float32).min
MASKS: dict[str, Loss] = {
    "filled": lambda z: z.masked_fill(~LEGAL, -math.inf),
    "chosen": lambda z: torch.where(LEGAL, z, LEAST),
    "added": lambda z: z + MASK * -1e9,
    "subtracted": lambda z: z - MASK * 100,
    "of the best": lambda z: torch.full_like(z, -1e8).scatter(-1, *reversed(z.topk(8, -1))),
}
OF_MASKED: dict[str, Loss] = {
    "cross entropy": lambda z: F.cross_entropy(z, CHOSEN),
    "softmax": lambda z: (z.softmax(-1) * torch.arange(64)).mean(),
    "logsumexp": lambda z: z.logsumexp(-1).mean(),
    "attention": lambda z: (z.softmax(-1) @ z.detach().clamp(min=-1).T).square().mean(),
}
OF_FINITE: dict[str, Loss] = {
    "entropy": lambda z: -(z.softmax(-1) * z.log_softmax(-1)).sum(-1).mean(),
    "expected score": lambda z: (z.softmax(-1) * z).sum(-1).square().mean(),
}


def masked(mask: Loss, loss: Loss) -> Row:
    return Row(lambda z, bias: loss(mask(z + bias)), normal((256, 64), parameters=((64,),)))


ROWS |= {f"masked, filled, {name}": masked(MASKS["filled"], f) for name, f in OF_MASKED.items()}
ROWS |= {
    f"masked, {name}, softmax": masked(mask, OF_MASKED["softmax"])
    for name, mask in MASKS.items()
    if name not in ("filled", "of the best")
}
ROWS |= {
    f"masked, {mask}, {name}": masked(MASKS[mask], f)
    for mask in ("added", "subtracted", "of the best")
    for name, f in OF_FINITE.items()
}

# Two sides with gradients, and distributions near the one that they learn.


def kl(p: Tensor, q: Tensor) -> Tensor:
    return F.kl_div(q.log_softmax(-1), p.softmax(-1), reduction="batchmean")


def jensen_shannon(a: Tensor, b: Tensor) -> Tensor:
    p, q = a.softmax(-1), b.softmax(-1)
    middle = ((p + q) / 2).log()
    return F.kl_div(middle, p, reduction="batchmean") + F.kl_div(middle, q, reduction="batchmean")


DIVERGENCES: dict[str, tuple[float, Loss]] = {
    "both ways": (0.015, lambda a, b: kl(a, b) + kl(b, a)),
    "of logarithms": (
        0.1,
        lambda a, b: F.kl_div(b.log_softmax(-1), a.log_softmax(-1), reduction="sum", log_target=True),
    ),
    "written out": (0.015, lambda a, b: (a.softmax(-1) * (a.log_softmax(-1) - b.log_softmax(-1))).sum()),
    "from the middle": (0.3, jensen_shannon),
}


def apart(distance: float) -> Callable[[], Operands]:
    """Draw logits of two sides; nearer ones find 16 bits too coarse (docs/exactness.md, "What is left")."""

    def draw() -> Operands:
        first = torch.randn(512, 64)
        return Operands([first, first + distance * torch.randn(512, 64)])

    return draw


ROWS |= {f"divergence, {name}": Row(f, apart(distance)) for name, (distance, f) in DIVERGENCES.items()}

DISTRIBUTIONS: dict[str, Callable[[Tensor], D.Distribution]] = {
    "Beta": lambda x: D.Beta(*(3 * F.softplus(x) + 1e-3).chunk(2)),
    "Chi2": lambda x: D.Chi2(3 * F.softplus(x) + 1e-3),
    "Categorical": lambda x: D.Categorical(probs=x.softmax(-1)),
    "Normal": lambda x: D.Normal(x, 1 + x**2),
}


def near_what_it_learns() -> Operands:
    learnt = 0.8 * torch.randn(256, 64)
    return Operands([learnt], [], [learnt + 0.05 * torch.randn(256, 64)])


# torch.compile does not trace the checks of a distribution as one graph.
ROWS |= {
    f"distribution, {name}": Row(
        lambda x, target, kind=kind: D.kl_divergence(kind(x), kind(target)).mean(), near_what_it_learns, ways=EAGER
    )
    for name, kind in DISTRIBUTIONS.items()
}


def normal_log_probability(mean: Tensor, s: Tensor, y: Tensor) -> Tensor:
    return (0.5 * ((y - mean) / s.exp()).square() + s).mean()


def autoencoder(mean: Tensor, log_variance: Tensor, noise: Tensor) -> Tensor:
    sample = mean + noise * torch.exp(1.5 * log_variance)
    return sample.square().sum() - 0.5 * (1 + 3 * log_variance - mean.pow(2) - (3 * log_variance).exp()).sum()


ROWS["a normal distribution"] = Row(
    normal_log_probability, lambda: Operands([torch.randn(128, 64)], [torch.randn(64)], [torch.randn(128, 64)])
)
ROWS["an autoencoder"] = Row(autoencoder, lambda: Operands(list(torch.randn(2, 128, 64)), [], [torch.randn(128, 64)]))

# Residuals times a learnt precision, which differ by 20 from row to row.

RESIDUALS: dict[str, Loss] = {
    "square": lambda m, y: (y - m) ** 2,
    "magnitude": lambda m, y: ((y - m).abs() + 1e-6) ** 1.5,
    "log1p": lambda m, y: torch.log1p((y - m) ** 2),
    "smooth_l1_loss": lambda m, y: F.smooth_l1_loss(m, y, reduction="none"),
}


def fitted(residual: Loss) -> Callable[[], Operands]:
    def draw() -> Operands:
        deviation = torch.empty(256, 1).uniform_(-1.5, 1.5).exp()
        y = torch.randn(256, 16)
        mean = y + deviation * torch.randn(256, 16)
        precision = residual(mean, y).mean(-1, keepdim=True).log()
        return Operands([mean], [precision + 0.1 * torch.randn(256, 1)], [y])

    return draw


ROWS |= {
    f"precision, {name}": Row(lambda m, s, y, f=f: (f(m, y) * torch.exp(-s) + s).mean(), fitted(f))
    for name, f in RESIDUALS.items()
}

# Squared distances [points, classes, 2], of which a softmax passes the smallest alone: other centres are a hundred
# times farther than a point's own.

CENTRES, SPREAD = 16, 0.15


def mixture() -> Operands:
    centres = 3 * torch.randn(CENTRES, 2)
    t = torch.randint(0, CENTRES, (512,))
    x = centres[t] + SPREAD * torch.randn(512, 2)
    scale = torch.eye(2) / SPREAD + 0.1 * torch.randn(CENTRES, 2, 2)
    return Operands([x], [centres + 0.3 * SPREAD * torch.randn(CENTRES, 2), scale], [t])


FORMS: dict[str, Loss] = {
    "square times a rate": lambda d, s: (d**2 * s.diagonal(dim1=-2, dim2=-1) ** 2).sum(-1),
    "square of a matrix product": lambda d, s: (torch.einsum("nkd,kde->nke", d, s) ** 2).sum(-1),
    "quadratic form": lambda d, s: torch.einsum("nki,kij,nkj->nk", d, s @ s.mT, d),
}
NEAREST: dict[str, Loss] = {
    "logsumexp": lambda scores, t: -scores.logsumexp(-1).mean(),
    "softmax": lambda scores, t: (scores.softmax(-1) * torch.linspace(0, 1, CENTRES)).sum(-1).mean(),
    "exp": lambda scores, t: -(scores.exp().sum(-1) + 1e-6).log().mean(),
}


def of_centres(form: Loss, reader: Loss) -> Row:
    def loss(x: Tensor, centres: Tensor, scale: Tensor, t: Tensor) -> Tensor:
        logarithms = scale.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return reader(logarithms - 0.5 * form(x[:, None] - centres, scale), t)

    return Row(loss, mixture)


ROWS |= {f"nearest, {name}, cross entropy": of_centres(form, F.cross_entropy) for name, form in FORMS.items()}
ROWS |= {
    f"nearest, square, {name}": of_centres(FORMS["square times a rate"], reader) for name, reader in NEAREST.items()
}

# Hinges of one of eight classes, whose score is close to the margin; the others are far beyond it.

RIGHT = F.one_hot(torch.arange(512) % 8, 8).float()
HINGES: dict[str, Loss] = {
    "square": lambda h: F.relu(h) ** 2,
    "product": lambda h: (r := h.clamp(min=0)) * r,
    "cube": lambda h: F.hardtanh(h, 0, 4) ** 3,
    "softplus": lambda h: F.softplus(h, beta=1000).square(),
}


def margins() -> Operands:
    z = torch.randn(512, 8)
    scores = RIGHT * (1 - 0.02 * z.abs()) + (1 - RIGHT) * 8 * z
    return Operands([scores], [torch.ones(8)])


ROWS |= {f"hinge, {name}": Row(lambda s, m, f=f: (RIGHT * f(m - s)).mean(), margins) for name, f in HINGES.items()}

# Differences of which a robust loss, or a kernel with a radius, passes the small ones; a tenth lie far away.


def outliers() -> Operands:
    targets = torch.randn(256, 8)
    targets[torch.rand(256, 8) < 0.1] *= 10
    return Operands([torch.randn(256, 8)], [torch.ones(8)], [targets])


KERNELS: dict[str, Loss] = {
    "truncated": lambda d: (d / 0.3).square().clamp(max=1),
    "bump": lambda d: 1 - torch.exp(-0.5 * (d / 0.3) ** 2),
    "chosen": lambda d: (d / 0.3).square().flatten().topk(256, largest=False)[0],
    "tukey": lambda d: torch.where(d.abs() < 1, 1 - (1 - d**2) ** 3, 1.0),
    "tricube": lambda d: (1 - d.abs() ** 3) ** 3 * (d.abs() < 1),
    "fourth power": lambda d: d**4 * (d.abs() < 1),
    "of a length": lambda d: (lambda r: (1 - r) ** 3 * (r < 1))(d.norm(dim=-1) / 4),
    "geman": lambda d: d**2 / (d**2 + 0.1),
}
ROWS |= {f"robust, {name}": Row(lambda x, w, y, f=f: f((x - y) * w).mean(), outliers) for name, f in KERNELS.items()}
TARGETS = torch.where(LEGAL, torch.rand(256, 64, generator=torch.Generator().manual_seed(0)), -9999.0)
OFFSETS = 0.03 * torch.randn(4, 64, 4, generator=torch.Generator().manual_seed(0))


def nearest_point(z: Tensor, scale: Tensor) -> Tensor:
    points = z.view(4, 1024, 4)[:, :64] * scale
    targets = points.detach() + OFFSETS
    return ((points[:, :, None] - targets[:, None]) ** 2).sum(-1).amin(1).mean()


ROWS["missing targets"] = Row(
    lambda z, bias: ((z + bias - TARGETS) ** 2 * LEGAL).mean(), normal((256, 64), parameters=((64,),))
)
ROWS["nearest point"] = Row(nearest_point, normal((256, 64), parameters=((4,),)))
