"""Whether two states are equal: tensors by their elements, in dicts, lists and tuples of any depth."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def same(a: Any, b: Any) -> bool:
    """Return whether both hold equal values in the same places."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)
