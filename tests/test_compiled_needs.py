"""How exactly backward graphs need saved values: cases outside the samples of PyTorch's operators."""

from __future__ import annotations

import pytest
import torch
from compiled_backend import gradients, off
from torch import Tensor

from pyactcomp.compiled import needs
from pyactcomp.config import Config

INT8 = Config(min_bytes=1)
BAR = 0.02


def test_a_product_that_backward_divides_keeps_its_small_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(64, 64, requires_grad=True) for _ in range(2)]
    index, scale = torch.randint(0, 64, (64, 64)), torch.randn(64, 64)

    def step(x: Tensor, y: Tensor) -> Tensor:
        # The derivative is the product, over each of its factors.
        return (torch.scatter_reduce(x * scale, 0, index, y * scale, "prod")).sum()

    expected = gradients(step, leaves, None, *leaves)[1]
    # Two roundings to bfloat16, of one part in 256 each.
    assert off(gradients(step, leaves, INT8, *leaves)[1], expected) <= 2 / 256
    monkeypatch.setattr(needs, "_is_divided", lambda _: False)
    assert off(gradients(step, leaves, INT8, *leaves)[1], expected) > BAR
