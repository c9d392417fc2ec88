"""Under autocast normalized rows are packed from their bfloat16; operands of sums of data are not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compiled_backend import gradients, off
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from works_with import GRADIENT_BOUND

from pyactcomp.codec import format as fmt
from pyactcomp.codec import reference
from pyactcomp.compiled import codec, plans
from pyactcomp.compiled.rounding import is_read_in_halves
from pyactcomp.config import Config

INT8 = Config(min_bytes=4096)
ROUNDING = 2.0**-8
"""Of an element that is rounded to bfloat16, at most."""


class Packed:
    """The tensors that graphs pack, in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dtypes: list[torch.dtype] = []

        def note(x: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
            self.dtypes.append(x.dtype)
            return codec.quantize(x, *options)

        monkeypatch.setattr(plans, "quantize", note)


class Normed(nn.Module):
    """Two rounds of a norm and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(128) for _ in range(2))
        self.linears = nn.ModuleList(nn.Linear(128, 128) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + linear(norm(x))
        return x


def rolled(module: Normed, x: Tensor) -> Tensor:
    for norm, linear in zip(module.norms, module.linears, strict=True):
        x = x + linear(torch.roll(norm(x).view(16, 16, 128), (3, 3), (0, 1)).view(256, 128))
    return x


def run(
    function: Callable[[Normed, Tensor], Tensor], config: Config | None, autocast: bool = True
) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    module, weights = Normed(), torch.randn(256, 128)
    x = torch.randn(256, 128, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        # As on a GPU, where norms compute in float32.
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return (function(module, x).float() * weights).sum()

    loss, found, _ = gradients(step, [x, *module.parameters()], config, x)
    return found, loss


@pytest.mark.parametrize("function", [Normed.forward, rolled])
def test_normalized_rows_are_packed_from_their_bfloat16(
    function: Callable[[Normed, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, loss = run(function, None)
    packed = Packed(monkeypatch)
    rounded, same = run(function, INT8)
    assert torch.equal(loss, same)
    assert set(packed.dtypes) == {torch.bfloat16}
    packed.dtypes.clear()
    monkeypatch.setattr(plans, "is_read_in_halves", lambda *_: False)
    unrounded, _ = run(function, INT8)
    assert torch.float32 in packed.dtypes
    # Errors of codes and of the rounding are independent.
    assert off(rounded, exact) <= (off(unrounded, exact) ** 2 + ROUNDING**2) ** 0.5
    assert off(rounded, exact) <= GRADIENT_BOUND


def test_float32_models_pack_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = Packed(monkeypatch)
    run(Normed.forward, INT8, autocast=False)
    assert packed.dtypes
    assert set(packed.dtypes) == {torch.float32}


def test_a_rounded_value_has_the_codes_of_its_bfloat16() -> None:
    x = torch.randn(64, 128)
    packed = reference.quantize(x.to(torch.bfloat16).flatten())
    codes, groups = plans._code_plan(x, [0, 1], 64, False, True).pack(x)
    at = fmt.parameters_offset(x.numel(), 8)
    assert torch.equal(codes.flatten(), packed[: x.numel()])
    assert torch.equal(groups, packed[at:].view(torch.int32))


READ_IN_HALVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cast": lambda x, w: x.bfloat16(),
    "scaled": lambda x, w: (x * w).bfloat16(),
    "moved": lambda x, w: torch.roll(x * w, 1, 0).transpose(0, 1).half(),
}
READ_IN_FLOAT32: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "float32": lambda x, w: x * w,
    "summed": lambda x, w: (x * w).sum(0).bfloat16(),
    "centred": lambda x, w: (x - x.mean(0)).bfloat16(),
    "centred by a buffer": lambda x, w: ((x - w) * w).bfloat16(),
    "centred by a bias": lambda x, w: (x * w + w).bfloat16(),
    "residual": lambda x, w: (x + x * w).bfloat16(),
    "function": lambda x, w: torch.exp(x).bfloat16(),
    "both": lambda x, w: (x * w).bfloat16() + x.sum(0),
    "compared": lambda x, w: (x * (x > 0.5)).bfloat16(),
    "wider": lambda x, w: x.bfloat16() + x.double(),
}


@pytest.mark.parametrize("case", [*READ_IN_HALVES, *READ_IN_FLOAT32])
def test_who_reads_decides(case: str) -> None:
    function = {**READ_IN_HALVES, **READ_IN_FLOAT32}[case]

    def traced(x: Tensor, w: Tensor) -> Tensor:
        return function(torch.sin(x), w)

    graph = make_fx(traced, tracing_mode="fake")(torch.randn(8, 8), torch.randn(8)).graph
    known: Any = SimpleNamespace(data={node.name for node in graph.nodes if node.name != "w_1"})
    (sin,) = [node for node in graph.nodes if node.name == "sin"]
    assert is_read_in_halves(sin, known) == (case in READ_IN_HALVES)


@pytest.mark.parametrize("buffer", [False, True], ids=["data", "buffer"])
@pytest.mark.parametrize("statistic", [(8, 1), (8, 8), (8,)], ids=["row", "element", "column"])
def test_normalized_rows_may_have_a_bias(statistic: tuple[int, ...], buffer: bool) -> None:
    def traced(x: Tensor, factor: Tensor, w: Tensor) -> Tensor:
        return ((x * factor) * w + w).bfloat16()

    graph = make_fx(traced, tracing_mode="fake")(torch.randn(8, 8), torch.randn(statistic), torch.randn(8)).graph
    others = {"w_1", "factor_1"} if buffer else {"w_1"}
    known: Any = SimpleNamespace(data={node.name for node in graph.nodes if node.name not in others})
    (product,) = [node for node in graph.nodes if node.name == "mul"]
    assert is_read_in_halves(product, known) == (statistic == (8, 1) and not buffer)
