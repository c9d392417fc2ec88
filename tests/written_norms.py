"""Norms as programs write them out, and classes that look like one and do more."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Weighted(nn.Module):
    """A weight for each element of a row."""

    start = 1.0

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), self.start))
        self.eps = eps


class Llama(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weight * x.to(dtype)


class Meta(Weighted):
    """As in Meta's own Llama: a method, and the weight last."""

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        output = self._norm(x.float()).type_as(x)
        return output * self.weight


class Gemma(Weighted):
    start = 0.0

    def forward(self, x: Tensor) -> Tensor:
        normal = x.float() / torch.sqrt((x.float() * x.float()).mean(dim=-1, keepdim=True) + self.eps)
        return (normal * (1.0 + self.weight.float())).type_as(x)


class T5(Weighted):
    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.to(torch.float32).square().mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.eps)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


class Literal(nn.Module):
    """Another name for the weight, and eps as a number in the code."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.g * x / (x.pow(2).mean(-1, keepdim=True) + 1e-5) ** 0.5


class ByNorm(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True) ** 2 / x.shape[-1]
        return x * (square + self.eps).rsqrt() * self.weight


class ByFunction(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.size(-1),), self.weight, self.eps)


class Centred(nn.Module):
    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return self.gamma * ((x - mean) / torch.sqrt(variance + self.variance_epsilon)) + self.beta


class CentredByVar(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias, self.weight = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x.float(), -1, correction=0, keepdim=True)
        return ((x.float() - mean) * torch.rsqrt(variance + 1e-5) * self.weight + self.bias).to(x.dtype)


class CentredByFunction(nn.Module):
    """As in nanoGPT: no bias."""

    def __init__(self, width: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class Derived(nn.LayerNorm):
    """As in CLIP: in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.type(torch.float32)).type(x.dtype)


NORMS = [
    *(Llama, Meta, Gemma, T5, Literal, ByNorm, ByFunction),
    *(Centred, CentredByVar, CentredByFunction, Derived),
]


class Counts(Llama):
    """Counts its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class CountsOfRows(Llama):
    """Counts its calls in a branch."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() > 1:
            self.calls += 1
        return super().forward(x)


class Prints(Llama):
    def forward(self, x: Tensor) -> Tensor:
        sys.stdout.write("called")
        return super().forward(x)


class Branches(Llama):
    """Another function where the input is large."""

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 1000:
            return x
        return super().forward(x)


class Writes(Weighted):
    """Writes to the input if that is float32."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide *= torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide * self.weight


class Stops(Weighted):
    """Takes the deviation as a constant: the values of a norm, and other gradients."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps).detach()


class Clamps(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)).clamp(-2, 2)


class AddsInput(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class OverRows(Weighted):
    """Over the wrong dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + self.eps)


class Drops(Llama):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


OTHERS = [Counts, CountsOfRows, Prints, Branches, Writes, Stops, Clamps, AddsInput, OverRows, Drops]
