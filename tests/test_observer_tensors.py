"""Answers of the observer's library about a tensor to be packed."""

from __future__ import annotations

from typing import Any

import torch
from observer_checks import leaf, library
from torch import Tensor
from torch.nn import functional as F

from pyactcomp.readers.nodes import VIEWS


def origins() -> list[Tensor]:
    x = leaf(4, 8)
    y = x * 2
    edited = x * x
    edited[:2] = 0
    made = [
        *(x, x.detach(), y, y.t(), y.view(8, 4)[2:], y.to(torch.bfloat16), torch.complex(y, y).real, y.unbind()[1]),
        *(y.log_softmax(-1), y.expm1().t()[1:], edited, edited[1], Plain.apply(y.log()), Plain.apply(y).view(-1)),
        *(F.linear(y, y), x[1:], torch.where(y > 1, y, x).view(-1).view(4, 8), torch.cat([y, y])),
    ]
    return [t for each in made for t in (each, each.detach(), each.unsqueeze(0))]


class Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def origin(tensor: Tensor) -> str:
    """Return the name of the operator behind ``tensor``, views aside."""
    base = tensor._base
    # Start at the base: a Python object for each view's node would live as long as the graph. A view in another dtype,
    # such as the real part, has a node of its own.
    node = (tensor if base is None or base.dtype is not tensor.dtype else base).grad_fn
    for _ in range(8):
        if node is None:
            break
        name = node.name()
        if name not in VIEWS:
            return str(name)
        node = node.next_functions[0][0]
    return ""


def test_library_finds_the_origins_that_python_finds() -> None:
    found = [library().facts(t)[3] for t in origins()]
    assert found == [origin(t) for t in origins()]
    assert set(found) > {"", "MulBackward0", "LogSoftmaxBackward0", "PlainBackward"}
