"""Blocks of transformers in torch's operators, for the tests of compiled graphs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, math: bool, dropout: float = 0.0, heads: int = 2) -> None:
        super().__init__()
        self.qkv, self.out, self.math, self.dropout = nn.Linear(128, 384), nn.Linear(128, 128), math, dropout
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        heads = *x.shape[:2], self.heads, 128 // self.heads
        q, k, v = (t.view(heads).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        if self.math:
            p = F.dropout((q @ k.transpose(-1, -2) * (128 // self.heads) ** -0.5).softmax(-1), self.dropout)
            y = p @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, math: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention, self.dropout = Attention(math, dropout), dropout
        self.first, self.second = nn.LayerNorm(128), nn.LayerNorm(128)
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.first(x)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.second(x)))), self.dropout)


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ParameterList([torch.ones(128), torch.ones(128)])
        self.q, self.k, self.v, self.o = (nn.Linear(128, 128, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((128, 384), (128, 384), (384, 128)))
        angle = torch.arange(64.0)[:, None] * 10.0 ** -torch.arange(32.0)
        self.register_buffer("cos", angle.cos().repeat(1, 2))
        self.register_buffer("sin", angle.sin().repeat(1, 2))

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight

    def rotate(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-b, a], -1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x, self.norms[0])
        q, k, v = (f(h).view(*x.shape[:2], 2, 64).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(x.shape))
        h = self.norm(x, self.norms[1])
        return x + self.down(F.silu(self.gate(h)) * self.up(h))
