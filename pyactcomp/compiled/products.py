"""Products of matrices in backward that sum fewer elements than a group, as of values in heads of 16: 16 bits.

Such sums do not average the errors of codes. In attention with softmax these errors stay small beside the gradient (1 %
with heads of 8 and 16), so its operands take codes. Without softmax, as in RetNet, where a norm of each head follows,
gradients of queries and keys were 2 to 30 % off.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import fx

from .divisors import is_at_least_one
from .joint import VIEWS, is_elementwise, is_view, name_of, unviewed, value

_PRODUCTS = {"bmm", "baddbmm"}
# Operators between a softmax and a product: masks, dropout, casts.
_WALK = 16
_HANDED_ON = VIEWS | {"mul", "div", "getitem", "native_dropout", "masked_fill"}


def short_products(graph: fx.Graph, tangent: Collection[str], group_size: int) -> set[str]:
    """Return the forward's operands of backward's products with short sums, those of a softmax's attention aside."""
    found = set()
    for node in graph.nodes:
        if node.name in tangent and name_of(node) in _PRODUCTS and _is_short(node, group_size):
            for operand in node.args[-2:]:
                if isinstance(operand, fx.Node) and operand.name not in tangent and not _attends(operand, tangent):
                    found.add(operand.name)
    return found


def _is_short(product: fx.Node, group_size: int) -> bool:
    rows = value(product.args[-2])
    size = rows.shape[-1] if rows is not None else group_size
    return isinstance(size, int) and size < group_size


def _attends(operand: fx.Node, tangent: Collection[str]) -> bool:
    """Return whether the forward multiplies a value by probabilities, or computes scores of a softmax from it."""
    for product, own in _forward_products(unviewed(operand), tangent):
        others = [factor for factor in product.args[-2:] if isinstance(factor, fx.Node) and factor is not own]
        if any(map(_is_from_softmax, others)) or _is_read_by_softmax(product, tangent):
            return True
    return False


def _forward_products(source: fx.Node, tangent: Collection[str]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the forward's products of a value, or of a view of it, each with the operand."""
    waiting = [source]
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if user.name in tangent:
                continue
            if name_of(user) in _PRODUCTS:
                yield user, node
            elif is_view(user):
                waiting.append(user)


def _is_from_softmax(node: fx.Node) -> bool:
    waiting = [node]
    for _ in range(_WALK):
        if not waiting:
            break
        node = waiting.pop(0)
        name = name_of(node)
        divisor = node.args[1] if name == "div" else None
        if name == "_softmax" or (name_of(divisor) == "sum" and _is_large(divisor)):
            return True
        if name in _HANDED_ON:
            waiting.extend(node.all_input_nodes)
    return False


def _is_large(divisor: object) -> bool:
    return isinstance(divisor, fx.Node) and is_at_least_one(divisor, False)


def _is_read_by_softmax(node: fx.Node, tangent: Collection[str]) -> bool:
    waiting = [node]
    for _ in range(_WALK):
        if not waiting:
            break
        for user in waiting.pop(0).users:
            if name_of(user) in ("_softmax", "amax"):
                return True
            if user.name not in tangent and is_elementwise(user):
                waiting.append(user)
    return False
