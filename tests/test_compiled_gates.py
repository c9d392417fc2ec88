"""Functions that saturate, in graphs: the few small elements, which pass the gradient, keep their precision."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from compiled_backend import gradients, off
from torch import Tensor, nn

from pyactcomp.compiled import partition
from pyactcomp.config import Config

INT8 = Config(min_bytes=4096)
BAR = 0.02
# The largest of a group's 64 operands is near 60: one step of the codes is half a unit, the width of a function.
SCALE = 24.0


def by_hand(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def halves(x: Tensor) -> Tensor:
    value, gate = x.chunk(2, dim=-1)
    return value * torch.sigmoid(gate)


def cell(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * torch.tanh(x.roll(1, 0))


def run(function: Callable[[Tensor], Tensor], config: Config | None) -> tuple[list[Tensor], dict[str, str]]:
    """Return the gradients of a projection before the function, and the form of each operator's saved result."""
    torch.manual_seed(0)
    linear, x = nn.Linear(128, 128), SCALE * torch.randn(512, 128)
    weights = torch.randn(512, 128)

    def step(x: Tensor) -> Tensor:
        y = function(linear(x))
        return (y * weights[:, : y.shape[1]]).sum()

    _, found, records = gradients(step, list(linear.parameters()), config, x)
    return found, {value.operator: value.form for record in records for value in record.saved}


@pytest.mark.parametrize("function", [torch.tanh, torch.sigmoid, halves, cell])
def test_operands_of_saturating_functions_are_no_codes(
    function: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = run(function, None)
    got, forms = run(function, INT8)
    assert off(got, expected) <= BAR
    assert forms.get("addmm") != "codes"
    monkeypatch.setattr(partition, "saturating", lambda *_: {})
    assert off(run(function, INT8)[0], expected) > BAR


@pytest.mark.parametrize("function", [F.gelu, F.silu, F.mish, by_hand, swish])
def test_activations_that_gate_their_own_operand_take_codes(function: Callable[[Tensor], Tensor]) -> None:
    got, forms = run(function, INT8)
    assert off(got, run(function, None)[0]) <= BAR
    assert "codes" in forms.values()
