"""Norms in graphs, whose groups of codes would span channels of different scales: standardized values are stored."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
import torch._functorch.config as functorch_config
from compiled_backend import gradients, off
from torch import Tensor, nn
from works_with import GRADIENT_BOUND

from pyactcomp.config import Config

GROUP = 64
INT8 = Config(min_bytes=1, group_size=GROUP)
CHANNELS, SIZE = 64, 14
ALL = (0, 2, 3)
LAYOUTS = {"channels-last": torch.channels_last, "contiguous": torch.contiguous_format}


class Written(nn.Module):
    """A norm by hand, with a weight for each channel."""

    def __init__(self, normalize: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.normalize = normalize
        self.weight = nn.Parameter(torch.rand(1, CHANNELS, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(x) * self.weight


def var_mean(x: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, ALL, correction=0, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + 1e-6)


def root_mean_square(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(ALL, keepdim=True) + 1e-6)


def frozen(scales: Tensor) -> nn.Module:
    norm = nn.BatchNorm2d(CHANNELS)
    norm.running_var = scales.flatten() ** 2
    return norm.eval()


NORMS: dict[str, Callable[[Tensor], nn.Module]] = {
    "batch": lambda scales: nn.BatchNorm2d(CHANNELS),
    "batch, frozen": frozen,
    "var_mean": lambda scales: Written(var_mean),
    "root mean square": lambda scales: Written(root_mean_square),
    "by a parameter": lambda scales: Scaled(scales),
}


class Scaled(nn.Module):
    """A learned scale, which is no deviation of the values: their channels have one scale as they are."""

    def __init__(self, scales: Tensor) -> None:
        super().__init__()
        self.variance = nn.Parameter(scales**2)

    def forward(self, x: Tensor) -> Tensor:
        return (x / x.std().detach()) * self.variance.rsqrt()


class Net(nn.Module):
    """A sum whose channels have a scale each, normalized, as before an activation in a pre-activation ResNet."""

    def __init__(self, norm: nn.Module, scales: Tensor) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.norm = norm
        self.register_buffer("scales", scales if not isinstance(norm, Scaled) else torch.ones_like(scales))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        summed = (self.first(x) + x) * self.scales
        return (self.second(self.norm(summed).relu()) * weights).sum()


def step(norm: str, layout: torch.memory_format, config: Config | None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    scales = torch.logspace(-3, 3, CHANNELS)[torch.randperm(CHANNELS)].view(1, CHANNELS, 1, 1)
    net = Net(NORMS[norm](scales), scales).to(memory_format=layout)  # type: ignore[call-overload]
    x, weights = (torch.randn(8, CHANNELS, SIZE, SIZE).to(memory_format=layout) for _ in range(2))
    _, found, _ = gradients(net, list(net.parameters()), config, x, weights)
    return dict(zip((name for name, _ in net.named_parameters()), found, strict=True))


@functools.cache
def exact_step(norm: str, layout: torch.memory_format) -> dict[str, Tensor]:
    return step(norm, layout, None)


@pytest.mark.parametrize(("layout", "budget"), [("channels-last", 1.0), ("channels-last", 0.4), ("contiguous", 1.0)])
@pytest.mark.parametrize("norm", NORMS)
def test_channels_of_different_scales_have_gradients_of_their_own(norm: str, layout: str, budget: float) -> None:
    exact = exact_step(norm, LAYOUTS[layout])
    # A budget may have backward compute the statistics again.
    with functorch_config.patch(activation_memory_budget=budget):
        compressed = step(norm, LAYOUTS[layout], INT8)
    errors = {name: float((compressed[name] - e).norm() / e.norm()) for name, e in exact.items()}
    if norm != "batch, frozen" and norm != "root mean square" and norm != "by a parameter":
        # A norm subtracts what a bias adds, so the gradient is zero but for rounding.
        del errors["first.bias"]
    assert max(errors.values()) <= GRADIENT_BOUND, errors


def test_scales_that_are_no_statistic_of_the_values_standardize_nothing() -> None:
    """As the degrees of a graph's nodes do: a product reads the values too, whose channels have one scale."""
    torch.manual_seed(0)
    first, second = nn.Conv2d(CHANNELS, CHANNELS, 1), nn.Conv2d(CHANNELS, CHANNELS, 1)
    scales = torch.logspace(-3, 3, CHANNELS).view(1, CHANNELS, 1, 1)
    x, weights, others = (torch.randn(8, CHANNELS, SIZE, SIZE).to(memory_format=torch.channels_last) for _ in range(3))

    def loss(x: Tensor, weights: Tensor, others: Tensor, scales: Tensor) -> Tensor:
        y = first(x)
        return (second(y) * weights).sum() + (y * scales.rsqrt() * others).sum()

    arguments = x, weights, others, scales
    exact, found = (gradients(loss, [second.weight], config, *arguments)[1][0] for config in (None, INT8))
    assert float((found - exact).norm() / exact.norm()) <= GRADIENT_BOUND


def clamped(x: Tensor) -> Tensor:
    """Return values over a deviation that an infinity among them leaves finite."""
    return x * torch.rsqrt(x.pow(2).mean(ALL, keepdim=True).clamp(max=100.0) + 1e-6)


def inverse(x: Tensor) -> Tensor:
    """Return values over a deviation to whose inverse a number is added: with an infinity the number is left."""
    return x * ((x.pow(2).mean(ALL, keepdim=True).reciprocal() + 1e-2).reciprocal()).rsqrt()


@pytest.mark.parametrize("norm", ["batch", "batch, frozen", "root mean square", clamped, inverse])
@pytest.mark.parametrize("bad", [-math.inf, math.nan])
def test_infinities_and_nan_reach_the_gradients(norm: str | Callable[[Tensor], Tensor], bad: float) -> None:
    torch.manual_seed(0)
    module = NORMS[norm](torch.ones(1, CHANNELS, 1, 1)) if isinstance(norm, str) else Written(norm)
    assert isinstance(module.weight, Tensor)
    x, weights = (torch.randn(8, CHANNELS, SIZE, SIZE).to(memory_format=torch.channels_last) for _ in range(2))
    x[1, 2, 3, 4] = bad

    # Each element by itself; no backward recomputes a convolution.
    copied = nn.Conv2d(CHANNELS, CHANNELS, 1, groups=CHANNELS)

    def loss(x: Tensor, weights: Tensor) -> Tensor:
        return (module(copied(x)) * weights).sum()

    exact, found = (gradients(loss, [module.weight], config, x, weights)[1][0].flatten() for config in (None, INT8))
    assert not exact[2].isfinite()
    assert torch.equal(found.isfinite(), exact.isfinite())


class Bottleneck(nn.Module):
    """Three convolutions with batch norms around a residual, as in ResNet-50."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [(4 * width, width, 1), (width, width, 3), (width, 4 * width, 1)]
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, k, padding=k // 2, bias=False) for a, b, k in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _ in sizes)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for index, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            y = norm(convolution(y))
            y = y.relu() if index < 2 else (y + x).relu()
        return y


def test_a_residual_block_in_channels_last_stores_codes_and_bits() -> None:
    """No rule may ask for more unseen: one for operands of a norm once made ResNet's graphs half again as large."""
    torch.manual_seed(0)
    width, blocks, shape = 64, 3, (2, 256, SIZE, SIZE)
    net = nn.Sequential(*(Bottleneck(width) for _ in range(blocks))).to(memory_format=torch.channels_last)
    x, weights = (torch.randn(shape).to(memory_format=torch.channels_last) for _ in range(2))
    records = gradients(lambda x, w: (net(x.exp()) * w).sum(), [], INT8, x, weights)[2]
    stored = sum(saved.after for record in records for saved in record.saved if saved.operator not in ("None", "exp"))
    wide, narrow = math.prod(shape), math.prod(shape) * width // shape[1]
    # Codes of the input of each norm and of each block, and a bit for each result of ReLU.
    codes = blocks * ((wide + 2 * narrow) + wide) * (1 + 4 / GROUP)
    bits = blocks * (wide + 2 * narrow) / 8
    # Two statistics of each channel, in float32.
    statistics = blocks * 3 * 2 * 4 * max(shape[1], width)
    assert stored <= codes + bits + statistics


def test_the_difference_from_a_mean_of_few_elements_is_exact() -> None:
    """Each statistic is of 4 elements, over which no errors average out."""
    torch.manual_seed(0)
    convolution, norm = nn.Conv2d(CHANNELS, CHANNELS, 1), nn.InstanceNorm2d(CHANNELS)
    x, weights = torch.randn(2, 32, CHANNELS, 2, 2)

    def loss(x: Tensor, weights: Tensor) -> Tensor:
        return (norm(convolution(x) + x).relu() * weights).sum()

    exact, found = (gradients(loss, [convolution.weight], config, x, weights)[1][0] for config in (None, INT8))
    assert float((found - exact).norm() / exact.norm()) <= GRADIENT_BOUND


@pytest.mark.parametrize(("begins", "form"), [("trained", "codes"), ("frozen", "codes"), ("given", "16 bits")])
def test_a_stream_that_begins_with_a_frozen_embedding_is_packed_as_others(begins: str, form: str) -> None:
    """A constant that no layer made may be a mask, and the sums in which it is added are no layer's."""
    torch.manual_seed(0)
    table = nn.Parameter(torch.randn(50, GROUP), requires_grad=begins == "trained")
    weights: list[Tensor] = [nn.Parameter(torch.randn(GROUP, GROUP) / 8) for _ in range(5)]
    tokens = torch.randint(50, (256,))

    def normalized(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def loss(tokens: Tensor, given: Tensor) -> Tensor:
        x = given if begins == "given" else nn.functional.embedding(tokens, table)
        for first, second in (weights[:2], weights[2:4]):
            x = x + torch.tanh(normalized(x) @ first) @ second
        return torch.tanh(normalized(x) @ weights[4]).sum()

    given = table.detach()[tokens]
    _, exact, _ = gradients(loss, weights, None, tokens, given)
    _, got, (graph,) = gradients(loss, weights, INT8, tokens, given)
    assert off(got, exact) <= GRADIENT_BOUND
    assert {saved.form for saved in graph.saved if saved.operator == "add"} == {form}
