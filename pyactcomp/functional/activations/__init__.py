"""GELU and the inside of SwiGLU, which store their inputs in codes."""

from __future__ import annotations

from .gelu import gelu
from .new_gelu import new_gelu
from .silu_mul import silu_mul

__all__ = ["gelu", "new_gelu", "silu_mul"]
