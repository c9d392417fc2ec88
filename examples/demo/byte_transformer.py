"""The demo's model: a small decoder-only transformer over bytes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCABULARY = 256


class Block(nn.Module):
    """Pre-LayerNorm attention and MLP, each around a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, sequence, width] to the same shape."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class ByteTransformer(nn.Module):
    """A language model over bytes; ``forward`` returns the loss.

    The loss is part of the module, so compressing the module also compresses the tensors saved by the loss.
    """

    def __init__(self, width: int, depth: int, heads: int, sequence: int) -> None:
        super().__init__()
        self.checkpoint_blocks = False
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per byte; both arguments are [batch, sequence], int64."""
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.token(inputs) + self.position(positions)
        for block in self.blocks:
            if self.checkpoint_blocks and self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
