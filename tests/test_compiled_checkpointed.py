"""Checkpointed blocks of a compressed graph: inputs take codes, unless a block takes decisions from values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compiled_backend import gradients, off
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from works_with import GRADIENT_BOUND, Block

from pyactcomp.compiled.graphs import GraphRecord
from pyactcomp.config import Config

INT8 = Config(min_bytes=0)
LOSSLESS = Config(mode="lossless", min_bytes=0)
# Two tensors of codes and scales, of 4 bytes an element: 8 bits and 4 bytes for each group of 64.
CODED = (1 + 4 / 64) / 4


def run(blocks: list[Callable[[Tensor], Tensor]], x: Tensor, config: Config | None) -> tuple[list[Tensor], GraphRecord]:
    """Return the gradients of blocks checkpointed in one graph, and the graph's record."""
    first = nn.Linear(x.shape[-1], x.shape[-1])
    nn.init.eye_(first.weight)
    nn.init.zeros_(first.bias)
    parameters = [p for block in blocks if isinstance(block, nn.Module) for p in block.parameters()]

    def model(x: Tensor) -> Tensor:
        x = first(x)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)  # type: ignore[no-untyped-call]
        return x.square().mean()

    _, found, records = gradients(model, [*first.parameters(), *parameters], config, x)
    return found, records[0] if records else GraphRecord("", ())


def transformer_blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block() for _ in range(3)]


def test_inputs_of_checkpointed_blocks_take_codes() -> None:
    blocks, x = transformer_blocks(), torch.randn(4, 64, 64)
    plain, _ = run(blocks, x, None)
    compressed, record = run(blocks, x, INT8)
    inputs = [value for value in record.saved if value.before == x.nbytes]
    assert [value.form for value in inputs if not value.reason] == ["codes"] * 3
    assert all(value.after <= 1.01 * CODED * value.before for value in inputs if not value.reason)
    assert 0 < off(compressed, plain) <= GRADIENT_BOUND


def test_lossless_gradients_of_checkpointed_blocks_are_those_of_torch() -> None:
    blocks, x = transformer_blocks(), torch.randn(4, 64, 64)
    plain, _ = run(blocks, x, None)
    assert off(run(blocks, x, LOSSLESS)[0], plain) == 0


def rounds(x: Tensor) -> Tensor:
    return (4 * x).round() * x


def keeps_the_largest(x: Tensor) -> Tensor:
    values, places = x.topk(4)
    return torch.zeros_like(x).scatter(-1, places, values.square())


@pytest.mark.parametrize("block", [rounds, keeps_the_largest])
def test_a_block_that_takes_decisions_reruns_from_the_same_values(block: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(64, 256)
    plain, _ = run([block], x, None)
    compressed, record = run([block], x, INT8)
    assert any("decisions" in value.reason for value in record.saved)
    assert off(compressed, plain) == 0


class Rectified(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def test_a_comparison_in_a_checkpointed_block_is_that_of_the_forward() -> None:
    torch.manual_seed(0)
    blocks, x = [Rectified(), Rectified()], torch.randn(64, 128)
    plain, _ = run(blocks, x, None)
    compressed, record = run(blocks, x, INT8)
    assert sum(value.form == "codes" for value in record.saved if not value.reason) >= 2
    assert 0 < off(compressed, plain) <= GRADIENT_BOUND


def short_cosines(x: Tensor) -> Tensor:
    """Divides by sums over four elements, which do not average the errors of codes."""
    return torch.nn.functional.cosine_similarity(x.view(-1, 4), x.view(-1, 4).roll(1, 0), dim=-1)


def test_a_block_that_divides_by_short_sums_reruns_from_more_than_codes() -> None:
    x = torch.randn(64, 256)
    plain, _ = run([short_cosines], x, None)
    compressed, record = run([short_cosines], x, INT8)
    assert not any(value.form == "codes" for value in record.saved if not value.reason)
    assert off(compressed, plain) <= GRADIENT_BOUND
