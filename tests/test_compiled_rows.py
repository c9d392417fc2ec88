"""What backward sums over rows is restored by the library's kernel, the rest in generated code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_backend import gradients, off
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from works_with import GRADIENT_BOUND

from pyactcomp.compiled import partition
from pyactcomp.compiled.rows import is_summed_by_rows
from pyactcomp.config import Config

INT8 = Config(min_bytes=4096)
ROUNDING = 2.0**-8
"""Of an element that is rounded to bfloat16, at most."""


class Block(nn.Module):
    """A norm, and two projections with GELU between."""

    def __init__(self, norm: nn.Module, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm, nn.Linear(width, 256), nn.Linear(256, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    found: list[fx.GraphModule] = []
    rewrite = partition.rewrite

    def note(forward: fx.GraphModule, backward: fx.GraphModule, *arguments: Any) -> Any:
        found.append(backward)
        return rewrite(forward, backward, *arguments)

    monkeypatch.setattr(partition, "rewrite", note)
    return found


def run(
    dtype: torch.dtype,
    autocast: bool,
    config: Config | None,
    norm: Callable[[int], nn.Module] = nn.LayerNorm,
    width: int = 128,
) -> list[Tensor]:
    torch.manual_seed(0)
    block = nn.Sequential(*(Block(norm(width), width) for _ in range(2))).to(dtype)
    x = torch.randn(64, width, dtype=dtype, requires_grad=True)
    weights = torch.randn(64, width)

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return (block(x).float() * weights).sum()

    return gradients(step, [x, *block.parameters()], config, x)[1]


def restored_by_kernel(graph: fx.GraphModule) -> list[torch.dtype]:
    return [node.args[2] for node in graph.graph.nodes if "pyactcomp.restore" in str(node.target)]


@pytest.mark.parametrize(
    ("dtype", "autocast", "kernel"),
    [(torch.float32, True, torch.bfloat16), (torch.bfloat16, False, torch.bfloat16), (torch.float32, False, None)],
    ids=["autocast", "bfloat16", "float32"],
)
def test_a_norms_operand_is_restored_in_16_bits(
    dtype: torch.dtype,
    autocast: bool,
    kernel: torch.dtype | None,
    backwards: list[fx.GraphModule],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    got = run(dtype, autocast, INT8)
    # One for each norm, but for a norm of the input, which lives anyway; GELU's operands take no kernel of their own.
    found = restored_by_kernel(backwards[0])
    assert set(found) == ({kernel} if kernel else set())
    assert len(found) <= 2
    monkeypatch.setattr("pyactcomp.compiled.rewrite.is_summed_by_rows", lambda _: False)
    fused = run(dtype, autocast, INT8)
    assert not restored_by_kernel(backwards[1])
    assert off(got, fused) <= 2 * ROUNDING
    assert off(got, run(dtype, autocast, None)) <= GRADIENT_BOUND


def test_a_standardized_operand_is_restored_in_16_bits(backwards: list[fx.GraphModule]) -> None:
    """Rows of 96 are no multiple of a group; standardized, they are in bfloat16 before the codec, in every dtype."""
    got = run(torch.float32, False, INT8, nn.RMSNorm, 96)
    # One for each norm, but for a norm of the input, which lives anyway.
    assert restored_by_kernel(backwards[0]) == [torch.bfloat16]
    assert off(got, run(torch.float32, False, None, nn.RMSNorm, 96)) <= GRADIENT_BOUND


READERS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "rows": (lambda x, grad: (x * grad).sum(-1), True),
    "rows kept": (lambda x, grad: (x.float() * grad).sum([1], keepdim=True), True),
    "columns": (lambda x, grad: (x * grad).sum(0), False),
    "all": (lambda x, grad: (x * grad).sum(), False),
    "product": (lambda x, grad: x.t() @ grad, False),
    "behind a product": (lambda x, grad: (x.t() @ grad).sum(-1), False),
    "pointwise": (lambda x, grad: x * grad, False),
}


@pytest.mark.parametrize("name", READERS)
def test_who_sums_rows(name: str) -> None:
    reader, expected = READERS[name]
    graph = make_fx(reader, tracing_mode="fake")(torch.randn(8, 8), torch.randn(8, 8)).graph
    assert is_summed_by_rows(graph.find_nodes(op="placeholder")[0]) == expected
