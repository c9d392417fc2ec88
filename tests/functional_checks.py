"""What the tests of ``pyactcomp.functional`` share: what was saved, and how far a gradient may be off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from native_cases import assert_same_bytes
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from pyactcomp import functional
from pyactcomp.codec import reference
from pyactcomp.functional import Codes

EPS = torch.finfo(torch.float32).eps
SEED = 77


class Passing(TorchDispatchMode):
    """Sees every operator and changes none."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def saved_by(compute: Callable[[], Tensor]) -> list[Tensor]:
    """Return the tensors that autograd saves while ``compute`` runs."""
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        compute()
    return saved


def padded(x: Tensor, group_size: int) -> Tensor:
    """Return the rows of ``x`` as a norm packs them: those longer than a group end with their last element repeated."""
    length = x.shape[-1]
    missing = -length % group_size if group_size < length < x.numel() else 0
    return torch.cat([x, x[..., -1:].expand(*x.shape[:-1], missing)], -1)


def assert_codes_saved(
    saved: list[Tensor], x: Tensor, bits: int, group_size: int, rounding: str | None, seed: int = SEED
) -> None:
    """Assert that the one uint8 tensor saved is the reference's packing of ``x``."""
    (codes,) = (s for s in saved if s.dtype is torch.uint8)
    flat = x.detach().cpu().as_strided((x.numel(),), (1,))
    stochastic = rounding == "stochastic" or (rounding is None and bits != 8)
    expected = reference.quantize(flat, bits=bits, group_size=group_size, stochastic=stochastic, seed=seed)
    assert_same_bytes(codes, expected)


def assert_within(actual: Tensor, exact: Tensor, bound: Tensor) -> None:
    """Assert an elementwise bound, to which the rounding of ``actual`` to its own dtype is added."""
    bound = bound + torch.finfo(actual.dtype).eps * (exact.abs() + bound) + torch.finfo(actual.dtype).tiny
    excess = ((actual.detach().double().cpu() - exact).abs() / bound).max()
    assert float(excess) <= 1, f"{float(excess):.3g} times the bound"


def error_of(x: Tensor, bits: int, group_size: int) -> Tensor:
    """Return the largest error of each restored element, float64, in the shape of a contiguous ``x``."""
    flat = x.detach().cpu().reshape(-1)
    bound = reference.error_bound(flat, bits=bits, group_size=group_size, stochastic=bits != 8, dtype=x.dtype)
    return bound.view(x.shape)


def check_gelu(x: Tensor, grad: Tensor, approximate: str, bits: int, group_size: int, impl: str) -> None:
    leaf = x.clone().requires_grad_()
    out = functional.gelu(leaf, approximate, codes=Codes(bits=bits, group_size=group_size, seed=SEED, impl=impl))
    out.backward(grad)
    assert out.dtype == x.dtype
    assert leaf.grad is not None
    wide = x.cpu().double().requires_grad_()
    exact = F.gelu(wide, approximate=approximate)
    exact.backward(grad.cpu().double())
    assert wide.grad is not None
    # A dozen float32 operations on magnitudes of at most |x|, or of at most 1.2 in the derivative; Abramowitz and
    # Stegun's formula is within half an ulp of 1. The second derivative is at most 0.8. By tanh, 1 - s cancels: what s
    # is off by, up to 2 ulp of 1, is taken times x and the slope of its argument, until s rounds to 1, below 6.
    g = grad.cpu().double().abs()
    a = wide.detach().abs().clamp(max=6)
    cancelled = 2 * EPS * a * 1.6 * (1 + 0.1342 * a * a) if approximate == "tanh" else 0.0
    assert_within(out, exact.detach(), 12 * EPS * wide.detach().abs())
    assert_within(leaf.grad, wide.grad, 0.8 * error_of(x, bits, group_size) * g + (1.2 * 12 * EPS + cancelled) * g)


def turned(x: Tensor) -> Tensor:
    """Return the halves of each row, the second one negated, in front of one another, as rope does."""
    low, high = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-high, low), -1)
