"""A GPT, a ViT and a U-Net in plain PyTorch, as users write them: functional attention and loss, no library."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            each.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for each in self.qkv(self.norm1(x)).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A causal language model that returns its loss."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads, causal=True) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))


class ViT(nn.Module):
    """A vision transformer that returns its loss."""

    def __init__(self, layers: int, width: int, heads: int, classes: int, side: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(torch.randn(1, (side // patch) ** 2, width) * 0.02)
        self.blocks = nn.ModuleList([Block(width, heads, causal=False) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)), labels)


class Stage3d(nn.Sequential):
    """Two convolutions of a volume, each with its norm and activation."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__(
            nn.Conv3d(before, after, 3, stride, 1),
            nn.InstanceNorm3d(after, affine=True),
            nn.LeakyReLU(0.01, inplace=True),
            nn.Conv3d(after, after, 3, 1, 1),
            nn.InstanceNorm3d(after, affine=True),
            nn.LeakyReLU(0.01, inplace=True),
        )


class UNet3d(nn.Module):
    """A U-Net that returns the loss of each voxel's class, as medical images are segmented."""

    def __init__(self, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(widths))
        down = [Stage3d(1, widths[0], 1), *(Stage3d(a, b, 2) for a, b in pairs)]
        up = [Stage3d(2 * a, a, 1) for a, _ in reversed(pairs)]
        self.stages = nn.ModuleList([*down, *up])
        self.grow = nn.ModuleList(nn.ConvTranspose3d(b, a, 2, 2) for a, b in reversed(pairs))
        self.head = nn.Conv3d(widths[0], classes, 1)

    def forward(self, volumes: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        x, skipped = volumes, []
        for stage in self.stages[: len(self.grow) + 1]:
            x = stage(x)
            skipped.append(x)
        skipped.pop()
        for grow, stage in zip(self.grow, self.stages[len(self.grow) + 1 :], strict=True):
            x = stage(torch.cat((grow(x), skipped.pop()), 1))
        return F.cross_entropy(self.head(x), labels)
