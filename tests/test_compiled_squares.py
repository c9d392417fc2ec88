"""Squares of clipped differences, in graphs: small elements, which pass the gradient of a low loss, stay precise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from compiled_backend import gradients, off
from torch import Tensor, nn

from pyactcomp.compiled import partition
from pyactcomp.config import Config

INT8 = Config(min_bytes=1)
BAR = 0.02
CLASSES = 8


def hinge(x: Tensor) -> Tensor:
    return F.relu(1 - x) ** 2


def shifted(x: Tensor) -> Tensor:
    return F.relu(1.0 + x.neg()).square()


def clamped(x: Tensor) -> Tensor:
    return (1 - x).clamp(min=0).pow(2)


def maximum(x: Tensor) -> Tensor:
    return torch.maximum(1 - x, torch.zeros(())) ** 2


def hard(x: Tensor) -> Tensor:
    return F.hardtanh(1 - x, 0.0, 100.0) ** 2


def chosen(x: Tensor) -> Tensor:
    return torch.where(x < 1, 1 - x, 0.0) ** 2


def soft(x: Tensor) -> Tensor:
    return F.softplus(1 - x, beta=20) ** 2


def cube(x: Tensor) -> Tensor:
    return 2 * F.relu(1 - x) ** 3


def product(x: Tensor) -> Tensor:
    clipped = F.relu(1 - x)
    return clipped * clipped


def two(x: Tensor) -> Tensor:
    return F.relu(torch.ones_like(x) - x) ** 2


def insensitive(x: Tensor) -> Tensor:
    return F.relu((x - 1).abs() - 1e-3) ** 2


def run(function: Callable[[Tensor], Tensor], config: Config | None) -> list[Tensor]:
    """Return the gradients where the target's score is near its margin, and all others far below."""
    torch.manual_seed(0)
    targets = F.one_hot(torch.randint(0, CLASSES, (256,)), CLASSES).float()
    scores = targets * (1 - 0.05 * torch.rand(256, 1)) + (1 - targets) * -8 * torch.rand(256, CLASSES)
    weight = torch.eye(CLASSES, requires_grad=True)

    def step(scores: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        # Backward does not compute a product of matrices again.
        return (targets * function(scores @ weight)).sum()

    return gradients(step, [weight], config, scores, weight, targets)[1]


@pytest.mark.parametrize("function", [hinge, shifted, clamped, maximum, hard, cube, product, two])
def test_a_squared_hinge_keeps_its_small_elements(
    function: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(function, None)
    assert off(run(function, INT8), expected) <= BAR
    monkeypatch.setattr(partition, "clipped_squares", lambda *_: set())
    assert off(run(function, INT8), expected) > BAR


@pytest.mark.parametrize("function", [chosen, soft, insensitive])
def test_hinges_of_other_operators_keep_their_small_elements(function: Callable[[Tensor], Tensor]) -> None:
    assert off(run(function, INT8), run(function, None)) <= BAR


def test_an_activation_that_is_squared_takes_codes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256))
    down, x = nn.Linear(256, 64), torch.randn(128, 64)
    step = lambda x: down(F.relu(model(x)).square()).square().mean()  # noqa: E731
    leaves: list[Tensor] = [*model.parameters(), *down.parameters()]
    _, expected, _ = gradients(step, leaves, None, x)
    _, got, (record,) = gradients(step, leaves, INT8, x)
    assert off(got, expected) <= BAR
    assert {value.form for value in record.saved if value.shape == (128, 256)} <= {"codes", "bits"}
