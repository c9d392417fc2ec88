"""Fused modules of :mod:`torch.nn`."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import Module

from ...engine.saved import library
from ...functional.activations.gelu.gelu import gelu_unchecked
from ...functional.activations.gelu.launch import gelu_of
from ...functional.masks.dropout import dropout_unchecked
from ...functional.norms.launch import norm_of
from ...functional.norms.layer_norm import layer_norm_unchecked
from ...functional.norms.rms_norm import rms_norm_unchecked
from ..formulas import children_fed, forward_of
from ..fusion import Fused, Fusion, codes_for, fits, fused_class, linear_dtype, original_of
from ..sharded import local_rows, of_rows
from ..stand_ins import with_children
from ..state import active_codes
from ..tampering import bypassable, bypassable_as


class LayerNorm(Fused, nn.LayerNorm):
    """``nn.LayerNorm``; like torch's, the output is float32 under autocast."""

    stands_for: ClassVar[tuple[str, ...]] = ("layer_norm",)

    @staticmethod
    def row_length(module: Module) -> int | None:
        """Return the elements of a row."""
        return math.prod(cast(nn.LayerNorm, module).normalized_shape)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x``."""
        return self.normalise(x, None)

    def normalise(self, x: Tensor, dtype: torch.dtype | None) -> Tensor:
        """Normalise ``x`` and, where codes serve, cast to ``dtype``."""
        shape = self.normalized_shape
        if not torch.compiler.is_compiling() and (codes := library().ordinary_codes(self, x, True)) is not None:
            if not self.__dict__.get("_fast_norm", False):
                norm = norm_of(shape, True, self.eps, codes)
                made = norm.apply_where_served(x, self.weight, self.bias, dtype)
                if made is not None:
                    return made
        own, weight, bias = local_rows(x, len(shape), self.weight, self.bias)
        codes = codes_for(self, own, constant=True)
        # timm's layer norm may run apex's kernel, with another rounding.
        if codes is None or vars(self).get("_fast_norm", False) or not fits(own, shape, weight, bias):
            return super().forward(x)
        out = layer_norm_unchecked(own, None, weight, bias, None, shape, self.eps, dtype, codes)
        return out if own is x else of_rows(out, x)


class RMSNorm(Fused, nn.RMSNorm):
    """``nn.RMSNorm`` over the last dimension, with a weight and an ``eps`` of its own."""

    stands_for = ("rms_norm",)

    @staticmethod
    def row_length(module: Module) -> int | None:
        """Return the elements of a row."""
        return math.prod(cast(nn.RMSNorm, module).normalized_shape)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x``."""
        if not torch.compiler.is_compiling() and (codes := library().ordinary_codes(self, x, True)) is not None:
            if self.weight is not None and self.eps is not None and len(self.normalized_shape) == 1:
                norm = norm_of(self.normalized_shape, False, self.eps, codes)
                made = norm.apply_where_served(x, self.weight, None, None)
                if made is not None:
                    return made
        own, weight = local_rows(x, 1, self.weight)
        codes = codes_for(self, own, constant=True)
        autocast = torch.is_autocast_enabled(x.device.type)
        # Without a weight or eps torch's formula differs.
        if (
            codes is None
            or weight is None
            or self.eps is None
            or not own.shape[-1:] == weight.shape == self.normalized_shape
            or weight.dtype is not (torch.float32 if autocast else x.dtype)
        ):
            return super().forward(x)
        # Under autocast torch normalises in float32, and returns float32 on some devices only.
        dtype = _result_of_rms_norm(x.device, x.dtype, torch.get_autocast_dtype(x.device.type)) if autocast else None
        out = rms_norm_unchecked(own.float() if autocast else own, weight, self.eps, dtype, False, codes)
        return out if own is x else of_rows(out, x)


@functools.lru_cache(maxsize=64)
def _result_of_rms_norm(device: torch.device, dtype: torch.dtype, autocast: torch.dtype) -> torch.dtype:
    """Return the dtype of torch's result under autocast."""
    with torch.no_grad(), torch.autocast(device.type, autocast):
        return nn.functional.rms_norm(torch.ones(1, device=device, dtype=dtype), (1,), eps=1.0).dtype


class GELU(Fused, nn.GELU):
    """``nn.GELU`` where kernels run: hooks alone store the same bytes, and are faster than two passes of the CPU's."""

    stands_for = ("gelu",)

    def forward(self, input: Tensor) -> Tensor:
        """Apply GELU."""
        if not torch.compiler.is_compiling() and (codes := library().ordinary_codes(self, input, False)) is not None:
            made = gelu_of(self.approximate == "tanh", codes).apply_where_served(input)
            if made is not None:
                return made
        codes = codes_for(self, input, kernels=True)
        return super().forward(input) if codes is None else gelu_unchecked(input, cast(Any, self.approximate), codes)


class Dropout(Fused, nn.Dropout):
    """``nn.Dropout`` on the CPU, but not in place."""

    stands_for = ("dropout",)

    def forward(self, input: Tensor) -> Tensor:
        """Drop elements."""
        # On a GPU the engine stores a bit for each boolean that torch's own dropout saves.
        codes = None if input.is_cuda else codes_for(self, input)
        if codes is None or self.inplace:
            return super().forward(input)
        return dropout_unchecked(input, self.p)


class PreNormBlock(Fused):
    """A block whose forward gives the output of a norm to one child, of which Linears alone read it.

    Under autocast the norm then writes the dtype of the Linears' cast: for the block's own forward, not for others that
    call the norm.
    """

    feeds: ClassVar[Mapping[str, str]]
    """Each norm's name, and the name of the child that alone reads the norm's output; set by a derived class."""

    @staticmethod
    def linears() -> tuple[type[Module], ...]:
        """Return the classes whose inputs autocast casts."""
        return (nn.Linear,)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's own forward, with norms that cast."""
        block = self
        if active_codes(self) is not None:
            norms = {}
            for name, reader in self.feeds.items():
                norm, child = self._modules.get(name), self._modules.get(reader)
                if isinstance(norm, LayerNorm) and child is not None:
                    norms[name] = functools.partial(_normalise_for_linears, norm, child, self.linears())
            block = with_children(self, norms)
        return cast(Any, super(PreNormBlock, block)).forward(*args, **kwargs)

    @classmethod
    def suits(cls, block: Module) -> bool:
        """Return whether one of the children that read a norm consists of Linears."""
        children = [block._modules.get(child) for child in cls.feeds.values()]
        return any(child is not None and _feeds(child, cls.linears()) for child in children)


def _normalise_for_linears(norm: LayerNorm, child: Module, linears: tuple[type[Module], ...], x: Tensor) -> Tensor:
    dtype = linear_dtype(x)
    if dtype is None or not bypassable(norm) or not _feeds(child, linears):
        return cast(Tensor, norm(x))
    return norm.normalise(x, dtype)


def _feeds(module: Module, linears: tuple[type[Module], ...]) -> bool:
    """Return whether Linears without hooks read the input of a module, and nothing else does."""
    names = children_fed(forward_of(original_of(type(module))))
    children = [getattr(module, name, None) for name in names]
    # A branch that is never taken may name an absent child.
    present = [child for child in children if child is not None]
    return bypassable(module) and bool(present) and all(bypassable_as(child, *linears) for child in present)


def by_class(classes: Collection[type[Module]]) -> dict[type[Module], Fusion]:
    """Return the fusion of each class."""
    return {
        nn.LayerNorm: Fusion(fused_class(LayerNorm, nn.LayerNorm)),
        nn.RMSNorm: Fusion(fused_class(RMSNorm, nn.RMSNorm), suits=_scales_rows),
        nn.GELU: Fusion(fused_class(GELU, nn.GELU)),
        # A dropout with p = 0, common in models, costs one call less without fusing.
        nn.Dropout: Fusion(fused_class(Dropout, nn.Dropout), exact=True, suits=_drops),
    }


def _scales_rows(norm: Module) -> bool:
    # Without a weight or eps torch's formula differs.
    own = cast(nn.RMSNorm, norm)
    return own.weight is not None and own.eps is not None and len(own.normalized_shape) == 1


def _drops(dropout: Module) -> bool:
    return 0 < cast(nn.Dropout, dropout).p < 1
