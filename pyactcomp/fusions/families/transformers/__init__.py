"""Fused modules of Hugging Face transformers."""

from __future__ import annotations

from .modules import by_class, by_place

__all__ = ["by_class", "by_place"]
