"""Fused modules of :mod:`torch.nn`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import Module

from ...engine.recompute import is_result_to_store
from ...functional import dropout, gelu, layer_norm, rms_norm
from ..formulas import children_fed, forward_of
from ..fusion import Fused, Fusion, codes_for, fits, fused_class, linear_dtype, original_of
from ..sharded import local_rows, of_rows
from ..tampering import bypassable_as, tampering_reason


class LayerNorm(Fused, nn.LayerNorm):
    """``nn.LayerNorm``; like torch's, the output is float32 under autocast."""

    stands_for: ClassVar[tuple[str, ...]] = ("layer_norm",)

    @staticmethod
    def row_length(module: Module) -> int | None:
        """Return the elements of a row."""
        return math.prod(cast(nn.LayerNorm, module).normalized_shape)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x``."""
        return self._normalise(x, None)

    def _normalise(self, x: Tensor, dtype: torch.dtype | None) -> Tensor:
        own, weight, bias = local_rows(x, len(self.normalized_shape), self.weight, self.bias)
        codes = codes_for(self, own)
        # timm's layer norm may run apex's kernel, with another rounding.
        if codes is None or getattr(self, "_fast_norm", False) or not fits(self, own):
            return super().forward(x)
        out = layer_norm(own, self.normalized_shape, weight, bias, self.eps, dtype=dtype, codes=codes)
        return out if own is x else of_rows(out, x)


class LayerNormForLinear(LayerNorm):
    """A layer norm read by Linears only: under autocast the output has the dtype of the Linears' cast."""

    stands_for = ("layer_norm", "linear")

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x``."""
        return self._normalise(x, linear_dtype(x))


class RMSNorm(Fused, nn.RMSNorm):
    """``nn.RMSNorm`` over the last dimension, with a weight and an ``eps`` of its own."""

    stands_for = ("rms_norm",)

    @staticmethod
    def row_length(module: Module) -> int | None:
        """Return the elements of a row."""
        return math.prod(cast(nn.RMSNorm, module).normalized_shape)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x``."""
        own, weight = local_rows(x, 1, self.weight)
        codes = codes_for(self, own)
        # Under autocast torch's result is float32 on some devices only; without a weight or eps its formula differs.
        if (
            codes is None
            or self.weight is None
            or self.eps is None
            or len(self.normalized_shape) != 1
            or x.shape[-1:] != self.weight.shape
            or self.weight.dtype is not x.dtype
            or torch.is_autocast_enabled(x.device.type)
        ):
            return super().forward(x)
        out = rms_norm(own, weight, self.eps, codes=codes)
        return out if own is x else of_rows(out, x)


class GELU(Fused, nn.GELU):
    """``nn.GELU``."""

    stands_for = ("gelu",)

    def forward(self, input: Tensor) -> Tensor:
        """Apply GELU."""
        codes = codes_for(self, input)
        return super().forward(input) if codes is None else gelu(input, cast(Any, self.approximate), codes=codes)


class Dropout(Fused, nn.Dropout):
    """``nn.Dropout``, but not in place."""

    stands_for = ("dropout",)

    def forward(self, input: Tensor) -> Tensor:
        """Drop elements."""
        codes = codes_for(self, input)
        # The output of CUDA's own dropout is recomputed from stored probabilities.
        if codes is None or self.inplace or (input.is_cuda and is_result_to_store(input)):
            return super().forward(input)
        return dropout(input, self.p, impl=codes.impl)


def by_class(classes: Collection[type[Module]]) -> dict[type[Module], Fusion]:
    """Return the fusion of each class."""
    return {
        nn.LayerNorm: Fusion(fused_class(LayerNorm, nn.LayerNorm)),
        nn.RMSNorm: Fusion(fused_class(RMSNorm, nn.RMSNorm)),
        nn.GELU: Fusion(fused_class(GELU, nn.GELU)),
        # A dropout with p = 0, common in models, costs one call less without fusing.
        nn.Dropout: Fusion(fused_class(Dropout, nn.Dropout), exact=True, suits=_drops),
    }


def _drops(dropout: Module) -> bool:
    return 0 < cast(nn.Dropout, dropout).p < 1


def norms_before_linears(
    block: Module,
    places: Mapping[tuple[str, str], Mapping[str, str]],
    norms: Collection[type[Module]],
    linears: Collection[type[Module]],
) -> dict[Module, Fusion]:
    """Return the fusions of the layer norms in ``block`` read only by Linears.

    Parameters
    ----------
    block : Module
    places : mapping
        (Python module, class name) of a block: {norm: the only child that reads the norm's output}.
    norms, linears : collection of type
        Classes of norms, and classes with inputs cast by autocast.
    """
    cls = original_of(type(block))
    feeds = places.get((cls.__module__, cls.__name__))
    if feeds is None or tampering_reason(block) is not None:
        return {}
    children = block._modules
    return {
        norm: Fusion(fused_class(LayerNormForLinear, type(norm)))
        for norm, child in ((children.get(a), children.get(b)) for a, b in feeds.items())
        if norm is not None and type(norm) in norms and child is not None and _feeds(child, linears)
    }


def _feeds(module: Module, linears: Collection[type[Module]]) -> bool:
    names = children_fed(forward_of(original_of(type(module))))
    children = [getattr(module, name, None) for name in names]
    # A branch that is never taken may name an absent child.
    present = [child for child in children if child is not None]
    return (
        tampering_reason(module) is None and bool(present) and all(bypassable_as(child, *linears) for child in present)
    )
