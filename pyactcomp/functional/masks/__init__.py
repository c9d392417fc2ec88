"""ReLU and dropout, which store one bit an element."""

from __future__ import annotations

from .dropout import dropout
from .relu import relu

__all__ = ["dropout", "relu"]
