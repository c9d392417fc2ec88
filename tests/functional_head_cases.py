"""The kernel of ``linear_cross_entropy``, on the device that this process has Triton kernels for.

Run by ``test_triton.py`` in processes of their own, with Triton's interpreter and, where there is a GPU,
without.
"""

from __future__ import annotations

import pytest
import torch
from head_checks import check, inputs, relative_errors

from pyactcomp.codec.kernels import triton as kernels
from pyactcomp.functional.head.linear_cross_entropy import BLOCK, linear_cross_entropy

DEVICE = torch.device("cpu" if kernels.interpreted() else "cuda")
# Rows of less than a block, of one with padding, of whole blocks and of several with padding.
VOCABULARIES = [100, BLOCK - 7, BLOCK, BLOCK + 65]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("bias", [True, False])
def test_float32_is_within_its_bounds(vocabulary: int, bias: bool) -> None:
    check(*inputs(5, 24, vocabulary, torch.float32, bias, DEVICE), chunk=2, impl="triton")


@pytest.mark.parametrize("vocabulary", [100, BLOCK + 65])
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_capped_logits_are_within_their_bounds(vocabulary: int, softcap: float) -> None:
    check(*inputs(5, 24, vocabulary, torch.float32, True, DEVICE), softcap=softcap, chunk=2, impl="triton")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_that_of_the_unchunked_functions(dtype: torch.dtype) -> None:
    for ours, torchs in relative_errors(*inputs(12, 32, 777, dtype, True, DEVICE), chunk=5, impl="triton"):
        assert ours <= torchs + torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_gives_what_the_operators_give(dtype: torch.dtype) -> None:
    leaves, labels = inputs(6, 16, 300, dtype, True, DEVICE)
    results = []
    for impl in ("triton", "reference"):
        loss = linear_cross_entropy(leaves[0], leaves[1], labels, leaves[2], impl=impl)
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    for a, b in zip(*results, strict=True):
        # One rounding to the dtype may go the other way in each gradient of a logit, and in the sum.
        assert float((a - b).abs().max()) <= 4 * torch.finfo(dtype).eps * float(b.abs().max())


def test_non_finite_rows_and_labels_out_of_range_are_seen() -> None:
    leaves, labels = inputs(6, 16, 100, torch.float32, False, DEVICE)
    x, weight, _ = leaves
    with torch.no_grad():
        x[1, 0], x[2, 0] = float("inf"), float("nan")
    for row in (1, 2):
        alone = torch.where(torch.arange(6, device=DEVICE) == row, labels, -100)
        loss = linear_cross_entropy(x, weight, alone, impl="triton")
        (grad,) = torch.autograd.grad(loss, x)
        assert bool(loss.isnan())
        assert bool(grad[row].isnan().all())
        assert not bool(grad[3:].any())


@pytest.mark.gpu
def test_label_out_of_range_gives_nan_and_no_assert() -> None:
    leaves, labels = inputs(6, 16, 100, torch.bfloat16, True, DEVICE)
    labels[3] = 100
    for impl in ("triton", "reference"):
        loss = linear_cross_entropy(leaves[0], leaves[1], labels, leaves[2], impl=impl)
        (grad,) = torch.autograd.grad(loss, leaves[0])
        assert bool(loss.isnan())
        assert grad.isnan().any(1).tolist() == [False, False, False, True, False, False]


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [32000, 50257])
def test_peak_is_that_of_the_formula(vocabulary: int) -> None:
    rows, width, chunk = 4096, 256, 512
    leaves, labels = inputs(rows, width, vocabulary, torch.bfloat16, False, DEVICE)
    padded = -(-vocabulary // 64) * 64
    copy = 0 if padded == vocabulary else padded * width * 2
    bound = chunk * padded * 2 + padded * width * 4 + rows * width * 2 + copy
    linear_cross_entropy(leaves[0][:8], leaves[1], labels[:8])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(leaves[0], leaves[1], labels, chunk=chunk)
    # The rest: per-row losses, labels that count and the allocator's rounding.
    assert torch.cuda.max_memory_allocated() - before <= bound + rows * 64 + 2**22
