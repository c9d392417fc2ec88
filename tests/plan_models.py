"""Models that test_plan.py plans; the child process imports them from here, once."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

try:
    from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM
except ImportError:  # the tests that need them skip
    pass

SEQ = 128


class Block(nn.Module):
    """A residual perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Mlp(nn.Module):
    def __init__(self, blocks: int = 4, width: int = 128) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def square(out: Tensor) -> Tensor:
    return out.square().mean()


def mlp(batch: int) -> tuple[nn.Module, Tensor, Any]:
    return Mlp(), torch.zeros(batch, SEQ, 128), square


def deep_mlp(batch: int) -> tuple[nn.Module, Tensor, Any]:
    return Mlp(blocks=12), torch.zeros(batch, SEQ, 128), square


def short_mlp(batch: int) -> tuple[nn.Module, Tensor, Any]:
    return Mlp(blocks=3), torch.zeros(batch, SEQ, 128), square


def _tokens(batch: int) -> dict[str, Tensor]:
    tokens = torch.zeros(batch, SEQ, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def bert(batch: int) -> tuple[nn.Module, dict[str, Tensor]]:
    sizes = {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 1024}
    return BertForMaskedLM(BertConfig(vocab_size=2048, **sizes)), _tokens(batch)


def llama(batch: int) -> tuple[nn.Module, dict[str, Tensor]]:
    sizes = {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 704}
    return LlamaForCausalLM(LlamaConfig(vocab_size=2048, num_key_value_heads=2, **sizes)), _tokens(batch)


class Double(nn.Sequential):
    def __init__(self, before: int, after: int) -> None:
        first = (nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU())
        super().__init__(*first, nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU())


class Unet(nn.Module):
    """Blocks of all sizes, whose outputs far later ones read."""

    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        sizes = [width * 2**i for i in range(depth + 1)]
        pairs = list(itertools.pairwise(sizes))
        self.first = Double(3, width)
        self.down = nn.ModuleList(Double(a, b) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in reversed(pairs))
        self.join = nn.ModuleList(Double(2 * a, a) for a, _ in reversed(pairs))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skips = []
        for block in self.down:
            skips.append(x)
            x = block(F.max_pool2d(x, 2))
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat((up(x), skips.pop()), 1))
        return x


def unet(batch: int) -> tuple[nn.Module, Tensor, Any]:
    return Unet(), torch.zeros(batch, 3, 128, 128), square


def without_blocks(batch: int) -> tuple[nn.Module, Tensor, Any]:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU()), torch.zeros(batch, 64), square
