"""Window attention and the residual addition behind it, by torch's operators and by the kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from functional_checks import SEED, assert_codes_saved, normal, saved_by
from torch import Tensor
from window_checks import attention, check_window_attention, inputs, recipe_of

from pyactcomp.errors import PyactcompError
from pyactcomp.functional import Codes
from pyactcomp.functional.windows.residual_add import residual_add
from pyactcomp.functional.windows.take_rows import take_rows
from pyactcomp.functional.windows.window_attention import window_attention


@pytest.mark.parametrize("masked", [False, True])
def test_window_attention_passes_gradcheck(masked: bool) -> None:
    qkv, bias, mask = inputs(4, 2, 2, 1, torch.float64, masked)
    mask = None if mask is None else mask / 100  # all probabilities are to count
    arguments = qkv.requires_grad_(), bias.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, b: window_attention(x, 2, b, mask, codes=Codes(bits=None)), arguments)
    torch.testing.assert_close(window_attention(arguments[0], 2, arguments[1], mask), attention(*arguments, mask))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bits", [8, 16, None])
def test_window_attention_is_within_its_bounds(bits: int | None, masked: bool) -> None:
    qkv, bias, mask = inputs(4, 9, 2, 32, torch.float32, masked)
    check_window_attention(qkv, bias, mask, normal(4, 9, 64, seed=3), bits, 64, "auto")


def gradients_at(qkv: Tensor, bias: Tensor, bits: int | None) -> Tensor:
    """Return all gradients, q's first, of 16 windows with two heads of 32."""
    leaves = qkv.clone().requires_grad_(), bias.to(qkv.dtype).requires_grad_()
    out = window_attention(leaves[0], 2, leaves[1], codes=Codes(bits=bits))
    grads = torch.autograd.grad(out, leaves, normal(*out.shape, seed=3).to(out.dtype))
    return torch.cat([g.double().flatten() for g in grads])


@pytest.mark.parametrize("largest", [5, 20, 45, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_16_bits_cost_no_more_than_the_dtype_whatever_the_logits(dtype: torch.dtype, largest: float) -> None:
    qkv, bias = normal(16, 49, 3 * 64), normal(2, 49, 49, seed=1)
    q, k = (t.unflatten(2, (2, 32)).transpose(1, 2) for t in qkv[..., :128].split(64, 2))
    qkv[..., :64] *= largest / float((q @ k.mT).abs().max() * 32**-0.5)
    exact = gradients_at(qkv.double(), bias, None)

    def error(x: Tensor, bits: int | None) -> float:
        return float((gradients_at(x, bias, bits) - exact).norm() / exact.norm())

    # A training in bfloat16 has 8 binary digits of qkv, float16 has 11: an eighth of the error, here within twice.
    most = error(qkv.bfloat16(), None) * (1 if dtype is torch.bfloat16 else 2 / 8)
    assert error(qkv.to(dtype), 16) <= most < error(qkv.to(dtype), 8)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_window_attention_in_16_bits_is_traced() -> None:
    # Traced, the function is torch's own. An odd number of parts of 256 elements, each of which has an exponent.
    qkv, bias, _ = inputs(4, 9, 2, 32, torch.float32, False)

    def gradient(function: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = qkv.detach().requires_grad_()
        return torch.autograd.grad(function(leaf).square().sum(), leaf)[0]

    def stored(leaf: Tensor, bits: int | None = 16) -> Tensor:
        return window_attention(leaf, 2, bias, None, codes=Codes(bits=bits))

    exact = gradient(lambda leaf: stored(leaf, None))
    found = gradient(torch.compile(stored, backend="aot_eager"))
    # Sums of 9 and of 32 products in another order.
    assert float((found - exact).norm()) <= 2 * (9 + 32) * torch.finfo(torch.float32).eps * float(exact.norm())


def test_window_attention_saves_16_bits() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        qkv, bias, mask = inputs(4, 9, 2, 32, dtype, True)
        leaf = qkv.requires_grad_()
        kept, *_ = saved_by(
            lambda leaf=leaf, bias=bias, mask=mask: window_attention(leaf, 2, bias, mask, codes=Codes(bits=16))
        )
        # The exponents of parts of 256 elements come with what is not qkv itself.
        assert kept.nbytes == 2 * qkv.numel() + 2 * (qkv.numel() // 256) * (dtype is torch.float32)
        assert (kept.data_ptr() == leaf.data_ptr()) == (dtype is torch.bfloat16)


def test_qkv_that_is_kept_itself_must_not_be_written_to() -> None:
    leaf, bias, _ = inputs(2, 9, 2, 32, torch.bfloat16, False)
    qkv = leaf.requires_grad_() * 1
    out = window_attention(qkv, 2, bias, codes=Codes(bits=16))
    qkv.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_window_attention_saves_codes_and_no_probabilities() -> None:
    qkv, bias, mask = inputs(4, 9, 2, 32, torch.bfloat16, True)
    leaf, bias = qkv.clone().requires_grad_(), bias.requires_grad_()
    saved = saved_by(lambda: window_attention(leaf, 2, bias, mask, codes=Codes(seed=SEED)))
    assert_codes_saved(saved, qkv, 8, 64, None)
    assert [t.data_ptr() for t in saved[1:]] == [bias.data_ptr(), mask.data_ptr()]
    # What needs no gradient is kept as it is by the saved-tensor hooks.
    assert not any(t.requires_grad for t in saved)


def test_output_of_window_attention_is_computed_again() -> None:
    qkv, bias, mask = inputs(4, 9, 2, 32, torch.float32, True)
    out = window_attention(qkv.requires_grad_(), 2, bias, mask, codes=Codes(bits=None))
    recipe = recipe_of(out)
    assert torch.equal(recipe.compute(torch.float32), out.detach())
    assert torch.equal(recipe.compute(torch.bfloat16), out.detach().bfloat16())
    mask.mul_(0.5)
    del out  # while it is there, it is taken as it is
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        recipe.compute(torch.float32)


def test_window_attention_takes_no_part_in_autocast() -> None:
    qkv, bias, _ = inputs(2, 9, 2, 32, torch.float32, False)
    leaf = qkv.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(window_attention(leaf, 2, bias), window_attention(qkv, 2, bias))
    assert torch.equal(window_attention(leaf, 2, bias), window_attention(qkv, 2, bias))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_residual_add_passes_gradcheck(scaled: bool, ordered: bool) -> None:
    scale = torch.tensor([0.0, 2.0], dtype=torch.float64) if scaled else None
    rows = torch.tensor([3, 0, 2, 1]) if ordered else None
    x, branch = (normal(4, 2, seed=seed).double().requires_grad_() for seed in (0, 1))
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda a, b: residual_add(a, b, scale=scale, rows=rows), (x, branch))
    expected = x.detach().clone()
    for i in range(4):
        to = i if rows is None else int(rows[i])
        expected[to] += branch.detach()[i] * (1 if scale is None else scale[to // 2])
    assert torch.equal(residual_add(x, branch, scale=scale, rows=rows), expected)
    assert torch.equal(residual_add(x.detach(), branch.detach(), scale=scale, rows=rows), expected)


def test_take_rows_passes_gradcheck_twice() -> None:
    rows = torch.tensor([3, 0, 2, 1])
    x = normal(4, 2).double().requires_grad_()

    def taken(x: Tensor) -> Tensor:
        return take_rows(x, rows, rows.argsort(), torch.float64).sin()

    assert torch.equal(taken(x), x[rows].sin())
    assert torch.autograd.gradcheck(taken, (x,))
    assert torch.autograd.gradgradcheck(taken, (x,))


def test_residual_add_saves_nothing_of_its_operands() -> None:
    x, branch, scale = normal(4, 3).requires_grad_(), normal(4, 3).requires_grad_(), torch.ones(2)
    saved = saved_by(lambda: residual_add(x, branch, scale=scale, rows=torch.arange(4)))
    assert [tuple(t.shape) for t in saved] == [(2,), (4,)]


def test_second_derivative_raises() -> None:
    qkv, bias, _ = inputs(2, 9, 2, 32, torch.float32, False)
    with pytest.raises(PyactcompError, match="only once"):
        torch.autograd.grad(window_attention(qkv.requires_grad_(), 2, bias).sum(), qkv, create_graph=True)


QKV, BIAS, X = normal(4, 9, 192), normal(2, 9, 9), normal(4, 3)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: window_attention(QKV[0], 2, BIAS), ValueError, r"qkv of \[windows, tokens, 3 \* heads"),
        (lambda: window_attention(QKV, 7, BIAS), ValueError, "for 7 heads"),
        (lambda: window_attention(QKV, 2, BIAS[:1]), ValueError, r"bias of \(2, 9, 9\), got \(1, 9, 9\)"),
        (lambda: window_attention(QKV, 2, BIAS, normal(3, 9, 9)), ValueError, "4 windows a multiple of n"),
        (lambda: window_attention(QKV, 2, BIAS, BIAS > 0), TypeError, "mask must be a floating-point"),
        (lambda: window_attention(QKV, 2, BIAS, codes=Codes(bits=3)), ValueError, "bits must be one of"),
        (lambda: residual_add(X, X[:2]), ValueError, r"one \[n, width\], got \(4, 3\) and \(2, 3\)"),
        (lambda: residual_add(X, X, rows=torch.arange(3)), ValueError, r"rows of \(4,\), got \(3,\)"),
        (lambda: residual_add(X, X, rows=X[:, 0]), TypeError, "int32 or int64 torch.Tensor, got torch.float32"),
        (lambda: residual_add(X, X, scale=X[:3, 0]), ValueError, r"4 rows a multiple of it, got \(3,\)"),
        (lambda: residual_add(X.int(), X), TypeError, "x must be a floating-point"),
    ],
)
def test_bad_arguments_raise(call: Callable[[], Tensor], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()
