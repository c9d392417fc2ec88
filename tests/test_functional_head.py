"""``linear_cross_entropy``: its loss and gradients, what it holds and what it saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from child_pytest import run_cases
from functional_checks import normal, saved_by
from head_checks import Largest, check, inputs, largest_numel, relative_errors
from torch import Tensor
from torch.nn import functional as F

from pyactcomp.errors import PyactcompError
from pyactcomp.functional.head.linear_cross_entropy import RowLoss, linear_cross_entropy


@pytest.mark.slow
def test_compiled_kernel() -> None:
    run_cases("head_ptx_cases.py", interpret=False)


LABELS = torch.tensor([0, 3, -100, 8, 2, 2])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunk": 4},
        {"reduction": "sum"},
        {"reduction": "sum", "divisor": 3.3},
        {"ignore_index": 2},
        {"softcap": 0.7},
    ],
)
def test_passes_gradcheck(options: dict[str, Any], bias: bool) -> None:
    leaves, _ = inputs(6, 5, 9, torch.float64, bias)
    labels = LABELS if "ignore_index" not in options else LABELS.clamp(min=0)
    assert torch.autograd.gradcheck(lambda x, w, b: linear_cross_entropy(x, w, labels, b, **options), leaves)


# One row, no whole number of chunks, whole chunks, one chunk.
@pytest.mark.parametrize(("rows", "chunk"), [(1, 1), (130, 64), (128, 64), (130, None)])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("bias", [True, False])
def test_float32_is_within_its_bounds(rows: int, chunk: int | None, reduction: str, bias: bool) -> None:
    leaves, labels = inputs(rows, 48, 101, torch.float32, bias)
    labels[0] = 100
    check(leaves, labels, reduction, chunk=chunk)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_capped_logits_are_within_their_bounds(softcap: float) -> None:
    leaves, labels = inputs(130, 48, 101, torch.float32, True)
    check(leaves, labels, softcap=softcap, chunk=64)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_rounding_of_capped_logits_is_that_of_the_unchunked_functions(softcap: float) -> None:
    for ours, torchs in relative_errors(*inputs(300, 64, 777, torch.bfloat16, True), softcap=softcap, chunk=64):
        assert ours <= torchs + torch.finfo(torch.bfloat16).eps / 2


@pytest.mark.parametrize("softcap", [0.0, -1.0, float("nan"), float("inf"), "30", True])
def test_softcap_that_is_no_positive_number_is_named(softcap: Any) -> None:
    leaves, labels = inputs(4, 8, 9, torch.float32, False)
    with pytest.raises(ValueError, match="softcap must be a positive number or None, got"):
        linear_cross_entropy(leaves[0], leaves[1], labels, softcap=softcap)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [16, None])
def test_rounding_is_that_of_the_unchunked_functions(dtype: torch.dtype, chunk: int | None) -> None:
    # Nothing is rounded that is not rounded there, but that two results may round to different neighbours.
    for ours, torchs in relative_errors(*inputs(300, 64, 777, dtype, True), chunk=chunk):
        assert ours <= torchs + torch.finfo(dtype).eps / 2


def test_float16_gradients_do_not_underflow() -> None:
    leaves, labels = inputs(4096, 16, 64, torch.float32, False)
    halves = [None if t is None else t.detach().half().requires_grad_() for t in leaves]
    scale = 2.0**16
    loss = linear_cross_entropy(halves[0], halves[1], labels) * scale
    exact = F.cross_entropy(F.linear(*leaves[:2]), labels) * scale
    ours, theirs = torch.autograd.grad(loss, halves[:2]), torch.autograd.grad(exact, leaves[:2])
    for a, b in zip(ours, theirs, strict=True):
        # Logits of about 4 are rounded to 11 bits, and change a softmax by twice as much.
        assert float((a.float() - b).norm() / b.norm()) < 2 * 8 * torch.finfo(torch.float16).eps


def test_shape_of_rows_and_labels() -> None:
    leaves, labels = inputs(24, 8, 30, torch.float32, False)
    flat = linear_cross_entropy(leaves[0], leaves[1], labels)
    shaped = linear_cross_entropy(leaves[0].view(2, 3, 4, 8), leaves[1], labels.view(2, 3, 4))
    strided = linear_cross_entropy(leaves[0].view(2, 12, 8)[:, ::2], leaves[1], labels.view(2, 12)[:, ::2])
    assert torch.equal(flat, shaped)
    kept = labels.view(2, 12)[:, ::2].reshape(-1)
    expected = F.cross_entropy(leaves[0].view(2, 12, 8)[:, ::2].reshape(-1, 8) @ leaves[1].t(), kept)
    torch.testing.assert_close(strided, expected, rtol=30 * torch.finfo(torch.float32).eps, atol=0)


@pytest.mark.parametrize("divisor", [7, 7.0, torch.tensor(7)])
def test_divisor_divides_the_sum(divisor: float | Tensor) -> None:
    leaves, labels = inputs(24, 8, 30, torch.float32, False)
    total = linear_cross_entropy(leaves[0], leaves[1], labels, reduction="sum")
    divided = linear_cross_entropy(leaves[0], leaves[1], labels, reduction="sum", divisor=divisor)
    torch.testing.assert_close(divided, total / 7, rtol=2 * torch.finfo(torch.float32).eps, atol=0)
    a, b = (torch.autograd.grad(loss, leaves[1])[0] for loss in (divided, total / 7))
    torch.testing.assert_close(a, b, rtol=0, atol=30 * torch.finfo(torch.float32).eps * float(b.abs().max()))


def test_no_row_that_counts() -> None:
    leaves, labels = inputs(5, 8, 30, torch.float32, True)
    loss = linear_cross_entropy(leaves[0], leaves[1], torch.full_like(labels, -100), leaves[2])
    assert bool(loss.isnan())
    assert not any(bool(g.any()) for g in torch.autograd.grad(loss, leaves))
    assert float(linear_cross_entropy(leaves[0][:0], leaves[1], labels[:0], reduction="sum").detach()) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_that_is_also_an_embedding_gets_both_gradients(dtype: torch.dtype) -> None:
    weight = (normal(70, 16) / 4).to(dtype).requires_grad_()
    ids = torch.randint(70, (40,), generator=torch.Generator().manual_seed(1))
    linear_cross_entropy(F.embedding(ids, weight), weight, ids.roll(1), chunk=16).backward()
    ours, weight.grad = weight.grad, None
    F.cross_entropy((F.embedding(ids, weight) @ weight.t()).float(), ids.roll(1)).backward()
    # Sums of as many terms as there are rows and classes, in bfloat16 rounded once or twice.
    eps = 110 * torch.finfo(torch.float32).eps + (4 * torch.finfo(dtype).eps if dtype is torch.bfloat16 else 0)
    assert float((ours - weight.grad).norm() / weight.grad.norm()) <= eps


def test_autocast_casts_as_torch() -> None:
    leaves, labels = inputs(40, 32, 100, torch.float32, True)
    x, weight, bias = leaves
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = linear_cross_entropy(x, weight, labels, bias, chunk=16)
        torchs = F.cross_entropy(F.linear(x, weight, bias).float(), labels)
    torch.testing.assert_close(ours, torchs, rtol=40 * torch.finfo(torch.float32).eps, atol=0)
    for a, b in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(torchs, leaves), strict=True):
        assert a.dtype is torch.float32
        assert float((a - b).norm() / b.norm()) <= torch.finfo(torch.bfloat16).eps / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_more_than_a_chunk_are_never_made(dtype: torch.dtype) -> None:
    rows, width, vocabulary, chunk = 256, 16, 300, 64
    leaves, labels = inputs(rows, width, vocabulary, dtype, True)
    x, weight, bias = leaves
    assert largest_numel(lambda: F.cross_entropy(F.linear(*leaves), labels)) == rows * vocabulary
    ours = largest_numel(lambda: linear_cross_entropy(x, weight, labels, bias, chunk=chunk))
    assert ours == chunk * 320  # padded to a multiple of 64


def test_chunks_by_default_are_few_and_of_one_size() -> None:
    loss_of = RowLoss(-100, None, "auto")
    assert loss_of.rows(16384, 32000 * 2) == 4096
    for rows, row_bytes in [(16384, 50304 * 2), (100, 10), (1, 10), (10**6, 2**19), (0, 10)]:
        chunk = loss_of.rows(rows, row_bytes)
        chunks = -(-rows // chunk)
        assert chunk % 128 == 0 or rows == 0
        assert chunk * row_bytes <= 2**28 + 128 * row_bytes
        assert chunks <= rows * row_bytes // 2**28 + 1


@pytest.mark.parametrize(
    ("frozen", "shapes"),
    [([], [(24, 8), (30, 8), (30,)]), ([0], [(30, 8), (30,)]), ([1, 2], [(24, 8)]), ([0, 1], [(30,)])],
)
def test_saves_the_gradients_that_are_needed_alone(frozen: list[int], shapes: list[tuple[int, ...]]) -> None:
    leaves, labels = inputs(24, 8, 30, torch.bfloat16, True)
    for i in frozen:
        leaves[i].requires_grad_(False)
    saved = saved_by(lambda: linear_cross_entropy(leaves[0], leaves[1], labels, leaves[2]))
    assert [tuple(s.shape) for s in saved if s.dim()] == shapes
    assert all(s.dtype is torch.bfloat16 for s in saved if s.dim() == 2)


def test_without_gradients_only_the_loss_is_computed() -> None:
    leaves, labels = inputs(24, 8, 30, torch.float32, True)
    expected = linear_cross_entropy(leaves[0], leaves[1], labels, leaves[2]).detach()
    with torch.no_grad(), Largest() as mode:
        loss = linear_cross_entropy(leaves[0], leaves[1], labels, leaves[2], chunk=2)
    assert mode.numel == 64 * 8  # the padded weight: no gradient of its size, nor of more than a chunk
    torch.testing.assert_close(loss, expected, rtol=24 * torch.finfo(torch.float32).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_runs_again_where_the_graph_is_retained_and_in_place_where_not(dtype: torch.dtype) -> None:
    leaves, labels = inputs(24, 8, 30, dtype, False)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = linear_cross_entropy(leaves[0], leaves[1], labels)
    addresses = {t.data_ptr() for t in saved if t.dim() == 2}
    results = [torch.autograd.grad(loss * 3, leaves[:2], retain_graph=retain) for retain in (True, True, False)]
    for first, second, last in zip(*results, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first, last)
    assert {t.data_ptr() for t in results[2]} == addresses
    assert not addresses & {t.data_ptr() for t in (*results[0], *results[1])}


def test_second_derivative_raises() -> None:
    leaves, labels = inputs(4, 8, 30, torch.float32, False)
    with pytest.raises(PyactcompError, match="only once"):
        torch.autograd.grad(linear_cross_entropy(leaves[0], leaves[1], labels), leaves[0], create_graph=True)


X, W, Y = normal(4, 8), normal(9, 8), torch.tensor([0, 1, 2, 8])


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: linear_cross_entropy(X, W, Y + 1), IndexError, "from 0 to 8 or -100, got 9"),
        (lambda: linear_cross_entropy(X, W, Y - 1), IndexError, "got -1"),
        (lambda: linear_cross_entropy(X, W, Y.int()), TypeError, "torch.int64, got torch.int32"),
        (lambda: linear_cross_entropy(X, W, X), TypeError, "torch.int64, got torch.float32"),
        (lambda: linear_cross_entropy(X.int(), W, Y), TypeError, "x must be a floating-point"),
        (lambda: linear_cross_entropy(X, W.t(), Y), ValueError, r"weight of \[vocabulary, in\]"),
        (lambda: linear_cross_entropy(X, W, Y[:3]), ValueError, r"labels of \[...\], got"),
        (lambda: linear_cross_entropy(X, W, Y, X[0]), ValueError, r"a bias of \(9,\), got \(8,\)"),
        (lambda: linear_cross_entropy(X, W.half(), Y), ValueError, "one dtype"),
        (lambda: linear_cross_entropy(X, W, Y.to("meta")), ValueError, "on one device"),
        (lambda: linear_cross_entropy(X, W, Y, reduction="none"), ValueError, "reduction"),  # type: ignore[arg-type]
        (lambda: linear_cross_entropy(X, W, Y, impl="gpu"), ValueError, "impl"),  # type: ignore[arg-type]
        (lambda: linear_cross_entropy(X, W, Y, chunk=0), ValueError, "chunk must be"),
        (lambda: linear_cross_entropy(X, W, Y, divisor=2), ValueError, "divisor is for"),
    ],
)
def test_bad_arguments_raise(call: Callable[[], Tensor], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()
