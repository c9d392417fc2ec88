"""Works with: timm's convolutional and windowed-attention models."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from works_with import DEVICES, assert_step_agrees

timm = pytest.importorskip("timm", reason="timm is not installed")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
def test_timm_resnet_gradients_agree(device: str, memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    model = timm.create_model("resnet18", num_classes=10).to(device, memory_format=memory_format).train()
    images = torch.randn(4, 3, 64, 64).to(device, memory_format=memory_format)
    labels = torch.arange(4, device=device)
    assert_step_agrees(model, lambda m: F.cross_entropy(m(images), labels))


@pytest.mark.parametrize("device", DEVICES)
def test_timm_swin_gradients_agree(device: str) -> None:
    torch.manual_seed(0)
    model = timm.models.SwinTransformer(
        img_size=32, patch_size=2, embed_dim=32, depths=(2, 2), num_heads=(2, 4), window_size=4, num_classes=10
    )
    model = model.to(device).train()
    images = torch.randn(4, 3, 32, 32).to(device)
    labels = torch.arange(4, device=device)
    assert_step_agrees(model, lambda m: F.cross_entropy(m(images), labels))
