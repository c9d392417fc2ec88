"""Products of matrices with few summands, in graphs, and the norms of short heads that follow in linear attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from compiled_backend import gradients, off
from torch import Tensor, nn

from pyactcomp.compiled import divisors, partition
from pyactcomp.compiled.graphs import GraphRecord
from pyactcomp.compiled.joint import value
from pyactcomp.config import Config

INT8 = Config(min_bytes=1)
BAR = 0.02


class Attention(nn.Module):
    """Attention without softmax and with a norm of each head, as in RetNet; or with softmax."""

    def __init__(self, width: int, heads: int, softmax: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm = nn.GroupNorm(heads, width)
        self.heads, self.softmax = heads, softmax

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.q(x), self.k(x), self.v(x)))
        # With a quotient behind the product, Inductor fuses attention and torch 2.13 fails to guard its graph.
        scores = (q / 4) @ k.transpose(-1, -2)
        if self.softmax:
            y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        else:
            y = self.norm((scores.tril() @ v).transpose(1, 2).flatten(2).flatten(0, 1)).view(x.shape)
        projected: Tensor = self.out(y)
        return projected


def run(config: Config | None, width: int, heads: int, softmax: bool) -> tuple[list[Tensor], list[GraphRecord]]:
    torch.manual_seed(0)
    attention, x = Attention(width, heads, softmax), torch.randn(4, 128, width)
    if not softmax:
        nn.init.normal_(attention.v.bias, std=4.0)
    target = torch.randn(4, 128, width)
    leaves: list[Tensor] = [attention.q.weight, attention.k.weight, attention.v.weight]
    _, found, records = gradients(lambda x, y: F.mse_loss(attention(x), y), leaves, config, x, target)
    return found, records


def products(config: Config | None, size: int) -> list[Tensor]:
    """Return gradients of queries and keys, where the gradient is zero along a direction that all values share."""
    torch.manual_seed(0)
    x, weights = torch.randn(8, 128, 64), [(torch.randn(64, size) / 8).requires_grad_() for _ in range(3)]
    shared, gradient = 16 * torch.randn(size), torch.randn(8, 128, size)
    # As a norm of each head gives it.
    gradient -= (gradient @ shared)[..., None] * shared / shared.dot(shared)

    def step(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (x @ q) @ (x @ k).transpose(1, 2) / 4
        return (gradient * (scores @ (x @ v + shared))).sum()

    return gradients(step, weights[:2], config, x, *weights)[1]


@pytest.mark.parametrize("size", [16, 32])
def test_operands_of_sums_over_a_short_head_take_16_bits(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = products(None, size)
    assert off(products(INT8, size), expected) <= BAR
    monkeypatch.setattr(partition, "short_products", lambda *_: set())
    assert off(products(INT8, size), expected) > BAR


def test_the_input_of_a_norm_of_short_heads_keeps_small_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm's statistics are two results of one operator; a group of codes spans two heads in another order."""
    expected, _ = run(None, 64, 2, False)
    assert off(run(INT8, 64, 2, False)[0], expected) <= BAR
    monkeypatch.setattr(divisors, "_first_result", value)
    assert off(run(INT8, 64, 2, False)[0], expected) > BAR


def test_a_batch_norm_asks_nothing_of_what_its_convolution_reads() -> None:
    """In channels-last a group spans channels: the norm's input is standardized; it gives ReLU's results again."""
    torch.manual_seed(0)
    layers = [
        layer
        for _ in range(3)
        for layer in (nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    ]
    net = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    x, weights = (torch.randn(4, 64, 12, 12).to(memory_format=torch.channels_last) for _ in range(2))
    (record,) = gradients(lambda x: (net(x) * weights).sum(), [], INT8, x)[2]
    # Inputs and the norms' statistics aside.
    computed = [saved for saved in record.saved if saved.shape == x.shape and saved.operator != "None"]
    stored = [(saved.operator, saved.form) for saved in computed]
    assert sorted(stored) == 3 * [("convolution", "codes")] + 3 * [("le", "bits")]


@pytest.mark.parametrize("heads", [2, 4])
def test_attention_with_softmax_takes_codes_whatever_its_heads(heads: int) -> None:
    got, (record,) = run(INT8, 64, heads, True)
    assert off(got, run(None, 64, heads, True)[0]) <= BAR
    # Queries, keys and values.
    assert [saved.form for saved in record.saved if saved.operator == "permute"] == 3 * ["codes"]
