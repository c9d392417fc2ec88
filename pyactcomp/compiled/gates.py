"""Functions that saturate on both sides: their gradient is largest where the operand is small.

A group of codes has one step, set by its largest element, so the few small elements, which alone pass a gradient, are
coarse. An activation that multiplies its own operand by such a function, as GELU, SiLU and Mish, passes the gradient of
the large elements too, and these outweigh the others.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from .joint import VIEWS, is_elementwise, name_of

_SATURATING = {"tanh", "sigmoid"}
# Each element of a result is the operand's at the same place.
_IN_PLACE = {"view", "_unsafe_view", "reshape", "clone", "alias", "detach", "_to_copy", "convert_element_type"}
_ARITHMETIC = {"add", "sub", "mul", "div", "neg", "reciprocal"}
# Operators of an activation, as written by hand or decomposed; Mish takes 12.
_WALK = 24


def saturating(graph: fx.Graph, backward: Collection[str]) -> set[str]:
    """Return the names of tanh, sigmoid and a sigmoid's exponential in the forward that do not gate their operand."""
    return {
        node.name
        for node in graph.nodes
        if node.name not in backward
        and (name_of(node) in _SATURATING or (name_of(node) == "exp" and is_sigmoid(node)))
        and not _gates_itself(node, backward)
    }


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


def _gates_itself(node: fx.Node, backward: Collection[str]) -> bool:
    """Return whether the forward multiplies a value by a function of it, which may be scaled and shifted."""
    sources = _computed_from(node.args[0], node)
    waiting, seen = [node], {node}
    while waiting:
        gate = waiting.pop()
        for user in gate.users:
            if user.name in backward or user in seen:
                continue
            others = [operand for operand in user.all_input_nodes if operand is not gate]
            if name_of(user) in ("mul", "div") and any(_computed_from(o, node) & sources for o in others):
                return True
            if not others and name_of(user) in _IN_PLACE | _ARITHMETIC:
                seen.add(user)
                waiting.append(user)
    return False


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
