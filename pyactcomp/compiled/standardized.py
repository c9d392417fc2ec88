"""Inputs of norms whose groups of codes would span rows, as of a batch norm in channels-last: standardized values.

The elements of such a group are of different channels, each with a mean and a deviation of its own. The derivative
divides by the deviation again, so codes of the values are too coarse for channels that vary less. Standardized, all
channels have the same scale, as in ``functional/convolutional/batch_norm.py``. Restored, a standardized value is taken
times the deviation: the value less its mean, which is all that backward reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch import fx

from .joint import CASTS, Joint, adjacent, is_multiple, is_smaller, is_view, name_of, unscaled, value

_REDUCTIONS = {"sum", "mean", "var", "var_mean", "std", "std_mean", "linalg_vector_norm", "norm", "logsumexp"}
# What makes the other operand, by the operator that standardizes.
_SCALES = {"mul": {"rsqrt", "reciprocal"}, "div": {"sqrt"}}
# An infinity or NaN in their operand makes the result infinite, NaN or zero.
_SPREADING = {"var", "var_mean", "getitem", "mean", "sum", "add", "mul", "div", "pow", "sqrt", "rsqrt", "reciprocal"}
# Operators from a deviation back to the values, views among them.
_WALK = 16


class Statistics(NamedTuple):
    """What standardizes a value whose groups of codes would span rows.

    Attributes
    ----------
    mean : str or None
        Name of the mean of each row; None of values from which it is subtracted.
    scale : str
        Name of the deviation of each row, or of its inverse.
    is_inverse : bool
    spreads : bool
        Whether an infinity or NaN in a row leaves the scale zero, infinite or NaN, and so every restored value.
    """

    mean: str | None
    scale: str
    is_inverse: bool
    spreads: bool


def standardized(graph: fx.Graph, known: Joint, group_size: int) -> dict[str, Statistics]:
    """Return the values that the forward standardizes, and those of which it reads only the difference from a mean."""
    found: dict[str, Statistics] = {}
    for node in graph.nodes:
        makers = _SCALES.get(name_of(node))
        if makers is None or node.name in known.backward:
            continue
        is_inverse = name_of(node) == "mul"
        for centered, scale in (node.args[:2], node.args[1::-1]) if is_inverse else (node.args[:2],):
            if not _is_of_rows(scale, centered, group_size) or name_of(unscaled(scale)) not in makers:
                continue
            if _is_computed_from(scale, centered) or (_is_difference(centered) and _is_buffer(scale, known)):
                statistics = Statistics(None, scale.name, is_inverse, _spreads(scale, centered))
                found.update(_values(centered, statistics, known.tangent))
    # As twice the operand of a square.
    for node in graph.nodes:
        of_operand = found.get(node.args[0].name) if is_multiple(node) and isinstance(node.args[0], fx.Node) else None
        if of_operand is not None and of_operand.mean is None:
            found.setdefault(node.name, of_operand)
    return found


def differences_of(node: fx.Node) -> list[fx.Node] | None:
    """Return the differences from a mean that are computed from a value, or None if it has other users too."""
    found: list[fx.Node] = []
    for user in node.users:
        if name_of(user) == "sub" and user.args[0] is node:
            found.append(user)
        elif name_of(user) in CASTS and (further := differences_of(user)) is not None:
            found.extend(further)
        else:
            return None
    return found


def _values(centered: fx.Node, statistics: Statistics, tangent: Collection[str]) -> Iterator[tuple[str, Statistics]]:
    yield from ((cast.name, statistics) for cast in _casts(centered))
    source, mean = centered.args[:2] if _is_difference(centered) else (None, None)
    if not isinstance(source, fx.Node) or not isinstance(mean, fx.Node) or not is_smaller(mean, centered):
        return
    # Backward casts the value and subtracts the mean again.
    for read in _casts(source):
        yield from ((user.name, statistics) for user in read.users if _subtracts(user, read, mean))
        if _is_only_centered(read, mean, tangent):
            yield read.name, statistics._replace(mean=mean.name)


def _casts(node: fx.Node) -> Iterator[fx.Node]:
    """Yield a value in each dtype that the graph has of it."""
    while name_of(node) in CASTS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(user for user in node.users if name_of(user) in CASTS)


def _is_of_rows(statistic: object, node: object, group_size: int) -> bool:
    """Return whether a value is one number for each row of a node, in which groups of codes would span rows."""
    if not isinstance(statistic, fx.Node) or not isinstance(node, fx.Node) or not is_smaller(statistic, node):
        return False
    small, large = value(statistic), value(node)
    if small is None or large is None:
        return False
    sizes = [1] * (large.dim() - small.dim()) + list(small.shape)
    rows = {dim for dim, size in enumerate(sizes) if isinstance(size, int) and size == 1}
    return adjacent(large, rows) % group_size != 0


def _is_computed_from(scale: fx.Node, centered: fx.Node) -> bool:
    """Return whether a scale is a statistic of the values, not one of its own, as by the degrees of a graph's nodes."""
    sources = _sources(centered)
    waiting = [scale]
    for _ in range(_WALK):
        if not waiting:
            break
        node = waiting.pop(0)
        if node in sources:
            return True
        waiting.extend(node.all_input_nodes)
    return False


def _spreads(scale: fx.Node, centered: fx.Node) -> bool:
    """Return whether an infinity or NaN among the values leaves the scale zero, infinite or NaN."""
    sources = _sources(centered)
    node, is_added_to = scale, False
    while node not in sources:
        if len(node.all_input_nodes) != 1 or not (name_of(node) in _SPREADING or is_view(node)):
            return False
        # A number added to the inverse of an infinity is finite.
        if is_added_to and _is_inverse(node):
            return False
        is_added_to = is_added_to or name_of(node) == "add"
        node = node.all_input_nodes[0]
    return True


def _is_inverse(node: fx.Node) -> bool:
    name, first, last = name_of(node), node.args[0], node.args[-1]
    negative = name == "pow" and not (isinstance(last, (int, float)) and last > 0)
    return name in ("rsqrt", "reciprocal") or negative or (name == "div" and not isinstance(first, fx.Node))


def _sources(centered: fx.Node) -> set[fx.Node]:
    """Return the nodes of ``x - mean`` and of ``x``, with their casts."""
    sources = set(_casts(centered))
    if name_of(centered) == "sub" and isinstance(centered.args[0], fx.Node):
        sources.update(_casts(centered.args[0]))
    return sources


def _is_buffer(scale: fx.Node, known: Joint) -> bool:
    """Return whether a scale depends on neither data nor parameters, as that of a frozen batch norm."""
    return scale.name not in known.data and scale.name not in known.learns


def _uncast(node: fx.Node) -> fx.Node:
    """Return the value that a node is a view of, in the same dtype: on a CPU a backward reads the mean in 16 bits."""
    while is_view(node) and isinstance(node.args[0], fx.Node):
        tensor, viewed = value(node), value(node.args[0])
        if tensor is None or viewed is None or tensor.dtype is not viewed.dtype:
            break
        node = node.args[0]
    return node


def _subtracts(node: fx.Node, read: fx.Node, mean: fx.Node) -> bool:
    """Return whether a node is a value less the mean, or less another node that has computed its mean."""
    if not _is_difference(node) or node.args[0] is not read or not isinstance(node.args[1], fx.Node):
        return False
    other = _uncast(node.args[1])
    again = name_of(other) == "mean" and other.args[0] is read and _sizes(node.args[1]) == _sizes(mean)
    return again or other is _uncast(mean)


def _is_difference(node: fx.Node) -> bool:
    tensor = value(node)
    return name_of(node) == "sub" and tensor is not None and tensor.dtype is torch.float32


def _sizes(node: fx.Node) -> list[object] | None:
    tensor = value(node)
    return None if tensor is None else list(tensor.shape)


def _is_only_centered(node: fx.Node, mean: fx.Node, tangent: Collection[str]) -> bool:
    """Return whether a value, or a cast of it, is read for statistics and for its difference from the mean alone."""
    return all(
        _is_only_centered(user, mean, tangent)
        if name_of(user) in CASTS
        else _subtracts(user, node, mean) or (name_of(user) in _REDUCTIONS and user.name not in tangent)
        for user in node.users
    )
