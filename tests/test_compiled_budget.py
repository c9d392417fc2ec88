"""``activation_memory_budget`` inside compressed graphs, and what lossless mode recomputes."""

from __future__ import annotations

import functools

import pytest
import torch
import torch._functorch.config as functorch
import torch.nn.functional as F
from compiled_backend import gradients, off
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy
from works_with import GRADIENT_BOUND

from pyactcomp.compiled.budget import save_within
from pyactcomp.compiled.graphs import GraphRecord
from pyactcomp.config import Config

INT8 = Config(min_bytes=1024)
LOSSLESS = Config(mode="lossless", min_bytes=1024)
WIDTH, HEADS, TOKENS, VOCABULARY = 128, 2, 128, 1024
# A narrow value counts 6 % less a byte than a wide one, so that the narrow one is saved (costs.py).
SLACK = 1.12


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        heads = *x.shape[:2], HEADS, WIDTH // HEADS
        q, k, v = (t.view(heads).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(x.shape)), self.dropout)
        return x + self.down(F.gelu(self.up(self.second(x))))


class Language(nn.Module):
    def __init__(self, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.tokens(tokens)
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


@functools.cache
def step(config: Config | None, budget: float = 1.0, dropout: float = 0.0) -> tuple[list[Tensor], int]:
    """Return the gradients of a step, and the bytes that its graph stores for backward."""
    torch.manual_seed(0)
    model = Language(dropout=dropout)
    tokens = torch.randint(VOCABULARY, (2, TOKENS))
    records: list[GraphRecord]
    with functorch.patch(activation_memory_budget=budget):
        _, found, records = gradients(model, list(model.parameters()), config, tokens)
    return found, sum(record.after for record in records)


@pytest.mark.parametrize("budget", [0.7, 0.35])
def test_a_budget_is_a_share_of_what_compression_stores(budget: float) -> None:
    exact, _ = step(None)
    _, plain = step(INT8)
    found, stored = step(INT8, budget)
    assert stored <= SLACK * budget * plain
    assert 0.0 < off(found, exact) <= GRADIENT_BOUND


def test_a_budget_changes_no_bit_of_lossless_gradients() -> None:
    # The masks of dropout are drawn once: backward runs no operator again that draws numbers.
    exact, _ = step(None, dropout=0.1)
    _, plain = step(LOSSLESS, dropout=0.1)
    found, stored = step(LOSSLESS, 0.5, dropout=0.1)
    assert all(torch.equal(a, b) for a, b in zip(found, exact, strict=True))
    assert stored <= SLACK * 0.5 * plain


def test_a_budget_that_no_choice_meets_is_left_to_torch() -> None:
    exact, _ = step(None, dropout=0.1)
    _, half = step(LOSSLESS, 0.5, dropout=0.1)
    found, stored = step(LOSSLESS, 0.02, dropout=0.1)
    assert all(torch.equal(a, b) for a, b in zip(found, exact, strict=True))
    assert stored < half


def test_lossless_graphs_recompute_norms_and_activations() -> None:
    # A token and channel of a block, in bytes: both norms 2 x (4 + 2), queries, keys, values and attention's result 8,
    # operand and result of GELU 2 x 8. Without the results of the affine maps and of GELU, 24 of 36.
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(Block(0.0) for _ in range(2)))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.blocks(x).square().mean()

    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(2, TOKENS, WIDTH)
    parameters = list(model.parameters())
    exact, expected, _ = gradients(model, parameters, None, x)
    loss, found, records = gradients(model, parameters, LOSSLESS, x)
    assert torch.equal(loss, exact)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    stored = sum(value.after for value in records[0].saved if value.shape[-1:] != (1,))
    assert stored / (2 * x.numel()) <= 24 + 3  # three for what the square saves, and for statistics


def test_a_kind_runs_again_in_part() -> None:
    # Ten equal products, of ten bytes each: six of them run again for a budget of 0.4.
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 4)
    products = []
    for _ in range(10):
        products.append(graph.call_function(torch.ops.aten.mm.default, (x, x)))
        products[-1].meta["val"] = torch.empty(4, 4)

    def solve(again: object) -> tuple[list[torch.fx.Node], int]:
        saved = [node for node in products if node not in again]  # type: ignore[operator]
        return saved, 10 * len(saved)

    assert save_within(0.4, products, solve, lambda _: 1.0) == products[6:]
    products[0].meta["recompute"] = CheckpointPolicy.MUST_SAVE
    saved = save_within(0.4, products, solve, lambda _: 1.0)
    assert saved == [products[0], *products[7:]]
    assert save_within(0.05, products, solve, lambda _: 1.0) is None
