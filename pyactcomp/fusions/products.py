"""Linears in a fused forward: the test for a bare matrix product, and one cast for several Linears."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import Module

from .formulas import children_fed, forward_of
from .fusion import autocast_dtype, original_of
from .tampering import bypassable_as


def is_matrix_product(linear: Module) -> bool:
    """Return whether a child is a Linear without hooks or changes by other code."""
    return bypassable_as(linear, nn.Linear) and type(linear._parameters.get("weight")) is nn.Parameter


def feeds_linears(module: Module) -> bool:
    """Return whether several Linears read the input of a module, and nothing else does."""
    children = _reading(module)
    return len(children) > 1 and all(isinstance(child, nn.Linear) for child in children)


def _reading(module: Module) -> list[Any]:
    names = children_fed(forward_of(original_of(type(module))))
    return [getattr(module, name, None) for name in names]


def cast_once(module: Module, x: Any) -> Any:
    """Return the input in autocast's dtype if several bare Linears and nothing else read the input, else unchanged.

    A hook, or a forward of another class, may read the input before the cast that torch's Linear makes.
    """
    if type(x) is not Tensor or (dtype := autocast_dtype(x)) is None:
        return x
    children = _reading(module)
    return x.to(dtype) if len(children) > 1 and all(bypassable_as(each, nn.Linear) for each in children) else x
