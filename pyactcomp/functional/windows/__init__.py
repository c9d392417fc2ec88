"""Attention within windows and the residual addition behind it, for Swin Transformers."""

from __future__ import annotations

from .residual_add import residual_add
from .take_rows import take_rows
from .window_attention import window_attention

__all__ = ["residual_add", "take_rows", "window_attention"]
