"""GELU in compiled graphs, where products alone read the result.

One kernel computes it and packs its operand, one restores the operand and computes GELU and the derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_backend import gradients, off
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from works_with import GRADIENT_BOUND

from pyactcomp import codec
from pyactcomp.codec import reference
from pyactcomp.codec.ops import quantize, restore
from pyactcomp.compiled import partition
from pyactcomp.compiled.codec import parts_of
from pyactcomp.config import Config
from pyactcomp.functional.activations.gelu.operator import gelu_quantize, gelu_restore

INT8 = Config(min_bytes=4096)
HALF_AN_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# The kernel's approximation of erf (Abramowitz and Stegun 7.1.26).
ERF = 1.5e-7


class Mlp(nn.Module):
    """Two projections, and a function between."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(64, 256), nn.Linear(256, 64), function

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(self.up(x)))


def tanh_by_hand(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.79 * (x + 0.044715 * x**3)))


PACKED_WITH = {
    "erf": F.gelu,
    "tanh": lambda x: F.gelu(x, approximate="tanh"),
    "views": lambda x: F.gelu(x.view(4, 16, 4, 256)).view(16, 16, 256),
}
FORWARD, BACKWARD = "pyactcomp.gelu_quantize.default", "pyactcomp.gelu_restore.default"
PACKED_APART = {
    "other constants": tanh_by_hand,
    "SiLU": F.silu,
    "pointwise reader": lambda x: F.gelu(x) * 1.5,
    "two readers": lambda x: (y := F.gelu(x)) + y.sin(),
    "dropout": lambda x: F.dropout(F.gelu(x), 0.1),
    "of a function": lambda x: F.gelu(x.sin()),
    "transposed": lambda x: F.gelu(x.transpose(1, 2)).transpose(1, 2),
}


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """Return the forward and backward graphs; a kernel serves the CPU, whose operators call torch's functions."""
    found: list[fx.GraphModule] = []
    rewrite, reason = partition.rewrite, codec.unavailable_reason

    def note(forward: fx.GraphModule, backward: fx.GraphModule, *arguments: Any) -> Any:
        saved = rewrite(forward, backward, *arguments)
        found.extend((forward, backward))
        return saved

    monkeypatch.setattr(partition, "rewrite", note)
    monkeypatch.setattr(codec, "unavailable_reason", lambda i, d: None if i == "triton" else reason(i, d))
    return found


def run(function: Callable[[Tensor], Tensor], dtype: torch.dtype, autocast: bool, config: Config | None) -> Any:
    torch.manual_seed(0)
    model = Mlp(function).to(dtype)
    x, weights = torch.randn(16, 16, 64, dtype=dtype), torch.randn(16, 16, 64)

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return (model(x).float() * weights).mean()

    loss, found, _ = gradients(step, list(model.parameters()), config, x)
    return loss, found


def _targets(graph: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes]


# Each function with each dtype; under autocast every second of them, so that each is there with and without.
@pytest.mark.parametrize(
    ("name", "dtype", "autocast"),
    [
        (name, dtype, bool((i + j) % 2))
        for i, name in enumerate(PACKED_WITH)
        for j, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16))
    ],
    ids=str,
)
def test_gelu_is_computed_where_its_operand_is_packed(
    name: str, dtype: torch.dtype, autocast: bool, graphs: list[fx.GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    got = run(PACKED_WITH[name], dtype, autocast, INT8)
    for graph, operator in zip(graphs, (FORWARD, BACKWARD), strict=True):
        targets = _targets(graph)
        assert targets.count(operator) == 1
        assert not {"aten.erf.default", "aten.tanh.default", "aten.exp.default"} & set(targets)
    monkeypatch.setattr("pyactcomp.compiled.rewrite.gelu_of", lambda *_: None)
    monkeypatch.setattr("pyactcomp.compiled.rewrite.differentiate", lambda *_: None)
    apart = run(PACKED_WITH[name], dtype, autocast, INT8)
    assert not {FORWARD, BACKWARD} & {*_targets(graphs[2]), *_targets(graphs[3])}
    # Of 256 operands of a sum each may round the other way.
    rounding = HALF_AN_ULP[torch.bfloat16 if autocast else dtype]
    torch.testing.assert_close(got[0], apart[0], rtol=0, atol=2 * rounding)
    # Ten operators of float32 make the derivative, and torch's own rounds each the other way.
    assert off(got[1], apart[1]) <= 2 * rounding + math.sqrt(10) * HALF_AN_ULP[torch.float32]
    assert off(got[1], run(PACKED_WITH[name], dtype, autocast, None)[1]) <= GRADIENT_BOUND


@pytest.mark.parametrize("name", PACKED_APART)
def test_other_functions_and_readers_keep_their_operators(name: str, graphs: list[fx.GraphModule]) -> None:
    run(PACKED_APART[name], torch.bfloat16, False, INT8)
    assert not {FORWARD, BACKWARD} & {*_targets(graphs[0]), *_targets(graphs[1])}


def test_a_graph_without_a_kernel_keeps_the_operators(
    graphs: list[fx.GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "unavailable_reason", lambda *_: "none serves this device")
    run(F.gelu, torch.bfloat16, False, INT8)
    assert not {FORWARD, BACKWARD} & {*_targets(graphs[0]), *_targets(graphs[1])}


def test_a_gradient_that_depends_on_gelu_is_computed_after_it(graphs: list[fx.GraphModule]) -> None:
    """A checkpointed block recomputes the second projection for the gradient."""
    torch.manual_seed(0)
    model = Mlp(F.gelu)
    x, weights = torch.randn(16, 16, 64), torch.randn(16, 16, 64)

    def step(x: Tensor) -> Tensor:
        up = model.up(x)
        down = checkpoint(lambda up: (y := model.down(F.gelu(up))) * y.sin(), up, use_reentrant=False)
        return (down * weights).mean()

    exact, found = (gradients(step, list(model.parameters()), config, x)[1] for config in (None, INT8))
    assert BACKWARD not in _targets(graphs[1])
    assert off(found, exact) <= GRADIENT_BOUND


def test_gradients_in_float32_of_operands_in_bfloat16_keep_the_operators(graphs: list[fx.GraphModule]) -> None:
    model = Mlp(lambda x: x).bfloat16()
    weight = nn.Parameter(torch.randn(256, 64))

    def step(x: Tensor) -> Tensor:
        return (F.gelu(model.up(x)).float() @ weight).square().mean()

    x = torch.randn(16, 16, 64, dtype=torch.bfloat16)
    exact, found = (gradients(step, [*model.up.parameters(), weight], config, x)[1] for config in (None, INT8))
    assert not {FORWARD, BACKWARD} & {*_targets(graphs[0]), *_targets(graphs[1])}
    assert off(found, exact) <= GRADIENT_BOUND


def test_a_gradient_in_another_order_keeps_the_operators(graphs: list[fx.GraphModule]) -> None:
    torch.manual_seed(0)
    up, down = (nn.Parameter(torch.randn(16, 64, size)) for size in (256, 16))
    x, weights = torch.randn(16, 64, 64), torch.randn(16, 256, 16)

    def step(x: Tensor) -> Tensor:
        return (torch.bmm(F.gelu(torch.bmm(x, up)).transpose(1, 2), down) * weights).mean()

    exact, found = (gradients(step, [up, down], config, x)[1] for config in (None, INT8))
    assert FORWARD in _targets(graphs[0])
    assert BACKWARD not in _targets(graphs[1])
    assert off(found, exact) <= GRADIENT_BOUND


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", HALF_AN_ULP, ids=str)
@pytest.mark.parametrize("tanh", [False, True], ids=["erf", "tanh"])
def test_operator_gives_gelu_and_the_codes_of_the_reference(tanh: bool, dtype: torch.dtype, device: str) -> None:
    x = (4 * torch.randn(37, 192)).to(dtype)
    x[0, 0], x[1, 1] = float("inf"), float("nan")
    out, packed = gelu_quantize(x.to(device), tanh, 64)
    assert torch.equal(packed.cpu(), reference.quantize(x.flatten()))
    expected = F.gelu(x.double(), approximate="tanh" if tanh else "none")
    # tanh: torch's CPU code for it is off by 2**-22 of the operand.
    bound = HALF_AN_ULP[dtype] * expected.abs() + (ERF + 2.0**-21) * x.double().abs()
    finite = expected.isfinite()
    assert bool(((out.cpu().double() - expected).abs() <= bound)[finite].all())
    # On some CPUs torch's own GELU of infinity is NaN.
    theirs = F.gelu(x.to(device), approximate="tanh" if tanh else "none")
    assert torch.equal(out.isnan(), theirs.isnan())
    assert torch.equal(out.isinf(), theirs.isinf())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", HALF_AN_ULP, ids=str)
@pytest.mark.parametrize("tanh", [False, True], ids=["erf", "tanh"])
@pytest.mark.parametrize("apart", [False, True], ids=["views", "copies"])
def test_operator_gives_the_derivative_and_gelu_of_the_codes(
    tanh: bool, dtype: torch.dtype, apart: bool, device: str
) -> None:
    x, grad = (4 * torch.randn(37, 192)).to(dtype).to(device), torch.randn(37, 192).to(dtype).to(device)
    x[0, 0], x[1, 1] = float("inf"), float("nan")
    codes, groups = parts_of(quantize(x, 8, 64, False, 0, "auto"), x.shape)
    parts = (codes.clone(), groups.clone()) if apart else (codes, groups)
    derivative, out = gelu_restore(*parts, grad, tanh, 64)
    # The kernel computes from float32, torch's operators from the restored value in the dtype.
    restored = restore(codes, groups, torch.float32, 64)
    exact = restored.double().requires_grad_()
    expected = F.gelu(exact, approximate="tanh" if tanh else "none")
    slopes = torch.autograd.grad(expected, exact, grad.double())[0]
    half, size = HALF_AN_ULP[dtype], restored.double().abs()
    # An operand rounded to the dtype changes GELU by its slope, at most 1.13, and the slope by its own, at most 0.8.
    of_gelu = half * (expected.abs() + 1.13 * size) + (ERF + 2.0**-21) * size
    of_slope = half * (slopes.abs() + 0.8 * size * grad.abs()) + (ERF + 2.0**-19) * grad.abs() * (1 + size)
    finite = expected.isfinite() & slopes.isfinite()
    assert not bool(finite[1, 1])
    for got, wanted, bound in ((out, expected, of_gelu), (derivative, slopes, of_slope)):
        assert bool(((got.double() - wanted).abs() <= bound)[finite].all())
    assert bool(out[1, 1].isnan())
    assert bool(derivative[1, 1].isnan())


def test_operators_pass_torchs_checks_and_refuse_gaps() -> None:
    x = torch.randn(8, 192, dtype=torch.bfloat16)
    torch.library.opcheck(torch.ops.pyactcomp.gelu_quantize.default, (x, False, 64))
    with pytest.raises(ValueError, match="contiguous"):
        gelu_quantize(x.t(), False, 64)
    parts = parts_of(quantize(x, 8, 64, False, 0, "auto"), x.shape)
    torch.library.opcheck(torch.ops.pyactcomp.gelu_restore.default, (*parts, x, False, 64))
    with pytest.raises(ValueError, match="contiguous"):
        gelu_restore(*parts, x.t().contiguous().t(), False, 64)
    with pytest.raises(ValueError, match="1536 elements"):
        gelu_restore(*parts, x[:4], False, 64)
