"""Linears that a form may take for what they compute: matrix products of one input."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from torch.nn import Module

from ..functional._linears import linears
from .formulas import children_fed, forward_of
from .fusion import autocast_dtype, original_of
from .untouched import hooked, plain


def is_matrix_product(linear: Module | None) -> bool:
    """Return whether a child is a Linear, and nothing else computes or sees its output."""
    return plain(linear, nn.Linear) and type(cast(Module, linear)._parameters.get("weight")) is nn.Parameter


def multiplied(x: Tensor, *children: Module | None) -> tuple[Tensor, ...] | None:
    """Return the products of Linears with ``x`` from :func:`linears`, or None where these are not what they compute.

    They have no bias and no hooks then, and multiply ``x`` as it is with weights as they are.
    """
    weights = []
    for child in children:
        if child is None or not is_matrix_product(child) or hooked(child) or child._parameters.get("bias") is not None:
            return None
        weights.append(cast(Tensor, child._parameters["weight"]))
    if autocast_dtype(x) is not None or any(weight.dtype is not x.dtype for weight in weights):
        return None
    return linears(x, *weights)


def fed_by(module: Module) -> list[str]:
    """Return the names of the children that a module's input goes to, and nowhere else, in a fixed order."""
    return sorted(children_fed(forward_of(original_of(type(module)))))


def feeds_linears(module: Module) -> bool:
    """Return whether the input of a module goes to several Linears, and nowhere else."""
    children = [getattr(module, name, None) for name in fed_by(module)]
    return len(children) > 1 and all(isinstance(child, nn.Linear) for child in children)


def cast_once(module: Module, x: Any) -> Any:
    """Return the input as the Linears that it goes to would cast it, if it goes to several, and nowhere else."""
    if type(x) is not Tensor or (dtype := autocast_dtype(x)) is None:
        return x
    return x.to(dtype) if feeds_linears(module) else x
