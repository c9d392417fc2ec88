"""Comparisons of the backward, computed in the forward from exact values and saved in bits."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from ..torch_private.partitions import is_tangent
from .joint import COMPARISONS, first_operator, name_of, new_input, outputs_of, value

_LOGICAL = {"logical_not", "logical_and", "logical_or", "bitwise_and", "bitwise_or", "bitwise_not"}


def hoist(forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int, rounded: Collection[str]) -> set[str]:
    """Move each comparison that reads a rounded value from the backward to the forward.

    Parameters
    ----------
    forward, backward : fx.GraphModule
        Changed in place.
    num_outputs : int
        Outputs of the forward that are not saved.
    rounded : collection of str
        Saved values to be stored in fewer bits.

    Returns
    -------
    set of str
        Results of ReLU of which backward asks only whether they are positive: the codec can keep that.
    """
    end = forward.graph.find_nodes(op="output")[0]
    saved = {node.name: node for node in outputs_of(forward)[num_outputs:] if value(node) is not None}
    positive, moved = _find(backward, saved, rounded)
    copier = _Copier(forward)
    first = next((node for node in backward.graph.find_nodes(op="placeholder") if node.name in saved), None)
    masks = []
    for comparison in moved:
        mask = copier.copy(comparison)
        mask._rename(f"mask_{comparison.name}")
        comparison.replace_all_uses_with(new_input(backward, first, mask))
        backward.graph.erase_node(comparison)
        masks.append(mask)
    if masks:
        _insert(end, outputs_of(forward), num_outputs, masks)
        backward.graph.eliminate_dead_code()
        drop(end, outputs_of(forward), num_outputs, _unread(backward, saved))
    return positive


def _find(
    backward: fx.GraphModule, saved: dict[str, fx.Node], rounded: Collection[str]
) -> tuple[set[str], list[fx.Node]]:
    positive: set[str] = set()
    moved: list[fx.Node] = []
    tangent: set[fx.Node] = set()
    affected: set[fx.Node] = set()
    for node in backward.graph.nodes:
        if node.op == "placeholder":
            if is_tangent(node):
                tangent.add(node)
            if node.name in rounded:
                affected.add(node)
            continue
        if any(source in tangent for source in node.all_input_nodes):
            tangent.add(node)
        if any(source in affected for source in node.all_input_nodes):
            affected.add(node)
        result = value(node)
        if node not in affected or node in tangent or result is None or result.dtype is not torch.bool:
            continue
        if name_of(node) not in COMPARISONS | _LOGICAL:
            continue
        affected.discard(node)
        source = node.args[0]
        is_relu = isinstance(source, fx.Node) and source.name in rounded and name_of(saved[source.name]) == "relu"
        if is_relu and name_of(node) in ("le", "gt") and node.args[1] == 0:
            positive.add(source.name)
        else:
            moved.append(node)
    return positive, moved


class _Copier:
    """Copies nodes of the backward into the forward, each right after the last value that the node reads.

    Far from the kernels that compute the same values, a copy fuses with none: Inductor fuses no distant nodes.
    """

    def __init__(self, forward: fx.GraphModule) -> None:
        self.graph = forward.graph
        self.nodes = {node.name: node for node in forward.graph.nodes}
        # places: for each node, the position in the forward after which it stands. ends: the last node at a position.
        self.places = {node: place for place, node in enumerate(forward.graph.nodes)}
        self.ends = dict(enumerate(forward.graph.nodes))
        # Nothing stands between inputs.
        self.start = max(self.places[first_operator(forward)] - 1, 0)

    def copy(self, node: fx.Node) -> fx.Node:
        """Return the node of the forward that computes a node of the backward; add one where there is none."""
        found: fx.Node | None = self.nodes.get(node.name)
        if found is not None and (node.op == "placeholder" or _is_same(node, found)):
            return found
        sources = {source: self.copy(source) for source in node.all_input_nodes}
        place = max([self.start, *(self.places[source] for source in sources.values())])
        with self.graph.inserting_after(self.ends[place]):
            copy: fx.Node = self.graph.node_copy(node, sources.__getitem__)
        copy.meta = {key: found for key, found in node.meta.items() if key != "autograd_backward"}
        self.places[copy] = place
        self.ends[place] = self.nodes[node.name] = copy
        return copy


def _is_same(node: fx.Node, other: fx.Node) -> bool:
    """Return whether nodes of both graphs, of one name, come from one node of the joint graph."""
    inputs = [[source.name for source in each.all_input_nodes] for each in (node, other)]
    return node.target == other.target and inputs[0] == inputs[1]


def _insert(end: fx.Node, outputs: list[Any], num_outputs: int, masks: list[fx.Node]) -> None:
    """Save masks before the other tensors, so tensors without version check stay last."""
    at = next(k for k, node in enumerate(outputs) if k >= num_outputs and value(node) is not None)
    end.args = ((*outputs[:at], *masks, *outputs[at:]),)
    if "desc" in end.meta:
        descriptions = list(end.meta["desc"])
        end.meta["desc"] = [*descriptions[:at], *[descriptions[at]] * len(masks), *descriptions[at:]]


def _unread(backward: fx.GraphModule, saved: dict[str, fx.Node]) -> set[str]:
    """Erase the inputs of the backward that only comparisons read; return their names."""
    unread = [n for n in backward.graph.find_nodes(op="placeholder") if not n.users and n.name in saved]
    for node in unread:
        backward.graph.erase_node(node)
    return {node.name for node in unread}


def drop(end: fx.Node, outputs: list[Any], num_outputs: int, gone: Collection[str]) -> None:
    """Save some tensors no more."""
    left = [k for k, node in enumerate(outputs) if k < num_outputs or getattr(node, "name", None) not in gone]
    if "desc" in end.meta:
        end.meta["desc"] = [end.meta["desc"][k] for k in left]
    end.args = (tuple(outputs[k] for k in left),)
