"""Lossless packing of a float cast from a narrower dtype: store the narrower dtype."""

from __future__ import annotations

import torch

_EXACT = {
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float64),
    (torch.float16, torch.float64),
    (torch.float32, torch.float64),
}


def is_exact_cast(source: torch.dtype | None, dtype: torch.dtype) -> bool:
    """Return whether the wider ``dtype`` represents every value of ``source`` exactly."""
    return (source, dtype) in _EXACT
