"""An image classifier of timm: batch norms, ReLU and window attention run through fused functions."""

from __future__ import annotations

import argparse

import timm
import torch
from torch.nn import functional as F

import pyactcomp


def main() -> None:
    """Train on random images, and print the report of the first step."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", default="resnet18", help="a name of timm, as swin_tiny_patch4_window7_224")
    options.add_argument("--size", type=int, default=64)
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--steps", type=int, default=5)
    arguments = options.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = timm.create_model(arguments.model, num_classes=10)
    model = pyactcomp.compress(model.to(device, memory_format=torch.channels_last).train())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = torch.randn(arguments.batch, 3, arguments.size, arguments.size, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.arange(arguments.batch, device=device) % 10
    for step in range(arguments.steps):
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")
    print(pyactcomp.report(model))


if __name__ == "__main__":
    main()
