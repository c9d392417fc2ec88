"""Saved values with the same elements: stored once, and made from one another in backward."""

from __future__ import annotations

import torch
from torch import fx

from .costs import FLOATS
from .joint import CASTS, Joint, first_operator, name_of, new_input, outputs_of, storage_order, value
from .masks import drop

# Views of all elements of a tensor, in the same memory.
_WHOLE_VIEWS = {"view", "_unsafe_view", "permute", "transpose", "t", "squeeze", "unsqueeze", "alias", "detach"}


def first_use(graph: fx.GraphModule, entry: fx.Node) -> fx.Node:
    """Return the first reader of an input."""
    first: fx.Node = next((node for node in graph.graph.nodes if node in entry.users), first_operator(graph))
    return first


def share_computed(joint: fx.GraphModule, known: Joint) -> None:
    """Let backward read what the forward computes from a contiguous copy of the same operand.

    Of rows that lie apart in memory a norm's forward reads a copy, and its derivative the rows. Saved for both, the
    normalized rows would be stored twice.
    """
    first: dict[object, fx.Node] = {}
    same: dict[fx.Node, fx.Node] = {}
    for node in list(joint.graph.nodes):
        if node.op != "call_function" or value(node) is None or node.name in known.tangent:
            continue
        if name_of(node) == "clone":
            same[node] = same.get(node.args[0], node.args[0])
            continue
        tags = getattr(node.target, "tags", ())
        pointwise = torch.Tag.pointwise in tags or name_of(node) == "convert_element_type"
        if not pointwise or torch.Tag.nondeterministic_seeded in tags or node.kwargs:
            continue
        read = tuple(same.get(each, each) if isinstance(each, fx.Node) else repr(each) for each in node.args)
        found = first.setdefault((node.target, read), node)
        if found is node or node.name not in known.backward:
            continue
        with joint.graph.inserting_before(node):
            replacement = _laid_out(joint, found, node)
        if replacement is not None:
            same[replacement] = found
            node.replace_all_uses_with(replacement)


def separate_indices(joint: fx.GraphModule, known: Joint) -> None:
    """Give each reader of equal index vectors a view of its own, as the rolls of shifted windows in equal blocks.

    Torch merges equal vectors, and saves the result of an operator one of whose operands is also read far before it:
    all rolls would be saved, beside the tensors that they roll.
    """
    numbers: dict[str, int] = {}
    formulas: dict[fx.Node, int] = {}
    views: dict[int, fx.Node] = {}
    for node in list(joint.graph.nodes):
        if node.op == "call_function" and node.name not in known.data:
            # Equal for equal formulas.
            read = [formulas.get(each, each) if isinstance(each, fx.Node) else repr(each) for each in node.args]
            formulas[node] = numbers.setdefault(f"{node.target}({read}, {node.kwargs})", len(numbers))
        for index in node.args[1] if name_of(node) == "index" else ():
            formula = formulas.get(index)
            if formula is None:
                continue
            view = index
            if formula in views:
                # Torch never bans recomputing a view, and merges equal views: each is a view of the one before.
                with joint.graph.inserting_before(node):
                    view = joint.graph.call_function(torch.ops.aten.alias.default, (views[formula],))
                view.meta["val"] = torch.ops.aten.alias.default(value(index))
                node.replace_input_with(index, view)
            views[formula] = view


def _laid_out(joint: fx.GraphModule, found: fx.Node, node: fx.Node) -> fx.Node | None:
    """Return a node with the elements of one and the strides of another, or None where the strides have gaps."""
    source, wanted = value(found), value(node)
    assert source is not None
    assert wanted is not None
    if source.stride() == wanted.stride():
        return found
    order = storage_order(wanted)
    if order is None or not wanted.permute(order).is_contiguous():
        return None
    graph, back = joint.graph, [order.index(dim) for dim in range(len(order))]
    permuted = graph.call_function(torch.ops.aten.permute.default, (found, order))
    dense = graph.call_function(torch.ops.aten.clone.default, (permuted,), {"memory_format": torch.contiguous_format})
    result = graph.call_function(torch.ops.aten.permute.default, (dense, back))
    permuted.meta["val"] = source.permute(order)
    dense.meta["val"] = permuted.meta["val"].clone(memory_format=torch.contiguous_format)
    result.meta["val"] = dense.meta["val"].permute(back)
    return result


def share_casts(forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> None:
    """Save only the narrower of a value and its cast to a wider dtype: backward casts again."""
    end = forward.graph.find_nodes(op="output")[0]
    outputs = outputs_of(forward)
    names = {node.name: node for node in outputs[num_outputs:] if value(node) is not None}
    entries = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    gone = set()
    for name, node in names.items():
        source = node.args[0] if name_of(node) in CASTS else None
        wide, narrow = value(node), value(source)
        if wide is None or narrow is None or not isinstance(source, fx.Node) or source.name not in names:
            continue
        exact = narrow.dtype in FLOATS[1:] and wide.dtype is torch.float32
        if not exact or wide.stride() != narrow.stride() or name not in entries or source.name not in entries:
            continue
        entry = entries[name]
        with backward.graph.inserting_before(first_use(backward, entry)):
            cast = backward.graph.node_copy(node, {source: entries[source.name]}.__getitem__)
        cast.meta = dict(node.meta)
        entry.replace_all_uses_with(cast)
        backward.graph.erase_node(entry)
        gone.add(name)
    if gone:
        drop(end, outputs, num_outputs, gone)


def share_views(forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> None:
    """Save one of several views of the same elements: as views they share memory, as codes they would not."""
    end = forward.graph.find_nodes(op="output")[0]
    outputs = outputs_of(forward)
    entries = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    bases: dict[fx.Node, list[tuple[fx.Node, list[fx.Node]]]] = {}
    for node in outputs[num_outputs:]:
        if value(node) is not None and node.name in entries:
            base, chain = _view_chain(node)
            bases.setdefault(base, []).append((node, chain))
    gone = set()
    for base, found in bases.items():
        if len(found) == 1:
            continue
        if all(chain for _, chain in found):
            first = found[0][0]
            outputs[outputs.index(first)] = base
            entries[base.name] = new_input(backward, entries[first.name], base)
            if first.meta.get("saved_tensor_with_no_vc_check"):
                base.meta["saved_tensor_with_no_vc_check"] = True
        for node, chain in found:
            if not chain:
                continue
            entry, made = entries[node.name], {base: entries[base.name]}
            with backward.graph.inserting_before(first_use(backward, entry)):
                for each in chain:
                    made[each] = backward.graph.node_copy(each, made.__getitem__)
            entry.replace_all_uses_with(made[node])
            backward.graph.erase_node(entry)
            gone.add(node.name)
    if gone:
        drop(end, outputs, num_outputs, gone)


def _view_chain(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Return the node of which another is a view of all elements, and the views between, that one last."""
    chain: list[fx.Node] = []
    while name_of(node) in _WHOLE_VIEWS and node.all_input_nodes == [node.args[0]]:
        chain.insert(0, node)
        node = node.all_input_nodes[0]
    return node, chain
