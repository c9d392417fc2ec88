"""Works with: a training loop, copies of the model for averaging."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from works_with import DEVICES, MIN_BYTES, Transformer, assert_compressed, assert_losses_agree, regression

import pyactcomp


def train(model: nn.Module, device: str, steps: int = 5) -> list[float]:
    inputs, targets = regression(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_training_follows_the_exact_loss_curve(device: str, rounding: str) -> None:
    torch.manual_seed(0)
    exact = Transformer().to(device)
    model = pyactcomp.compress(copy.deepcopy(exact), min_bytes=MIN_BYTES, rounding=rounding)
    assert_losses_agree(train(model, device), train(exact, device))
    assert_compressed(pyactcomp.report(model))


@pytest.mark.parametrize("device", DEVICES)
def test_deep_copy_is_compressed_and_independent(device: str) -> None:
    torch.manual_seed(0)
    model = pyactcomp.compress(Transformer().to(device), min_bytes=MIN_BYTES)
    before = train(model, device, steps=1)
    ema = copy.deepcopy(model)
    assert not pyactcomp.report(ema).tensors, "the copy has a record of its own"
    weights = [p.detach().clone() for p in ema.parameters()]

    train(model, device, steps=2)
    assert all(torch.equal(p, w) for p, w in zip(ema.parameters(), weights, strict=True))

    pyactcomp.decompress(model)
    after = train(ema, device, steps=1)
    assert after[0] < before[0]
    assert_compressed(pyactcomp.report(ema))


def test_averaged_model_follows_a_compressed_model() -> None:
    torch.manual_seed(0)
    model = pyactcomp.compress(Transformer(), min_bytes=MIN_BYTES)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    averaged.update_parameters(model)
    first = [p.detach().clone() for p in model.parameters()]
    train(model, "cpu", steps=1)
    averaged.update_parameters(model)
    for average, start, now in zip(averaged.module.parameters(), first, model.parameters(), strict=True):
        # One lerp in float32: a product and a sum, each rounded once.
        torch.testing.assert_close(average, (start + now) / 2, rtol=4 * torch.finfo(torch.float32).eps, atol=1e-9)
