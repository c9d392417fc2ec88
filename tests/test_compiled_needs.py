"""How exactly backward graphs need saved values: cases outside the samples of PyTorch's operators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from compiled_backend import gradients, off
from torch import Tensor

from pyactcomp.compiled import divisors, needs
from pyactcomp.config import Config
from pyactcomp.readers.forms import AS_CODES, BFLOAT16, Form

INT8 = Config(min_bytes=1)
BAR = 0.02


def test_a_product_that_backward_divides_keeps_its_small_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(64, 64, requires_grad=True) for _ in range(2)]
    index, scale = torch.randint(0, 64, (64, 64)), torch.randn(64, 64)

    def step(x: Tensor, y: Tensor) -> Tensor:
        # The derivative is the product, over each of its factors.
        return (torch.scatter_reduce(x * scale, 0, index, y * scale, "prod")).sum()

    expected = gradients(step, leaves, None, *leaves)[1]
    # Two roundings to bfloat16, of one part in 256 each.
    assert off(gradients(step, leaves, INT8, *leaves)[1], expected) <= 2 / 256
    monkeypatch.setattr(needs, "_is_divided", lambda *_: False)
    assert off(gradients(step, leaves, INT8, *leaves)[1], expected) > BAR


def _gradients_are_close_only_with(name: str, patch: pytest.MonkeyPatch, function: Callable[..., Tensor]) -> None:
    """Compare gradients where the loss counts only the small results, with and without a decision of ``needs``."""
    torch.manual_seed(0)
    leaves = [torch.randn(64, 64, requires_grad=True) for _ in range(2)]
    # Backward does not compute a product of matrices again.
    weight = torch.randn(64, 64) / 4
    results = function(*(x @ weight for x in leaves)).detach().abs()
    counts = (results <= results.quantile(0.1)).float()

    def step(x: Tensor, y: Tensor) -> Tensor:
        return (function(x @ weight, y @ weight) * counts).sum()

    expected = gradients(step, leaves, None, *leaves)[1]
    # Two roundings to bfloat16, of one part in 256 each.
    assert off(gradients(step, leaves, INT8, *leaves)[1], expected) <= 2 / 256
    patch.setattr(needs, name, lambda *_: False)
    assert off(gradients(step, leaves, INT8, *leaves)[1], expected) > BAR


def test_derivatives_that_span_magnitudes_keep_their_small_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, scale = torch.randn(64, 64, requires_grad=True), torch.full((64, 64), 4.0)
    # The gradient is zero at the largest elements of each group.
    counts = ((x * scale).sinh().abs() < 10).float().detach()
    step = lambda x, scale, counts: ((x * scale).sinh() * counts).sum()  # noqa: E731
    leaves = [x]
    expected = gradients(step, leaves, None, x, scale, counts)[1]
    assert off(gradients(step, leaves, INT8, x, scale, counts)[1], expected) <= 2 / 256
    monkeypatch.setattr(needs, "_grows", lambda _: False)
    assert off(gradients(step, leaves, INT8, x, scale, counts)[1], expected) > BAR


def test_numerators_of_quotients_keep_their_small_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    _gradients_are_close_only_with("_is_quotient", monkeypatch, lambda x, y: x / y)


def test_distances_of_near_points_keep_their_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    points, scale = torch.randn(64, 128, requires_grad=True), torch.full((128,), 2.0)
    others = (points * scale).detach() + 0.01 * torch.randn(64, 128)
    step = lambda points, scale, others: torch.cdist(points * scale, others).diagonal().sum()  # noqa: E731
    leaves = [points]
    expected = gradients(step, leaves, None, points, scale, others)[1]
    assert off(gradients(step, leaves, INT8, points, scale, others)[1], expected) <= BAR
    monkeypatch.setattr(divisors, "_is_squared_distance", lambda _: False)
    assert off(gradients(step, leaves, INT8, points, scale, others)[1], expected) > BAR


@pytest.mark.parametrize(("power", "form"), [(-0.7, BFLOAT16), (2, AS_CODES)])
def test_factors_of_an_inverse_keep_their_small_elements(power: float, form: Form) -> None:
    """Gradient, times a scaled power, times a factor: the derivative of sigmoid(x) ** 0.3 is such a product."""
    forward, backward = torch.fx.Graph(), torch.fx.Graph()
    aten = torch.ops.aten
    x, factor = forward.placeholder("x"), forward.placeholder("factor")
    raised = forward.call_function(aten.pow.Tensor_Scalar, (x, power))
    scaled = forward.call_function(aten.mul.Tensor, (raised, 0.3))
    saved = [backward.placeholder(node.name) for node in (scaled, factor)]
    tangent = backward.placeholder("tangent")
    first = backward.call_function(aten.mul.Tensor, (tangent, saved[0]))
    second = backward.call_function(aten.mul.Tensor, (first, saved[1]))
    backward.output((second,))
    for node in (x, factor, raised, scaled, *saved, tangent, first, second):
        node.meta["val"] = torch.empty(256, 64, device="meta")
    tangents = {node.name for node in (tangent, first, second)}
    producers = {scaled.name: scaled, factor.name: factor}
    found = needs.needs(backward, tangents, {"x", "factor"}, INT8, producers=producers)
    assert [found[node.name].form for node in saved] == [form, form]


@pytest.mark.parametrize("square", [lambda h: h**2, lambda h: (-h) * (h / -1)], ids=["power", "product of multiples"])
def test_multiples_of_a_factor_behind_a_divisor_are_exact(
    square: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean of squares less the square of the mean: backward reads twice the factor, whose codes cost less."""
    torch.manual_seed(0)
    near = torch.rand(48, 48).sub(0.8).relu()
    near /= near.sum(1, keepdim=True)
    # Columns with variances that span magnitudes, beside large means.
    x = torch.randn(48, 64) * 10 ** torch.linspace(-3, 0, 64) + 1
    weight = torch.eye(64, requires_grad=True)

    def step(x: Tensor, weight: Tensor, near: Tensor) -> Tensor:
        h = x @ weight
        mean = near @ h
        return (F.relu(near @ square(h) - mean**2) + 1e-6).sqrt().sum()

    leaves = [weight]
    expected = gradients(step, leaves, None, x, weight, near)[1]
    assert off(gradients(step, leaves, INT8, x, weight, near)[1], expected) <= BAR
    monkeypatch.setattr(divisors, "is_multiple", lambda _: False)
    assert off(gradients(step, leaves, INT8, x, weight, near)[1], expected) > BAR
