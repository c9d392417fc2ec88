"""Works with: autocast, GradScaler, gradient accumulation."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from works_with import (
    DEVICES,
    GRADIENT_BOUND,
    MIN_BYTES,
    Transformer,
    assert_compressed,
    assert_step_agrees,
    gradients,
    kept_for,
    regression,
    relative_error,
)

import pyactcomp
from pyactcomp.engine import reasons


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast_gradients_agree_and_weight_copies_are_not_held(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Transformer().to(device)
    inputs, targets = regression(device)

    def loss_of(m: nn.Module) -> torch.Tensor:
        with torch.autocast(device, dtype):
            return F.mse_loss(m(inputs).float(), targets)

    report = assert_step_agrees(model, loss_of)
    copies = kept_for(report, reasons.RECAST)
    # Four matrices a block are as large as min_bytes in 16 bits, and so is the embedding; the head is not.
    assert len(copies) >= 4 * len(model.blocks)
    assert all(tensor.dtype == str(dtype).removeprefix("torch.") and tensor.stored_bytes == 0 for tensor in copies)


class Scaled:
    """A model trained under fp16 autocast with a GradScaler."""

    def __init__(self, model: nn.Module, device: str) -> None:
        self.model = model
        self.device = device
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler(device, init_scale=2.0**10)

    def step(self, inputs: torch.Tensor) -> tuple[float, float]:
        """Return the loss and the scale after the step."""
        self.optimizer.zero_grad()
        with torch.autocast(self.device, torch.float16):
            loss = self.model(inputs).float().square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item(), self.scaler.get_scale()


@pytest.mark.parametrize("device", DEVICES)
def test_grad_scaler_skips_the_step_for_an_infinity_that_only_a_saved_tensor_carries(device: str) -> None:
    # ReLU6 hides the infinity from the loss: it reaches the first weight's gradient, as 0 * inf, through the saved
    # input alone, so a codec that lost it would let the step happen.
    torch.manual_seed(0)
    exact = nn.Sequential(nn.Linear(64, 256), nn.ReLU6(), nn.Linear(256, 1)).to(device)
    model = pyactcomp.compress(copy.deepcopy(exact), min_bytes=MIN_BYTES)
    compressed, plain = Scaled(model, device), Scaled(exact, device)
    clean = torch.randn(32, 64, device=device)
    poisoned = clean.clone()
    poisoned[3, 5] = float("inf")

    scales = []
    for inputs in (clean, poisoned, clean):
        before = [p.detach().clone() for p in model.parameters()]
        loss, scale = compressed.step(inputs)
        _, expected_scale = plain.step(inputs)
        assert loss < float("inf")
        assert scale == expected_scale
        moved = [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
        assert not any(moved) if inputs is poisoned else all(moved)
        scales.append(scale)
    assert scales == [2.0**10, 2.0**9, 2.0**9]
    assert_compressed(pyactcomp.report(model))


@pytest.mark.parametrize("device", DEVICES)
def test_gradient_accumulation_sums_micro_batches(device: str) -> None:
    torch.manual_seed(0)
    exact = Transformer().to(device)
    model = pyactcomp.compress(copy.deepcopy(exact), min_bytes=MIN_BYTES)
    inputs, targets = regression(device, batch=8)
    F.mse_loss(exact(inputs), targets).backward()
    # All graphs at once, so that the packed tensors of one micro-batch must survive the forward of the next.
    losses = [F.mse_loss(model(x), y) / 4 for x, y in zip(inputs.split(2), targets.split(2), strict=True)]
    for loss in losses:
        loss.backward()
    assert 0.0 < relative_error(gradients(model), gradients(exact)) <= GRADIENT_BOUND
    assert_compressed(pyactcomp.report(model))
