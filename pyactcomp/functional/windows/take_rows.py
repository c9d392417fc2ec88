"""``take_rows``: a permutation of rows and a cast in one pass."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ...codec import Impl
from ..saving import begin, kernels_of


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, inverse: Tensor, dtype: torch.dtype, impl: Impl) -> Tensor:
        begin(ctx)
        ctx.save_for_backward(rows, inverse)
        ctx.dtype, ctx.impl = x.dtype, impl
        if kernels_of(impl).runs_kernels(x) and dtype in (torch.float32, torch.bfloat16, torch.float16):
            from . import launch

            return launch.residual_add_backward(x, None, rows, 1, dtype)
        return x.to(dtype)[rows]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 5
        rows, inverse = ctx.saved_tensors
        return take_rows(grad, inverse, rows, ctx.dtype, ctx.impl), None, None, None, None


def take_rows(x: Tensor, rows: Tensor, inverse: Tensor, dtype: torch.dtype, impl: Impl = "auto") -> Tensor:
    """Return ``x[rows].to(dtype)`` for x [n, width]; ``rows``, a permutation, and ``inverse`` are int32 or int64 [n].

    Differentiable any number of times; ``x`` is not saved. Bytes moved per element, float32 to bfloat16: 6.
    """
    return cast(Tensor, _TakeRows.apply(x, rows, inverse, dtype, impl))  # type: ignore[no-untyped-call]
