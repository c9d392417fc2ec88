"""Rows of algebra between activations: rates, shares, similarities, exact zeros, dead features, decays.

Each has one cause of error: small elements of a saved tensor, which get the gradient, beside large ones, which do not.
"""

from __future__ import annotations

import torch
from exactness_rows import Loss, Operands, Row, enter, gained, normal
from torch import Tensor
from torch.nn import functional as F

ROWS: dict[str, Row] = {}
SEED = torch.Generator().manual_seed(0)

# Rates inside an exponential.

RATES = {"one": (1,), "of columns": (64,), "of rows": (256, 1), "each": (256, 64)}
ROWS |= {
    f"rate, {name}": Row(
        lambda z, rate: torch.exp(-(50 * z.square() * rate.exp())).mean(),
        normal((256, 64), parameters=(shape,), scale=0.1),
    )
    for name, shape in RATES.items()
}
ROWS["bumps"] = Row(lambda z, rate: torch.exp(-0.5 * (50 * z) * (50 * rate * z)).square().mean(), gained(256, 64))

# Weights divided by their own sum, of which one is nearly the whole.

ALONE = torch.arange(64) == torch.arange(256)[:, None] % 64
KEPT = ALONE | (torch.rand(256, 64, generator=SEED) < 0.5)
SHARES: dict[str, Loss] = {
    "sum": lambda w: w / w.sum(-1, keepdim=True),
    "masked sum": lambda w: w / (w * KEPT).sum(-1, keepdim=True).clamp_min(1e-6),
    "mean": lambda w: w / (64 * w.mean(-1, keepdim=True)),
}


def alone() -> Operands:
    z = torch.randn(256, 64)
    return Operands([torch.where(ALONE, 1 + 0.1 * z, 1e-4 + 1e-4 * z).clamp(min=1e-9)], [torch.ones(64)])


ROWS |= {f"shares, {name}": Row(lambda w, s, f=f: (1 - f(w * s)[ALONE]).mean(), alone) for name, f in SHARES.items()}

# Similarities: of rows that are nearly equal within a class, and beside a large diagonal that gets no gradient.

OWN = torch.eye(64)
MATES = (torch.arange(64) % 4 == torch.arange(64)[:, None] % 4).float() - OWN


def nearly_equal() -> Operands:
    return Operands(
        [torch.randn(4, 64)[torch.arange(64) % 4] + 0.12 * torch.randn(64, 64)], [torch.full((1,), 1 / 0.07)]
    )


def contrastive(x: Tensor, scale: Tensor) -> Tensor:
    z = F.normalize(x, dim=-1)
    return -(MATES * (z @ z.t() * scale - 1e9 * OWN).log_softmax(-1)).mean()


def off_the_diagonal() -> Operands:
    return Operands([8 * OWN + 0.05 * torch.randn(64, 64)], [torch.ones(64)])


ROWS["similarities, contrastive"] = Row(contrastive, nearly_equal)
ROWS["similarities, squared"] = Row(lambda z, w: ((z * w @ z.t()) ** 2 * (1 - OWN)).sum(), off_the_diagonal)
ROWS["similarities, less the diagonal"] = Row(
    lambda z, w: (lambda k: (k**2).sum() - (k.diagonal() ** 2).sum())(z @ (z * w).t()), off_the_diagonal
)

# Gates that a second loss pulls towards a target.

NEAR = torch.randn(256, 64, generator=SEED)


def pulled(function: Loss) -> Row:
    def loss(z: Tensor, w: Tensor) -> Tensor:
        near = NEAR + 0.02 * z
        gate = function(near * w)
        return 1e-6 * (near * gate).square().mean() + (gate - function(NEAR)).square().mean()

    return Row(loss, gained(256, 64))


ROWS |= {f"pulled, {f.__name__}": pulled(f) for f in (torch.sigmoid, torch.tanh)}


def transport(z: Tensor, temperature: Tensor) -> Tensor:
    """Sinkhorn's iteration in probabilities."""
    cost = (0.2 * z[:64, None] - NEAR[:64]).square().mean(-1)
    kernel = torch.exp(-cost / temperature)
    left = torch.full((64,), 1 / 64)
    for _ in range(8):
        right = 1 / 64 / (kernel.T @ left)
        left = 1 / 64 / (kernel @ right)
    return (left[:, None] * kernel * right * cost).sum()


ROWS["optimal transport"] = Row(transport, lambda: Operands([torch.randn(64, 64)], [torch.full((1,), 0.05)]))

# Exact zeros in a signed matrix: the gradient of a bias of the values adds up the errors of a row. Equal bounds for all
# groups, with zero halfway between two codes.

SIGNED = torch.randn(4, 32, 32, generator=SEED).clamp(-3, 3)
SIGNED[:, 1::2, 0], SIGNED[:, 1::2, 1] = 3, -3
LOWER, PADDED = torch.ones(32, 32).tril(), torch.arange(32) < 12
ZEROS: dict[str, Loss] = {
    "tril": lambda a: a.tril(),
    "filled": lambda a: a.masked_fill(LOWER == 0, 0),
    "boolean factor": lambda a: a * PADDED,
    "multiple of a factor": lambda a: -(a * LOWER) / 8,
    "difference of softmaxes": lambda a: (
        (8 * a - 1e9 * (1 - LOWER)).softmax(-1) - 0.9 * (-8 * a - 1e9 * (1 - LOWER)).softmax(-1)
    ),
}
PRODUCTS: dict[str, Loss] = {
    "bmm": torch.matmul,
    "addmm": lambda a, v: torch.cat([torch.addmm(torch.zeros(16), x, y) for x, y in zip(a, v, strict=True)]),
    "einsum": lambda a, v: torch.einsum("bij,bjd->bid", a, v),
}


def zeros(zero: Loss, product: Loss) -> Row:
    return Row(
        lambda a, v, bias: product(zero(a), v + bias).sum(),
        lambda: Operands([SIGNED, torch.randn(4, 32, 16)], [torch.zeros(16)]),
    )


ROWS |= {f"zeros, {name}, bmm": zeros(zero, torch.matmul) for name, zero in ZEROS.items()}
ROWS |= {f"zeros, tril, {name}": zeros(ZEROS["tril"], product) for name, product in PRODUCTS.items() if name != "bmm"}

# Linear attention: a feature that all keys lack makes a row of zeros in the matrix of keys and values; a query with
# that feature alone divides by the smallest normaliser, which amplifies what stands in the row.

PHASE = torch.linspace(0.05, 1.5, 32)[:, None]
FEATURES: dict[str, Loss] = {
    "relu": F.relu,
    "square": lambda x: F.relu(x) ** 2,
    "waves": lambda x: torch.cat([F.relu(x) * PHASE.sin(), F.relu(x) * PHASE.cos()], -1),
    "masked": lambda x: F.relu(x).masked_fill(PHASE > 1.4, 0),
}


def by_outer_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bnd,bnde->bne", q, torch.einsum("bnd,bne->bnde", k, v).cumsum(1))


def by_state(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state, outputs = torch.zeros(k.shape[0], k.shape[-1], v.shape[-1]), []
    for one, key, value in zip(q.chunk(4, 1), k.chunk(4, 1), v.chunk(4, 1), strict=True):
        state = 0.99 * state + key.mT @ value
        outputs.append(one @ state)
    return torch.cat(outputs, 1)


LINEAR: dict[str, Loss] = {
    "matmul": lambda q, k, v: q @ (k.mT @ v),
    "running sum": by_outer_products,
    "state": by_state,
}


def dead_feature() -> Operands:
    """Draw the last queries with, of all features, only the one that all keys lack."""
    q, k, v = torch.randn(3, 4, 32, 16)
    k[..., 3] = -k[..., 3].abs()
    q[:, -8:] = -q[:, -8:].abs()
    q[:, -8:, 3] *= -1
    return Operands([q, k, v], [torch.ones(16)])


def linear(features: Loss, form: Loss) -> Row:
    def loss(q: Tensor, k: Tensor, v: Tensor, gain: Tensor) -> Tensor:
        q, k = features(q), features(k)
        seen = k.cumsum(1) if form is by_outer_products else k.sum(1, keepdim=True)
        return form(q, k, v * gain) / ((q * seen).sum(-1, keepdim=True) + 1e-4)

    return Row(loss, dead_feature)


ROWS |= {f"dead feature, {name}": linear(features, LINEAR["matmul"]) for name, features in FEATURES.items()}
ROWS |= {f"dead feature, {name}": linear(F.relu, form) for name, form in LINEAR.items() if name != "matmul"}

# Decays, through their logarithms and products.

row, SEQUENCE = enter(ROWS), (4, 16, 32)


@row(SEQUENCE, SEQUENCE, p=[torch.zeros(32)])
def decay_by_logarithms(g: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    decay = F.logsigmoid(2 * g + bias).cumsum(1)
    return (decay.exp() * (x * (-decay).exp()).cumsum(1)).square().mean()


@row(SEQUENCE, SEQUENCE, p=[torch.zeros(32)])
def decay_by_products(g: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    decay = (2 * g + bias).sigmoid().cumprod(1)
    return (decay * (x / decay).cumsum(1)).square().mean()


@row(SEQUENCE, SEQUENCE, p=[torch.full((32,), 3.0)])
def causal_average(g: Tensor, x: Tensor, rate: Tensor) -> Tensor:
    size = (rate * g).exp()
    return ((size * x).cumsum(1) * (1 / size.cumsum(1))).square().mean()


@row(SEQUENCE, SEQUENCE, SEQUENCE, p=[torch.zeros(32)])
def gated_linear_attention(q: Tensor, k: Tensor, g: Tensor, bias: Tensor) -> Tensor:
    decay = (F.logsigmoid(g + bias) / 2).cumsum(1)
    scores = (q * decay.exp()) @ (k * (-decay).exp()).mT
    return (scores.tril() @ k).square().mean()
