"""The kernels of batch norm and max-pool, on the device that this process has Triton kernels for.

Run by ``test_triton.py`` in processes of their own, with Triton's interpreter and, where there is a
GPU, without.
"""

from __future__ import annotations

import pytest
import torch
from convolutional_checks import (
    Case,
    assert_codes_of_normalised,
    assert_small_channels_have_their_gradients,
    check_batch_norm,
    error_of,
    normalised,
    recipe_of,
)
from functional_checks import EPS, SEED, normal, saved_by
from native_cases import DTYPES
from torch import Tensor
from torch.nn import functional as F

from pyactcomp.codec import reference
from pyactcomp.codec.kernels import triton as kernels
from pyactcomp.functional import Codes
from pyactcomp.functional.convolutional import launch as fused
from pyactcomp.functional.convolutional.batch_norm import batch_norm, kernels_for
from pyactcomp.functional.convolutional.max_pool import max_pool2d
from pyactcomp.functional.saving import saving

DEVICE = torch.device("cpu" if kernels.interpreted() else "cuda")
HOW = saving(Codes(seed=SEED, impl="triton"))
# One group a row, two, a number that shares no power of two with a tile, eight, of which a program takes more than
# one tile; the last tile is partial.
SHAPES = [((2, 64, 5, 5), False), ((3, 128, 3, 3), True), ((2, 192, 3, 3), False), ((3, 512, 3, 3), True)]


def serve(x: Tensor) -> bool:
    kernels = kernels_for(x, HOW)
    return kernels is not None and kernels.serves(x, None, None, None, None, None, 0.1, 1e-5, False)


@pytest.mark.parametrize(("shape", "residual"), SHAPES, ids=str)
def test_batch_norm_is_within_its_bounds(shape: tuple[int, int, int, int], residual: bool) -> None:
    case = Case.make(shape, residual=residual, device=DEVICE)
    assert serve(case.x)
    check_batch_norm(case, impl="triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("relu", "affine"), [(False, True), (True, False)])
def test_batch_norm_of_each_kind_is_within_its_bounds(dtype: torch.dtype, relu: bool, affine: bool) -> None:
    check_batch_norm(Case.make((2, 64, 3, 3), relu=relu, affine=affine, dtype=dtype, device=DEVICE), impl="triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batch_norm_with_residual_of_each_dtype(dtype: torch.dtype) -> None:
    check_batch_norm(Case.make((2, 64, 3, 3), residual=True, dtype=dtype, device=DEVICE), impl="triton")


@pytest.mark.parametrize("group_size", [128, 256])
def test_batch_norm_in_larger_groups(group_size: int) -> None:
    check_batch_norm(Case.make((2, 256, 2, 2), device=DEVICE), impl="triton", group_size=group_size)


def test_rows_of_no_whole_groups_take_separate_passes() -> None:
    case = Case.make((2, 96, 3, 3), device=DEVICE)
    assert not serve(case.x)
    assert not serve(Case.make((2, 64, 3, 3)).x.contiguous().to(DEVICE))
    check_batch_norm(case, impl="triton")


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_batch_norm_saves_codes_of_the_normalised_input(rounding: str) -> None:
    case = Case.make((2, 192, 3, 3), device=DEVICE)
    # Statistics make all of a channel NaN, as torch's do.
    case.x[0, 3, 1, 1], case.x[1, 70, 2, 2], case.x[1, 190, 1, 2] = float("inf"), float("nan"), -float("inf")
    saved = saved_by(lambda: case.run(case.leaves(), (None, None), impl="triton", rounding=rounding))
    (codes,) = (s for s in saved if s.dtype is torch.uint8)
    assert_codes_of_normalised(codes, case, 64, stochastic=rounding == "stochastic")
    (signs,) = (s for s in saved if s.dtype is torch.int16)
    # One bit an element, in whole tiles.
    tile = kernels.TILE // 64 * 192
    assert signs.nbytes * 8 == -(-case.x.numel() // tile) * tile


@pytest.mark.parametrize("residual", [False, True])
def test_channels_orders_of_magnitude_apart_have_their_gradients(residual: bool) -> None:
    assert_small_channels_have_their_gradients((4, 64, 5, 5), torch.channels_last, residual, DEVICE, impl="triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_output_is_recomputed_from_the_codes_of_the_input(dtype: torch.dtype) -> None:
    case = Case.make((3, 128, 5, 5), device=DEVICE)
    leaves = case.leaves()
    out = case.run(leaves, (None, None), impl="triton")
    recipe = recipe_of(out)
    assert recipe is not None
    out = out.detach()
    recomputed = recipe.compute(dtype)
    assert recomputed.dtype is dtype
    assert recomputed.stride() == out.stride()
    assert torch.equal(recomputed > 0, out > 0)
    assert case.weight is not None
    bound = error_of(normalised(case.x).float(), 64).to(DEVICE) * case.weight.abs().view(1, -1, 1, 1) + 2.0**-14
    bound = bound + torch.finfo(dtype).eps * (out.abs() + bound) + 64 * EPS * (out.abs() + 8)
    assert float(((recomputed.double() - out).abs() / bound).max()) <= 1
    # From the memory that was read, whatever the parameters' is by then.
    for parameter in leaves[1:3]:
        assert parameter is not None
        parameter.data = torch.full_like(parameter, 7.0)
    assert torch.equal(recipe.compute(dtype), recomputed)


def test_output_with_a_residual_has_the_codes_of_the_reference() -> None:
    case = Case.make((3, 64, 5, 5), residual=True, device=DEVICE)
    out = case.run(case.leaves(), (None, None), impl="triton")
    recipe = recipe_of(out)
    assert recipe is not None
    out = out.detach()
    flat = out.cpu().as_strided((out.numel(),), (1,))
    packed = reference.quantize(flat, bits=8, group_size=64, stochastic=False, seed=SEED)
    expected = reference.dequantize(packed, flat.numel())
    recomputed = recipe.compute(torch.float32)
    assert recomputed.stride() == out.stride()
    assert torch.equal(recomputed.cpu().as_strided((out.numel(),), (1,)), expected)


def test_variance_survives_a_large_mean() -> None:
    # The sum of squares less the square of the sum would be off by about 1e6 EPS, a tenth of the variance.
    x = (1000 + normal(4, 64, 5, 5)).to(DEVICE).to(memory_format=torch.channels_last).requires_grad_()
    var = torch.zeros(64, device=DEVICE)
    batch_norm(x, torch.zeros(64, device=DEVICE), var, momentum=1.0, codes=Codes(impl="triton"))
    apart = x.detach().double() - 1000
    count = 4 * 5 * 5
    bound = count * EPS * (apart.amax((0, 2, 3)) - apart.amin((0, 2, 3))).square()
    assert bool(((var - apart.var((0, 2, 3))).abs() <= bound).all())


def test_non_finite_values_stay_visible() -> None:
    x = normal(2, 128, 3, 3).to(DEVICE).to(memory_format=torch.channels_last)
    x[0, 5, 1, 1] = float("inf")
    leaf = x.clone().requires_grad_()
    out = batch_norm(leaf, None, None, relu=True, codes=Codes(impl="triton"))
    expected = F.batch_norm(x, None, None, training=True).relu()
    assert torch.equal(out.isnan(), expected.isnan())
    out.backward(torch.ones_like(out))
    assert leaf.grad is not None
    assert bool(leaf.grad[:, 5].isnan().all())
    assert bool(leaf.grad[:, :5].isfinite().all())


WINDOWS = [(3, 2, 1), (2, 2, 0), ((3, 2), (1, 2), (1, 0)), (5, 3, 2), (2, 3, 0)]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_max_pool_is_that_of_torch_to_the_bit(dtype: torch.dtype, window: tuple[int, int, int]) -> None:
    # Few values, so that windows hold their maximum several times, and NaN, of which the last is taken.
    x = (2 * normal(2, 64, 5, 6)).round().to(DEVICE, dtype).to(memory_format=torch.channels_last)
    x[0, 1, 2, 3:5] = float("nan")
    x[1, 1, 2, 2] = -float("inf")
    assert fused.max_pool_serves(x)
    # On the CPU torch rounds each of its sums; the kernel does as torch's on CUDA, which sums in float32.
    torchs = x.float() if DEVICE.type == "cpu" else x
    results: list[tuple[Tensor, Tensor]] = []
    for source, function in ((torchs, F.max_pool2d), (x, lambda t, *w: max_pool2d(t, *w, impl="triton"))):
        leaf = source.clone().requires_grad_()
        out = function(leaf, *window)
        out.backward(normal(*out.shape, seed=1).to(DEVICE, dtype).to(source.dtype))
        assert leaf.grad is not None
        results.append((out.detach().to(dtype), leaf.grad.to(dtype)))
    (out, grad_x), (ours, grad_ours) = results
    assert torch.equal(out.isnan(), ours.isnan())
    assert torch.equal(out.nan_to_num(), ours.nan_to_num())
    assert torch.equal(grad_x, grad_ours)


@pytest.mark.gpu
@pytest.mark.parametrize("residual", [False, True])
def test_batch_norm_over_more_rows_than_programs(residual: bool) -> None:
    check_batch_norm(Case.make((32, 64, 56, 56), residual=residual, device=DEVICE), impl="triton")
