"""Gradients stay within 2 % if saved tensors span orders of magnitude and backward ignores the large elements."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import ranges
import torch
from compiled_backend import gradients, off, trained
from exactness_checks import BAR, distance, error, leaf
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pyactcomp
from pyactcomp.config import Config


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", ranges.LOSSES)
def test_gradients_beside_elements_that_do_not_count(name: str) -> None:
    assert error(ranges.LOSSES[name], leaf(256, 64)) <= BAR


@pytest.mark.parametrize("name", [name for name in ranges.LOSSES if not name.startswith("entropy")])
def test_gradients_in_a_graph_beside_elements_that_do_not_count(name: str) -> None:
    x, w = leaf(256, 64), leaf(64, 64, scale=0.125)

    def step(x: Tensor, w: Tensor) -> Tensor:
        return ranges.LOSSES[name](x @ w)

    exact, got = (gradients(step, [x, w], config, x, w)[1] for config in (None, Config(min_bytes=1)))
    assert off(got, exact) <= BAR


RATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "exp": lambda square, rate: torch.exp(-(rate * square)),
    "exp2": lambda square, rate: torch.exp2(-square * rate),
    "expm1": lambda square, rate: torch.expm1(-square * rate),
    "a multiple": lambda square, rate: torch.exp(-0.5 * (square * rate) / 2),
    "a view": lambda square, rate: torch.exp(-(square * rate).view(64, 256).t()),
    "a sum": lambda square, rate: torch.exp(1 - square * rate),
    "a difference": lambda square, rate: torch.exp(rate - square * rate),
}


@pytest.mark.parametrize("shape", [(1,), (64,), (256, 1)], ids=["one rate", "rates of columns", "rates of rows"])
@pytest.mark.parametrize("name", RATES)
def test_the_gradient_of_a_rate_inside_an_exponential(name: str, shape: tuple[int, ...]) -> None:
    z = leaf(256, 64)
    assert error(lambda rate: RATES[name](50 * z.square(), rate.exp()).mean(), leaf(*shape, scale=0.1)) <= BAR


@pytest.mark.parametrize("name", RATES)
def test_the_gradient_of_a_square_and_its_rate_inside_an_exponential(name: str) -> None:
    assert error(lambda z, rate: RATES[name]((7 * z) * (7 * z), rate.exp()).mean(), leaf(256, 64), leaf(256, 64)) <= BAR


class Scored(nn.Module):
    """A small network with a loss of :mod:`ranges`."""

    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.inner(x))


@pytest.mark.parametrize("name", [name for name in ranges.LOSSES if name.startswith(("bumps", "sigmoid", "tanh"))])
def test_gradients_of_a_compiled_network_whose_loss_passes_few_elements(name: str) -> None:
    plain, model = (
        trained(lambda: Scored(ranges.LOSSES[name]), lambda model: model(torch.randn(256, 64)), packed)
        for packed in (False, True)
    )
    got, exact = (tuple(p.grad for p in each.parameters() if p.grad is not None) for each in (model, plain))
    assert distance(got, exact) <= BAR
    assert sum(tensor.form == "codes" for tensor in pyactcomp.report(model).graphs[0].saved)


class Biased(nn.Module):
    """Attention with relative positions, a learned bias to which a mask is added for all blocks."""

    def __init__(self, fill: float, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.qkv, self.bias = nn.Linear(16, 16), nn.Linear(16, 48), nn.Embedding(127, 4)
        self.fill, self.use_reentrant = fill, use_reentrant
        self.register_buffer("distances", torch.arange(64)[:, None] - torch.arange(64) + 63)

    def block(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 64, 3, 4, 4).permute(2, 0, 3, 1, 4)
        mixed = (q @ k.transpose(-1, -2) + bias).softmax(-1) @ v
        return x + mixed.transpose(1, 2).reshape(x.shape)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias(self.distances).permute(2, 0, 1)[None] + torch.ones(64, 64).triu(1) * self.fill
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.block, x, bias, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["nonreentrant", "reentrant"])
@pytest.mark.parametrize("fill", [-1e9, -1e4, -100.0])
def test_a_checkpointed_block_gets_its_mask_back(fill: float, use_reentrant: bool) -> None:
    plain, model = (Biased(fill, use_reentrant) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    pyactcomp.compress(model, min_bytes=0)
    x = torch.randn(8, 64, 16)
    for each in (plain, model):
        each(x).square().mean().backward()
    got, exact = ([p.grad for p in each.parameters() if p.grad is not None] for each in (model, plain))
    assert distance(tuple(got), tuple(exact)) <= BAR
    # To the stream between blocks no constant is added.
    inputs = [t for t in pyactcomp.report(model).tensors if t.shape == (8, 64, 16) and t.kept is None]
    assert inputs
    assert all(t.stored_bytes <= x.nbytes / 2 for t in inputs)
