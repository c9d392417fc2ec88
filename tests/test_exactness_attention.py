"""Gradients of attention stay within the bar where its probabilities saturate."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from exactness_checks import distance
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from works_with import GRADIENT_BOUND

import pyactcomp


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# Attention.

Heads = tuple[Tensor, Tensor, Tensor]


def attention_gradients(leaves: Heads, w: Tensor, backend: SDPBackend | None, **given: Any) -> Heads:
    with sdpa_kernel(backend) if backend is not None else nullcontext():
        out = F.scaled_dot_product_attention(*(each * 1 for each in leaves), **given)
    return torch.autograd.grad((out * w).sum(), leaves)  # type: ignore[return-value]


def exact_and_cost_of_bfloat16(leaves: Heads, w: Tensor) -> tuple[Heads, float]:
    """Return the gradients in float64, and the error of rounding q, k and v to bfloat16."""
    wide: Heads = tuple(each.detach().double().requires_grad_() for each in leaves)  # type: ignore[assignment]
    exact = attention_gradients(wide, w.double(), SDPBackend.MATH)
    halved: Heads = tuple(each.detach().bfloat16().double().requires_grad_() for each in leaves)  # type: ignore[assignment]
    return exact, distance(attention_gradients(halved, w.double(), SDPBackend.MATH), exact)


def assert_attention_is_as_exact_as_bfloat16(largest: float, backend: SDPBackend | None, device: str) -> None:
    """Hold the error against float64 to twice that of q, k and v in bfloat16, and to 2 % where the logits are usual.

    The composition of operators, which computes no exponential again, to 2 % however large they are.
    """
    q, k, v, w = (torch.randn(2, 4, 128, 64, device=device) for _ in range(4))
    scale = math.sqrt(largest / float((q @ k.mT / 8).abs().max()))
    leaves: Heads = tuple(each.requires_grad_() for each in (q * scale, k * scale, v))  # type: ignore[assignment]
    exact, of_bfloat16 = exact_and_cost_of_bfloat16(leaves, w)
    with pyactcomp.compressed(min_bytes=0):
        got = attention_gradients(leaves, w, backend)
    found = distance(got, exact)
    if backend is not SDPBackend.MATH:
        assert found <= 2 * of_bfloat16
    if backend is SDPBackend.MATH or largest <= 20:
        assert found <= GRADIENT_BOUND


@pytest.mark.parametrize("largest", [5.0, 20.0, 45.0, 80.0])
@pytest.mark.parametrize("backend", [None, SDPBackend.MATH], ids=["chosen", "math"])
def test_attention_is_as_exact_as_bfloat16_however_large_its_logits(largest: float, backend: SDPBackend | None) -> None:
    assert_attention_is_as_exact_as_bfloat16(largest, backend, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("largest", [5.0, 20.0, 45.0, 80.0])
@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION], ids=lambda backend: backend.name)
def test_float32_attention_on_a_gpu_is_as_exact_as_bfloat16(largest: float, backend: SDPBackend) -> None:
    assert_attention_is_as_exact_as_bfloat16(largest, backend, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("largest", [5.0, 20.0, 45.0, 80.0])
@pytest.mark.parametrize(
    "backend",
    [
        SDPBackend.MATH,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
    ],
    ids=lambda backend: backend.name,
)
def test_16_bit_attention_on_a_gpu_loses_its_values_codes_alone(
    backend: SDPBackend, largest: float, dtype: torch.dtype
) -> None:
    """Hold the error of the codes to 2 % where the logits are usual, and to twice that of bfloat16 beyond."""
    q, k, v, w = (torch.randn(2, 4, 128, 64, device="cuda") for _ in range(4))
    scale = math.sqrt(largest / float((q @ k.mT / 8).abs().max()))
    heads: Heads = (q * scale, k * scale, v)
    leaves: Heads = tuple(each.to(dtype).requires_grad_() for each in heads)  # type: ignore[assignment]
    exact = attention_gradients(leaves, w.to(dtype), backend)
    with pyactcomp.compressed(min_bytes=0):
        got = attention_gradients(leaves, w.to(dtype), backend)
    bound = GRADIENT_BOUND if largest <= 20 else max(GRADIENT_BOUND, 2 * exact_and_cost_of_bfloat16(heads, w)[1])
    assert distance(got, exact) <= bound
