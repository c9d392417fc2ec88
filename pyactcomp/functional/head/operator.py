"""The chunked loss as a ``torch.library`` operator, for compiled graphs.

``torch.ops.pyactcomp.linear_cross_entropy(x, weight, bias, labels, ignore_index, mean, dtype, needs)`` returns the
loss, a power of two, and the gradients of ``x``, ``weight`` and ``bias`` without that power; an empty tensor for each
gradient not needed. Differentiable once: backward scales the gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..saving import wide
from .linear_cross_entropy import RowLoss, counted_labels, loss_and_gradients

_library: Any = torch.library.Library("pyactcomp", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor labels, int ignore_index, bool mean, "
    "ScalarType dtype, bool[3] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _compute(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    mean: bool,
    dtype: torch.dtype,
    needs: list[bool],
) -> Results:
    exact = wide(dtype)
    count = counted_labels(labels, ignore_index, weight.shape[0]).sum().to(exact)
    divisor, scale = (count, 1 / count.clamp(min=1)) if mean else (torch.ones_like(count), torch.ones_like(count))
    needed = (needs[0], needs[1], needs[2] and bias is not None)
    with torch.autocast(x.device.type, enabled=False):
        loss_of = RowLoss(ignore_index, None, "auto")
        results = loss_and_gradients(
            x.contiguous(), weight, bias, labels.contiguous(), divisor, scale, dtype, loss_of, needed
        )
    loss, power, *gradients = results
    grad_x, grad_weight, grad_bias = (x.new_empty(0) if g is None else g for g in gradients)
    # The gradients of padded parameters are views.
    return loss, power, grad_x, grad_weight.contiguous(), grad_bias


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    mean: bool,
    dtype: torch.dtype,
    needs: list[bool],
) -> Results:
    exact = wide(dtype)
    loss = x.new_empty((), dtype=exact)
    whole = torch.bfloat16 if weight.dtype is torch.bfloat16 else exact
    grad_x = x.new_empty(x.shape, dtype=dtype) if needs[0] else x.new_empty(0)
    grad_weight = x.new_empty(weight.shape, dtype=whole) if needs[1] else x.new_empty(0)
    grad_bias = x.new_empty(weight.shape[:1], dtype=exact) if needs[2] and bias is not None else x.new_empty(0)
    return loss, torch.empty_like(loss), grad_x, grad_weight, grad_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    x, weight, bias, *_ = inputs
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
    ctx.needs = inputs[-1]


def _scale(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    power, *gradients = ctx.saved_tensors
    # One dimension: a 0-dim factor would not promote the product to float32.
    factor = (grad * power).view(1)
    scaled = (
        (g * factor).to(dtype) if need and dtype is not None else None
        for g, dtype, need in zip(gradients, ctx.dtypes, ctx.needs, strict=True)
    )
    return (*scaled, None, None, None, None, None)


_library.impl("linear_cross_entropy", _compute, "CompositeExplicitAutograd")
torch.library.register_fake("pyactcomp::linear_cross_entropy", _fake, lib=_library)
torch.library.register_autograd("pyactcomp::linear_cross_entropy", _scale, setup_context=_save, lib=_library)
linear_cross_entropy = torch.ops.pyactcomp.linear_cross_entropy.default
