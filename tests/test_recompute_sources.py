"""What is computed again from a tensor that the operator did not save itself, but another one did."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import pyactcomp
from pyactcomp.codec import format as fmt
from pyactcomp.engine import policy


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
        assert (got - exact).norm() <= 0.02 * exact.norm()


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
    assert rows[0].kept == policy.RECOMPUTED
    for got, expected in zip(torch.autograd.grad(out, parameters), exact, strict=True):
        assert (got - expected).norm() <= 0.02 * expected.norm()


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
    assert (got - exact).norm() <= 0.02 * exact.norm()
