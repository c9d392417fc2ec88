"""Differences of two values, and squares of clipped ones: of these only small elements may get a gradient.

The gradient of a distance passes where the distance is small: for the nearest point, the inliers of a robust loss such
as Tukey's, ``where(d.abs() < 1, 1 - (1 - d**2) ** 3, 1)``, and a kernel with a radius. Backward multiplies by multiples
and polynomials of the difference, such as ``(1 - d**2) ** 2``.

A squared hinge clips a difference: ``target * relu(margin - distance) ** 2``. The derivative is a multiple of the
clipped difference, and the target is often zero where the difference is largest. A group of codes has one step, set by
its largest element, so the few small elements, which alone pass a gradient, are coarse. An activation that is squared,
as ReLU in some transformers, clips no difference and passes the gradient of the large elements too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import fx

from .joint import VIEWS, Joint, fewest, is_multiple, is_view, name_of, unscaled, value
from .needs import SELECTING, is_broadcast, is_difference

# Softplus is decomposed into a ``where``, whose results take 16 bits anyway.
_CLIPS = {"relu", "clamp", "clamp_min", "clamp_max", "hardtanh", "maximum", "minimum", "abs"}
_SHIFTS = {"sub", "rsub", "add"}
_MOVED = VIEWS | SELECTING | {"getitem"}
# Operators that make multiples and polynomials of a difference, and the lengths of vectors of differences.
_POLYNOMIALS = {"mul", "div", "neg", "pow", "abs", "addcmul", "sum", "mean", "linalg_vector_norm"} | _SHIFTS
# Factors of a product, as of ``weight * hinge * hinge``.
_FACTORS = 8


def differences(graph: fx.Graph, known: Joint) -> set[str]:
    """Return the differences of two values that the forward computes, with their views, multiples and polynomials."""
    found: set[str] = set()
    for node in graph.nodes:
        if node.name in known.tangent:
            continue
        if is_difference(node) or (name_of(node) in _MOVED | _POLYNOMIALS and _is_made_of(node, found, known)):
            found.add(node.name)
    return found


def _is_made_of(node: fx.Node, found: Collection[str], known: Joint) -> bool:
    """Return whether all operands that count are differences.

    A factor that is constant, or has fewer elements, as a row of scales, does not count. A product with another value
    that learns may be an activation of the difference.
    """
    operands = [operand for operand in node.all_input_nodes if operand.name in known.learns] or node.all_input_nodes
    if name_of(node) in _POLYNOMIALS:
        operands = [operand for operand in operands if not is_broadcast(operand, node)]
    return bool(operands) and all(operand.name in found for operand in operands)


def clipped_squares(graph: fx.Graph, tangent: Collection[str]) -> set[str]:
    """Return the clipped differences that the forward squares, with their views, multiples and powers."""
    found = set()
    for node in graph.nodes:
        if node.name not in tangent:
            for squared in _squared(node):
                clip = unscaled(squared)
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


def _is_clipped_difference(clip: fx.Node) -> bool:
    """Return whether a value is a difference clipped once, or from both sides."""
    if name_of(clip) not in _CLIPS:
        return False
    operands = [unscaled(operand) for operand in clip.all_input_nodes]
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
