"""Inputs that separate implementations of the format, shared by the CPU and CUDA parity tests."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 63, 64, 65, 127, 1000, 4096 + 7)

_INF, _NAN = float("inf"), float("nan")


def _normal(n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n + 1))


def _with_specials(n: int) -> Tensor:
    """Every third group holds one of each, so that most of its elements must survive them."""
    x = _normal(n)
    for i, special in enumerate((_NAN, _INF, -_INF, 3e38, -3e38, -0.0)):
        x[5 * i :: 3 * 64] = special
    return x


def _all_non_finite(n: int) -> Tensor:
    return torch.tensor([_INF, -_INF, _NAN]).repeat(n // 3 + 1)[:n]


def _ties(n: int) -> Tensor:
    """Quotients of exactly k + 1/2: a group's range is 255 steps of 1, its elements halves."""
    x = torch.arange(n, dtype=torch.float32) % 511 / 2
    x[::64], x[1::64] = 0.0, 255.0
    return x


def _subnormal_and_smallest_step(n: int) -> Tensor:
    return _normal(n) * 2.0 ** -(torch.arange(n) // 64 % 40 + 110.0)


CASES = {
    "normal": _normal,
    "relu": lambda n: _normal(n).relu(),
    "offset": lambda n: _normal(n) + 300,
    "outliers": lambda n: torch.where(torch.arange(n) % 97 == 0, _normal(n) * 60, _normal(n)),
    "constant": lambda n: torch.full((n,), 0.1),
    "all_negative": lambda n: -_normal(n).abs() - 1,
    "negative_zero": lambda n: torch.full((n,), -0.0),
    "mixed_zeros": lambda n: torch.where(torch.arange(n) % 2 == 0, 0.0, -0.0),
    "huge": lambda n: _normal(n) * 2.0**120,
    "around_the_largest": lambda n: _normal(n).clamp(-1, 1) * 2.0**126,
    "beyond_the_largest": lambda n: _normal(n).clamp(-1, 1) * 3e38,
    # Steps down and up from here are beyond float16, whose finite values stay finite.
    "largest_of_float16": lambda n: _normal(n).clamp(-1, 1) * 65504,
    "subnormal": lambda n: _normal(n) * 1e-41,
    "smallest_step": _subnormal_and_smallest_step,
    "specials": _with_specials,
    "all_non_finite": _all_non_finite,
    "ties": _ties,
}


def assert_same_bytes(actual: Tensor, expected: Tensor) -> None:
    """Compare two tensors of one dtype byte by byte; the message has the first difference."""
    assert actual.dtype == expected.dtype
    a, b = actual.cpu().view(torch.uint8), expected.cpu().view(torch.uint8)
    assert a.shape == b.shape
    different = (a != b).nonzero()
    assert len(different) == 0, (
        f"{len(different)} of {a.numel()} bytes differ, first at {int(different[0])}: "
        f"got {int(a[different[0]])}, expected {int(b[different[0]])}"
    )
