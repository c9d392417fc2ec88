"""Checkpointed blocks of a compressed graph: inputs take codes, unless a block takes decisions from values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compiled_backend import gradients, off
from torch import Tensor, nn
from torch.nn import functional as F
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
    return [Block() for _ in range(2)]


def test_inputs_of_checkpointed_blocks_take_codes() -> None:
    blocks, x = transformer_blocks(), torch.randn(4, 64, 64)
    plain, _ = run(blocks, x, None)
    compressed, record = run(blocks, x, INT8)
    inputs = [value for value in record.saved if value.before == x.nbytes]
    assert [value.form for value in inputs if not value.reason] == ["codes"] * 2
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


@pytest.mark.parametrize("squash", [torch.tanh, torch.sigmoid], ids=["tanh", "sigmoid"])
def test_a_block_that_takes_decisions_gets_the_exact_result_of_a_saturating_function(
    squash: Callable[[Tensor], Tensor],
) -> None:
    x, weight = torch.randn(64, 64), torch.randn(64, 256, requires_grad=True)

    def model(x: Tensor) -> Tensor:
        y = squash(x @ weight)
        return checkpoint(keeps_the_largest, y, use_reentrant=False).square().mean()  # type: ignore[no-untyped-call]

    (plain,), (compressed,) = (gradients(model, [weight], config, x)[1] for config in (None, INT8))
    assert torch.equal(compressed, plain)


def attends(x: Tensor) -> Tensor:
    heads = x.view(8, 64, 1, 64).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(512, 64)


def attends_and_sorts(x: Tensor) -> Tensor:
    return (x * attends(x)).sort(-1).values * x


@pytest.mark.parametrize(("block", "decides"), [(attends, False), (attends_and_sorts, True)])
def test_a_block_with_attention_that_backward_runs_with_the_same_random_numbers(
    block: Callable[[Tensor], Tensor], decides: bool
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(512, 16), (torch.randn(16, 64) / 4).requires_grad_()

    def model(x: Tensor) -> Tensor:
        return checkpoint(block, F.gelu(x @ weight), use_reentrant=False).square().mean()  # type: ignore[no-untyped-call]

    (_, (plain,), _), (_, (compressed,), (record,)) = (gradients(model, [weight], c, x) for c in (None, INT8))
    assert any("decisions" in value.reason for value in record.saved) == decides
    assert any(value.form == "codes" for value in record.saved) != decides
    assert off([compressed], [plain]) <= (0 if decides else GRADIENT_BOUND)
