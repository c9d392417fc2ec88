"""GELU and the codes of its input as ``torch.library`` operators, for compiled graphs.

``torch.ops.pyactcomp.gelu_quantize(x, tanh, group_size) -> (gelu, packed)`` reads a contiguous ``x`` once: 5.06 bytes
an element of bfloat16, where GELU and packing apart move 7.06. ``torch.ops.pyactcomp.gelu_restore(codes, groups, grad,
tanh, group_size) -> (grad_x, gelu)`` reads the codes once for the derivative and for GELU itself: 7.06 bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu as gelu_of_torch

from ....codec import format as fmt
from ....codec.ops import joined, quantize, restore
from ...codes import Codes
from ...saving import saving
from .launch import gelu_of

_library: Any = torch.library.Library("pyactcomp", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "gelu_quantize(Tensor x, bool tanh, int group_size) -> (Tensor, Tensor)", tags=(torch.Tag.needs_exact_strides,)
)
_library.define(
    "gelu_restore(Tensor codes, Tensor groups, Tensor grad, bool tanh, int group_size) -> (Tensor, Tensor)",
    tags=(torch.Tag.needs_exact_strides,),
)


def _compute(x: Tensor, tanh: bool, group_size: int) -> tuple[Tensor, Tensor]:
    if not x.is_contiguous():
        raise ValueError(f"the operator takes contiguous tensors, got shape {tuple(x.shape)}, strides {x.stride()}")
    how = saving(Codes(group_size=group_size))
    if how.fuses(x):
        return gelu_of(tanh, how).forward(x)
    packed = quantize(x, 8, group_size, False, 0, "auto")
    return gelu_of_torch(x, approximate="tanh" if tanh else "none"), packed


def _restore(codes: Tensor, groups: Tensor, grad: Tensor, tanh: bool, group_size: int) -> tuple[Tensor, Tensor]:
    if not grad.is_contiguous() or grad.numel() != codes.numel():
        raise ValueError(
            f"the operator takes a contiguous gradient of {codes.numel()} elements, got shape {tuple(grad.shape)}, "
            f"strides {grad.stride()}"
        )
    how = saving(Codes(group_size=group_size))
    if how.fuses(grad):
        return gelu_of(tanh, how).backward_and_recompute(joined(codes, groups, group_size), grad)
    x = restore(codes, groups, grad.dtype, group_size).view(grad.shape)
    approximate = "tanh" if tanh else "none"
    return torch.ops.aten.gelu_backward(grad, x, approximate=approximate), gelu_of_torch(x, approximate=approximate)


def _restore_fake(codes: Tensor, groups: Tensor, grad: Tensor, tanh: bool, group_size: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(grad), torch.empty_like(grad)


def _fake(x: Tensor, tanh: bool, group_size: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((fmt.packed_nbytes(x.numel(), 8, group_size),), dtype=torch.uint8)


_library.impl("gelu_quantize", _compute, "CompositeExplicitAutograd")
_library.impl("gelu_restore", _restore, "CompositeExplicitAutograd")
torch.library.register_fake("pyactcomp::gelu_quantize", _fake, lib=_library)
torch.library.register_fake("pyactcomp::gelu_restore", _restore_fake, lib=_library)

gelu_quantize = torch.ops.pyactcomp.gelu_quantize.default
gelu_restore = torch.ops.pyactcomp.gelu_restore.default
