"""Models, data and losses that the tests of ``verify`` share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

ROWS = 512


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64), nn.ReLU())


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def batch(seed: int = 0) -> Tensor:
    return torch.randn(ROWS, 128, generator=torch.Generator().manual_seed(seed))


class Stateful(nn.Module):
    """Draws random numbers, counts its calls, and normalises with running statistics."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(128, 128)
        self.norm = nn.BatchNorm1d(128)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(128, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("history", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history = torch.cat([self.history[1:], x.mean().view(1)])
        result: Tensor = self.last(self.drop(self.norm(self.first(x))))
        return result


def hooks(model: nn.Module) -> list[tuple[list[Any], list[Any]]]:
    return [(list(m._forward_pre_hooks.values()), list(m._forward_hooks.values())) for m in model.modules()]
