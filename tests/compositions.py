"""Compositions of operators that the sweep of ``operators.py`` runs beside PyTorch's own entries.

Samples of one operator are small and of one magnitude, and read what they are given. These have elements enough for a
small one in each group, rows of zeros beside others, and readers behind one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH = 64, 64


@dataclass
class Sample:
    """What an entry's function is called with, as PyTorch's own samples have it."""

    input: Tensor
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    broadcasts_input: bool = False

    def output_process_fn_grad(self, output: Any) -> Any:
        """Return all of the output."""
        return output


@dataclass(frozen=True)
class Composition:
    """An entry, as PyTorch's own are."""

    full_name: str
    op: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...] = ((ROWS, WIDTH),)
    method_variant: None = None
    inplace_variant: None = None
    supports_inplace_autograd: bool = False

    def sample_inputs(self, device: str, dtype: torch.dtype, requires_grad: bool) -> Iterator[Sample]:
        """Yield one sample of standard normal tensors."""
        first, *others = (
            torch.randn(shape, device=device).to(dtype).requires_grad_(requires_grad) for shape in self.shapes
        )
        yield Sample(first, tuple(others))

    def supported_backward_dtypes(self, _: str) -> set[torch.dtype]:
        """Return the dtypes of the sweep."""
        return {torch.float32, torch.bfloat16}


def _every_other(x: Tensor) -> Tensor:
    return torch.arange(x.numel(), device=x.device).view(x.shape) % 3 == 0


def _entropy_of_masked_scores(x: Tensor) -> Tensor:
    chances = x.masked_fill(_every_other(x), -1e9).log_softmax(-1)
    return -(chances.exp() * chances).sum(-1)


def _reciprocal_root_of_a_square(x: Tensor) -> Tensor:
    return torch.rsqrt(x.square() + 1e-3)


def _rows_beside_padding(x: Tensor) -> Tensor:
    padding = torch.arange(len(x), device=x.device) % 8 == 7
    x = x.masked_fill(padding[:, None], 0.0)
    return (x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).pow(-0.5))[~padding]


def _relu_of_a_view(x: Tensor, weight: Tensor) -> Tensor:
    return torch.relu_(F.linear(x, weight)).sum(-1)


def _root_of_what_may_be_zero(x: Tensor) -> Tensor:
    return x.relu().add(1e-6).pow(0.5)


def _quotient_by_a_square(x: Tensor) -> Tensor:
    return 1 / (x * x + 1e-3)


def _dropped_probabilities(x: Tensor, v: Tensor) -> Tensor:
    return torch.native_dropout(x.softmax(-1), 0.1, True)[0] * v


def _routed(x: Tensor) -> Tensor:
    def block(x: Tensor) -> Tensor:
        return x * (x >= x.topk(8, -1).values.amin(-1, keepdim=True)) * 2

    kept: Tensor = checkpoint(block, x * 1.0, use_reentrant=False)
    return kept


def _cast_to_another_format(x: Tensor, weight: Tensor) -> Tensor:
    weight = nn.Parameter(weight.detach())
    copy = weight.to(torch.float64, memory_format=torch.channels_last)
    return F.conv2d(x.double(), copy)


def _cast_and_edited(x: Tensor, weight: Tensor) -> Tensor:
    copy = nn.Parameter(weight.detach()).to(torch.float64)
    with torch.no_grad():
        copy.clamp_(-0.5, 0.5)
    return x.double() @ copy


def _operand_edited_behind_its_output(v: Tensor) -> tuple[Tensor, Tensor]:
    operand = torch.ones_like(v).requires_grad_() * 1.0
    output = F.gelu(operand)
    product = output * v
    with torch.no_grad():
        operand.add_(1)
    return product, output


# Of thousands of elements some lie beside the kink, where codes mistake their side.
KINKED: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": lambda x: F.elu(x, 2.0),
    "selu": F.selu,
    "prelu": lambda x: F.prelu(x, torch.full((1,), 0.1, device=x.device, dtype=x.dtype)),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "hardtanh": F.hardtanh,
    "relu6": lambda x: F.relu6(3 * x),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "threshold": lambda x: F.threshold(x, 0.1, -0.2),
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "hardsigmoid": lambda x: F.hardsigmoid(3 * x),
    "hardswish": lambda x: F.hardswish(3 * x),
    "abs": torch.abs,
}

SQUARE = ((ROWS, WIDTH), (WIDTH, WIDTH))
compositions = [
    Composition("entropy of masked scores", _entropy_of_masked_scores),
    Composition("reciprocal root of a square", _reciprocal_root_of_a_square),
    Composition("rows beside padding", _rows_beside_padding),
    Composition("relu of a view", _relu_of_a_view, ((4, 16, WIDTH), (WIDTH, WIDTH))),
    Composition("root of what may be zero", _root_of_what_may_be_zero),
    Composition("waves", lambda x: torch.cos(30 * x)),
    Composition("quotient by a square", _quotient_by_a_square),
    Composition("dropped probabilities", _dropped_probabilities, ((ROWS, WIDTH), (ROWS, WIDTH))),
    Composition("routed by a checkpointed block", _routed),
    Composition("cast to another memory format", _cast_to_another_format, ((2, 8, 8, 8), (8, 8, 3, 3))),
    Composition("cast and edited", _cast_and_edited, SQUARE),
    Composition("operand edited behind its output", _operand_edited_behind_its_output),
    *(Composition(f"{name} of thousands", function) for name, function in KINKED.items()),
]
