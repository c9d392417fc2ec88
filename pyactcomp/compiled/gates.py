"""Functions that saturate on both sides: their gradient is largest where the operand is small.

A group of codes has one step, set by its largest element, so the few small elements, which alone pass a gradient, are
coarse. An activation that multiplies its own operand by such a function, as GELU, SiLU and Mish, passes the gradient of
the large elements too, and these outweigh the others.

A loss subtracts such a function from its target, or from one. Once it is low, all elements are large, and the gradient
is a difference as small as the exponential of the operand: bfloat16 of an operand of 9 moves it by 3 %, float16 by
0.4 %.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import fx

from ..readers.forms import BFLOAT16, LOG, Form
from .joint import CASTS, VIEWS, is_elementwise, name_of

_SATURATING = {"tanh", "sigmoid"}
# Each element of a result is the operand's at the same place.
_IN_PLACE = {"view", "_unsafe_view", "reshape", "clone", "alias", "detach"} | CASTS
_ARITHMETIC = {"add", "sub", "mul", "div", "neg", "reciprocal"}
# Operators of an activation, as written by hand or decomposed; Mish takes 12.
_WALK = 24


def saturating(graph: fx.Graph, backward: Collection[str], tangent: Collection[str]) -> dict[str, Form]:
    """Return the forms for operands of tanh, sigmoid and a sigmoid's exponential that do not gate their operand.

    Those in the backward are of losses: elsewhere a derivative reads the result that the forward has. ``tangent`` names
    the values that depend on one.
    """
    found = {}
    for node in graph.nodes:
        if name_of(node) in _SATURATING or (name_of(node) == "exp" and is_sigmoid(node)):
            of_loss = node.name in backward
            outside: Collection[str] = () if of_loss else backward
            if not _gates_itself(node, outside, tangent):
                found[node.name] = LOG if of_loss or _is_subtracted(node, outside) else BFLOAT16
    return found


def is_sigmoid(exp: fx.Node) -> bool:
    """Return whether an exponential serves only 1 / (1 + exp(-x))."""
    if name_of(exp.args[0]) != "neg":
        return False
    for user in exp.users:
        if name_of(user) != "add" or 1 not in [a for a in user.args if isinstance(a, (int, float))]:
            return False
        if not all(name_of(u) == "reciprocal" or (name_of(u) == "div" and u.args[1] is user) for u in user.users):
            return False
    return True


def _uses(node: fx.Node, outside: Collection[str]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the users of a value, scaled and shifted, each with the operand that is the value."""
    waiting, seen = [node], {node}
    while waiting:
        gate = waiting.pop()
        for user in gate.users:
            if user.name in outside or user in seen:
                continue
            yield user, gate
            if user.all_input_nodes == [gate] and name_of(user) in _IN_PLACE | _ARITHMETIC:
                seen.add(user)
                waiting.append(user)


def _gates_itself(node: fx.Node, outside: Collection[str], tangent: Collection[str]) -> bool:
    """Return whether a value is multiplied by a function of it, which may be scaled and shifted.

    The gradient from above, ``tangent``, is no such value: that of a loss has the target as a factor.
    """
    sources = _computed_from(node.args[0], node)
    return any(
        name_of(user) in ("mul", "div")
        and any(
            _computed_from(other, node) & sources
            for other in user.all_input_nodes
            if other is not gate and other.name not in tangent
        )
        for user, gate in _uses(node, outside)
    )


def _is_subtracted(node: fx.Node, outside: Collection[str]) -> bool:
    """Return whether a function is subtracted from something, or something from it."""
    return any(name_of(user) in ("sub", "rsub") for user, _ in _uses(node, outside))


def _computed_from(value: object, gate: fx.Node) -> set[fx.Node]:
    """Return a value and the values at the same place that it is computed from, up to the gate."""
    found: set[fx.Node] = set()
    waiting = [value]
    while waiting and len(found) < _WALK:
        node = waiting.pop(0)
        if not isinstance(node, fx.Node) or node is gate or node in found:
            continue
        found.add(node)
        if is_elementwise(node) and name_of(node) not in VIEWS - _IN_PLACE - {"where"}:
            waiting.extend(node.all_input_nodes)
    return found
