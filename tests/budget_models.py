"""Eleven small models, of which ``test_budget.py`` holds the bytes that a step stores."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, TOKENS = 128, 2, 64
CHANNELS, SIZE = 32, 16


class Residual(nn.Module):
    """Two convolutions with batch norms around a residual, as in ResNet-18."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(CHANNELS) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](self.convolutions[0](x)).relu()
        return (self.norms[1](self.convolutions[1](y)) + x).relu()


class Inverted(nn.Module):
    """EfficientNet's block: a depthwise convolution, and a gate for each channel."""

    def __init__(self) -> None:
        super().__init__()
        wide = 4 * CHANNELS
        self.expand = nn.Sequential(nn.Conv2d(CHANNELS, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU())
        self.depth = nn.Sequential(
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.SiLU()
        )
        self.squeeze, self.excite = nn.Conv2d(wide, CHANNELS // 4, 1), nn.Conv2d(CHANNELS // 4, wide, 1)
        self.project = nn.Sequential(nn.Conv2d(wide, CHANNELS, 1, bias=False), nn.BatchNorm2d(CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depth(self.expand(x))
        gate = self.excite(F.silu(self.squeeze(y.mean((2, 3), keepdim=True)))).sigmoid()
        return x + self.project(y * gate)


class Denoiser(nn.Module):
    """A U-Net of one level, with an embedding of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(4, CHANNELS) for _ in range(3))
        self.first, self.middle = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(2))
        self.down = nn.Conv2d(CHANNELS, CHANNELS, 3, 2, 1)
        self.last = nn.Conv2d(2 * CHANNELS, CHANNELS, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(CHANNELS, CHANNELS), nn.SiLU(), nn.Linear(CHANNELS, CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        time = torch.cos(torch.arange(len(x))[:, None] * torch.logspace(0, -3, CHANNELS))
        x = x + self.first(F.silu(self.norms[0](x))) + self.time(time)[..., None, None]
        y = self.down(F.silu(self.norms[1](x)))
        y = y + self.middle(F.silu(self.norms[2](y)))
        return self.last(torch.cat([x, F.interpolate(y, scale_factor=2.0)], 1))


class WrittenNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def written_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    future = torch.full((TOKENS, TOKENS), -math.inf).triu(1)
    return (q @ k.mT / math.sqrt(q.shape[-1]) + future).softmax(-1) @ v


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).tril() @ v / TOKENS


class Experts(nn.Module):
    """Four experts, each of which picks half of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.up, self.down = (nn.Parameter(torch.randn(4, *shape) / 12) for shape in ((WIDTH, 256), (256, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, chosen = self.gate(flat).softmax(-1).t().topk(len(flat) // 2, -1)
        y = F.silu(flat[chosen] @ self.up) @ self.down * weight[..., None]
        return torch.zeros_like(flat).index_add(0, chosen.flatten(), y.flatten(0, 1)).view(x.shape)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(a, b) for a, b in ((WIDTH, 256), (WIDTH, 256), (256, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A block of a transformer, with scales of its residuals and dropout if asked for."""

    def __init__(
        self, norm: type[nn.Module], attention: Attention, layer: Callable[[], nn.Module], scaled: bool = False
    ) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norm(WIDTH) for _ in range(2))
        self.qkv, self.out, self.layer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), layer()
        self.attention, self.scaled = attention, scaled
        self.scales = nn.Parameter(torch.full((2, WIDTH), 0.1))
        self.dropout = nn.Dropout(0.1)

    def _scaled(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.dropout(x) * scale if self.scaled else x

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self._scaled(self.out(self.attention(q, k, v).transpose(1, 2).flatten(2)), self.scales[0])
        return x + self._scaled(self.layer(self.norms[1](x)), self.scales[1])


class GraphAttention(nn.Module):
    """Attention of eight neighbours each, with a softmax by sums over edges."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.source, self.target = (nn.Parameter(torch.randn(WIDTH) / 12) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        count = len(x)
        target = torch.arange(count).repeat(8)
        source = (7 * torch.arange(8 * count)) % count
        z = self.linear(x)
        scores = F.leaky_relu((z @ self.source)[source] + (z @ self.target)[target], 0.2).exp()
        share = scores / torch.zeros(count).index_add(0, target, scores)[target]
        return self.out(F.elu(torch.zeros_like(z).index_add(0, target, share[:, None] * z[source])))


IMAGES, SEQUENCES, NODES = (4, CHANNELS, SIZE, SIZE), (4, TOKENS, WIDTH), (256, WIDTH)


@dataclass(frozen=True)
class Budget:
    """Tensors that a step may store in each form, in sizes of the model's input; in graphs ``more`` in codes.

    Operands of layers are in codes; half is 16 bits, and ``whole`` as computed.
    """

    codes: float
    half: float = 0
    bits: float = 0
    whole: float = 0
    more: float = 0

    def bytes(self, size: int, graph: bool) -> float:
        """Return the bytes for an input of ``size`` elements in float32: a scale of 4 bytes for 64 codes."""
        codes = self.codes + (self.more if graph else 0)
        return size * (codes * (1 + 4 / 64) + 2 * self.half + self.bits / 8 + 4 * self.whole)


def block(attention: Attention, layer: Callable[[], nn.Module], **options: Any) -> Callable[[], nn.Module]:
    return lambda: Block(attention=attention, layer=layer, **{"norm": WrittenNorm, **options})


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True), 1)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Budget]] = {
    # Inputs of four convolutions and norms, and the last ReLU's result.
    "ResNet": (lambda: nn.Sequential(Residual(), Residual()), IMAGES, Budget(codes=9)),
    # Inputs of the norms, four times as wide but for the last, and of two convolutions; SiLU is computed again, but in
    # graphs, where backward reads two results more of it.
    "EfficientNet": (Inverted, IMAGES, Budget(codes=14, more=8)),
    # Inputs of three norms and activations, the last of which have a quarter, and of the last convolution.
    "U-Net": (Denoiser, IMAGES, Budget(codes=6.5)),
    # Inputs of two norms, values and attention's result, and of the experts, which see each token twice, inputs, SiLU's
    # operands and results; queries and keys in 16 bits; the choices. Graphs hold transposed copies for the products.
    "mixture of experts": (
        block(fused_attention, Experts, norm=nn.LayerNorm),
        SEQUENCES,
        Budget(12, half=2, whole=0.1, more=4),
    ),
    # Inputs of two Linear, their results and one row for each of eight edges; of the edges' numbers two are 64-bit
    # indices, and three as computed.
    "graph attention": (GraphAttention, NODES, Budget(codes=11, half=1, whole=7 * 8 / WIDTH)),
    # Inputs of two norms, values, attention's and the layer's results, and GELU's operands; two masks of dropout. Of
    # the first norm a graph has the caller's input; it holds the result too, which the loss squares, in 16 bits.
    "GPT with LayerScale": (
        block(fused_attention, perceptron, norm=nn.LayerNorm, scaled=True),
        SEQUENCES,
        Budget(codes=10, half=2, bits=2, more=1),
    ),
    # Written out where it drops: inputs of the Linear and of two norms; queries, keys, values and probabilities, before
    # and after dropout, in 16 bits, and its mask of floats.
    "nn.TransformerEncoder": (encoder, SEQUENCES, Budget(codes=12, half=5, bits=6, whole=1)),
    # Attention's values and result and both halves of the gate; in 16 bits norms' inputs, which their own squares read,
    # queries and keys. Graphs store the values with those.
    "Llama": (block(fused_attention, Gated, norm=nn.RMSNorm), SEQUENCES, Budget(codes=6, half=4, more=1)),
    "Llama, norm written out": (block(fused_attention, Gated), SEQUENCES, Budget(codes=6, half=4, more=1)),
    # Queries, keys and values are results of a layer in a product of matrices; probabilities take 16 bits.
    "Llama, attention too": (block(written_attention, Gated), SEQUENCES, Budget(codes=8, half=3, more=1)),
    "linear attention": (block(linear_attention, Gated), SEQUENCES, Budget(codes=8, half=3, more=1)),
}
