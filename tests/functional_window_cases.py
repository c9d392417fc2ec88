"""The kernels of window attention and of the residual addition, on the device that this process has Triton for.

Run by ``test_triton.py`` in processes of their own, with Triton's interpreter and, where there is a GPU,
without.
"""

from __future__ import annotations

import pytest
import torch
from functional_checks import SEED, assert_codes_saved, normal, saved_by
from torch import Tensor
from window_checks import attention, check_window_attention, inputs, recipe_of, restored

from pyactcomp import codec
from pyactcomp.codec.kernels import triton as kernels
from pyactcomp.functional import Codes
from pyactcomp.functional.saving import saving
from pyactcomp.functional.windows import launch
from pyactcomp.functional.windows.residual_add import residual_add
from pyactcomp.functional.windows.take_rows import take_rows
from pyactcomp.functional.windows.window_attention import window_attention

DEVICE = torch.device("cpu" if kernels.interpreted() else "cuda")
# Dtype, tokens, heads and their width, group, mask: Swin's twice, a window with no padding, one group of all heads.
FORMS = [
    (torch.bfloat16, 49, 2, 32, 64, True),
    (torch.float16, 49, 2, 32, 64, False),
    (torch.bfloat16, 16, 1, 64, 64, False),
    (torch.float16, 9, 8, 16, 128, True),
]


def placed(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.to(DEVICE) for t in tensors]


@pytest.mark.parametrize("bits", [8, None])
@pytest.mark.parametrize(("dtype", "tokens", "heads", "head", "group_size", "masked"), FORMS, ids=str)
def test_attention_is_within_its_bounds(
    dtype: torch.dtype, tokens: int, heads: int, head: int, group_size: int, masked: bool, bits: int | None
) -> None:
    qkv, bias, mask = placed(*inputs(4, tokens, heads, head, dtype, masked))
    (grad,) = placed(normal(4, tokens, heads * head, seed=3).to(dtype))
    assert launch.attention_serves(
        qkv, heads, saving(Codes(bits=bits, group_size=group_size, seed=SEED, impl="triton"))
    )
    check_window_attention(qkv, bias, mask, grad, bits, group_size, "triton")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_attention_from_codes_and_from_what_they_restore_are_the_same_to_the_bit(
    dtype: torch.dtype, masked: bool
) -> None:
    qkv, bias, mask = placed(*inputs(4, 49, 2, 32, dtype, masked))
    (grad,) = placed(normal(4, 49, 64, seed=3).to(dtype))

    def results(x: Tensor, bits: int | None) -> tuple[Tensor, list[Tensor]]:
        leaves = x.clone().requires_grad_(), bias.clone().requires_grad_()
        out = window_attention(leaves[0], 2, leaves[1], mask, codes=Codes(bits=bits, impl="triton"))
        return out, [recipe_of(out).compute(dtype), *torch.autograd.grad(out, leaves, grad)]

    out, later = results(qkv, 8)
    assert torch.equal(out, results(qkv, None)[0])
    assert all(torch.equal(*pair) for pair in zip(later, results(restored(qkv, 8), None)[1], strict=True))


def by_columns(x: Tensor) -> Tensor:
    """Return ``x`` with its last dimension strided."""
    return x.mT.contiguous().mT


def test_a_strided_bias_and_mask_change_nothing() -> None:
    qkv, bias, mask = placed(*inputs(4, 9, 2, 32, torch.bfloat16, True))
    (grad,) = placed(normal(4, 9, 64, seed=3).bfloat16())

    def results(bias: Tensor, mask: Tensor) -> list[Tensor]:
        leaves = qkv.clone().requires_grad_(), bias.requires_grad_()
        out = window_attention(leaves[0], 2, leaves[1], mask, codes=Codes(impl="triton"))
        return [out.detach(), recipe_of(out).compute(torch.bfloat16), *torch.autograd.grad(out, leaves, grad)]

    expected = results(bias, mask)
    assert not by_columns(bias).is_contiguous()
    for strided in (results(by_columns(bias), mask), results(bias, by_columns(mask))):
        assert all(torch.equal(*pair) for pair in zip(strided, expected, strict=True))


@pytest.mark.parametrize("bits", [16, None])
def test_attention_keeps_its_input_itself(bits: int | None) -> None:
    # Three heads: of codes, groups would have to divide their common width.
    qkv, bias, _ = placed(*inputs(3, 49, 3, 32, torch.bfloat16, False))
    assert launch.attention_serves(qkv, 3, saving(Codes(bits=None, seed=0, impl="triton")))
    assert not launch.attention_serves(qkv, 3, saving(Codes(seed=0, impl="triton")))
    leaf = qkv.requires_grad_()
    saved = saved_by(lambda: window_attention(leaf, 3, bias, codes=Codes(bits=bits, impl="triton")))
    assert [t.data_ptr() for t in saved] == [leaf.data_ptr(), bias.data_ptr()]
    copy = leaf * 1
    out = window_attention(copy, 3, bias, codes=Codes(bits=bits, impl="triton"))
    assert torch.equal(recipe_of(out).compute(torch.bfloat16), out)
    copy.mul_(2)
    loss, recipe = out.sum(), recipe_of(out)
    # While the output is alive it is taken as it is.
    del out
    for read in (loss.backward, lambda: recipe.compute(torch.bfloat16)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            read()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_attention_saves_the_bytes_of_the_reference(rounding: codec.Rounding) -> None:
    qkv, bias, _ = placed(*inputs(3, 49, 4, 32, torch.bfloat16, False))
    qkv[1, 7, 70], qkv[2, 48, 383] = float("inf"), float("nan")
    leaf = qkv.clone().requires_grad_()
    saved = saved_by(lambda: window_attention(leaf, 4, bias, codes=Codes(rounding=rounding, seed=SEED, impl="triton")))
    assert_codes_saved(saved, qkv, 8, 64, rounding)
    assert sum(t.nbytes for t in saved) == qkv.numel() * 17 // 16 + bias.nbytes


@pytest.mark.parametrize("bits", [8, None])
@pytest.mark.parametrize("special", [float("inf"), float("nan")])
def test_non_finite_values_stay_visible_in_their_window_alone(special: float, bits: int | None) -> None:
    qkv, bias, mask = placed(*inputs(2, 49, 2, 32, torch.bfloat16, True))
    qkv[1, 3, 150] = special
    leaf, bias = qkv.clone().requires_grad_(), bias.requires_grad_()
    out = window_attention(leaf, 2, bias, mask, codes=Codes(bits=bits, impl="triton"))
    out.float().sum().backward()
    wide = qkv.cpu().double().requires_grad_()
    exact = attention(wide, bias.detach().cpu().double(), mask.cpu())
    exact.sum().backward()
    assert torch.equal(out.isfinite().cpu(), exact.isfinite())
    # Where float64 has a finite gradient beside infinite ones, a NaN is as good: no such value is trusted.
    assert bool((leaf.grad.isfinite().cpu() <= wide.grad.isfinite()).all())
    assert bool(leaf.grad[0].isfinite().all())


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16,) * 2, (torch.float32,) * 2])
@pytest.mark.parametrize("width", [96, 5])
@pytest.mark.parametrize(("scaled", "ordered"), [(False, False), (True, False), (True, True)])
def test_residual_add_is_bitwise_that_of_the_operators(
    dtypes: tuple[torch.dtype, torch.dtype], width: int, scaled: bool, ordered: bool
) -> None:
    x, branch, grad = (normal(36, width, seed=seed) for seed in (0, 1, 2))
    rows = torch.randperm(36, generator=torch.Generator().manual_seed(3), dtype=torch.int32) if ordered else None
    scale = torch.tensor([0.0, 1.11, 1.0, 2.0]).to(dtypes[1]) if scaled else None
    x, branch, rows, scale = placed(x.to(dtypes[0]), branch.to(dtypes[1]), rows, scale)
    leaves = x.requires_grad_(), branch.requires_grad_()
    out = residual_add(*leaves, scale=scale, rows=rows, impl="triton")
    back = branch if rows is None else branch[rows.argsort()]
    expected = x + (back if scale is None else back * scale.repeat_interleave(9)[:, None])
    assert torch.equal(out, expected)
    (grad,) = placed(grad.to(out.dtype))
    for ours, torchs in zip(*(torch.autograd.grad(t, leaves, grad) for t in (out, expected)), strict=True):
        assert torch.equal(ours, torchs)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16,) * 2, (torch.float32,) * 2])
@pytest.mark.parametrize("width", [96, 5])
def test_take_rows_is_bitwise_a_cast_of_the_rows(dtypes: tuple[torch.dtype, torch.dtype], width: int) -> None:
    x, grad = normal(36, width), normal(36, width, seed=1)
    x[0, :4] = torch.tensor([0.0, -0.0, float("inf"), 1e-40])
    rows = torch.randperm(36, generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    x, rows, grad = placed(x.to(dtypes[0]), rows, grad.to(dtypes[1]))
    leaf = x.requires_grad_()
    ours = take_rows(leaf, rows, rows.argsort().int(), dtypes[1], "triton")
    theirs = leaf[rows].to(dtypes[1])
    assert torch.equal(ours.signbit(), theirs.signbit())
    assert torch.equal(ours, theirs)
    assert torch.equal(*(torch.autograd.grad(t, leaf, grad)[0] for t in (ours, theirs)))
    # Every other element of a tensor twice as long.
    strided = rows.repeat_interleave(2)[::2]
    assert torch.equal(take_rows(x.detach(), strided, strided.argsort().int(), dtypes[1], "triton"), theirs)


@pytest.mark.gpu
def test_attention_sums_the_bias_over_more_windows_than_programs() -> None:
    qkv, bias, mask = placed(*inputs(600, 49, 4, 32, torch.bfloat16, True))
    (grad,) = placed(normal(600, 49, 128, seed=3).bfloat16())
    assert len(qkv) > launch._programs(DEVICE) // 4
    check_window_attention(qkv, bias, mask, grad, 8, 64, "triton")
