"""What PyTorch's formulas for gradients are said to save is what its nodes hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from derivatives import saved_by_operator
from torch import Tensor


def _leaf(*shape: int) -> Tensor:
    return torch.rand(shape, requires_grad=True)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("abs", lambda: _leaf(3).abs()),
        ("add.Tensor", lambda: _leaf(3) + _leaf(3)),
        ("addmm", lambda: torch.addmm(_leaf(3), _leaf(2, 4), _leaf(4, 3))),
        ("amax", lambda: _leaf(3, 4).amax(1)),
        ("exp", lambda: _leaf(3).exp()),
        ("gather", lambda: _leaf(3, 4).gather(1, torch.zeros(3, 1, dtype=torch.long))),
        ("mul.Tensor", lambda: _leaf(3) * _leaf(3)),
        ("native_layer_norm", lambda: torch.native_layer_norm(_leaf(3, 4), [4], _leaf(4), _leaf(4), 1e-5)[0]),
        ("sum.dim_IntList", lambda: _leaf(3, 4).sum(1)),
        ("_log_softmax", lambda: _leaf(3, 4).log_softmax(1)),
    ],
)
def test_formulas_save_what_nodes_hold(name: str, call: Callable[[], Tensor]) -> None:
    node = call().grad_fn
    held = {
        attribute.removeprefix("_saved_")
        for attribute in dir(node)
        if attribute.startswith("_saved_") and isinstance(getattr(node, attribute), Tensor)
    }
    assert held == saved_by_operator()[name]


def test_each_operator_with_a_formula_is_one_of_torch() -> None:
    unknown = {name for name in saved_by_operator() if not hasattr(torch.ops.aten, name.partition(".")[0])}
    assert not unknown
