"""Batch norm and max-pool, for convolutional networks."""

from __future__ import annotations

from .batch_norm import batch_norm
from .max_pool import max_pool2d

__all__ = ["batch_norm", "max_pool2d"]
