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
