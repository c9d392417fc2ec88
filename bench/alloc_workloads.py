"""Trainings whose shapes change from step to step: random weights and inputs, the same sequence for every allocator.

Plain torch, so that a process is at its first step in a few seconds: each of the many runs pays for its imports.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SEED = 0
Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Workload:
    """``build(device, tiny)`` returns one training step, which draws its own shapes and returns its loss."""

    name: str
    build: Callable[[str, bool], Step]
    steps: int
    conditions: str


class Norm(nn.Module):
    """Root mean square normalisation in fp32, as language models have it."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        exact = x.float()
        exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * exact.to(x.dtype)


class Cache:
    """Keys and values of what was generated, grown by concatenation with every token."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.layers:
            before = self.layers[layer]
            keys, values = torch.cat([before[0], keys], dim=2), torch.cat([before[1], values], dim=2)
        self.layers[layer] = keys, values
        return keys, values

    @property
    def length(self) -> int:
        return self.layers[0][0].shape[2] if self.layers else 0


class Attention(nn.Module):
    """Causal attention with rotary positions; several query heads share one of keys and values."""

    def __init__(self, hidden: int, heads: int, shared_heads: int, layer: int) -> None:
        super().__init__()
        self.heads, self.shared_heads, self.size, self.layer = heads, shared_heads, hidden // heads, layer
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, shared_heads * self.size, bias=False)
        self.value = nn.Linear(hidden, shared_heads * self.size, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], cache: Cache | None) -> Tensor:
        batch, length, hidden = x.shape
        query = self._rotate(self.query(x).view(batch, length, self.heads, -1).transpose(1, 2), rotation)
        key = self._rotate(self.key(x).view(batch, length, self.shared_heads, -1).transpose(1, 2), rotation)
        value = self.value(x).view(batch, length, self.shared_heads, -1).transpose(1, 2)
        if cache is not None:
            key, value = cache.extend(self.layer, key, value)
        key, value = (t.repeat_interleave(self.heads // self.shared_heads, dim=1) for t in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=length > 1)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))

    @staticmethod
    def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * rotation[0] + torch.cat([-second, first], dim=-1) * rotation[1]


class GatedUnit(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """A mixture of experts: how many tokens each one gets depends on the tokens."""

    def __init__(self, hidden: int, inner: int, count: int, chosen: int = 2) -> None:
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(hidden, count, bias=False)
        self.experts = nn.ModuleList(GatedUnit(hidden, inner) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weight, expert = self.router(tokens).float().softmax(-1).topk(self.chosen)
        order = expert.flatten().argsort(stable=True)
        loads = torch.bincount(expert.flatten(), minlength=len(self.experts)).tolist()
        rows = (order // self.chosen).split(loads)
        weights = weight.flatten()[order].to(x.dtype).split(loads)
        mixed = torch.zeros_like(tokens)
        for unit, mine, share in zip(self.experts, rows, weights, strict=True):
            mixed.index_add_(0, mine, unit(tokens[mine]) * share[:, None])
        return mixed.view_as(x)


class Layer(nn.Module):
    def __init__(self, attention: Attention, unit: nn.Module, hidden: int) -> None:
        super().__init__()
        self.attention, self.unit = attention, unit
        self.before_attention, self.before_unit = Norm(hidden), Norm(hidden)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], cache: Cache | None) -> Tensor:
        x = x + self.attention(self.before_attention(x), rotation, cache)
        return x + self.unit(self.before_unit(x))


class Decoder(nn.Module):
    """A causal language model; ``unit(hidden, inner)`` makes what follows each attention."""

    def __init__(
        self, hidden: int, layers: int, heads: int, shared_heads: int, inner: int, vocabulary: int,
        unit: Callable[[int, int], nn.Module] = GatedUnit,
    ) -> None:  # fmt: skip
        super().__init__()
        self.size = hidden // heads
        self.embed = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(
            Layer(Attention(hidden, heads, shared_heads, i), unit(hidden, inner), hidden) for i in range(layers)
        )
        self.norm = Norm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        begin = cache.length if cache is not None else 0
        x = self.embed(tokens)
        position = torch.arange(begin, begin + tokens.shape[1], device=x.device, dtype=torch.float32)
        frequency = 10000.0 ** -(torch.arange(0, self.size, 2, device=x.device) / self.size)
        angle = torch.outer(position, frequency).repeat(1, 2)
        rotation = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, rotation, cache)
        return self.head(self.norm(x))

    def losses(self, tokens: Tensor) -> Tensor:
        """Return the negative log likelihood of every token but the first."""
        logits = self(tokens[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(len(tokens), -1)


class Bottleneck(nn.Module):
    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        out = 4 * inner
        self.body = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def resnet(depths: tuple[int, ...], width: int, classes: int) -> nn.Module:
    """Return a residual network of bottlenecks; depths (3, 4, 6, 3) and width 64 make ResNet-50."""
    parts: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
    ]  # fmt: skip
    channels = width
    for stage, depth in enumerate(depths):
        inner = width << stage
        for block in range(depth):
            parts.append(Bottleneck(channels, inner, 2 if block == 0 and stage > 0 else 1))
            channels = 4 * inner
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class MessagePassing(nn.Module):
    """Gated messages along edges, summed at their targets."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.source, self.target, self.value, self.own = (nn.Linear(hidden, hidden) for _ in range(4))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        gate = torch.sigmoid(self.source(nodes)[source] + self.target(nodes)[target])
        received = torch.zeros_like(nodes).index_add_(0, target, gate * self.value(nodes)[source])
        return nodes + F.relu(self.norm(self.own(nodes) + received))


def trainer(model: nn.Module, learning_rate: float) -> Callable[[Tensor], Tensor]:
    """Return what follows a forward: backward, optimizer, gradients gone; gives the loss back detached."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)

    def finish(loss: Tensor) -> Tensor:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return finish


def make(device: str, build: Callable[[], nn.Module]) -> Any:
    """Build a model on a device from the one seed."""
    torch.manual_seed(SEED)
    with torch.device(device):
        return build()


def _sft_varlen(device: str, tiny: bool) -> Step:
    size = (64, 2, 4, 2, 128, 512) if tiny else (1536, 12, 12, 4, 4096, 32000)
    model = make(device, lambda: Decoder(*size)).bfloat16()
    finish, draw = trainer(model, 1e-4), random.Random(SEED)
    shortest, longest, batch = (8, 64, 2) if tiny else (256, 4096, 4)

    def step() -> Tensor:
        # Lengths of real texts are skewed: uniform in their logarithm.
        length = int(math.exp(draw.uniform(math.log(shortest), math.log(longest))))
        tokens = torch.randint(size[-1], (batch, length), device=device)
        return finish(model.losses(tokens).mean())

    return step


def _multiscale_resnet(device: str, tiny: bool) -> Step:
    classes = 10 if tiny else 1000
    model = make(device, lambda: resnet((1, 1) if tiny else (3, 4, 6, 3), 8 if tiny else 64, classes))
    model = model.to(memory_format=torch.channels_last)
    finish, draw = trainer(model, 1e-4), random.Random(SEED)

    def step() -> Tensor:
        batch, side = (draw.randint(2, 4), 32) if tiny else (draw.randint(32, 96), 32 * draw.randint(4, 11))
        images = torch.randn(batch, 3, side, side, device=device).to(memory_format=torch.channels_last)
        labels = torch.randint(classes, (batch,), device=device)
        with torch.autocast(device, torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        return finish(loss)

    return step


def _moe(device: str, tiny: bool) -> Step:
    size = (64, 2, 4, 2, 128, 512) if tiny else (1024, 8, 16, 4, 2048, 32000)
    count = 4 if tiny else 16
    model = make(device, lambda: Decoder(*size, unit=lambda hidden, inner: Experts(hidden, inner, count))).bfloat16()
    finish, draw = trainer(model, 1e-4), random.Random(SEED)

    def step() -> Tensor:
        batch, length = (2, draw.randint(8, 32)) if tiny else (draw.randint(4, 16), draw.randint(256, 1024))
        tokens = torch.randint(size[-1], (batch, length), device=device)
        return finish(model.losses(tokens).mean())

    return step


def _graphs(device: str, tiny: bool) -> Step:
    hidden, layers = (16, 2) if tiny else (128, 6)
    model = make(
        device, lambda: nn.ModuleList([*(MessagePassing(hidden) for _ in range(layers)), nn.Linear(hidden, 1)])
    )
    finish, draw = trainer(model, 1e-3), random.Random(SEED)

    def step() -> Tensor:
        nodes = draw.randint(20, 50) if tiny else draw.randint(10_000, 100_000)
        edges = torch.randint(nodes, (2, nodes * draw.randint(5, 15)), device=device)
        x = torch.randn(nodes, hidden, device=device)
        wanted = torch.randn(nodes, 1, device=device)
        *passing, head = model
        for layer in passing:
            x = layer(x, edges)
        return finish(F.mse_loss(head(x), wanted))

    return step


@torch.no_grad()
def generate(model: Decoder, prompt: Tensor, count: int) -> Tensor:
    """Return the prompt and ``count`` sampled tokens after it."""
    cache = Cache()
    tokens = [prompt]
    for _ in range(count):
        logits = model(tokens[-1], cache)[:, -1].float()
        tokens.append(torch.multinomial(logits.softmax(-1), 1))
    return torch.cat(tokens, dim=1)


def _rl_generate(device: str, tiny: bool) -> Step:
    size = (64, 2, 4, 2, 128, 512) if tiny else (1024, 8, 16, 4, 4096, 32000)
    model = make(device, lambda: Decoder(*size)).bfloat16()
    finish, draw = trainer(model, 1e-4), random.Random(SEED)

    def step() -> Tensor:
        batch, length, count = (
            (2, draw.randint(4, 16), 4) if tiny else (draw.randint(16, 48), draw.randint(64, 512), draw.randint(16, 64))
        )
        tokens = generate(model, torch.randint(size[-1], (batch, length), device=device), count)
        reward = torch.rand(batch, 1, device=device)
        return finish((reward * model.losses(tokens)).mean())

    return step


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "sft_varlen", _sft_varlen, 45,
            "decoder of 12 layers of 1536, bf16, 4 sequences of 256 to 4096 tokens, lengths uniform in their logarithm",
        ),
        Workload(
            "multiscale_resnet", _multiscale_resnet, 45,
            "ResNet-50, channels_last, bf16 autocast, 32 to 96 images of 128 to 352 px",
        ),
        Workload(
            "moe", _moe, 40,
            "decoder of 8 layers of 1024, 16 experts of which a token takes 2, bf16, 4 to 16 sequences of 256 to 1024",
        ),
        Workload(
            "graphs", _graphs, 45,
            "6 layers of gated message passing, fp32, 10,000 to 100,000 nodes with 5 to 15 edges each",
        ),
        Workload(
            "rl_generate", _rl_generate, 25,
            "decoder of 8 layers of 1024, bf16: 16 to 48 prompts, 16 to 64 tokens generated with a growing cache, "
            "then a reward-weighted step on them",
        ),
    )
}  # fmt: skip
