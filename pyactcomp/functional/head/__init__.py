"""The loss head of language models, a chunk of rows at a time."""

from __future__ import annotations

from .linear_cross_entropy import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
