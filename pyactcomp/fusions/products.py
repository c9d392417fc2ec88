"""Linears that a form may take for what they compute: matrix products of one input."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from torch.nn import Module

from ..functional._linears import linears
from .formulas import children_fed, forward_of
from .fusion import autocast_dtype, original_of
from .untouched import exempted, plain


def is_matrix_product(linear: Module) -> bool:
    """Return whether a child is a Linear, and nothing else computes or sees its output."""
    return plain(linear, nn.Linear) and type(linear._parameters.get("weight")) is nn.Parameter


def multiplied(x: Tensor, *children: Module) -> tuple[Tensor, ...] | None:
    """Return the products of Linears with ``x`` from :func:`linears`, or None where these are not what they compute.

    They are matrix products without a bias then, compressed as all else is, of ``x`` and of weights as they are.
    """
    if autocast_dtype(x) is not None or not all(_multiplies(x, child) for child in children):
        return None
    return linears(x, *(cast(Tensor, child.weight) for child in children))


def _multiplies(x: Tensor, child: Any) -> bool:
    return is_matrix_product(child) and not exempted(child) and child.bias is None and child.weight.dtype is x.dtype


def feeds_linears(module: Module) -> bool:
    """Return whether the input of a module goes to several Linears, and nowhere else."""
    names = children_fed(forward_of(original_of(type(module))))
    return len(names) > 1 and all(isinstance(getattr(module, name, None), nn.Linear) for name in names)


def cast_once(module: Module, x: Any) -> Any:
    """Return the input as the Linears that it goes to would cast it, if it goes to several, and nowhere else."""
    if type(x) is not Tensor or (dtype := autocast_dtype(x)) is None:
        return x
    return x.to(dtype) if feeds_linears(module) else x
