"""What Adam sees: the error of each input column of a weight whose inputs have channels of very different scales.

Six gains of a norm are a hundred times the others, and the weights that read these channels a hundredth: the function
stays the same. Codes of what the norm returns would round the other channels of a group in steps of the largest.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from compiled_backend import gradients as gradients_of_graph
from torch import Tensor, nn
from torch.nn import functional as F
from works_with import GRADIENT_BOUND
from written_norms import CentredByFunction, CentredByVar, Derived, Gemma, Llama, Meta

import pyactcomp
from pyactcomp.config import Config

ROWS, GAIN, OUTLIERS = 512, 100.0, 6


# What torch says of a bfloat16 input and a float32 weight, with compression or without.
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "LayerNorm": nn.LayerNorm,
    "LayerNorm without bias": lambda width: nn.LayerNorm(width, bias=False),
    "RMSNorm": lambda width: nn.RMSNorm(width, eps=1e-6),
    "derived": Derived,
    "function": functools.partial(CentredByFunction, bias=True),
    "RMSNorm, its own eps": nn.RMSNorm,
    "written": Llama,
    "written, weight last": Meta,
    "written, by a quotient": Gemma,
    "written, centred": CentredByVar,
}


class Net(nn.Module):
    """A norm that a Linear reads; its input needs a gradient unless it is ``first``."""

    def __init__(self, norm: Callable[[int], nn.Module], width: int, first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Identity() if first else nn.Linear(width, width)
        self.norm, self.read, self.after = norm(width), nn.Linear(width, 64), nn.Linear(64, 64)
        outliers = torch.randperm(width)[:OUTLIERS]
        with torch.no_grad():
            self.norm.weight.copy_(torch.rand(width) + 0.5)
            for each in self.norm.parameters():
                each[outliers] *= GAIN
            self.read.weight[:, outliers] /= GAIN

    def forward(self, x: Tensor) -> Tensor:
        return self.after(torch.tanh(self.read(self.norm(self.before(x)))))


def data(width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, width, generator=generator), torch.randn(ROWS, 64, generator=generator)


def gradient(net: Net, x: Tensor, target: Tensor, autocast: bool) -> Tensor:
    net.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = F.mse_loss(net(x).float(), target)
    loss.backward()
    assert net.read.weight.grad is not None
    return net.read.weight.grad.clone()


def worst_column(got: Tensor, exact: Tensor) -> float:
    return float(((got - exact).norm(dim=0) / exact.norm(dim=0)).max())


@pytest.mark.parametrize("first", [True, False], ids=["first", "inner"])
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "float32"])
@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "as written"])
@pytest.mark.parametrize("name", NORMS)
def test_columns_behind_outlying_gains(name: str, fuse: bool, autocast: bool, first: bool) -> None:
    net = Net(NORMS[name], 256, first)
    x, target = data(256)
    exact = gradient(net, x, target, autocast)
    pyactcomp.compress(net, fuse=fuse, min_bytes=1)
    assert worst_column(gradient(net, x, target, autocast), exact) <= GRADIENT_BOUND


@pytest.mark.parametrize("width", [96, 32], ids=["no whole groups", "shorter than a group"])
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_columns_of_rows_that_share_a_group(name: str, width: int) -> None:
    net = Net(NORMS[name], width, False)
    x, target = data(width)
    exact = gradient(net, x, target, False)
    pyactcomp.compress(net, min_bytes=1)
    assert worst_column(gradient(net, x, target, False), exact) <= GRADIENT_BOUND


@pytest.mark.parametrize("first", [True, False], ids=["first", "inner"])
@pytest.mark.parametrize("name", NORMS)
def test_columns_in_graphs(name: str, first: bool) -> None:
    net = Net(NORMS[name], 256, first)
    x, target = data(256)

    def loss(x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(net(x), target)

    tensors = [net.read.weight, *(p for p in net.parameters() if p is not net.read.weight)]
    exact, got = (gradients_of_graph(loss, tensors, config, x, target)[1][0] for config in (None, Config(min_bytes=1)))
    assert worst_column(got, exact) <= GRADIENT_BOUND


def test_the_first_norm_stores_its_input_alone() -> None:
    """The input of the first block is the program's own: kept as it is, and its norm is computed again from it."""
    net = Net(nn.LayerNorm, 256, True)
    x, target = data(256)
    exact = gradient(copy.deepcopy(net), x, target, False)
    pyactcomp.compress(net, min_bytes=1)
    got = gradient(net, x, target, False)
    report = pyactcomp.report(net)
    assert [t.stored_bytes for t in report.tensors if t.module == "read" and t.shape == (ROWS, 256)] == [0]
    # The codes of tanh's result are what is left of the error; the input of `read` is exact.
    assert worst_column(got, exact) <= GRADIENT_BOUND / 4
