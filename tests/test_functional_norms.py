"""The norms: what they compute and save, how exact their gradients are, and how their outputs are computed again."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Callable

import pytest
import torch
from functional_checks import assert_codes_saved, normal, padded, saved_by
from norm_checks import Case, case, check, recipe_of
from torch import Tensor, nn
from torch.nn import functional as F

from pyactcomp.errors import PyactcompError
from pyactcomp.functional import Codes, layer_norm, rms_norm
from pyactcomp.functional.norms.add_rms_norm import add_rms_norm
from pyactcomp.functional.norms.layer_norm import add_layer_norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = [(8, 64), (8, 256), (4, 64), (2, 128)]


# Without quantisation the functions are those of torch.


def wide(*shape: int, seed: int = 0) -> Tensor:
    return normal(*shape, seed=seed).double().requires_grad_()


def test_norms_pass_gradcheck() -> None:
    rows = torch.tensor([2, 0, 3, 1])
    x, residual, weight, bias = wide(2, 2, 4), wide(2, 2, 4, seed=1), wide(4, seed=2), wide(4, seed=3)
    check = torch.autograd.gradcheck
    assert check(lambda *a: layer_norm(a[0], 4, *a[1:], rows=rows, codes=Codes(bits=None)), (x, weight, bias))
    assert check(lambda *a: add_layer_norm(*a[:2], 4, *a[2:], codes=Codes(bits=None)), (x, residual, weight, bias))
    assert check(lambda *a: rms_norm(*a, 1e-3, codes=Codes(bits=None)), (x, weight))
    assert check(lambda a: rms_norm(a, None, 1e-3, codes=Codes(bits=None)), (x,))
    assert check(lambda *a: add_rms_norm(*a, 1e-3, codes=Codes(bits=None)), (x, residual, weight))
    assert check(lambda a: add_rms_norm(a, None, None, 1e-3, codes=Codes(bits=None)), (x,))


def results(compute: Callable[..., Tensor], leaves: list[Tensor | None], grad: Tensor) -> list[Tensor]:
    """Return an output and its gradients."""
    copies = [None if t is None else t.detach().clone().requires_grad_() for t in leaves]
    out = compute(*copies)
    return [out.detach(), *torch.autograd.grad(out, [t for t in copies if t is not None], grad.to(out.dtype))]


def bitwise(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parameters", [(True, True), (False, False)])
def test_exact_layer_norm_is_bitwise_that_of_torch(dtype: torch.dtype, parameters: tuple[bool, bool]) -> None:
    c = case(6, 96, dtype=dtype, parameters=parameters)
    leaves = [c.x, c.weight, c.bias]
    ours = results(lambda x, w, b: layer_norm(x, 96, w, b, codes=Codes(bits=None)), leaves, c.grad)
    assert bitwise(ours, results(lambda x, w, b: F.layer_norm(x, (96,), w, b), leaves, c.grad))


@pytest.mark.parametrize("residual", [torch.float32, torch.bfloat16], ids=str)
def test_exact_norm_of_a_sum_is_bitwise_that_of_torch(residual: torch.dtype) -> None:
    c = case(6, 96, dtype=torch.bfloat16, residual=residual)
    leaves = [c.x, c.residual, normal(96, seed=2), normal(96, seed=3)]
    ours = results(lambda x, r, w, b: add_layer_norm(x, r, 96, w, b, codes=Codes(bits=None)), leaves, c.grad)
    assert bitwise(ours, results(lambda x, r, w, b: F.layer_norm(x + r, (96,), w, b), leaves, c.grad))


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_exact_norm_of_a_sum_after_dropout_is_bitwise_that_of_torch(p: float) -> None:
    c = case(6, 96, dtype=torch.bfloat16, residual=torch.float32)
    leaves = [c.x, c.residual, normal(96, seed=2), normal(96, seed=3)]
    torch.manual_seed(0)
    ours = results(lambda x, r, w, b: add_layer_norm(x, r, 96, w, b, p=p, codes=Codes(bits=None)), leaves, c.grad)
    torch.manual_seed(0)
    assert bitwise(ours, results(lambda x, r, w, b: F.layer_norm(F.dropout(x, p) + r, (96,), w, b), leaves, c.grad))


@pytest.mark.parametrize("weight", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_rms_norm_is_bitwise_that_of_its_operators(dtype: torch.dtype, weight: torch.dtype) -> None:
    def separate(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * wide.to(x.dtype)

    leaves = [normal(2, 5, 96).to(dtype), normal(96, seed=1).to(weight)]
    grad = normal(2, 5, 96, seed=2)
    ours = results(lambda x, w: rms_norm(x, w, 1e-6, codes=Codes(bits=None)), leaves, grad)
    assert bitwise(ours, results(separate, leaves, grad))


@pytest.mark.parametrize("residual", [None, torch.float32, torch.bfloat16], ids=str)
def test_norm_and_sum_without_kernels_are_those_of_the_separate_functions(residual: torch.dtype | None) -> None:
    c = case(5, 256, dtype=torch.bfloat16, residual=residual, centred=False)
    found: list[list[Tensor]] = []
    for separate in (False, True):
        x, beside, weight = (None if t is None else t.clone().requires_grad_() for t in (c.x, c.residual, c.weight))
        assert x is not None
        total = x if beside is None else x + beside
        pair = (rms_norm(total, weight, 1e-6, copy=beside is not None), total)
        if not separate:
            pair = add_rms_norm(x, beside, weight, 1e-6)
        torch.autograd.backward(pair, [c.grad.to(pair[0].dtype), c.grad.to(pair[1].dtype)])
        found.append([*pair, *(t.grad for t in (x, beside, weight) if t is not None)])
    assert bitwise(*found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_is_that_of_torch_up_to_roundings(dtype: torch.dtype) -> None:
    leaves = [normal(8, 256).to(dtype), normal(256, seed=1).to(dtype)]
    grad = normal(8, 256, seed=2)
    ours = results(lambda x, w: rms_norm(x, w, 1e-6, codes=Codes(bits=None)), leaves, grad)
    torchs = results(lambda x, w: F.rms_norm(x, (256,), w, 1e-6), leaves, grad)
    eps = torch.finfo(dtype).eps
    # Two roundings of half an ulp here, one there; float32 has a dozen more of its own, and its sums.
    assert bool(((ours[0] - torchs[0]).abs() <= 2 * eps * torchs[0].abs() * (8 if dtype is torch.float32 else 1)).all())
    for a, b in zip(ours[1:], torchs[1:], strict=True):
        assert float((a - b).float().norm() / b.float().norm()) <= 4 * eps


# What is saved, and how exact the gradients are.


@pytest.mark.parametrize(("bits", "group_size"), FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_are_those_of_the_reference(dtype: torch.dtype, bits: int, group_size: int) -> None:
    for centred, residual in ((True, None), (True, torch.float32), (False, None)):
        c = case(7, 200, dtype=dtype, residual=residual, centred=centred)
        saved = saved_by(lambda c=c: c.run(c.leaves(), "auto", bits=bits, group_size=group_size))
        assert_codes_saved(saved, padded(c.normalised, group_size), bits, group_size, None)
        # Beside the codes the weight, and one number a row.
        assert [s.numel() for s in saved if s.dtype is not torch.uint8] == [7, 200]


@pytest.mark.parametrize(("bits", "group_size"), FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["layer_norm", "add_layer_norm", "rms_norm"])
def test_norm_is_within_its_bounds(form: str, dtype: torch.dtype, bits: int, group_size: int) -> None:
    residual = torch.float32 if form == "add_layer_norm" else None
    c = case(2, 9, 200, dtype=dtype, residual=residual, centred=form != "rms_norm")
    check(c, "auto", bits=bits, group_size=group_size)


@pytest.mark.parametrize("centred", [True, False])
def test_gradient_keeps_its_size_with_few_bits(centred: bool) -> None:
    """What is lost in the codes does not count as deviation of the row, which would scale the gradient down.

    Codes of 2 bits with stochastic rounding have an error of a variance of step**2 / 6 on average, about half the
    variance of 64 normal numbers. The gradient's projection on the exact one has a relative error of a few percent;
    with the deviation of the restored row it would be 1 - 1 / sqrt(1.5), 18 %.
    """
    c = case(256, 512, centred=centred)
    leaves, exact = c.leaves(), c.leaves()
    c.run(leaves, "auto", bits=2).backward(c.grad)
    c.run(exact, "auto", bits=None).backward(c.grad)
    ours, theirs = (t[0].grad for t in (leaves, exact))
    assert abs(float((ours * theirs).sum() / theirs.square().sum()) - 1) < 0.05


def test_rows_that_vary_less_than_a_step_have_a_gradient_of_the_right_size() -> None:
    # Each row is a constant and noise far below the step: all that is left of it is the constant.
    x, grad = 1e6 + normal(64, 128), normal(64, 128, seed=1)
    leaf = x.clone().requires_grad_()
    layer_norm(leaf, 128).backward(grad)
    centred = grad - grad.mean(-1, keepdim=True)
    assert leaf.grad is not None
    # The rest of the gradient, along the row, is 1 / sqrt(128) of it on average.
    rstd = 1 / (x.double().var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    assert float((leaf.grad - centred * rstd).norm() / (centred * rstd).norm()) < 4 / 128**0.5


@pytest.mark.parametrize("length", [96, 128])
def test_rows_come_in_the_order_asked_for(length: int) -> None:
    x, grad, rows = normal(4, 5, length), normal(20, length, seed=1), torch.randperm(20)
    for bits in (None, 8):
        ours = results(lambda t, b=bits: layer_norm(t, length, rows=rows.int(), codes=Codes(bits=b)), [x], grad)
        gathered = results(
            lambda t, b=bits: layer_norm(t, length, codes=Codes(bits=b)), [x.view(-1, length)[rows]], grad
        )
        assert torch.equal(ours[0], gathered[0])
        assert torch.equal(ours[1].view(-1, length)[rows], gathered[1])


# The output is computed again.

FORMS: list[tuple[str, Case]] = [
    ("layer_norm", case(6, 4, 96)),
    ("add_layer_norm", case(6, 4, 96, dtype=torch.bfloat16, residual=torch.float32)),
    ("rms_norm", case(6, 4, 96, dtype=torch.bfloat16, centred=False)),
]


@pytest.mark.parametrize("c", [c for _, c in FORMS], ids=[name for name, _ in FORMS])
def test_exact_output_computed_again_is_bitwise_the_output(c: Case) -> None:
    out = c.run(c.leaves(), "auto", bits=None)
    for dtype in (out.dtype, torch.bfloat16):
        assert torch.equal(recipe_of(out).compute(dtype), out.detach().to(dtype))


@pytest.mark.parametrize("c", [c for _, c in FORMS], ids=[name for name, _ in FORMS])
@pytest.mark.parametrize("bits", [None, 8])
def test_output_is_offered_to_what_saves_it(bits: int | None, c: Case) -> None:
    leaves = c.leaves()
    out = c.run(leaves, "auto", bits=bits)
    recipe = recipe_of(out)
    assert recipe_of(out.view(24, 96)) is recipe
    assert recipe_of(out.to(torch.float16)) is recipe
    assert recipe.casts
    recomputed = recipe.compute(out.dtype)
    assert (recomputed.shape, recomputed.stride(), recomputed.dtype) == (out.shape, out.stride(), out.dtype)
    with torch.no_grad():
        leaves[2].add_(1)
    # While it is there, the output is taken as it is.
    assert torch.equal(recipe.compute(out.dtype), out)
    with torch.no_grad():
        out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        recipe.compute(out.dtype)


def test_recipe_outlives_the_graph_and_holds_none_of_it() -> None:
    c = case(6, 96)
    out = c.run(c.leaves(), "auto")
    expected, recipe = out.detach().clone(), recipe_of(out)
    storage = weakref.ref(out.untyped_storage())
    del out
    assert storage() is None
    step = (c.x.amax(-1) - c.x.amin(-1)).max() / 255
    rstd = 1 / c.x.var(-1, unbiased=False).min().sqrt()
    # Half a step in the row, and in its mean.
    limit = 1.1 * step * rstd * float(c.weight.abs().max())
    assert float((recipe.compute(torch.float32) - expected).abs().max()) < limit


def test_weights_edited_before_backward_raise() -> None:
    weight = normal(64).requires_grad_()
    for function in (lambda t: layer_norm(t, 64, weight), lambda t: rms_norm(t, weight, 1e-6)):
        out = function(normal(4, 64).requires_grad_()).sum()
        with torch.no_grad():
            weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()


# Callers.


@pytest.mark.parametrize("bits", [None, 8])
def test_only_the_gradient_of_x_reads_the_weight_of_an_rms_norm(bits: int | None) -> None:
    x, weight = normal(3, 64), normal(64).requires_grad_()
    out = rms_norm(x, weight, 1e-6, codes=Codes(bits=bits))
    before = torch.autograd.grad(out.square().sum(), weight, retain_graph=True)[0]
    with torch.no_grad():
        weight.mul_(2)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), weight)[0], before, rtol=0, atol=0)


def test_output_has_the_dtype_asked_for() -> None:
    x = normal(4, 96)
    for bits in (None, 8):
        for leaf in (x.clone().requires_grad_(), x):
            out = layer_norm(leaf, 96, dtype=torch.bfloat16, codes=Codes(bits=bits))
            assert out.dtype is torch.bfloat16
            assert torch.equal(out, F.layer_norm(x, (96,)).bfloat16())


def test_empty_tensors_have_empty_gradients() -> None:
    x, weight = torch.empty(0, 64, requires_grad=True), nn.Parameter(normal(64))
    (layer_norm(x, 64).sum() + add_layer_norm(x, x, 64).sum() + rms_norm(x, weight, 1e-6).sum()).backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 64)
    assert weight.grad is not None
    assert not weight.grad.any()


def test_second_derivative_raises() -> None:
    x = normal(4, 64).requires_grad_()
    for function in (lambda t: add_layer_norm(t, t, 64), lambda t: rms_norm(t, None, 1e-6)):
        with pytest.raises(PyactcompError, match="only once"):
            torch.autograd.grad(function(x).sum(), x, create_graph=True)


X = normal(4, 64)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: layer_norm(X, 63), ValueError, "end with normalized_shape"),
        (lambda: layer_norm(X, 64, X), ValueError, r"weight of \(64,\), got \(4, 64\)"),
        (lambda: layer_norm(X, 64, None, X.int()[0]), TypeError, "bias must be a floating-point"),
        (lambda: layer_norm(X, 64, dtype=torch.int8), TypeError, "floating-point dtype, got torch.int8"),
        (lambda: layer_norm(X, 64, rows=torch.arange(3)), ValueError, r"the 4 rows of x once, got indices of \(3,\)"),
        (lambda: layer_norm(X, 64, rows=X[:, 0]), TypeError, "int32 or int64 torch.Tensor, got torch.float32"),
        (lambda: layer_norm(X, 64, rows=[0, 1, 2, 3]), TypeError, "got list"),  # type: ignore[arg-type]
        (lambda: add_layer_norm(X, X[:2], 64), ValueError, r"residual of \(4, 64\), got \(2, 64\)"),
        (lambda: add_layer_norm(X, X.int(), 64), TypeError, "residual must be a floating-point"),
        (lambda: add_layer_norm(X, X, 64, p=1.5), ValueError, "p must be from 0 to 1, got 1.5"),
        (lambda: add_rms_norm(X, X[:2], None, 1e-6), ValueError, r"one shape, got \(4, 64\) and \(2, 64\)"),
        (lambda: add_rms_norm(X, X.int(), None, 1e-6), TypeError, "residual must be a floating-point"),
        (lambda: add_rms_norm(X, X, X, 1e-6), ValueError, r"add_rms_norm expects x .* got \(4, 64\) and \(4, 64\)"),
        (lambda: rms_norm(X, X, 1e-6), ValueError, r"got \(4, 64\) and \(4, 64\)"),
        (lambda: rms_norm(X.int(), None, 1e-6), TypeError, "x must be a floating-point"),
        (lambda: rms_norm(X, None, 1e-6, codes=Codes(bits=7)), ValueError, "bits must be one of"),
        (lambda: rms_norm(X, None, 1e-6, codes=Codes(bits=None), copy=True), ValueError, "leave one of them out"),
    ],
)
def test_bad_arguments_raise(call: Callable[[], Tensor], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()


def test_a_copy_may_be_written_around() -> None:
    x, weight = normal(6, 128).requires_grad_(), normal(128, seed=1).requires_grad_()

    def gradients(edit: bool) -> tuple[Tensor, ...]:
        y = x * 1
        out = rms_norm(y, weight, 1e-6, copy=True)
        if edit:
            y.data.add_(1)  # else it raises, as where torch's operators keep y
        return torch.autograd.grad(out.square().sum(), (x, weight))

    for got, expected in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(got, expected)


def test_a_norm_may_be_the_first_thing_that_a_process_computes() -> None:
    """Whichever function needs the library's engine first sets it up, without a compressed model."""
    pytest.importorskip("triton")
    # The gradient is rstd * (1 - n * mean(n)) of the normalised row n, whose codes are off by half a step.
    script = """
import torch
from pyactcomp.functional import Codes, rms_norm
x = torch.randn(4, 128, requires_grad=True)
rms_norm(x, None, 1e-6, codes=Codes(impl="triton")).sum().backward()
(wanted,) = torch.autograd.grad(torch.nn.functional.rms_norm(x, (128,), eps=1e-6).sum(), x)
rstd = x.detach().square().mean(1, keepdim=True).rsqrt()
n = x.detach() * rstd
half = (n.amax(1, keepdim=True) - n.amin(1, keepdim=True)) / 510
bound = rstd * half * (n.mean(1, keepdim=True).abs() + n.abs() + half) + 1e-5
assert bool(((x.grad - wanted).abs() <= bound).all()), (x.grad - wanted).abs() / bound
"""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
