"""The kernel of rope, on the device that this process has Triton kernels for.

Run by ``test_triton.py`` in processes of their own, with Triton's interpreter and, where there is a
GPU, without.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from functional_activation_cases import on_device
from functional_checks import normal, saved_by, turned
from torch import Tensor

from pyactcomp.functional import rope
from pyactcomp.functional.attention import launch as rope_launch

# Of 3 heads a part of a tile more than whole ones.
TOKENS = 19


def rope_case(
    heads: int, dim: int, dtype: torch.dtype, table: torch.dtype, unsqueeze: int, batch: int
) -> tuple[list[Tensor], Callable[[Tensor, int], Tensor], Tensor, Tensor]:
    """Return two leaves as linear layers give them, the view of one as heads, cos and sin."""
    leaves = [on_device(normal(2, TOKENS, n * dim, seed=n), dtype).requires_grad_() for n in (heads, 1)]
    angles = on_device(10 * normal(batch, TOKENS, dim, seed=9), torch.float32)

    def split(x: Tensor, n: int) -> Tensor:
        x = x.view(2, TOKENS, n, dim)
        return x.transpose(1, 2) if unsqueeze == 1 else x

    return leaves, split, angles.cos().to(table), angles.sin().to(table)


@pytest.mark.parametrize("unsqueeze", [1, 2])
@pytest.mark.parametrize(("heads", "dim", "batch"), [(3, 128, 2), (5, 48, 1)])
@pytest.mark.parametrize(
    "types", [(torch.bfloat16,) * 2, (torch.bfloat16, torch.float32), (torch.float32,) * 2], ids=str
)
def test_rope_is_eager(
    types: tuple[torch.dtype, torch.dtype], heads: int, dim: int, batch: int, unsqueeze: int
) -> None:
    leaves, split, cos, sin = rope_case(heads, dim, *types, unsqueeze, batch)
    views = [split(leaves[0], heads), split(leaves[1], 1)]
    by_token = views[0].movedim(unsqueeze, 2)
    assert rope_launch.rotate(by_token, cos, sin, torch.empty_like(by_token), backward=False)
    ours = rope(*views, cos, sin, unsqueeze, impl="triton")
    wide = [t.unsqueeze(unsqueeze) for t in (cos, sin)]
    theirs = [x * wide[0] + turned(x) * wide[1] for x in views]
    grads = [on_device(normal(*t.shape, seed=7), t.dtype).transpose(1, 2).contiguous().transpose(1, 2) for t in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert [s for s, n in zip(a.stride(), a.shape, strict=True) if n > 1] == [
            s for s, n in zip(b.stride(), b.shape, strict=True) if n > 1
        ]
        assert torch.equal(a, b)
    for a, b in zip(torch.autograd.grad(ours, leaves, grads), torch.autograd.grad(theirs, leaves, grads), strict=True):
        assert torch.equal(a, b)


def test_rope_in_a_narrow_dtype_is_a_cast_of_the_wide_one() -> None:
    leaves, split, cos, sin = rope_case(4, 64, torch.bfloat16, torch.float32, 1, 1)
    views = [split(leaves[0], 4), split(leaves[1], 1)]
    narrow = rope(*views, cos, sin, dtype=torch.bfloat16, impl="triton")
    cast = [t.to(torch.bfloat16) for t in rope(*views, cos, sin, impl="triton")]
    grads = [on_device(normal(*t.shape), t.dtype) for t in cast]
    of_narrow, of_cast = (torch.autograd.grad(ts, leaves, grads) for ts in (narrow, cast))
    for a, b in (*zip(narrow, cast, strict=True), *zip(of_narrow, of_cast, strict=True)):
        assert torch.equal(a, b)


def test_rope_keeps_the_tables_alone() -> None:
    leaves, split, cos, sin = rope_case(4, 64, torch.bfloat16, torch.bfloat16, 1, 1)
    saved = saved_by(lambda: rope(split(leaves[0], 4), split(leaves[1], 1), cos, sin, impl="triton")[0])
    assert {s.data_ptr() for s in saved} == {cos.data_ptr(), sin.data_ptr()}


def test_rope_of_odd_layouts_is_eager() -> None:
    # Rows that begin nowhere in particular, and a gradient of ones, which has no strides.
    wide = on_device(normal(2, 3, 11, 70), torch.float32)
    q = wide[..., 3:67].detach().requires_grad_()
    cos, sin = (on_device(normal(1, 11, 64, seed=seed), torch.float32) for seed in (1, 2))
    ours, _ = rope(q, q, cos, sin, impl="triton")
    theirs = q * cos.unsqueeze(1) + turned(q) * sin.unsqueeze(1)
    assert torch.equal(ours, theirs)
    assert torch.equal(torch.autograd.grad(ours.sum(), q)[0], torch.autograd.grad(theirs.sum(), q)[0])
