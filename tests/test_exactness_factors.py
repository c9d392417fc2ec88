"""Gradients stay within 2 % where an operator divides by a product of tensors that would be in codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness_checks import BAR, distance, error, leaf
from torch import Tensor, nn
from torch.nn import functional as F

import pyactcomp


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Doubled(torch.autograd.Function):
    """A function of a user, which saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def many_others(x: Tensor) -> Tensor:
    product, w = (x - 1).square(), torch.randn(8, 8)
    others = sum(((x + k) * (x - k) @ w).mean() for k in range(9))
    return 1 / (product + 1e-2) + 1e-6 * others


def lerp_of_zeros(x: Tensor) -> Tensor:
    some = x * (torch.arange(len(x)) % 7 > 0)[:, None]
    return F.rms_norm(torch.lerp(some, some.roll(1, -1), x.roll(1, 0).sigmoid()), (8,), eps=1e-7)


def clamped_bands(x: Tensor) -> Tensor:
    spectrum = x.repeat(1, 8) * torch.logspace(-2, 1, 64)  # beyond 32 KiB
    bands = torch.eye(8).repeat_interleave(8, 0)
    return (spectrum**2 @ bands).clamp(min=1e-9).log()


def centroid(x: Tensor) -> Tensor:
    loudness = torch.logspace(-2, 1, 128)[torch.randperm(128)]  # of frames, neighbours in memory
    real, imaginary = x.view(64, 128) * loudness, x.flip(0).view(64, 128) * loudness
    power = real**2 + imaginary**2
    return (torch.arange(64.0)[:, None] * power).sum(0) / power.sum(0)


def smoothed_power(x: Tensor) -> Tensor:
    wave = x.view(64, 1, 128) * torch.logspace(-2, 1, 128)
    return (F.conv1d(wave**2, torch.ones(1, 1, 5) / 5) + 1e-6).log()


TEMPORARIES: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda x: ((x - 1).square() + 1e-2).reciprocal(),
    "product": lambda x: 1 / ((x + 1) * (x - 1) + 4).square().add(1e-2),
    "of a cast": lambda x: 1 / ((x - 1).double().float().square() + 1e-2),
    "second term": lambda x: 1 / (1e-2 + 2 * (x - 1).square()),
    "addcmul": lambda x: 1 / torch.addcmul(torch.full_like(x, 1e-2), x - 1, x - 1),
    "lerp of rows of zeros": lerp_of_zeros,
    "xlogy": lambda x: torch.xlogy(x.detach(), (x - 1).square() + 1e-2),
    "gelu": lambda x: 1 / (F.gelu(2 * x).square() + 1e-3),
    "silu": lambda x: 1 / (F.silu(2 * x).square() + 1e-3),
    "glu": lambda x: 1 / (F.glu(2 * x).square() + 1e-3),
    "where": lambda x: 1 / torch.where(x > 0, (x - 1).square() + 1e-2, (x + 1).square() + 1e-2),
    "products of them": lambda x: ((x - 1).square() + 0.1).prod(-1).div(1e3),
    "short rows": lambda x: 1 / ((x - 1).view(-1, 4, 4) @ x.detach().view(-1, 4, 4)).square().add(1e-2),
    "function of a user": lambda x: 1 / (Doubled.apply((x - 1).square()) + 1e-2),  # type: ignore[no-untyped-call]
    "many others between": many_others,
    "clamped": clamped_bands,
    "sums of sums": centroid,
    "smoothed": smoothed_power,
    "gaps": lambda x: 1 / torch.complex(x, x).real.square().add(1e-2),
}


@pytest.mark.parametrize("name", TEMPORARIES)
def test_what_is_gone_when_its_product_is_divided_by(name: str) -> None:
    function, w = TEMPORARIES[name], torch.randn(1024 * 8)

    def loss(x: Tensor) -> Tensor:
        y = function(x)
        return (y.flatten() * w[: y.numel()]).sum()

    assert error(loss, leaf(1024, 8)) <= BAR


def test_factors_are_stored_in_codes_where_no_division_comes() -> None:
    x, w = leaf(256, 64), leaf(64, 64)
    with pyactcomp.compressed(min_bytes=0) as c:
        ((x * 1).square() @ w).sum()
        (x * 2) * (x * 3)
    stored = [t.stored_bytes for t in pyactcomp.report(c).tensors if t.kept is None]
    # Both factors of the product, what is squared, and the square, all in codes and a scale for 64 of them.
    assert stored == [256 * (64 + 4)] * 4


def features(x: Tensor) -> Tensor:
    """Return features that have much smaller deviations in some directions than in others."""
    x = (x * torch.logspace(-1.5, 0, 16)) @ ROTATION
    return x - x.mean(0)


def covariance(x: Tensor) -> Tensor:
    return x.t() @ x / len(x)


ROTATION = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))[0]
SOLUTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "eigh": lambda c: torch.linalg.eigh(c)[1].abs(),
    "qr": lambda c: torch.linalg.qr(c)[0],
    "lu_factor": lambda c: torch.linalg.lu_factor(c)[0],
    "pinv": torch.linalg.pinv,
    "lstsq": lambda c: torch.linalg.lstsq(c, torch.ones(16, 3)).solution,
}


@pytest.mark.parametrize("name", SOLUTIONS)
def test_decompositions_of_a_covariance(name: str) -> None:
    w = torch.randn(16 * 16)

    def loss(x: Tensor) -> Tensor:
        y = SOLUTIONS[name](covariance(features(x)))
        return (y.flatten() * w[: y.numel()]).sum()

    assert error(loss, leaf(256, 16)) <= BAR


def whitening(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function of a covariance from one of the eigenvectors and of the roots' reciprocals."""

    def whiten(c: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(c)
        return function(vectors, values.rsqrt())

    return whiten


def by_singular_vectors(c: Tensor) -> Tensor:
    u, s, v = torch.linalg.svd(c)
    return u @ s.rsqrt().diag() @ v


WHITENING: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled vectors": whitening(lambda u, r: (u * r) @ u.t()),
    "scaled rows": whitening(lambda u, r: u @ (r[:, None] * u.t())),
    "diagonal": whitening(lambda u, r: u @ r.diag() @ u.t()),
    "diagonal first": whitening(lambda u, r: u @ (r.diag() @ u.t())),
    "batch": whitening(lambda u, r: (u[None] @ r[None].diag_embed() @ u[None].mT)[0]),
    "einsum": whitening(lambda u, r: torch.einsum("ij,j,kj->ik", u, r, u)),
    "singular vectors": by_singular_vectors,
}


@pytest.mark.parametrize("name", WHITENING)
def test_scaled_eigenvectors(name: str) -> None:
    w = torch.randn(256, 16)

    def loss(x: Tensor) -> Tensor:
        x = features(x)
        return (x @ WHITENING[name](covariance(x)) * w).mean()

    assert error(loss, leaf(256, 16)) <= BAR


class Divided(nn.Module):
    """Divides by the square of a module's result."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.linear, self.module = nn.Linear(64, 256), module

    def forward(self, x: Tensor) -> Tensor:
        return (1 / (self.module(self.linear(x)).square() + 1e-3)).sum()


def gelu_norm(eps: float = 1e-5) -> nn.Module:
    return nn.Sequential(nn.GELU(), nn.LayerNorm(256, eps=eps))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "GELU": nn.GELU,
    "tanh": lambda: nn.GELU("tanh"),
    "SiLU": nn.SiLU,
    "LayerNorm": lambda: nn.LayerNorm(256),
    "RMSNorm": lambda: nn.RMSNorm(256),
    "Dropout": lambda: nn.Dropout(0.3),
    "norm of GELU": gelu_norm,
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("name", MODULES)
def test_a_result_that_is_recomputed_from_codes_is_stored_for_a_divisor(name: str, fuse: bool, device: str) -> None:
    model, x = Divided(MODULES[name]()).to(device), torch.randn(512, 64, device=device)
    parameters = tuple(model.parameters())

    def gradients() -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        return torch.autograd.grad(model(x), parameters)

    exact = gradients()
    pyactcomp.compress(model, min_bytes=0, fuse=fuse)
    assert distance(gradients(), exact) <= BAR


def test_a_recomputed_result_that_was_written_to_is_not_stored_for_a_divisor() -> None:
    # The square keeps its recipe: the memory of its operand holds other numbers by the time of the division.
    model, x = pyactcomp.compress(nn.GELU(), min_bytes=0), leaf(512, 64)
    y = model(x)
    with pyactcomp.compressed(min_bytes=0):
        squared = y.square()
        y.mul_(2)
        (1 / (squared + 1e-3)).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()


class CountedBlock(nn.Module):
    """Counts the saved bytes of one block by hooks of its own; a norm written out divides by the block's output."""

    def __init__(self, operator: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.operator = operator
        self.nbytes = 0

    def forward(self, x: Tensor) -> Tensor:
        def count(tensor: Tensor) -> Tensor:
            self.nbytes += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            x = self.operator(self.first(x))
        x = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        return self.last(x)


@pytest.mark.parametrize("options", [{}, {"fuse": False}, {"mode": "lossless"}], ids=str)
@pytest.mark.parametrize(
    "operator", [F.gelu, F.silu, lambda x: x * x.cos(), lambda x: F.layer_norm(x, (64,))], ids=range(4)
)
def test_a_norm_of_what_hooks_of_other_code_packed(
    operator: Callable[[Tensor], Tensor], options: dict[str, Any]
) -> None:
    model, x = CountedBlock(operator), torch.randn(512, 64)
    exact = torch.autograd.grad(model(x).sin().sum(), list(model.parameters()))
    counted = model.nbytes
    pyactcomp.compress(model, min_bytes=1, **options)
    got = torch.autograd.grad(model(x).sin().sum(), list(model.parameters()))
    assert distance(got, exact) <= (0 if "mode" in options else BAR)
    assert model.nbytes == 2 * counted
