"""timm's layer norm, with the formula of torch's, and the blocks of timm's vision transformer."""

from __future__ import annotations

import sys
from collections.abc import Collection

from torch import nn
from torch.nn import Module

from ..fusion import Fusion, fused_class
from .torch_modules import LayerNorm, norms_before_linears

_PRE_NORM = {("timm.models.vision_transformer", "Block"): {"norm1": "attn", "norm2": "mlp"}}


def by_class(classes: Collection[type[Module]]) -> dict[type[Module], Fusion]:
    """Return the fusion of timm's layer norm, if timm is loaded."""
    return {norm: Fusion(fused_class(LayerNorm, norm)) for norm in _layer_norm()}


def by_place(block: Module) -> dict[Module, Fusion]:
    """Return the fusions of a block's norms read only by Linears."""
    return norms_before_linears(block, _PRE_NORM, (nn.LayerNorm, *_layer_norm()), (nn.Linear,))


def _layer_norm() -> tuple[type[nn.LayerNorm], ...]:
    norm = getattr(sys.modules.get("timm.layers.norm"), "LayerNorm", None)
    return () if norm is None else (norm,)
