"""A tensor that is written to after it was saved: backward raises where that of plain torch raises, and only there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pyactcomp
from pyactcomp import functional

Graph = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
MODES = ("lossless", "int8")
MODIFIED = "modified by an inplace operation"


def raises(graph: Graph, edited: bool, mode: str | None) -> bool:
    """Return whether backward raises autograd's error; a graph returns its loss and the tensor to write to."""
    torch.manual_seed(0)
    x, w = torch.randn(16, 32, requires_grad=True), torch.nn.Parameter(torch.randn(32, 32))
    if mode is None:
        loss, target = graph(x, w)
    else:
        with pyactcomp.compressed(min_bytes=1, mode=mode):
            loss, target = graph(x, w)
    if edited:
        with torch.no_grad():
            target.mul_(2)
    try:
        loss.sum().backward()
    except RuntimeError as error:
        if MODIFIED not in str(error):
            raise
        return True
    return False


def product(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x * x
    return y @ w, y


def gelu(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.gelu(x * 2)
    return y @ w, y


def view_of_silu(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.silu(x * 2)
    return y[:, :16].exp() + y.view(2, 8, 32).sin().view(16, 32)[:, 16:], y


def cast_of_a_parameter(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = w.to(torch.bfloat16)
    return (x * 2).to(torch.bfloat16) @ y, y


def normalised(x: Tensor) -> Tensor:
    """Return what offers to be computed again, casts of it too."""
    return functional.layer_norm(x * 2, 32, bits=None)


def cast_of_an_activation(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = normalised(x).to(torch.bfloat16)
    return y @ w.to(torch.bfloat16), y


def second_cast(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = normalised(x)
    first, second = y.to(torch.bfloat16), y.to(torch.bfloat16)
    return first @ w.to(torch.bfloat16) + second @ w.to(torch.bfloat16), second


def source_of_a_cast(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = normalised(x)
    return y.to(torch.bfloat16) @ w.to(torch.bfloat16), y


def narrow_probabilities(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = (x * 2).softmax(-1).to(torch.bfloat16)
    return y @ w.to(torch.bfloat16), y


def log_probabilities(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = (x * 2).log_softmax(-1) * 1.5
    return F.nll_loss(y, torch.arange(16)), y


def labels(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.arange(16)
    return F.cross_entropy(x @ w, y), y


def block_input(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return checkpoint(lambda y: (y @ w).sin(), y, use_reentrant=False), y


def product_in_checkpoint(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    made = []

    def block(x: Tensor) -> Tensor:
        made.append(F.gelu(x * 2))
        return made[-1] @ w

    return checkpoint(block, x, use_reentrant=False), made[0]


GRAPHS = [
    product,
    gelu,
    view_of_silu,
    cast_of_a_parameter,
    cast_of_an_activation,
    second_cast,
    source_of_a_cast,
    narrow_probabilities,
    log_probabilities,
    labels,
    block_input,
    product_in_checkpoint,
]


def test_the_graphs_are_of_both_kinds() -> None:
    assert {raises(graph, True, None) for graph in GRAPHS} == {True, False}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("graph", GRAPHS)
def test_backward_raises_where_that_of_torch_raises(graph: Graph, mode: str) -> None:
    assert raises(graph, True, mode) == raises(graph, True, None)
    assert not raises(graph, False, mode)
