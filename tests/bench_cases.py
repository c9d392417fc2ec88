"""What the tests of the benches share: where rows come from, options, and a small workload."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench import (
    rows,
)
from bench.workload import Workload

ORIGIN = {"commit": "c0ffee", "dirty": False, "sources": "s1", "device": "cpu", "command": "python -m bench frontier"}


def options(out: Path, **fields: Any) -> rows.Options:
    return replace(rows.Options(out, "cpu", rows.Budget(None), tiny=True), **fields)


def small_workload() -> Workload:
    def build(_: bool) -> nn.Module:
        class Loss(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for layer in self.layers:
                    x = layer(x)
                return x.square().mean()

        return Loss()

    def inputs(size: int, device: str, _: bool) -> tuple[torch.Tensor, ...]:
        return (torch.randn(512 * size, 64, device=device),)

    return Workload("small", build, inputs, lambda module: list(module.layers), 2, "four linear layers")
