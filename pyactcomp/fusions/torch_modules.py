"""Modules of :mod:`torch.nn` in fused form, and timm's layer norm, which computes the same."""

from __future__ import annotations

import math
import sys
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import Module

from ..functional._dropout import dropout
from ..functional._gelu import gelu
from ..functional._layer_norm import layer_norm
from ..functional._max_pool import max_pool2d
from ..functional._rms_norm import rms_norm
from ..redo import is_result_to_store
from .formulas import children_fed, forward_of
from .fusion import Fused, Fusion, fits, form_of, linear_dtype, options, original_of
from .untouched import plain, untouched


class LayerNorm(Fused, nn.LayerNorm):
    """``nn.LayerNorm``, float32 under autocast as that is."""

    @staticmethod
    def row_length(module: Module) -> int | None:
        """Return the elements of a row."""
        return math.prod(cast(nn.LayerNorm, module).normalized_shape)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x``."""
        return self._normalise(x, None)

    def _normalise(self, x: Tensor, dtype: torch.dtype | None) -> Tensor:
        how = options(self, x)
        # timm's may run apex's, which rounds otherwise.
        if how is None or getattr(self, "_fast_norm", False) or not fits(self, x):
            return super().forward(x)
        return layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps, dtype=dtype, **how)


class LayerNormForLinear(LayerNorm):
    """A layer norm whose output only goes to Linears: under autocast it is written as they would cast it."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x``."""
        return self._normalise(x, linear_dtype(x))


class RMSNorm(Fused, nn.RMSNorm):
    """``nn.RMSNorm`` over the last dimension, with a weight and an ``eps`` of its own."""

    @staticmethod
    def row_length(module: Module) -> int | None:
        """Return the elements of a row."""
        return math.prod(cast(nn.RMSNorm, module).normalized_shape)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x``."""
        how = options(self, x)
        # Under autocast torch's result is float32 on some devices only; without a weight or eps its formula differs.
        if (
            how is None
            or self.weight is None
            or self.eps is None
            or len(self.normalized_shape) != 1
            or x.shape[-1:] != self.weight.shape
            or self.weight.dtype is not x.dtype
            or torch.is_autocast_enabled(x.device.type)
        ):
            return super().forward(x)
        return rms_norm(x, self.weight, self.eps, **how)


class GELU(Fused, nn.GELU):
    """``nn.GELU``."""

    def forward(self, input: Tensor) -> Tensor:
        """Apply GELU."""
        how = options(self, input)
        return super().forward(input) if how is None else gelu(input, cast(Any, self.approximate), **how)


class MaxPool2d(Fused, nn.MaxPool2d):
    """``nn.MaxPool2d`` without dilation, rounding up or indices."""

    def forward(self, input: Tensor) -> Tensor:
        """Take the maximum of each window."""
        how = options(self, input)
        dilated = self.dilation not in (1, (1, 1))
        sizes = self.kernel_size, self.stride, self.padding
        if (
            how is None
            or dilated
            or self.ceil_mode
            or self.return_indices
            or input.dim() != 4
            or not all(isinstance(size, int) or len(size) == 2 for size in sizes)
        ):
            return cast(Tensor, super().forward(input))
        return max_pool2d(input, self.kernel_size, self.stride, self.padding, **how)


class Dropout(Fused, nn.Dropout):
    """``nn.Dropout``, but not in place."""

    def forward(self, input: Tensor) -> Tensor:
        """Drop elements."""
        how = options(self, input)
        # What CUDA's own makes of stored probabilities is computed again from them.
        if how is None or self.inplace or (input.is_cuda and is_result_to_store(input)):
            return super().forward(input)
        return dropout(input, self.p, **how)


# Blocks whose norms feed one child each: (module, class) -> {norm: child}.
_PRE_NORM = {
    ("transformers.models.gpt2.modeling_gpt2", "GPT2Block"): {"ln_1": "attn", "ln_2": "mlp"},
    ("transformers.models.vit.modeling_vit", "ViTLayer"): {"layernorm_before": "attention", "layernorm_after": "mlp"},
    ("timm.models.vision_transformer", "Block"): {"norm1": "attn", "norm2": "mlp"},
}


def table() -> dict[type[Module], Fusion]:
    """Return the fused form of each class, of timm's only if timm is loaded."""
    return {norm: Fusion(form_of(LayerNorm, norm)) for norm in _layer_norms()} | {
        nn.RMSNorm: Fusion(form_of(RMSNorm, nn.RMSNorm)),
        nn.GELU: Fusion(form_of(GELU, nn.GELU)),
        # One that drops nothing, of which models have many, costs a call less as it is.
        nn.Dropout: Fusion(form_of(Dropout, nn.Dropout), exact=True, suits=_drops),
        nn.MaxPool2d: Fusion(form_of(MaxPool2d, nn.MaxPool2d), exact=True),
    }


def _drops(dropout: Module) -> bool:
    return 0 < cast(nn.Dropout, dropout).p < 1


def _layer_norms() -> tuple[type[nn.LayerNorm], ...]:
    timm_norm = getattr(sys.modules.get("timm.layers.norm"), "LayerNorm", None)
    return (nn.LayerNorm,) if timm_norm is None else (nn.LayerNorm, timm_norm)


def norms_before_linears(block: Module) -> dict[Module, Fusion]:
    """Return the fused forms of the layer norms in ``block`` whose output goes to Linears, and nowhere else."""
    cls = original_of(type(block))
    feeds = _PRE_NORM.get((cls.__module__, cls.__name__))
    if feeds is None or untouched(block) is not None:
        return {}
    children = block._modules
    return {
        norm: Fusion(form_of(LayerNormForLinear, type(norm)))
        for norm, child in ((children.get(a), children.get(b)) for a, b in feeds.items())
        if norm is not None and type(norm) in _layer_norms() and child is not None and _feeds_linears(child)
    }


def _feeds_linears(module: Module) -> bool:
    names = children_fed(forward_of(original_of(type(module))))
    children = [getattr(module, name, None) for name in names]
    # A branch that is never taken may name a child that this module does not have.
    present = [child for child in children if child is not None]
    return untouched(module) is None and bool(present) and all(plain(child, *_linears()) for child in present)


def _linears() -> tuple[type[Module], ...]:
    """Return the classes of which autocast casts the input, and only that."""
    conv1d = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return (nn.Linear,) if conv1d is None else (nn.Linear, conv1d)
