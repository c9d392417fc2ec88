"""Answers of the observer's library about a tensor to be packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_observer import leaf, library
from torch import Tensor, nn
from torch.nn import functional as F

from pyactcomp.readers.observer import CONSTANT, KEPT, ORDINARY, UNCLEAR, WithoutLibrary


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


def test_library_finds_the_origins_that_python_finds() -> None:
    found = [library().origin(t) for t in origins()]
    assert found == [WithoutLibrary().origin(t) for t in origins()]
    assert set(found) > {"", "MulBackward0", "LogSoftmaxBackward0", "PlainBackward"}


def test_equal_layouts_have_equal_keys_and_others_have_not() -> None:
    x = torch.zeros(4, 8)
    others = [x, x.t(), x[:2], x.view(32), x.view(4, 8, 1), x.double(), x.to("meta"), torch.zeros(()), x.bfloat16()]
    for of in (library(), WithoutLibrary()):
        keys = [of.layout_key(t) for t in others]
        assert len(set(keys)) == len(others)
        assert keys == [of.layout_key(torch.empty_like(t)) for t in others]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_only_ordinary_tensors_are_packed_without_a_closer_look() -> None:
    x = leaf(64, 8)
    y = x * 2
    parameter = nn.Parameter(torch.ones(64, 8))
    cases: list[tuple[Tensor, int]] = [
        *((y, ORDINARY), (y.t(), ORDINARY), (y[1:], ORDINARY), (y.double(), ORDINARY), (y.bfloat16(), ORDINARY)),
        *((y[:1], KEPT), (x[0], KEPT), (x, KEPT), (x.t(), KEPT), (parameter, KEPT), (parameter.t(), KEPT)),
        *((y.detach()[:1], KEPT), (torch.arange(999), KEPT), (y.to(torch.cfloat), KEPT)),
        *((y.detach(), CONSTANT), (y.detach().t(), CONSTANT), (parameter.detach(), CONSTANT)),
        *((y > 1, UNCLEAR), (y.to_sparse(), UNCLEAR), (torch._neg_view(y), UNCLEAR), (Derived(y), UNCLEAR)),
        (torch.nested.nested_tensor([y[0], y[1]]), UNCLEAR),
    ]
    assert [library().saving(t, 256) for t, _ in cases] == [kind for _, kind in cases]
    with torch.autograd.forward_ad.dual_level():
        assert library().saving(y, 256) == UNCLEAR
    with torch.utils._python_dispatch.TorchDispatchMode():
        assert library().saving(y, 256) == UNCLEAR
    assert WithoutLibrary().saving(y, 256) == UNCLEAR


class Derived(Tensor):
    pass
