"""The fused kernels of ``pyactcomp.functional``, on the device that this process has Triton kernels for.

Run by ``test_triton.py`` in processes of their own, with Triton's interpreter and, where there is a GPU, without.
"""

from __future__ import annotations

import pytest
import torch
from functional_checks import SEED, assert_codes_saved, check_gelu, normal, saved_by
from native_cases import DTYPES
from torch import Tensor

from pyactcomp import functional
from pyactcomp.codec.kernels import triton as kernels
from pyactcomp.functional import Codes
from pyactcomp.functional.saving import saving

DEVICE = torch.device("cpu" if kernels.interpreted() else "cuda")
FORMATS = [(8, 64), (8, 256), (4, 64), (2, 128)]


def on_device(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(DEVICE, dtype)


@pytest.mark.parametrize(("bits", "group_size"), FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_saves_the_bytes_of_the_reference(dtype: torch.dtype, bits: int, group_size: int) -> None:
    x = on_device(normal(kernels.TILE + 99), dtype)
    x[3], x[70], x[200] = float("inf"), float("nan"), -float("inf")
    leaf = x.clone().requires_grad_()
    saved = saved_by(
        lambda: functional.gelu(leaf, codes=Codes(bits=bits, group_size=group_size, seed=SEED, impl="triton"))
    )
    assert len(saved) == 1
    assert_codes_saved(saved, x, bits, group_size, None)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_gradient_is_within_its_bound(dtype: torch.dtype, approximate: str) -> None:
    shape = (3, kernels.TILE // 2 + 33)
    x = on_device(3 * normal(*shape), dtype)
    check_gelu(x, on_device(normal(*shape, seed=1), dtype), approximate, 8, 64, "triton")


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_far_from_zero_is_the_identity_or_nothing(approximate: str) -> None:
    for sign in (1, -1):
        # Codes move an element by 8 at most. A reciprocal of 1 that were not 1 would be multiplied by x cubed.
        x = on_device(sign * torch.linspace(20, 4000, 3 * kernels.TILE), torch.float32).requires_grad_()
        out = functional.gelu(x, approximate, codes=Codes(impl="triton"))
        assert torch.equal(out, x.detach().clamp(min=0))
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], (x > 0).float())


def test_gelu_takes_the_gradient_in_any_layout() -> None:
    x = on_device(normal(2, 8, 5, 7), torch.float32).to(memory_format=torch.channels_last)
    grad = on_device(normal(2, 8, 5, 7, seed=1), torch.float32)
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        leaf = x.clone().requires_grad_()
        out = functional.gelu(leaf, codes=Codes(impl="triton"))
        assert out.stride() == x.stride()
        out.backward(grad.contiguous(memory_format=layout))
        results.append(leaf.grad)
    assert torch.equal(results[0], results[1])
    exact = torch.autograd.grad(torch.nn.functional.gelu(leaf), leaf, grad)[0]
    # Eight bits of 64 normal numbers, a range of about six: half a step, 0.012, times the second derivative, 0.8.
    assert float((results[0] - exact).abs().max() / grad.abs().max()) < 0.8 * 8 / 255 / 2


def test_gelu_keeps_the_overflow_of_float16() -> None:
    x = torch.full((64,), 65504.0, dtype=torch.float16, device=DEVICE, requires_grad=True)
    out = functional.gelu(x, codes=Codes(impl="triton"))
    assert torch.equal(out.detach(), torch.nn.functional.gelu(x.detach()))
    (grad,) = torch.autograd.grad(out, x, torch.full_like(out, float("inf")))
    assert bool(grad.isinf().all())


@pytest.mark.gpu
def test_auto_is_fused_on_the_gpu() -> None:
    x = on_device(normal(64, 256), torch.bfloat16).requires_grad_()
    assert saving(Codes(seed=0)).fuses(x)
    assert not saving(Codes(seed=0, impl="cuda")).fuses(x)
