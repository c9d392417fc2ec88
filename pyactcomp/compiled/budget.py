"""Meets ``activation_memory_budget``: backward runs operators again that torch saves the results of.

Torch's own plan for a budget gives up its bounds on chains of recomputed values first, takes each value's bytes as
saved whether or not it was, and so stores more at a budget of 0.9 than without one where values are codes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from .joint import value


class Kind(NamedTuple):
    """Equal operators of equal blocks, in the order of the forward, and the cost of running all of them again."""

    nodes: list[fx.Node]
    cost: float


def save_within(
    budget: float,
    nodes: Collection[fx.Node],
    solve: Callable[[Collection[fx.Node]], tuple[list[fx.Node], int]],
    cost: Callable[[fx.Node], float],
) -> list[fx.Node] | None:
    """Return the values to save, or None where the budget cannot be met so.

    Kinds of operators run again in the order of the bytes that they save for their cost. Of the last kind only as many
    do as the budget takes, the first ones of the forward: backward would read their results last.

    Parameters
    ----------
    budget : float
        Share of the bytes that are saved without a budget.
    nodes : collection of fx.Node
        Operators of the forward that run again only for a budget, in order.
    solve : callable
        Maps operators to run again to the values to save, and their bytes.
    cost : callable
        Maps an operator to the cost of running it.
    """
    saved, least = solve(())
    limit = budget * least
    ranked = []
    for kind in _kinds(nodes, cost):
        less = least - solve(kind.nodes)[1]
        if less > 0:
            ranked.append((less / kind.cost, kind.nodes))
    again: list[fx.Node] = []
    for _, members in sorted(ranked, key=lambda found: -found[0]):
        saved, size = solve(again + members)
        if size <= limit:
            few, many = 0, len(members)
            while many - few > 1:
                middle = (few + many) // 2
                part, size = solve(again + members[:middle])
                if size <= limit:
                    many, saved = middle, part
                else:
                    few = middle
            return saved
        if size < least:
            again, least = again + members, size
    return None


def _kinds(nodes: Collection[fx.Node], cost: Callable[[fx.Node], float]) -> list[Kind]:
    kinds: dict[object, list[fx.Node]] = {}
    for node in nodes:
        if _may_run_again(node):
            layouts = tuple(_layout(each) for each in (node, *node.all_input_nodes))
            kinds.setdefault((node.target, layouts, _readers(node)), []).append(node)
    return [Kind(members, max(cost(members[0]), 1.0) * len(members)) for members in kinds.values()]


def _may_run_again(node: fx.Node) -> bool:
    """Return whether an operator gives the same result again, and nobody asked to save the result."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return False
    drawn = torch.Tag.nondeterministic_seeded in target.tags
    return not drawn and node.meta.get("recompute") is not CheckpointPolicy.MUST_SAVE


def _layout(node: fx.Node) -> object:
    tensor = value(node)
    return None if tensor is None else (tensor.dtype, *map(str, (*tensor.shape, *tensor.stride())))


def _readers(node: fx.Node) -> tuple[str, ...]:
    return tuple(sorted(str(user.target) for user in node.users if user.op == "call_function"))
