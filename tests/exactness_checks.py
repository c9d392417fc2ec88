"""The measure and the bar of gradients that codes would spoil."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import pyactcomp


def distance(got: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> float:
    """Return the relative L2 distance over all gradients; NaN and infinity, where only one has them, are far off."""
    pairs = list(zip(got, exact, strict=True))
    assert all(bool(b.isfinite().all()) for _, b in pairs), "torch's own gradients are not finite"
    moved = sum(float((a - b).double().square().sum()) for a, b in pairs)
    size = sum(float(b.double().square().sum()) for _, b in pairs)
    assert size > 0
    return math.sqrt(moved / size) if math.isfinite(moved) else math.inf


def error(loss: Callable[..., Tensor], *leaves: Tensor, **options: Any) -> float:
    """Return how far the leaves' gradients are off with compression; what ``loss`` gets are no leaves."""

    def gradients() -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        return loss(*(leaf * 1 for leaf in leaves))  # type: ignore[return-value]

    exact = torch.autograd.grad(gradients(), leaves)  # type: ignore[arg-type]
    with pyactcomp.compressed(min_bytes=0, **options):
        value = gradients()
    return distance(torch.autograd.grad(value, leaves), exact)  # type: ignore[arg-type]


def leaf(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).requires_grad_()
