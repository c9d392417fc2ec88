"""Gradients stay within 2 % where a mask leaves the small elements, or zeros, of a tensor whose others are large."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from exactness_checks import BAR, error, leaf
from torch import Tensor
from torch.nn import functional as F

import pyactcomp


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# One of eight classes each, whose score is close to the margin; the others are far beyond it.
RIGHT = F.one_hot(torch.arange(512) % 8, 8).float()


def scores(z: Tensor) -> Tensor:
    """Return scores that are 1 less a little for the right class, and anywhere for the others."""
    return RIGHT * (1 - 0.02 * z.abs()) + (1 - RIGHT) * 8 * z


HINGES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda s: F.relu(1 - s) ** 2,
    "of a product": lambda s: (lambda hinge: hinge * hinge)(F.relu(1 - s)),
    "clamp_min": lambda s: (1 - s).clamp_min(0).square(),
    "clamp": lambda s: (1 - s).clamp(min=0).pow(2),
    "clamp with two bounds": lambda s: (1 - s).clamp(0, 4).pow(2),
    "hardtanh": lambda s: F.hardtanh(1 - s, 0, 4).pow(2),
    "sum with a number": lambda s: F.relu(-s + 1).square(),
    "sum with a number, clamped": lambda s: (-s + 1).clamp(min=0).square(),
    "of a difference": lambda s: F.relu(torch.ones(512, 8) - s).square(),
    "a multiple": lambda s: (2 * F.relu(1 - s)).square(),
    "softplus": lambda s: F.softplus(1 - s, beta=1000).square(),
}


@pytest.mark.parametrize("name", HINGES)
def test_squared_hinges_of_the_right_class(name: str) -> None:
    assert error(lambda z: (RIGHT * HINGES[name](scores(z))).mean(), leaf(512, 8)) <= BAR


def stored(function: Callable[[Tensor], object], *shape: int) -> list[int]:
    """Return the stored bytes of each tensor that ``function`` saves and that is not kept."""
    x = leaf(*shape) * 1
    with pyactcomp.compressed(min_bytes=0) as c:
        function(x)
    return [t.stored_bytes for t in pyactcomp.report(c).tensors if t.kept is None and t.stored_bytes]


def test_activations_that_look_like_hinges_stay_in_codes() -> None:
    w = leaf(64, 64)
    # The squared ReLU of a transformer's block, the gate of a Hardswish, the update of a gated unit.
    assert stored(lambda x: F.relu(x @ w).square() @ w, 512, 64) == [512 * (64 + 4)] * 3
    assert 512 * 64 * 2 not in stored(lambda x: x * F.relu6(x + 3) / 6, 512, 64)
    assert 512 * 64 * 2 not in stored(lambda x: x * (x + 3).clamp(0, 6) / 6, 512, 64)
    assert 512 * 64 * 2 not in stored(lambda x: (1 - x) * x, 512, 64)


# Exact zeros in a signed matrix: the gradient of a bias of the values adds up the errors of a row.

CAUSAL = (torch.arange(32)[:, None] >= torch.arange(32)).float()
PADDED = torch.arange(32) < 12
LESS = torch.triu(torch.full((32, 32), -torch.inf), 1)

ZEROS: dict[str, Callable[[Tensor], Tensor]] = {
    "tril": lambda a: a.tril(),
    "triu of a transpose": lambda a: a.mT.triu().mT,
    "masked_fill": lambda a: a.masked_fill(CAUSAL == 0, 0),
    "where": lambda a: torch.where(CAUSAL > 0, a, 0),
    "where otherwise": lambda a: torch.where(CAUSAL == 0, 0, a),
    "boolean factor": lambda a: a * PADDED,
    "boolean factor first": lambda a: PADDED * a,
    "broadcast factor": lambda a: a * CAUSAL,
    "factor of each element": lambda a: a * CAUSAL.expand(a.shape).contiguous(),
    "a multiple": lambda a: -a.tril() / 8 * 2,
    "a copy": lambda a: a.mT.triu().mT.contiguous(),
    "a cast": lambda a: a.double().tril().float(),
}
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bmm": torch.matmul,
    "einsum": lambda a, v: torch.einsum("bij,bjd->bid", a, v),
    "baddbmm": lambda a, v: torch.baddbmm(torch.zeros(16), a, v),
    "mm": lambda a, v: torch.cat([each @ one for each, one in zip(a, v, strict=True)]),
    "addmm": lambda a, v: torch.cat([torch.addmm(torch.zeros(16), each, one) for each, one in zip(a, v, strict=True)]),
}


def error_of_bias(function: Callable[[Tensor], Tensor], a: Tensor, product: str = "bmm") -> float:
    values = leaf(*a.shape[:-1], 16)
    return error(lambda bias: PRODUCTS[product](function(a * 1), values + bias).sum(), leaf(16))


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", ZEROS)
def test_a_matrix_product_with_exact_zeros(name: str, product: str) -> None:
    function, a = ZEROS[name], torch.randn(8, 32, 32)
    # Equal bounds for all groups, with zero halfway between two codes.
    a = a.clamp(-3, 3)
    a[:, 1::2, 0], a[:, 1::2, 1] = 3, -3
    assert error_of_bias(function, a.requires_grad_(), product) <= BAR


def test_the_difference_of_two_masked_softmaxes() -> None:
    a = leaf(8, 32, 32, scale=8)
    assert error_of_bias(lambda a: (a + LESS).softmax(-1) - 0.9 * (-a + LESS).softmax(-1), a) <= BAR


CODED: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "number": lambda x: x * 0.5,
    "whole number": lambda x: x * 2,
    "scale": lambda x: x * torch.rand(64),
    "copy": lambda x: F.gelu(x).clone(),
    "gate": lambda x: F.silu(x) * x,
    "masked relu": lambda x: x.relu() * (x > 0.5),
    "causal softmax": lambda x: x.softmax(-1).tril(),
    "causal square": lambda x: x.square().tril(),
    "choice": lambda x: torch.where(x > 0, x, -x),
    "centred": lambda x: x - torch.ones(64),
    "gated relu": lambda x: x.relu() * x.roll(1, 0),
    "layer behind a relu": lambda x: x.relu() @ leaf(64, 64),
    "relu attention": lambda x: (x @ x.t()).relu() @ x,
    "linear attention": lambda x: x.relu() @ (x.relu().t() @ x),
    "mean of relus": lambda x: (x @ x.t()).softmax(-1) @ x.relu(),
    "covariance of relus": lambda x: (x.relu().t() @ x.relu()).repeat(8, 1),
    "scaled relu": lambda x: x.relu() * x.mean(-1, keepdim=True),
    "residual of relus": lambda x: x + x.relu() @ leaf(64, 64),
}


@pytest.mark.parametrize("name", CODED)
def test_a_matrix_without_zeros_off_the_grid_stays_in_codes(name: str) -> None:
    w = leaf(64, 64)
    assert stored(lambda x: CODED[name](x) @ w, 512, 64)[-1] == 512 * (64 + 4)


def test_sums_of_products_without_a_dead_feature_stay_in_codes() -> None:
    w = leaf(64, 64)
    # Values that a layer made of the result of a ReLU; linear attention by other features.
    assert 512 * 64 * 2 not in stored(lambda x: (x @ x.t()).softmax(-1) @ (x.relu() @ w), 512, 64)
    assert 64 * 64 * 2 not in stored(lambda x: x @ ((F.elu(x) + 1).t() @ x), 512, 64)
    assert 64 * 64 * 2 not in stored(lambda x: x @ ((x / x.sum(-1, keepdim=True).clamp_min(1)).t() @ x), 512, 64)


# Linear attention by ReLU features: a feature that all keys lack makes a row of zeros in the matrix of keys and values,
# and a query with that feature alone divides by the smallest normaliser, which amplifies whatever stands in the row.

PHASE = torch.linspace(0.05, 1.5, 64)[:, None]
FEATURES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu and a number": lambda x: F.relu(x) + 1e-7,
    "relu6": F.relu6,
    "clamp": lambda x: x.clamp(min=0),
    "threshold": lambda x: F.threshold(x, 0, 0),
    "square": lambda x: F.relu(x) ** 2,
    "normalised power": lambda x: (lambda r: r**3 / (r**3).norm(dim=-1, keepdim=True).clamp_min(1e-6))(F.relu(x)),
    "waves": lambda x: torch.cat([F.relu(x) * PHASE.sin(), F.relu(x) * PHASE.cos()], -1),
    "masked": lambda x: F.relu(x).masked_fill(PHASE > 1.4, 0),
    "padded": lambda x: torch.where(PHASE > 1.4, 0, F.relu(x)),
    "contiguous heads": lambda x: F.relu(x.transpose(0, 1)).transpose(0, 1),
}


def by_outer_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bnd,bnde->bne", q, torch.einsum("bnd,bne->bnde", k, v).cumsum(1))


def by_state(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state, outputs = torch.zeros(k.shape[0], k.shape[-1], v.shape[-1]), []
    for one, key, value in zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True):
        state = 0.99 * state + value[:, None] * key[:, :, None]
        outputs.append(one[:, None] @ state)
    return torch.cat(outputs, 1)


def by_chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    chunks = zip(k.chunk(16, 1), v.chunk(16, 1), strict=True)
    states = torch.stack([torch.einsum("bnd,bne->bde", key, value) for key, value in chunks]).cumsum(0)
    return torch.cat([one @ state for one, state in zip(q.chunk(16, 1), states.unbind(0), strict=True)], 1)


def by_accumulation(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state, outputs = torch.zeros(k.shape[0], k.shape[-1], v.shape[-1]), []
    for one, key, value in zip(q.chunk(4, 1), k.chunk(4, 1), v.chunk(4, 1), strict=True):
        state = torch.baddbmm(state, key.mT, value)
        outputs.append(one @ state)
    return torch.cat(outputs, 1)


LINEAR: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "einsum": lambda q, k, v: torch.einsum("bld,bde->ble", q, torch.einsum("bnd,bne->bde", k, v)),
    "transposed einsum": lambda q, k, v: torch.einsum("bld,bed->ble", q, torch.einsum("bnd,bne->bed", k, v)),
    "matmul": lambda q, k, v: q @ (k.mT @ v),
    "channels first": lambda q, k, v: ((v.mT.contiguous() @ k) @ q.mT).mT,
    "mm": lambda q, k, v: torch.stack([a @ (b.t() @ c) for a, b, c in zip(q, k, v, strict=True)]),
    "a multiple": lambda q, k, v: q @ (k.mT @ v / 64),
    "ones beside the values": lambda q, k, v: (q @ (k.mT @ F.pad(v, (0, 1), value=1.0)))[..., :-1],
    "sum of outer products": lambda q, k, v: q @ (k[..., None] * v[..., None, :]).sum(1),
    "running sum of outer products": by_outer_products,
    "state": by_state,
    "chunks": by_chunks,
    "accumulation": by_accumulation,
}


def error_of_dead_features(features: str, form: str) -> float:
    """Return the error where the last queries have, of all features, only the one that all keys lack."""
    q, k, v = torch.randn(4, 64, 16), torch.randn(4, 64, 16), torch.randn(4, 64, 16)
    k[..., 3] = -k[..., 3].abs()
    q[:, -8:] = -q[:, -8:].abs()
    q[:, -8:, 3] *= -1
    weights = torch.randn(4, 64, 16)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = FEATURES[features](q), FEATURES[features](k)
        seen = k.cumsum(1) if form in ("running sum of outer products", "state") else k.sum(1, keepdim=True)
        normaliser = 1 / ((q * seen).sum(-1, keepdim=True) + 1e-4)
        return (LINEAR[form](q, k, v) * normaliser * weights).mean()

    return error(loss, q.requires_grad_(), k.requires_grad_(), v.requires_grad_())


@pytest.mark.parametrize("form", LINEAR)
def test_a_feature_that_all_keys_lack(form: str) -> None:
    assert error_of_dead_features("relu", form) <= BAR


@pytest.mark.parametrize("features", FEATURES)
def test_a_feature_map_with_zeros(features: str) -> None:
    assert error_of_dead_features(features, "einsum") <= BAR


# Rows of weights divided by their own sum, of which one weight is nearly the whole.

ALONE = torch.arange(64) == torch.arange(256)[:, None] % 64
QUOTIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda w: w / w.sum(-1, keepdim=True),
    "sum with a number": lambda w: w / (w.sum(-1, keepdim=True) + 1e-6),
    "clamped sum": lambda w: w / w.sum(-1, keepdim=True).clamp(min=1e-6),
    "clamp_min of a sum": lambda w: w / w.sum(-1, keepdim=True).clamp_min(1e-6),
    "expanded sum": lambda w: w / w.sum(-1, keepdim=True).expand_as(w),
    "viewed sum": lambda w: w / w.sum(-1)[:, None],
    "mean": lambda w: w / (64 * w.mean(-1, keepdim=True)),
    "masked": lambda w: w.triu() / (w.triu().sum(-1, keepdim=True) + 1e-6),
    "masked sum": lambda w: w / (w * (LESS[0, 0] < 1)).sum(-1, keepdim=True),
    "masked dividend": lambda w: w.masked_fill(~ALONE & (w > 1), 0) / w.sum(-1, keepdim=True),
    "view": lambda w: w.view(-1, 8, 64) / w.view(-1, 8, 64).sum(-1, keepdim=True),
    "transposed": lambda w: (w.t() / w.t().sum(0)).t(),
    "cast": lambda w: w / w.double().sum(-1, keepdim=True).float(),
}


@pytest.mark.parametrize("name", QUOTIENTS)
def test_weights_divided_by_their_sum(name: str) -> None:
    def loss(z: Tensor) -> Tensor:
        weights = torch.where(ALONE, 1 + 0.1 * z, 1e-4 + 1e-4 * z).clamp(min=0)
        return (1 - QUOTIENTS[name](weights).view(256, 64)[ALONE]).mean()

    assert error(loss, leaf(256, 64)) <= BAR


@pytest.mark.parametrize("divisor", [lambda x, w: w.sum(-1, keepdim=True), lambda x, w: 9 + w, lambda x, w: x.norm()])
def test_other_dividends_stay_in_16_bits(divisor: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, w = (leaf(512, 64) * 1 for _ in range(2))
    with pyactcomp.compressed(min_bytes=0) as c:
        (x * 2) / divisor(x, w)
    assert [t for t in pyactcomp.report(c).tensors if t.shape == (512, 64) and t.stored_bytes == x.nbytes / 2]
    assert [t for t in pyactcomp.report(c).tensors if t.shape == (512, 64) and t.stored_bytes == x.nbytes] == []


# Similarities of normalised rows with each other, which are nearly one within a class.

SIMILARITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "normalize": lambda x: (z := F.normalize(x, dim=-1)) @ z.t(),
    "norm": lambda x: (z := x / x.norm(dim=-1, keepdim=True)) @ z.t(),
    "norm with a number": lambda x: (z := x / (x.norm(dim=-1, keepdim=True) + 1e-8)) @ z.t(),
    "batches": lambda x: ((z := F.normalize(x.expand(2, 64, 64), dim=-1)) @ z.mT).mean(0),
    "einsum": lambda x: torch.einsum("id,jd->ij", z := F.normalize(x, dim=-1), z),
}


@pytest.mark.parametrize("name", SIMILARITIES)
def test_similarities_of_normalised_rows(name: str) -> None:
    """The supervised contrastive loss of four classes, whose rows are nearly equal."""
    own = torch.eye(64)
    mates = (torch.arange(64) % 4 == torch.arange(64)[:, None] % 4).float() - own
    centres = torch.randn(4, 64)[torch.arange(64) % 4]

    def loss(z: Tensor) -> Tensor:
        scores = SIMILARITIES[name](centres + 0.12 * z) / 0.07 - 1e9 * own
        return -(mates * scores.log_softmax(-1)).mean()

    assert error(loss, leaf(64, 64)) <= BAR


def test_other_products_of_normalised_rows_stay_in_codes() -> None:
    w, grown = leaf(64, 64), 64 * 64 * 2 - 64 * (64 + 4)

    def products(x: Tensor) -> None:
        z, other = F.normalize(x, dim=-1), F.normalize(2 * x, dim=-1)
        _ = z @ other.t(), z @ w, z @ w, w @ z

    # The operand of the norm and its quotient.
    assert stored(SIMILARITIES["normalize"], 64, 64).count(grown) == 2
    # The operands of two norms, and neither quotient.
    assert stored(products, 64, 64).count(grown) == 2


# Squares of similarities, whose large diagonal gets no gradient: the spectral contrastive loss.

OWN = torch.eye(64)
SQUARES: dict[str, Callable[[Tensor], Tensor]] = {
    "sum less the diagonal": lambda z: (lambda k: (k**2).sum() - (k.diagonal() ** 2).sum())(z @ z.t()),
    "factor": lambda z: ((z @ z.t()) ** 2 * (1 - OWN)).sum(),
    "index": lambda z: ((z @ z.t()) ** 2)[OWN == 0].sum(),
    "square": lambda z: ((z @ z.t()).square() * (1 - OWN)).sum(),
    "a multiple": lambda z: ((-2 * (z @ z.t()) / 64) ** 2 * (1 - OWN)).sum(),
    "two tensors": lambda z: ((z @ (z * 1.01).t()) ** 2 * (1 - OWN)).sum(),
    "einsum": lambda z: (torch.einsum("id,jd->ij", z, z) ** 2 * (1 - OWN)).sum(),
}


@pytest.mark.parametrize("name", SQUARES)
def test_squares_of_similarities_beside_a_large_diagonal(name: str) -> None:
    assert error(lambda z: SQUARES[name](8 * OWN + 0.05 * z), leaf(64, 64)) <= BAR


def test_squares_of_other_products_stay_in_codes() -> None:
    w, grown = leaf(64, 64), 512 * 64 * 2
    assert grown not in stored(lambda x: (x @ w) ** 2, 512, 64)
    assert grown not in stored(lambda x: (x.relu() @ w).relu() ** 2 @ w, 512, 64)

    def norm_of_heads(x: Tensor) -> Tensor:
        heads = x.view(4, 2, 64, 64)
        return (heads.softmax(-1) @ (2 * heads)).pow(2).mean(-1)

    assert grown not in stored(norm_of_heads, 512, 64)[1:]
