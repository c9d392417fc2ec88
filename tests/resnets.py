"""What is fused of torchvision's ResNets, for tests where no build of torchvision imports."""

from __future__ import annotations

import sys
import types

import pytest
from torch import Tensor, nn

NAME = "torchvision.models.resnet"


class Block(nn.Module):
    """What is fused of torchvision's ``BasicBlock``: one ReLU for both places."""

    def __init__(self, channels: int, project: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        projection = nn.Sequential(nn.Conv2d(channels, channels, 1, bias=False), nn.BatchNorm2d(channels))
        self.downsample = projection if project else None

    def forward(self, x: Tensor) -> Tensor:
        """Apply both convolutions."""
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class Model(nn.Module):
    """What is fused of a ``ResNet``: the stem, and its blocks."""

    def __init__(self, channels: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(Block(channels, True), Block(channels, False))
        self.fc = nn.Linear(channels, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """Return features, statement by statement as the libraries write it."""
        x = self.conv1(x)
        x = self.bn1(x)
        x = self.relu(x)
        x = self.maxpool(x)
        return self.layer1(x)

    def forward_head(self, x: Tensor) -> Tensor:
        """Return the logits of features."""
        return self.fc(x.mean((2, 3)))


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the classes of this file stand where torchvision defines its own."""
    module = types.ModuleType(NAME)
    module.BasicBlock, module.ResNet = Block, Model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, NAME, module)
