"""The fused kernels of ``pyactcomp.functional``, on the device that this process has Triton kernels for.

Run by ``test_functional.py`` in processes of their own, with Triton's interpreter and, where there is a GPU, without.
"""

from __future__ import annotations

import pytest
import torch
from functional_checks import EPS, SEED, assert_codes_saved, check_gelu, check_layer_norm, normal, saved_by
from native_cases import DTYPES
from torch import Tensor

from pyactcomp import codec, functional
from pyactcomp.functional import _fused
from pyactcomp.functional._saving import saving
from pyactcomp.kernels import triton as kernels

DEVICE = torch.device("cpu" if kernels.interpreted() else "cuda")
FORMATS = [(8, 64), (8, 256), (4, 64), (2, 128)]
# Rows of a power of two of groups, of another number of groups, and of no whole number, which are not fused.
LENGTHS = [256, 768, 200]


def on_device(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(DEVICE, dtype)


@pytest.mark.parametrize(("bits", "group_size"), FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_saves_the_bytes_of_the_reference(dtype: torch.dtype, bits: int, group_size: int) -> None:
    x = on_device(normal(kernels.TILE + 99), dtype)
    x[3], x[70], x[200] = float("inf"), float("nan"), -float("inf")
    leaf = x.clone().requires_grad_()
    saved = saved_by(lambda: functional.gelu(leaf, bits=bits, group_size=group_size, seed=SEED, impl="triton"))
    assert len(saved) == 1
    assert_codes_saved(saved, x, bits, group_size, None)


@pytest.mark.parametrize(("bits", "group_size"), FORMATS)
def test_linear_saves_the_bytes_of_the_reference(bits: int, group_size: int) -> None:
    x, weight = on_device(normal(9, 300), torch.bfloat16), on_device(normal(4, 300), torch.bfloat16).requires_grad_()
    saved = saved_by(lambda: functional.linear(x, weight, bits=bits, group_size=group_size, seed=SEED, impl="triton"))
    assert_codes_saved(saved, x, bits, group_size, None)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("bits", "group_size"), FORMATS)
def test_layer_norm_saves_the_bytes_of_the_reference(bits: int, group_size: int, length: int) -> None:
    x = on_device(normal(5, length), torch.bfloat16)
    x[2, 7] = float("inf")
    leaf = x.clone().requires_grad_()
    how = saving(bits, group_size, None, SEED, "triton")
    assert _fused.layer_norm_serves(leaf, (length,), how) == (length % group_size == 0)
    saved = saved_by(
        lambda: functional.layer_norm(leaf, length, bits=bits, group_size=group_size, seed=SEED, impl="triton")
    )
    assert_codes_saved(saved, x, bits, group_size, None)
    assert [s.dtype for s in saved].count(torch.float32) == 2


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_gradient_is_within_its_bound(dtype: torch.dtype, approximate: str) -> None:
    shape = (3, kernels.TILE // 2 + 33)
    x = on_device(3 * normal(*shape), dtype)
    check_gelu(x, on_device(normal(*shape, seed=1), dtype), approximate, 8, 64, "triton")


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm_gradients_are_within_their_bounds(dtype: torch.dtype, length: int) -> None:
    x, grad = (on_device(normal(2, 4, length, seed=seed), dtype) for seed in (0, 1))
    weight, bias = (on_device(normal(length, seed=seed), dtype) for seed in (2, 3))
    check_layer_norm(x, weight, bias, grad, 8, 64, "triton")


@pytest.mark.parametrize("length", [256, 768])
def test_fused_gradients_are_those_of_the_separate_passes(length: int) -> None:
    # Both restore the same values, so that only the rounding of the sums, and of the derivative of gelu, differs.
    def gradients(impl: codec.Impl) -> list[Tensor]:
        x, weight, bias = leaves = [on_device(normal(*s), torch.float32).requires_grad_() for s in shapes]
        out = functional.layer_norm(x, length, weight, bias, impl=impl)
        of_norm = torch.autograd.grad(out, leaves, grad)
        return [*of_norm, torch.autograd.grad(functional.gelu(x, impl=impl), x, grad)[0]]

    shapes = [(7, length), (length,), (length,)]
    grad = on_device(normal(7, length, seed=1), torch.float32)
    for fused, separate in zip(gradients("triton"), gradients("reference"), strict=True):
        limit = 2 * (length + 12) * EPS * float(separate.abs().max())
        assert float((fused - separate).abs().max()) <= limit


@pytest.mark.parametrize("parameters", [(False, False), (True, False), (False, True)])
def test_layer_norm_without_weight_or_bias(parameters: tuple[bool, bool]) -> None:
    x, grad = (on_device(normal(6, 192, seed=seed), torch.float32) for seed in (0, 1))
    weight, bias = (on_device(normal(192), torch.float32) if wanted else None for wanted in parameters)
    check_layer_norm(x, weight, bias, grad, 4, 64, "triton")


def test_gelu_takes_the_gradient_in_any_layout() -> None:
    x = on_device(normal(2, 8, 5, 7), torch.float32).to(memory_format=torch.channels_last)
    grad = on_device(normal(2, 8, 5, 7, seed=1), torch.float32)
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        leaf = x.clone().requires_grad_()
        out = functional.gelu(leaf, impl="triton")
        assert out.stride() == x.stride()
        out.backward(grad.contiguous(memory_format=layout))
        results.append(leaf.grad)
    assert torch.equal(results[0], results[1])
    exact = torch.autograd.grad(torch.nn.functional.gelu(leaf), leaf, grad)[0]
    # Eight bits of 64 normal numbers, a range of about six: half a step, 0.012, times the second derivative, 0.8.
    assert float((results[0] - exact).abs().max() / grad.abs().max()) < 0.8 * 8 / 255 / 2


def test_gelu_keeps_the_overflow_of_float16() -> None:
    x = torch.full((64,), 65504.0, dtype=torch.float16, device=DEVICE, requires_grad=True)
    out = functional.gelu(x, impl="triton")
    assert torch.equal(out.detach(), torch.nn.functional.gelu(x.detach()))
    (grad,) = torch.autograd.grad(out, x, torch.full_like(out, float("inf")))
    assert bool(grad.isinf().all())


@pytest.mark.gpu
def test_auto_is_fused_on_the_gpu() -> None:
    x = on_device(normal(64, 256), torch.bfloat16).requires_grad_()
    assert saving(8, 64, None, 0, "auto").fuses(x)
    assert not saving(8, 64, None, 0, "cuda").fuses(x)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [256, 200])
def test_layer_norm_under_autocast_gives_float32(length: int) -> None:
    x = on_device(normal(8, length), torch.bfloat16).requires_grad_()
    weight = on_device(normal(length), torch.float32).requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = functional.layer_norm(x, length, weight)
        expected = torch.nn.functional.layer_norm(x, (length,), weight)
    assert out.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(out, expected, rtol=0, atol=length * torch.finfo(torch.float32).eps * 8)
    out.sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert (x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.gpu
def test_layer_norm_sums_over_more_rows_than_programs() -> None:
    x, grad = (on_device(normal(5000, 256, seed=seed), torch.bfloat16) for seed in (0, 1))
    weight, bias = (on_device(normal(256, seed=seed), torch.bfloat16) for seed in (2, 3))
    check_layer_norm(x, weight, bias, grad, 8, 64, "triton")
