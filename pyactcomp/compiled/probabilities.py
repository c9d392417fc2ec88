"""Probabilities and their logarithms in a graph, where softmax and log_softmax are decomposed."""

from __future__ import annotations

from torch import fx

from .joint import name_of, unviewed


def is_log_probability(node: fx.Node) -> bool:
    """Return whether the values are logarithms of probabilities: a value less the log of the sum of exponentials."""
    if name_of(node) != "sub":
        return name_of(node) == "_log_softmax"
    exponential = _operand("exp", _operand("sum", _operand("log", node, 1)))
    return exponential is not None and _behind(exponential) is _behind(node)


def is_probability(node: fx.Node) -> bool:
    """Return whether the values lie between zero and one: a softmax, or the exponential of a log-probability."""
    name = name_of(node)
    if name == "exp":
        made = _behind(node)
        return made is not None and is_log_probability(made)
    if name == "div":
        exponential = _operand("exp", _operand("sum", node, 1))
        return exponential is not None and exponential is _behind(node)
    return name == "_softmax"


def _behind(node: fx.Node, argument: int = 0) -> fx.Node | None:
    """Return the node that made an operand, behind views."""
    operand = node.args[argument]
    return unviewed(operand) if isinstance(operand, fx.Node) else None


def _operand(name: str, node: fx.Node | None, argument: int = 0) -> fx.Node | None:
    """Return the node that made an operand, behind views, if it is this operator."""
    made = None if node is None else _behind(node, argument)
    return made if made is not None and name_of(made) == name else None
