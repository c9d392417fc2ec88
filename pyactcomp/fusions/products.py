"""Linears that a form may take for what they compute: matrix products of one input."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import Module

from .formulas import children_fed, forward_of
from .fusion import autocast_dtype, original_of
from .untouched import plain


def is_matrix_product(linear: Module) -> bool:
    """Return whether a child is a Linear, and nothing else computes or sees its output."""
    return plain(linear, nn.Linear) and type(linear._parameters.get("weight")) is nn.Parameter


def feeds_linears(module: Module) -> bool:
    """Return whether the input of a module goes to several Linears, and nowhere else."""
    names = children_fed(forward_of(original_of(type(module))))
    return len(names) > 1 and all(isinstance(getattr(module, name, None), nn.Linear) for name in names)


def cast_once(module: Module, x: Any) -> Any:
    """Return the input as the Linears that it goes to would cast it, if it goes to several, and nowhere else."""
    if type(x) is not Tensor or (dtype := autocast_dtype(x)) is None:
        return x
    return x.to(dtype) if feeds_linears(module) else x
