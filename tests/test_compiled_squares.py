"""Differences, and squares of clipped ones, in graphs: small elements, which pass the gradient, stay precise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from compiled_backend import gradients, off
from torch import Tensor, nn

from pyactcomp.compiled import partition, squares
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


ROWS = torch.full((CLASSES,), 1 / 0.3)
LEARNT = nn.Parameter(ROWS.clone())
WEIGHTS = 1 + torch.rand(256, CLASSES, generator=torch.Generator().manual_seed(0))


def tukey(d: Tensor) -> Tensor:
    return torch.where(d.abs() < 1, 1 - (1 - d**2) ** 3, 1.0)


def inside(kernel: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda d: kernel(d) * (d.abs() < 1)


def of_length(length: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A kernel of distances between points."""
    return lambda d: inside(lambda r: (1 - r) ** 3)(length(d))


def truncated(square: Tensor) -> Tensor:
    return square.clamp(max=1)


def bump(d: Tensor) -> Tensor:
    return 1 - torch.exp(-0.5 * d**2)


DIFFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "divided": lambda d: truncated((d / 0.3) ** 2),
    "divided, bump": lambda d: bump(d / 0.3),
    "divided, masked": lambda d: (d / 0.3) ** 2 * (d.abs() < 0.3),
    "divided, the least": lambda d: ((d / 0.3) ** 2).flatten().topk(256, largest=False)[0],
    "divided by a tensor of one element": lambda d: bump(d / torch.tensor(0.3)),
    "times a row": lambda d: bump(d * ROWS),
    "times weights": lambda d: bump(2 * d * WEIGHTS),
    "tukey": tukey,
    "tukey, divided": lambda d: tukey(d / 0.6),
    "tukey, masked": inside(lambda d: 1 - (1 - d**2) ** 3),
    "biweight": inside(lambda d: (1 - d**2) ** 2),
    "added product": inside(lambda d: torch.addcmul(torch.ones(()), d, d, value=-1) ** 2),
    "sum of squares": of_length(lambda d: (d**2).sum(-1) / 16),
    "mean of squares": of_length(lambda d: (d**2).mean(-1) / 2),
    "norm": of_length(lambda d: d.norm(dim=-1) / 4),
    "city blocks": of_length(lambda d: d.abs().sum(-1) / 8),
    "joined": lambda d: truncated((torch.cat([d, -d]) / 0.6) ** 2),
    "padded": lambda d: truncated((F.pad(d, (1, 1)) / 0.6) ** 2),
    "picked": lambda d: truncated((d[torch.arange(200)] / 0.6) ** 2),
    "split": lambda d: truncated((d.split(3, 1)[1] / 0.6) ** 2),
    "cube": inside(lambda d: d**3),
    "fourth power": inside(lambda d: d**4),
}


# Backward computes these again from the difference, with or without the rule.
FROM_THE_DIFFERENCE: dict[str, Callable[[Tensor], Tensor]] = {
    "over a row": lambda d: bump(d / ROWS.reciprocal()),
    "times a row that learns": lambda d: bump(d * LEARNT),
    "tukey of products": lambda d: torch.where(d.abs() < 1, (1 - d * d) * (1 - d * d) * (1 - d * d), 0.0),
    "tricube": inside(lambda d: (1 - d.abs() ** 3) ** 3),
    "polynomial": inside(lambda d: (1 - 3 * d**2 + 2 * d.abs() ** 3) ** 2),
    "one added": inside(lambda d: (-(d**2) + 1) ** 3),
}


def of_a_difference(function: Callable[[Tensor], Tensor], config: Config | None) -> list[Tensor]:
    """Return the gradients where a tenth of the targets lie far away."""
    torch.manual_seed(0)
    x, targets, weight = torch.randn(256, CLASSES), torch.randn(256, CLASSES), torch.eye(CLASSES, requires_grad=True)
    targets[torch.rand(256, CLASSES) < 0.1] *= 10

    def step(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        # Backward does not compute a product of matrices again.
        return function(x @ weight - targets).mean()

    return gradients(step, [weight], config, x, weight, targets)[1]


@pytest.mark.parametrize("name", DIFFERENCES)
def test_multiples_and_powers_of_a_difference_keep_their_small_elements(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient is zero at the largest differences, as of a robust loss or a kernel with a radius."""
    expected = of_a_difference(DIFFERENCES[name], None)
    assert off(of_a_difference(DIFFERENCES[name], INT8), expected) <= BAR
    monkeypatch.setattr(squares, "_is_made_of", lambda *_: False)
    assert off(of_a_difference(DIFFERENCES[name], INT8), expected) > BAR


@pytest.mark.parametrize("name", FROM_THE_DIFFERENCE)
def test_polynomials_that_backward_computes_again_keep_their_small_elements(name: str) -> None:
    function = FROM_THE_DIFFERENCE[name]
    assert off(of_a_difference(function, INT8), of_a_difference(function, None)) <= BAR


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
