"""``softmax`` with a bias and a mask, which keeps the codes of its output."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from functional_checks import EPS, SEED, assert_codes_saved, assert_within, error_of, normal, saved_by
from torch import Tensor

from pyactcomp.engine.marks import RECIPE
from pyactcomp.errors import PyactcompError
from pyactcomp.functional import Codes, softmax

MASK = torch.where(normal(2, 9, 9, seed=8) > 0, -100.0, 0.0)


def by_windows(x: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """Return the softmax of each window by itself."""
    return torch.stack([(x[i] + bias + mask[i % len(mask)]).softmax(-1) for i in range(len(x))])


@pytest.mark.parametrize("bias", [(1, 2, 2), (2,), None])
def test_softmax_passes_gradcheck(bias: tuple[int, ...] | None) -> None:
    x, mask = normal(4, 1, 2, 2).double().requires_grad_(), normal(2, 2, 2).double()
    added = None if bias is None else normal(*bias, seed=1).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, b: softmax(x, bias=b, mask=mask, codes=Codes(bits=None)), (x, added))
    expected = by_windows(x, torch.zeros(()) if added is None else added, mask)
    torch.testing.assert_close(softmax(x, bias=added, mask=mask), expected)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax_along_any_dimension_is_that_of_torch(dim: int) -> None:
    x, grad = normal(5, 6, 7).requires_grad_(), normal(5, 6, 7, seed=1)
    out, expected = softmax(x, dim, codes=Codes(bits=None)), x.softmax(dim)
    assert torch.equal(out, expected)
    ours, torchs = (torch.autograd.grad(t, x, grad)[0] for t in (out, expected))
    assert torch.equal(ours, torchs)


@pytest.mark.parametrize(("bits", "group_size"), [(8, 64), (8, 256), (4, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_softmax_is_within_its_bounds(dtype: torch.dtype, bits: int, group_size: int) -> None:
    x, bias, grad = normal(4, 2, 9, 9).to(dtype), normal(2, 9, 9, seed=1), normal(4, 2, 9, 9, seed=2).to(dtype)
    leaves = x.clone().requires_grad_(), bias.clone().requires_grad_()
    out = softmax(leaves[0], bias=leaves[1], mask=MASK, codes=Codes(bits=bits, group_size=group_size, seed=SEED))
    out.backward(grad)
    assert out.dtype == dtype
    wide = x.double().requires_grad_(), bias.double().requires_grad_()
    exact = by_windows(*wide, MASK.double())
    exact.backward(grad.double())
    p, g = exact.detach(), grad.double()
    # A score is off by the rounding of its two sums; row sums of nine.
    rounding = p * EPS * (2 * (x.double().abs() + bias.abs() + 100).amax(-1, keepdim=True) + 20)
    assert_within(out, p, rounding)
    # The bound of the codes is that of what was packed: the output as it was rounded.
    e = error_of(out.detach(), bits, group_size) + rounding + p * torch.finfo(dtype).eps
    along = (g * p).sum(-1, keepdim=True)
    bound = e * (g - along).abs() + (p + e) * (g.abs() * e).sum(-1, keepdim=True)
    bound = bound + 12 * EPS * (p + e) * (g.abs() + (g.abs() * (p + e)).sum(-1, keepdim=True))
    assert_within(leaves[0].grad, wide[0].grad, bound)
    assert_within(leaves[1].grad, wide[1].grad, bound.sum(0) + 4 * EPS * wide[0].grad.abs().sum(0))


def test_softmax_saves_the_codes_of_its_output_and_offers_them() -> None:
    x = normal(4, 2, 9, 9).requires_grad_()
    outputs: list[Tensor] = []
    saved = saved_by(lambda: outputs.append(softmax(x, dtype=torch.bfloat16, codes=Codes(seed=SEED))) or outputs[0])
    assert len(saved) == 1
    assert_codes_saved(saved, outputs[0], 8, 64, None)
    recipe = RECIPE.get(outputs[0])
    assert recipe is not None
    restored = recipe.compute(torch.bfloat16)
    assert_within(restored, outputs[0].detach().double(), error_of(outputs[0].detach(), 8, 64))


def test_dtype_of_the_output() -> None:
    x = normal(2, 9).bfloat16().requires_grad_()
    assert softmax(x).dtype is torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = softmax(x)
    assert out.dtype is torch.float32
    assert torch.equal(out, x.float().softmax(-1))
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is torch.bfloat16


def test_a_row_shut_out_entirely_is_nan_as_in_torch() -> None:
    x = normal(2, 9).requires_grad_()
    out = softmax(x, bias=torch.tensor([[0.0], [-float("inf")]]).expand(2, 9))
    assert torch.equal(out.isnan(), torch.tensor([[False], [True]]).expand(2, 9))
    out.sum().backward()
    assert x.grad is not None
    assert bool(x.grad[1].isnan().all())


def test_second_derivative_raises() -> None:
    x = normal(2, 9).requires_grad_()
    with pytest.raises(PyactcompError, match="only once"):
        torch.autograd.grad(softmax(x).square().sum(), x, create_graph=True)


X = normal(4, 2, 9, 9)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: softmax(X, 4), ValueError, "one of the 4 dimensions of x, got 4"),
        (lambda: softmax(X, bias=normal(3, 9, 9)), ValueError, r"broadcasts to x of \(4, 2, 9, 9\), got \(3, 9, 9\)"),
        (lambda: softmax(X[:, 0], mask=MASK), ValueError, r"x of \[windows, heads, rows, columns\]"),
        (lambda: softmax(X[:3], mask=MASK), ValueError, "windows a multiple of n"),
        (lambda: softmax(X, mask=MASK > 0), TypeError, "mask must be a floating-point"),
        (lambda: softmax(X, dtype=torch.int32), TypeError, "dtype must be a floating-point torch.dtype"),
        (lambda: softmax(X, codes=Codes(bits=5)), ValueError, "bits must be one of"),
    ],
)
def test_bad_arguments_raise(call: Callable[[], Tensor], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()
