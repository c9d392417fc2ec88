"""Squares of clipped differences, as in a squared hinge: ``target * relu(margin - distance) ** 2``.

The derivative is a multiple of the clipped difference, and the target is often zero where the difference is largest. A
group of codes has one step, set by its largest element, so the few small elements, which alone pass a gradient, are
coarse. An activation that is squared, as ReLU in some transformers, clips no difference and passes the gradient of the
large elements too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import fx

from .joint import fewest, is_multiple, is_view, name_of, value

# Softplus is decomposed into a ``where``, whose results take 16 bits anyway.
_CLIPS = {"relu", "clamp", "clamp_min", "clamp_max", "hardtanh", "maximum", "minimum", "abs"}
_SHIFTS = {"sub", "rsub", "add"}
# Factors of a product, as of ``weight * hinge * hinge``.
_FACTORS = 8


def clipped_squares(graph: fx.Graph, tangent: Collection[str]) -> set[str]:
    """Return the clipped differences that the forward squares, with their views, multiples and powers."""
    found = set()
    for node in graph.nodes:
        if node.name not in tangent:
            for squared in _squared(node):
                clip = _source(squared)
                if _is_clipped_difference(clip):
                    found.add(clip.name)
    for node in graph.nodes:
        if node.name not in tangent and (is_view(node) or is_multiple(node) or name_of(node) == "pow"):
            found.update(node.name for source in node.all_input_nodes[:1] if source.name in found)
    return found


def _squared(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the values of which an operator takes a square or a higher power."""
    if name_of(node) == "pow":
        base, power = node.args[0], node.args[1]
        if isinstance(base, fx.Node) and isinstance(power, (int, float)) and power > 1:
            yield base
    elif name_of(node) == "mul":
        seen: set[fx.Node] = set()
        waiting = list(node.args)
        for _ in range(_FACTORS):
            factor = waiting.pop() if waiting else None
            if not isinstance(factor, fx.Node):
                continue
            if factor in seen:
                yield factor
            seen.add(factor)
            if name_of(factor) == "mul":
                waiting.extend(factor.args)


def _source(node: fx.Node) -> fx.Node:
    """Return the value that a node is a view or a multiple of."""
    while (is_view(node) or is_multiple(node)) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _is_clipped_difference(clip: fx.Node) -> bool:
    """Return whether a value is a difference clipped once, or from both sides."""
    if name_of(clip) not in _CLIPS:
        return False
    operands = [_source(operand) for operand in clip.all_input_nodes]
    return any(_is_shifted(operand) or _is_clipped_difference(operand) for operand in operands)


def _is_shifted(node: fx.Node) -> bool:
    """Return whether a value is the difference of two others, or a value shifted by a constant.

    A statistic or a parameter with fewer elements, as the mean of a row, is no such other value.
    """
    if name_of(node) not in _SHIFTS:
        return False
    if any(_is_constant(argument) for argument in node.args[:2]):
        return True
    return name_of(node) != "add" and not _is_smaller(node.args[1], node)


def _is_constant(operand: object) -> bool:
    tensor = value(operand)
    return isinstance(operand, (int, float)) or (tensor is not None and not tensor.dim())


def _is_smaller(operand: object, result: fx.Node) -> bool:
    small, large = value(operand), value(result)
    return small is None or large is None or fewest(small.shape) < fewest(large.shape)
