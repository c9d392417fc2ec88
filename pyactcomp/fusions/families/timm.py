"""timm's layer norm, with the formula of torch's, and the blocks of timm's vision transformer."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import ClassVar

from torch.nn import Module

from ..fusion import Fusion, fused_class
from .torch_modules import LayerNorm, PreNormBlock


class Block(PreNormBlock):
    """timm's ``Block`` of a vision transformer."""

    feeds: ClassVar = {"norm1": "attn", "norm2": "mlp"}


def by_class(classes: Collection[type[Module]]) -> dict[type[Module], Fusion]:
    """Return the fusions of timm's layer norm and vision transformer, if loaded."""
    norm = getattr(sys.modules.get("timm.layers.norm"), "LayerNorm", None)
    block = getattr(sys.modules.get("timm.models.vision_transformer"), "Block", None)
    fusions = {} if norm is None else {norm: Fusion(fused_class(LayerNorm, norm))}
    return fusions if block is None else fusions | {block: Fusion(fused_class(Block, block), suits=Block.suits)}
