"""Fused blocks of timm's Swin Transformer.

Partition into windows and cyclic shift only permute rows: the norm before the attention writes rows in window order,
and the residual addition after the attention restores the order. Neither costs a pass. In lossless mode the norm is
torch's, and autocast's cast of the norm's output permutes the rows.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import Module

from ...functional import Codes, layer_norm
from ...functional.windows.residual_add import residual_add
from ...functional.windows.take_rows import take_rows
from ...functional.windows.window_attention import window_attention
from ..fusion import Fused, Fusion, attention_codes, codes_for, fits, fused_class, linear_dtype
from ..state import next_codes
from ..tampering import bypassable_as

# Tokens of one window: the kernels serve no more, and without kernels recomputing scores costs more than reading them.
_MOST_TOKENS = 64


class WindowAttention(Fused):
    """timm's ``WindowAttention`` without dropout of the probabilities; the probabilities are never stored."""

    _get_rel_pos_bias: Callable[[], Tensor]
    attn_drop: nn.Dropout
    num_heads: int
    proj: Callable[[Tensor], Tensor]
    proj_drop: Callable[[Tensor], Tensor]
    qkv: Callable[[Tensor], Tensor]
    scale: float
    softmax: nn.Softmax

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend within the windows of ``x`` [windows, tokens, channels]."""
        codes = codes_for(self, x)
        learnt = mask is not None and mask.requires_grad  # the fused function gives a mask no gradient
        if codes is None or learnt or not self._bypassable() or x.shape[1] > _MOST_TOKENS:
            return cast(Tensor, super().forward(x, mask))
        (bias,) = self._get_rel_pos_bias()
        kept = attention_codes(self, codes)
        x = window_attention(self.qkv(x), self.num_heads, bias, mask, scale=self.scale, codes=kept)
        return self.proj_drop(self.proj(x))

    def _bypassable(self) -> bool:
        return (
            bypassable_as(self.attn_drop, nn.Dropout)
            and not self.attn_drop.p
            and bypassable_as(self.softmax, nn.Softmax)
        )


class Block(Fused):
    """timm's ``SwinTransformerBlock`` for inputs of whole windows."""

    attn: Callable[..., Tensor]
    attn_mask: Tensor | None
    drop_path1: Module
    drop_path2: Module
    dynamic_mask: bool
    mlp: Callable[[Tensor], Tensor]
    norm1: nn.LayerNorm
    norm2: nn.LayerNorm
    shift_size: tuple[int, int]
    window_area: int
    window_size: tuple[int, int]

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention and MLP to ``x`` [batch, height, width, channels]."""
        codes = codes_for(self, x)
        if codes is None or self.dynamic_mask or not self._known(x):
            return cast(Tensor, super().forward(x))
        exact = codes.bits is None
        # take_rows needs contiguous rows, and torch's operators preserve the layout of other inputs.
        if exact and not x.is_contiguous():
            return cast(Tensor, super().forward(x))
        batch, height, width, channels = x.shape
        order, inverse = _windows(batch, height, width, tuple(self.window_size), tuple(self.shift_size), x.device)
        rows = x.reshape(-1, channels)
        early = _feeds_linear(self.attn, "timm.models.swin_transformer", "WindowAttention", "qkv")
        if exact:
            normal = self.norm1(x).reshape(-1, channels)
            dtype = linear_dtype(normal) if early else None
            windows = take_rows(normal, order, inverse, dtype or normal.dtype, codes.impl)
        else:
            windows = _normalise(self.norm1, rows, codes, order, early)
        branch = self.attn(windows.view(-1, self.window_area, channels), mask=self.attn_mask).reshape(-1, channels)
        scale = _drops(self.drop_path1, branch, batch)
        rows = residual_add(rows, branch, scale=scale, rows=order, impl=codes.impl)
        if exact:
            tokens = self.norm2(rows.view(batch, -1, channels))
        else:
            early = _feeds_linear(self.mlp, "timm.layers.mlp", "Mlp", "fc1")
            tokens = _normalise(self.norm2, rows, next_codes(self), None, early)
            tokens = tokens.view(batch, -1, channels)
        branch = self.mlp(tokens).reshape(-1, channels)
        scale = _drops(self.drop_path2, branch, batch)
        return residual_add(rows, branch, scale=scale, impl=codes.impl).view(x.shape)

    def _known(self, x: Tensor) -> bool:
        """Return whether ``x`` needs no padding and the block has the children of the standard configuration."""
        norms = self.norm1, self.norm2
        return (
            not any(size % window for size, window in zip(x.shape[1:3], self.window_size, strict=True))
            and all(bypassable_as(norm, nn.LayerNorm) for norm in norms)
            and all(fits(x, norm.normalized_shape, norm.weight, norm.bias) for norm in norms)
            and all(_is_drop_path(drop) for drop in (self.drop_path1, self.drop_path2))
        )


def _is_drop_path(module: Module) -> bool:
    return bypassable_as(module, nn.Identity, sys.modules["timm.layers.drop"].DropPath)


def _feeds_linear(module: object, file: str, cls: str, name: str) -> bool:
    """Return whether a Linear is the only reader of the input, so autocast's cast may happen earlier."""
    expected = getattr(sys.modules.get(file), cls, Module)
    return bypassable_as(module, expected) and bypassable_as(getattr(module, name), nn.Linear)


def _normalise(norm: nn.LayerNorm, x: Tensor, codes: Codes, order: Tensor | None, early: bool) -> Tensor:
    """Return the norm of ``x``; if ``early``, in the dtype of autocast's cast for a Linear."""
    dtype = linear_dtype(x) if early else None
    return layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps, dtype=dtype, rows=order, codes=codes)


def _drops(drop_path: Module, branch: Tensor, batch: int) -> Tensor | None:
    """Return the factor of each sample, drawn as ``drop_path`` would draw for the branch."""
    return None if isinstance(drop_path, nn.Identity) else drop_path(branch.new_ones(batch))


@functools.lru_cache(maxsize=64)
def _windows(
    batch: int, height: int, width: int, window: tuple[int, int], shift: tuple[int, int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the row of [batch, height, width] for each token of the shifted windows, and the inverse order."""
    rows = torch.arange(batch * height * width, dtype=torch.int32, device=device).view(batch, height, width)
    rows = rows.roll((-shift[0], -shift[1]), (1, 2))
    split = rows.view(batch, height // window[0], window[0], width // window[1], window[1])
    order = split.transpose(2, 3).flatten()
    return order, order.argsort().to(torch.int32)


def by_class(classes: Collection[type[Module]]) -> dict[type[Module], Fusion]:
    """Return the fusions of timm's Swin Transformer, if loaded."""
    swin = sys.modules.get("timm.models.swin_transformer")
    if swin is None:
        return {}
    return {
        swin.WindowAttention: Fusion(
            fused_class(WindowAttention, swin.WindowAttention), bypassed=("attn_drop", "softmax")
        ),
        swin.SwinTransformerBlock: Fusion(
            fused_class(Block, swin.SwinTransformerBlock),
            exact=True,
            bypassed=("norm1", "norm2", "drop_path1", "drop_path2"),
        ),
    }
