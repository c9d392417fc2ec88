"""Works with: Opacus, which computes a gradient for each sample from inputs of layers that it keeps itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from works_with import DEVICES, GRADIENT_BOUND, MIN_BYTES, assert_compressed, relative_error

import pyactcomp

pytest.importorskip("opacus", reason="Opacus is not installed")

# Opacus's hooks on the backward of the first layer, whose input needs no gradient.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")

SAMPLES, CLASSES, SIDE = 32, 8, 16


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * SIDE * SIDE, 128),
        nn.LayerNorm(128),
        nn.GELU(),
        nn.Linear(128, CLASSES),
    )


def of_samples(model: nn.Module, device: str) -> dict[str, Tensor]:
    """Return each parameter's gradients, one a sample, of one step."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(SAMPLES, 3, SIDE, SIDE, generator=generator).to(device)
    classes = torch.randint(CLASSES, (SAMPLES,), generator=generator).to(device)
    F.cross_entropy(model(images), classes).backward()
    found: dict[str, Any] = {name: parameter.grad_sample for name, parameter in model.named_parameters()}
    assert all(len(each) == SAMPLES for each in found.values())
    return {name: each.detach().clone() for name, each in found.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["int8", "lossless"])
@pytest.mark.parametrize(("first", "fuse"), [("compress", True), ("compress", False), ("opacus", False)])
def test_gradients_of_each_sample_agree(first: str, fuse: bool, mode: Any, device: str) -> None:
    from opacus import GradSampleModule

    exact = of_samples(GradSampleModule(network().to(device)), device)
    model = network().to(device)
    if first == "compress":
        compressed = pyactcomp.compress(model, mode=mode, fuse=fuse, min_bytes=MIN_BYTES)
        found = of_samples(GradSampleModule(model), device)
    else:
        compressed = pyactcomp.compress(GradSampleModule(model), mode=mode, fuse=fuse, min_bytes=MIN_BYTES)
        found = of_samples(compressed, device)
    error = relative_error(found, exact)
    assert (error == 0.0) if mode == "lossless" and device == "cpu" else (error <= GRADIENT_BOUND), error
    if mode == "int8":
        assert error > 0.0
        assert_compressed(pyactcomp.report(compressed))


def test_the_validator_sees_batch_norms_of_a_compressed_model_that_is_not_fused() -> None:
    """It looks classes up, and a fused module has one of its own."""
    from opacus.validators import ModuleValidator

    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    wrong = [str(error) for error in ModuleValidator.validate(model)]
    assert len(wrong) == 1
    pyactcomp.compress(model, fuse=False)
    assert [str(error) for error in ModuleValidator.validate(model)] == wrong
