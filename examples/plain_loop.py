"""A training loop of your own: compress the model, cover the loss, look at the report, check the gradients."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import pyactcomp


def build(width: int, depth: int, classes: int) -> nn.Module:
    """Return a plain MLP; any module does."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.LayerNorm(width)]
    return nn.Sequential(*layers, nn.Linear(width, classes))


def main() -> None:
    """Train on random data."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--width", type=int, default=256)
    options.add_argument("--depth", type=int, default=4)
    options.add_argument("--batch", type=int, default=2048)
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--mode", choices=["int8", "lossless"], default="int8")
    arguments = options.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = build(arguments.width, arguments.depth, classes=100).to(device)
    batch = torch.randn(arguments.batch, arguments.width, device=device)
    labels = torch.randint(100, (arguments.batch,), device=device)

    # How far do the gradients of this model move, with this batch? Nothing is changed by asking.
    print(pyactcomp.verify(model, batch, lambda output: F.cross_entropy(output, labels), mode=arguments.mode))

    pyactcomp.compress(model, mode=arguments.mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(arguments.steps):
        optimizer.zero_grad()
        # The loss is computed outside the model: the context covers what it saves.
        with pyactcomp.compressed(model, mode=arguments.mode):
            loss = F.cross_entropy(model(batch), labels)
        loss.backward()
        optimizer.step()
        if step in (0, arguments.steps - 1):
            print(f"step {step}: loss {loss.item():.4f}")
    print(pyactcomp.report(model))


if __name__ == "__main__":
    main()
