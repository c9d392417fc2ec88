"""The models of the suite `holds`; the loss is inside, so that what covers the module covers it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from .workload import ClassifierLoss

BYTES = 256


@dataclass(frozen=True)
class Shape:
    """The size of a :class:`ByteModel`."""

    layers: int
    width: int
    heads: int
    window: int


class Block(nn.Module):
    """A layer of a transformer that normalises before it attends and before it computes."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.attention_output = nn.Linear(shape.width, shape.width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(shape.width),
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        projected = self.query_key_value(self.attention_norm(x))
        query, key, value = projected.unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_output(attended.transpose(1, 2).flatten(2))
        return x + self.feed_forward(x)


class ByteModel(nn.Module):
    """A GPT-2-like language model over bytes whose output is its loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, shape.width)
        self.positions = nn.Embedding(shape.window, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, BYTES, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # As GPT-2: what is added to the residual stream starts smaller the more is added.
                residual = name.endswith(("attention_output.weight", "feed_forward.3.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def logits(self, tokens: Tensor) -> Tensor:
        """Return what the softmax over the next byte is taken of: [sequences, length, BYTES]."""
        x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten())


def resnet50() -> ClassifierLoss:
    """Return timm's ResNet-50 for grey images of ten classes."""
    import timm

    return ClassifierLoss(timm.create_model("resnet50", num_classes=10, in_chans=1))


def small_convolutional() -> ClassifierLoss:
    """Return what stands for it where only the harness is tested."""
    layers: list[nn.Module] = []
    for channels in (1, 32):
        layers += [nn.Conv2d(channels, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    return ClassifierLoss(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)))


def parameters_of(module: nn.Module) -> int:
    """Return how many numbers are trained."""
    return sum(parameter.numel() for parameter in module.parameters())


def by_decay(module: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return the parameters in two groups: matrices decay, biases and the scales of norms do not."""
    matrices = [p for p in module.parameters() if p.dim() >= 2]
    others = [p for p in module.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
