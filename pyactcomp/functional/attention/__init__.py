"""Softmax of scores, and rotary embeddings of queries and keys."""

from __future__ import annotations

from .rope import rope
from .softmax import softmax

__all__ = ["rope", "softmax"]
