"""Works with: AdamW of bitsandbytes and of torchao, whose two moments of each weight take 8 bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from works_with import DEVICES, GRADIENT_BOUND, MIN_BYTES, Transformer, assert_compressed, regression

import pyactcomp

# Both packages import other libraries, and compile, with warnings of their own.
pytestmark = pytest.mark.filterwarnings("ignore")

STEPS, EIGHT_BIT_FROM = 6, 4096
"""Both packages keep the moments of smaller weights in 32 bits."""


def bitsandbytes(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    package = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    return package.optim.AdamW8bit(parameters, lr=1e-3)


def torchao(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    package = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    return package.AdamW8bit(parameters, lr=1e-3)


Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def bytes_of(value: Any) -> int:
    """Return the bytes of a moment: torchao's is a tensor subclass of codes, scales and a map."""
    if not isinstance(value, Tensor):
        return 0
    inner = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else []
    return sum(getattr(value, name).nbytes for name in inner) if inner else value.nbytes


def train(make: Make, mode: Any, device: str) -> tuple[list[float], list[Tensor], dict[nn.Parameter, dict[str, Any]]]:
    """Return the losses, the weights at the end, and the optimizer's state."""
    torch.manual_seed(0)
    model = Transformer().to(device)
    if mode is not None:
        pyactcomp.compress(model, mode=mode, min_bytes=MIN_BYTES)
    optimizer = make(model.parameters())
    inputs, targets = regression(device)
    losses = []
    for _ in range(STEPS):
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if mode == "int8":
        assert_compressed(pyactcomp.report(model))
    return losses, [p.detach() for p in model.parameters()], dict(optimizer.state)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [bitsandbytes, pytest.param(torchao, marks=pytest.mark.slow)])  # torchao's compiles
def test_training_follows_that_without_compression(make: Make, device: str) -> None:
    exact, weights, _ = train(make, None, device)
    found, found_weights, _ = train(make, "lossless", device)
    if device == "cpu":
        assert found == exact
        assert all(torch.equal(a, b) for a, b in zip(found_weights, weights, strict=True))
    losses, _, state = train(make, "int8", device)
    assert exact[3] < 0.5 * exact[0]
    assert losses[0] == pytest.approx(exact[0], rel=2**-20)
    # An update is the ratio of two moments of the gradients: to first order off by at most twice the gradients' error.
    for loss, expected in itertools.islice(zip(losses, exact, strict=True), 1, None):
        assert abs(loss - expected) <= 2 * GRADIENT_BOUND * (exact[0] - expected)
    assert losses != exact
    large = {p: moments for p, moments in state.items() if p.numel() >= EIGHT_BIT_FROM}
    assert len(large) >= 4
    for parameter, moments in large.items():
        # Two moments of a byte each, their scales, one for each 256, and maps of 256 codes.
        assert sum(map(bytes_of, moments.values())) < (2 + 2 * 4 / 256) * parameter.numel() + 4096
