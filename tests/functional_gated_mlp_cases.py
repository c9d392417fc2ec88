"""The kernels of ``gated_mlp``, on the device that this process has Triton kernels for.

Run by ``test_triton.py`` in processes of their own, with Triton's interpreter and, where there is a GPU,
without.
"""

from __future__ import annotations

import pytest
import torch
from functional_checks import EPS, normal
from gated_mlp_checks import apart, leaves_of, projections
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pyactcomp.codec.kernels import triton as kernels
from pyactcomp.functional import Codes, gated_mlp, rms_norm

DEVICE = torch.device("cpu" if kernels.interpreted() else "cuda")
WIDTH, MIDDLE, ROWS = 32, 128, 22


def _results(impl: str, dtype: torch.dtype, recipe: bool, checkpointed: bool = False) -> list[Tensor]:
    x = normal(ROWS, WIDTH).to(DEVICE, dtype).requires_grad_()
    given = projections(WIDTH, MIDDLE, dtype, rich=False, device=DEVICE)
    codes = Codes(impl=impl)  # type: ignore[arg-type]

    def compute(x: Tensor) -> Tensor:
        rows = rms_norm(x, None, 1e-6, codes=codes) if recipe else x * 1
        return gated_mlp(rows, *given, tile=8, codes=codes)

    out = checkpoint(compute, x, use_reentrant=False) if checkpointed else compute(x)
    grad = normal(ROWS, WIDTH, seed=9).to(DEVICE, dtype)
    return [out.detach(), *torch.autograd.grad(out, [x, *leaves_of(*given)], grad)]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("recipe", [False, True])
def test_kernels_give_what_the_operators_give(recipe: bool, checkpointed: bool) -> None:
    x, given = normal(ROWS, WIDTH), projections(WIDTH, MIDDLE, torch.float32, rich=False)
    bounds = apart(1.5 * x.sign() * x.abs().clamp(min=1), *given, normal(ROWS, WIDTH, seed=9))
    ours, theirs = (_results(impl, torch.float32, recipe, checkpointed) for impl in ("triton", "reference"))
    torch.testing.assert_close(ours[0], theirs[0], rtol=MIDDLE * EPS, atol=MIDDLE * EPS * float(theirs[0].abs().max()))
    for a, b, bound in zip(ours[2:], theirs[2:], bounds[1:], strict=True):
        # A kernel's exponential is within 2 ulp of torch's; the largest magnitude bounds those of the norm's output.
        assert bool(((a - b).abs().cpu() <= 4 * bound.max()).all())


def test_bfloat16_is_off_by_a_few_roundings() -> None:
    ours, theirs = (_results(impl, torch.bfloat16, True) for impl in ("triton", "reference"))
    for a, b in zip(ours, theirs, strict=True):
        # Product, gradient of the product and those of gate and up are each rounded once, and the result.
        assert float((a - b).norm()) <= 5 * torch.finfo(torch.bfloat16).eps * float(b.norm())
