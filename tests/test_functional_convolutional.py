"""Batch norm and max-pool: what they compute, what they save, and how exact their gradients are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from convolutional_checks import (
    Case,
    assert_codes_of_normalised,
    assert_small_channels_have_their_gradients,
    check_batch_norm,
    recipe_of,
)
from functional_checks import normal, saved_by
from torch import Tensor
from torch.nn import functional as F

from pyactcomp.errors import PyactcompError
from pyactcomp.functional import Codes
from pyactcomp.functional.convolutional.batch_norm import batch_norm
from pyactcomp.functional.convolutional.max_pool import max_pool2d


def wide(*shape: int, seed: int = 0) -> Tensor:
    return normal(*shape, seed=seed).double().requires_grad_()


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_batch_norm_passes_gradcheck(relu: bool, residual: bool, affine: bool) -> None:
    arguments = [wide(3, 4, 2, 2), *((wide(4, seed=1), wide(4, seed=2)) if affine else (None, None))]
    arguments.append(wide(3, 4, 2, 2, seed=3) if residual else None)

    def function(x: Tensor, weight: Tensor | None, bias: Tensor | None, added: Tensor | None) -> Tensor:
        return batch_norm(x, None, None, weight, bias, relu=relu, residual=added, codes=Codes(bits=None))

    assert torch.autograd.gradcheck(function, tuple(arguments))


def test_max_pool_passes_gradcheck() -> None:
    assert torch.autograd.gradcheck(lambda x: max_pool2d(x, 3, 2, 1), (wide(2, 3, 5, 6),))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_batch_norm_is_within_its_bounds(dtype: torch.dtype, residual: bool, layout: torch.memory_format) -> None:
    case = Case.make((3, 64, 3, 5), residual=residual, dtype=dtype, layout=layout)
    # The bound knows groups of channels; exact tensors have no groups.
    check_batch_norm(case, bits=8 if layout is torch.channels_last else None)


def test_running_statistics_are_those_of_torch() -> None:
    case = Case.make((3, 5, 4, 4))
    for momentum in (0.1, 0.25):
        mine, theirs = case.running(), case.running()
        batch_norm(case.x.clone().requires_grad_(), *mine, momentum=momentum)
        F.batch_norm(case.x, *theirs, training=True, momentum=momentum)
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    before = [t.clone() for t in mine]
    with torch.no_grad():
        batch_norm(case.x, *mine)
    assert not any(torch.equal(a, b) for a, b in zip(mine, before, strict=True))


def test_running_statistics_in_bfloat16_are_updated() -> None:
    x = normal(8, 4, 3, 3).bfloat16().requires_grad_()
    mean, var = torch.zeros(4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16)
    batch_norm(x, mean, var, momentum=1.0)
    # A single rounding of the float32 value.
    expected = x.detach().float().mean((0, 2, 3))
    assert float(((mean - expected).abs() / expected.abs()).max()) <= torch.finfo(torch.bfloat16).eps
    assert not bool((var == 1).all())


def test_batch_norm_saves_codes_and_bits() -> None:
    case = Case.make((3, 64, 5, 5))
    saved = saved_by(lambda: case.run(case.leaves(), (None, None)))
    codes = [s for s in saved if s.dtype is torch.uint8 and s.numel() > case.x.numel()]
    assert_codes_of_normalised(*codes, case, 64)
    # Codes, bits, rstd and the weight itself.
    numel = case.x.numel()
    assert sum(s.nbytes for s in saved) == numel + numel // 64 * 4 + -(-numel // 8) + 2 * 64 * 4


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    ("shape", "layout"),
    [((64, 128), None), ((4, 64, 5, 5), torch.channels_last), ((4, 64, 3, 3), None), ((16, 32, 7), None)],
)
def test_channels_orders_of_magnitude_apart_have_their_gradients(
    shape: tuple[int, ...], layout: torch.memory_format | None, residual: bool
) -> None:
    assert_small_channels_have_their_gradients(shape, layout, residual)


def test_output_is_offered_where_it_can_be_recomputed() -> None:
    case = Case.make((3, 64, 5, 5))
    leaves = case.leaves()
    out = case.run(leaves, (None, None))
    recipe = recipe_of(out)
    assert recipe is not None
    out = out.detach()
    recomputed = recipe.compute(torch.float32)
    assert torch.equal(recomputed > 0, out > 0)
    # Half a step of the codes, a range of less than 24 in 255 steps, times the slope.
    slope = (case.weight.abs() / case.x.std((0, 2, 3))).max()
    assert float((recomputed - out).abs().max()) <= float(slope) * 24 / 255
    with_residual = Case.make((3, 64, 5, 5), residual=True)
    assert recipe_of(with_residual.run(with_residual.leaves(), (None, None))) is None
    assert recipe_of(case.run(case.leaves(), (None, None), bits=None)) is None


def test_recomputing_after_the_weight_was_edited_raises() -> None:
    case = Case.make((3, 64, 5, 5))
    leaves = case.leaves()
    recipe = recipe_of(case.run(leaves, (None, None)))
    assert recipe is not None
    assert leaves[1] is not None
    with torch.no_grad():
        leaves[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        recipe.compute(torch.float32)


def test_nothing_is_recorded_without_grad() -> None:
    x = normal(3, 4, 5, 5).requires_grad_()
    with torch.no_grad():
        assert not batch_norm(x, None, None, relu=True).requires_grad
        assert not max_pool2d(x, 2).requires_grad
    assert saved_by(lambda: max_pool2d(x.detach(), 2)) == []


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("window", [(3, 2, 1), (2, None, 0), ((3, 2), (1, 2), (1, 0)), (4, 4, 2)], ids=str)
def test_max_pool_is_that_of_torch_and_saves_a_byte(layout: torch.memory_format, window: tuple[int, int, int]) -> None:
    x = (2 * normal(2, 3, 7, 10)).round().contiguous(memory_format=layout)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    ours, theirs = max_pool2d(leaves[0], *window), F.max_pool2d(leaves[1], *window)
    assert torch.equal(ours, theirs)
    assert ours.stride() == theirs.stride()
    grad = normal(*ours.shape, seed=1)
    ours.backward(grad)
    theirs.backward(grad)
    assert leaves[0].grad is not None
    assert torch.equal(leaves[0].grad, leaves[1].grad)
    (saved,) = saved_by(lambda: max_pool2d(leaves[0], *window))
    assert (saved.dtype, saved.numel()) == (torch.uint8, ours.numel())


def test_max_pool_of_windows_with_nothing_but_minus_infinity() -> None:
    leaves = [torch.full((1, 2, 4, 4), -float("inf")).requires_grad_() for _ in range(2)]
    ours, theirs = max_pool2d(leaves[0], 3, 2, 1), F.max_pool2d(leaves[1], 3, 2, 1)
    ours.sum().backward()
    theirs.sum().backward()
    assert torch.equal(leaves[0].grad, leaves[1].grad)


def test_larger_windows_are_left_to_torch() -> None:
    x = normal(1, 1, 20, 20).requires_grad_()
    assert [s.dtype for s in saved_by(lambda: max_pool2d(x, 17, 1))] == [torch.float32, torch.int64]


def test_second_derivative_raises() -> None:
    x = normal(4, 3, 4, 4).requires_grad_()
    for function in (lambda t: batch_norm(t, None, None), lambda t: max_pool2d(t, 2)):
        with pytest.raises(PyactcompError, match="only once"):
            torch.autograd.grad(function(x).sum(), x, create_graph=True)


X = normal(4, 3, 4, 4)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: batch_norm(X.int(), None, None), TypeError, "floating-point torch.Tensor, got torch.int32"),
        (lambda: batch_norm(X[0, 0, 0], None, None), ValueError, r"x of \[N, C, ...\]"),
        (lambda: batch_norm(X[:1, :, :1, :1], None, None), ValueError, "more than one element a channel"),
        (lambda: batch_norm(X, torch.zeros(4), None), ValueError, r"running_mean of \(3,\), got \(4,\)"),
        (lambda: batch_norm(X, torch.zeros(3), None), ValueError, "or neither"),
        (lambda: batch_norm(X, None, None, residual=X.double()), ValueError, "got .* and torch.float64"),
        (lambda: batch_norm(X, None, None, residual=X[:1]), ValueError, "a residual of"),
        (lambda: batch_norm(X, None, None, codes=Codes(bits=7)), ValueError, "bits must be one of"),
        (lambda: max_pool2d(X[0], 2), ValueError, r"x of \[N, C, H, W\]"),
        (lambda: max_pool2d(X, 2.5), TypeError, "an integer or two for kernel_size"),  # type: ignore[arg-type]
        (lambda: max_pool2d(X.clone().requires_grad_(), 2, 1, 2), RuntimeError, "pad should be at most half"),
    ],
)
def test_bad_arguments_raise(call: Callable[[], Tensor], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()
