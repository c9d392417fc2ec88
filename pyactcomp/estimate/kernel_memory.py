"""Memory that kernels take while they run and that no operator shows, each rule with its source.

The rules are functions of an operator's arguments; they return the bytes of the blocks that are in use together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Rule = Callable[..., list[int]]


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _flash_backward(grad: Tensor, query: Tensor, key: Tensor, *_: Any, **__: Any) -> list[int]:
    """Return the blocks of FlashAttention 2's backward: sums of each row, dq in float32, dk and dv of all heads.

    ATen's flash_api.cpp, ``mha_bwd``: softmax_d, dq_accum, dk_expanded, dv_expanded.
    """
    batch, heads, rows, width = query.shape
    shared, columns = key.shape[1], key.shape[2]
    rows, padded = _up(rows, 128), _up(width, 32 if width <= 128 else 64)
    expanded = [2 * batch * columns * heads * width] * 2 if shared != heads else []
    return [4 * batch * heads * rows, 4 * batch * heads * rows * padded, *expanded]


def _efficient_backward(grad: Tensor, query: Tensor, *_: Any, **__: Any) -> list[int]:
    """Return the blocks of the memory-efficient backward: sums of each row, and dq in float32 for 16-bit elements.

    ATen's attention_backward.cu, ``_efficient_attention_backward``: delta and the kernel's workspace.
    """
    batch, heads, rows, width = query.shape
    workspace = [] if query.dtype is torch.float32 else [4 * batch * heads * _up(rows, 64) * _up(width, 32)]
    return [4 * batch * heads * rows, *workspace]


def _embedding_backward(grad: Tensor, indices: Tensor, *_: Any, **__: Any) -> list[int]:
    """Return the blocks of an embedding's backward: sorted indices and positions, sums of segments in float32.

    ATen's Embedding.cu sorts above 3072 indices; EmbeddingBackwardKernel.cu sums the segments.
    """
    count, width = indices.numel(), grad.shape[-1]
    return [] if count <= 3072 else [8 * count] * 4 + [4 * count * width]


RULES: dict[str, Rule] = {
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "aten::embedding_dense_backward": _embedding_backward,
}

#: Matrix products, which take cuBLAS's workspace of the thread at the first call.
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_addmm_activation", "addmv", "mv", "dot", "vdot", "addbmm"}


def blocks_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Return the bytes of the blocks that an operator's kernels take besides its results."""
    rule = RULES.get(operator._schema.name)
    return [] if rule is None else rule(*args, **kwargs)
