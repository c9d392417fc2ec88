"""What is computed again from a tensor that the operator did not save itself, but another one did."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from works_with import GRADIENT_BOUND

import pyactcomp
from pyactcomp.codec import format as fmt
from pyactcomp.engine import reasons


def test_the_dropout_of_a_relu_is_computed_again_from_its_result() -> None:
    torch.manual_seed(0)
    x = torch.randn(128, 64)
    up, down = nn.Linear(64, 256), nn.Linear(256, 64)

    def loss() -> Tensor:
        torch.manual_seed(1)
        return down(torch.native_dropout(up(x).relu(), 0.1, True)[0]).sum()

    with pyactcomp.compressed(min_bytes=1) as c:
        compressed = loss()
    wide = [tensor.stored_bytes for tensor in pyactcomp.report(c).tensors if tensor.shape == (128, 256)]
    # ReLU's result in codes, and the mask in bits.
    assert sorted(wide) == [0, 128 * 256 // 8, fmt.packed_nbytes(128 * 256, 8, 64)]
    parameters = (*up.parameters(), down.weight)
    for got, exact in zip(
        torch.autograd.grad(compressed, parameters), torch.autograd.grad(loss(), parameters), strict=True
    ):
        assert (got - exact).norm() <= GRADIENT_BOUND * exact.norm()


@pytest.mark.parametrize("index", ["rows", "negative", "two dimensions"])
def test_rows_taken_from_a_recomputed_output_are_taken_again(index: str) -> None:
    torch.manual_seed(0)
    taken = {"rows": torch.randint(64, (200,)), "negative": -1 - torch.randint(64, (200,))}.get(
        index, torch.randint(64, (20, 10))
    )
    x = torch.randn(4, 16, 64)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    router, expert = nn.Linear(64, 8), nn.Linear(64, 64)
    parameters = [*model.parameters(), *router.parameters(), *expert.parameters()]

    def loss() -> Tensor:
        y = model(x).view(-1, 64)
        return router(y).square().sum() + expert(y[taken]).square().sum()

    exact = torch.autograd.grad(loss(), parameters)
    with pyactcomp.compressed(min_bytes=1) as c:
        out = loss()
    rows = [t for t in pyactcomp.report(c).tensors if t.shape[-1:] == (64,) and math.prod(t.shape) == 200 * 64]
    assert rows[0].kept == reasons.RECOMPUTED
    for got, expected in zip(torch.autograd.grad(out, parameters), exact, strict=True):
        assert (got - expected).norm() <= GRADIENT_BOUND * expected.norm()


def test_rows_of_an_output_that_was_written_to_are_stored() -> None:
    x = torch.randn(64, 64)
    linear, norm, expert = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)
    taken = torch.randint(64, (200,))

    def gradient() -> Tensor:
        y = norm(linear(x))
        with torch.no_grad():
            y.mul_(2)
        return torch.autograd.grad(expert(y[taken]).sum(), expert.weight)[0]

    exact = gradient()
    with pyactcomp.compressed(min_bytes=1):
        got = gradient()
    assert (got - exact).norm() <= GRADIENT_BOUND * exact.norm()


CHANNELS, SIDE = 8, 16


def stored_of_a_skip(skip: Callable[[Tensor], Tensor], dim: int = 1, batch: int = 4) -> int:
    """Assert that gradients of a skip connection are right; return the bytes stored of its concatenation."""
    torch.manual_seed(0)
    first, second, grow = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(3))
    last = nn.Conv2d(2 * CHANNELS if dim == 1 else CHANNELS, CHANNELS, 3, padding=1)
    parameters = [each.weight for each in (first, second, grow, last)]
    x = torch.randn(batch, CHANNELS, SIDE, SIDE)

    def loss() -> Tensor:
        y = skip(first(x))
        up = grow(F.gelu(second(y)))
        out: Tensor = last(torch.cat((up, y), dim)).square().sum()
        return out

    with pyactcomp.compressed(min_bytes=1) as c:
        compressed = loss()
    for got, exact in zip(
        torch.autograd.grad(compressed, parameters), torch.autograd.grad(loss(), parameters), strict=True
    ):
        assert (got - exact).norm() <= GRADIENT_BOUND * exact.norm()
    whole = 2 * batch * CHANNELS * SIDE * SIDE
    return next(t.stored_bytes for t in pyactcomp.report(c).tensors if math.prod(t.shape) == whole)


def norm(y: Tensor) -> Tensor:
    return F.instance_norm(y, None, None, nn.Parameter(torch.ones(CHANNELS)), nn.Parameter(torch.zeros(CHANNELS)))


SKIPS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "leaky relu of a norm": lambda y: F.leaky_relu_(norm(y), 0.3),
}
PART = 4 * CHANNELS * SIDE * SIDE


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", SKIPS)
def test_a_part_of_a_concatenation_that_another_operator_saved_is_not_stored_again(name: str, batch: int) -> None:
    assert stored_of_a_skip(SKIPS[name], batch=batch) == fmt.packed_nbytes(PART * batch // 4, 8, 64)


@pytest.mark.parametrize(
    ("skip", "dim"),
    [(lambda y: y * 1, 1), (torch.relu, 3), (lambda y: torch.relu(y).mT, 1)],
    ids=["saved by none", "rows in halves", "transposed"],
)
def test_another_concatenation_is_stored_as_a_whole(skip: Callable[[Tensor], Tensor], dim: int) -> None:
    assert stored_of_a_skip(skip, dim) == fmt.packed_nbytes(2 * PART, 8, 64)


def test_a_part_that_was_written_to_is_stored() -> None:
    torch.manual_seed(0)
    layer, last = nn.Linear(64, 64), nn.Conv1d(16, 4, 1)
    x = torch.randn(4, 8, 64)

    def loss() -> Tensor:
        y = F.gelu(layer(x))
        rows = y @ torch.ones(64, 64)
        with torch.no_grad():
            y.add_(1)
        out: Tensor = last(torch.cat((y, rows), 1)).square().sum()
        return out

    exact = torch.autograd.grad(loss(), last.weight)[0]
    with pyactcomp.compressed(min_bytes=1):
        out = loss()
    found = torch.autograd.grad(out, last.weight)[0]
    assert (found - exact).norm() <= GRADIENT_BOUND * exact.norm()
