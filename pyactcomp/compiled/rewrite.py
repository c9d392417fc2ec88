"""Rewrites the forward and the backward graph: saved values leave as codes, 16 bits or bits, and are restored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, fx

from ..config import Config
from ..torch_private.partitions import traced
from .activations import Traces, differentiate, gelu_of
from .away import leave, may_leave
from .graphs import SavedValue
from .joint import Joint, first_operator, name_of, nbytes, new_input, outputs_of, value
from .masks import hoist
from .plans import Plan, living_memory, memory_of, plans_of
from .rows import is_summed_by_rows
from .sharing import first_use, share_casts, share_views
from .standardized import differences_of
from .uses import Uses


def rewrite(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    num_outputs: int,
    known: Joint,
    config: Config,
    uses: Uses,
    tape: int,
) -> tuple[SavedValue, ...]:
    """Rewrite both graphs in place; return what they save, parameters and other static inputs aside.

    With the number of a ``tape`` the stored values leave for the host.
    """
    share_casts(forward, backward, num_outputs)
    share_views(forward, backward, num_outputs)
    plans, _ = plans_of(forward, backward, num_outputs, known, config, uses, set())
    saved_nodes = outputs_of(forward)[num_outputs:]
    before = {node.name: nbytes(tensor) for node in saved_nodes if (tensor := value(node)) is not None}
    rounded = {name for name, plan in plans.items() if plan.form in ("codes", "16 bits")}
    positive = hoist(forward, backward, num_outputs, rounded)
    plans, reasons = plans_of(forward, backward, num_outputs, known, config, uses, positive)
    left = {name for name, plan in plans.items() if plan.form in ("codes", "16 bits")}
    # A reader may be gone with its comparison; the rest may only then fit in codes, after their comparisons stayed.
    for name in left - rounded:
        del plans[name]
        reasons[name] = "compared in backward"
    values = []
    leaving = []
    living = living_memory(forward, known)
    traces: Traces = {}
    end = forward.graph.find_nodes(op="output")[0]
    outputs = outputs_of(forward)
    descriptions = list(end.meta.get("desc") or [None] * len(outputs))
    entries = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    saved, described = list(outputs[:num_outputs]), descriptions[:num_outputs]
    for node, description in zip(outputs[num_outputs:], descriptions[num_outputs:], strict=True):
        tensor = value(node)
        plan = None if tensor is None else plans.get(node.name)
        if tape and plan is not None and plan.form == "kept":
            plan = None  # what leaves is copied anyway
        stored = [node] if plan is None else _store(forward, backward, node, entries[node.name], plan, traces)
        saved.extend(stored)
        described.extend([description] * len(stored))
        parts = stored if plan is None else stored[: len(plan.parts)]
        leaves = bool(tape) and tensor is not None and may_leave(parts, config.min_bytes)
        leaves = leaves and (plan is not None or memory_of(node) not in living)
        if leaves:
            leaving.append(parts)
        if tensor is not None and node.name not in known.static:
            after = sum(nbytes(part) for part in map(value, stored) if part is not None)
            form, reason = "kept" if plan is None else plan.form, reasons.get(node.name, "")
            shape = tuple(size if isinstance(size, int) else str(size) for size in tensor.shape)
            size = before.get(node.name, nbytes(tensor))
            where = "host" if leaves else "device"
            values.append(SavedValue(node.name, name_of(node), tensor.dtype, shape, size, after, form, reason, where))
    end.args = (tuple(saved),)
    if "desc" in end.meta:
        end.meta["desc"] = described
    leave(forward, backward, num_outputs, leaving, tape)
    for graph in (forward, backward):
        graph.graph.lint()
        graph.recompile()
    return tuple(values)


def _store(
    forward: fx.GraphModule, backward: fx.GraphModule, node: fx.Node, entry: fx.Node, plan: Plan, traces: Traces
) -> list[fx.Node]:
    """Pack a value right after its producer and restore it before its first reader; return the stored tensors."""
    tensor = value(node)
    assert tensor is not None
    gelu = gelu_of(node, traces) if plan.group_size else None
    packing = plan if gelu is None else replace(plan, pack=gelu.packing(plan.group_size), variant=gelu.variant)
    sources = [node, *_statistics(forward, plan)]
    last = max(sources)
    place = first_operator(forward) if last.op == "placeholder" else last.next
    with forward.graph.inserting_before(place):
        values = [source.meta["val"] for source in sources]
        stored = _inline(forward, _traced(packing, "pack", tensor, values, traces), sources)
    if gelu is not None:
        gelu.replace_by(stored.pop())
    entries = []
    for prefix, part in zip(plan.parts, stored, strict=True):
        part._rename(f"{prefix}{node.name}")
        if node.meta.get("saved_tensor_with_no_vc_check"):
            part.meta["saved_tensor_with_no_vc_check"] = True
        entries.append(new_input(backward, entry, part))
    if plan.statistics is not None:
        entries.append(_handed_over(sources[-1], backward, entry, stored))
    parts = [part.meta["val"] for part in entries]
    by_kernel = plan.restore_by_kernel is not None and is_summed_by_rows(entry)
    with backward.graph.inserting_before(first_use(backward, entry)):
        function = _traced(plan, "restore_by_kernel" if by_kernel else "restore", tensor, parts, traces)
        restored = _inline(backward, function, entries)[0]
    restored._rename(f"restored_{node.name}")
    differences = None if plan.statistics is None or plan.statistics.mean is None else differences_of(entry)
    for read in [entry] if differences is None else differences:
        read.replace_all_uses_with(restored)
    _erase(entry)
    if gelu is not None:
        differentiate(restored, entries, gelu.tanh, plan.group_size, traces)
    return stored


def _statistics(forward: fx.GraphModule, plan: Plan) -> list[fx.Node]:
    """Return the forward's nodes of the mean, if it is to be subtracted, and the scale of standardized values."""
    if plan.statistics is None:
        return []
    names = [name for name in plan.statistics[:2] if name is not None]
    named = {node.name: node for node in forward.graph.nodes if node.name in names}
    return [named[name] for name in names]


def _handed_over(node: fx.Node, backward: fx.GraphModule, entry: fx.Node, stored: list[fx.Node]) -> fx.Node:
    """Return the backward's input of a node, which is added to what is stored if there is none."""
    placeholder: fx.Node
    for placeholder in backward.graph.find_nodes(op="placeholder"):
        if placeholder.name == node.name:
            return placeholder
    stored.append(node)
    return new_input(backward, entry, node)


def _erase(entry: fx.Node) -> None:
    """Erase an input of a graph with the views and the differences that nothing reads any more."""
    for user in list(entry.users):
        _erase(user)
    entry.graph.erase_node(entry)


def _traced(plan: Plan, name: str, tensor: Tensor, arguments: Sequence[Tensor], traces: Traces) -> fx.GraphModule:
    """Return the trace of a plan's function; equal blocks, whose tensors have the same static sizes, share one."""
    function = getattr(plan, name)
    layout = (*tensor.shape, *tensor.stride())
    if not all(isinstance(size, int) for size in layout):
        return traced(function, *arguments)
    given = tuple((argument.shape, argument.dtype) for argument in arguments)
    key = (name, plan.form, plan.parts, plan.variant, given, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    if key not in traces:
        traces[key] = traced(function, *arguments)
    return traces[key]


def _inline(owner: fx.GraphModule, function: fx.GraphModule, inputs: list[fx.Node]) -> list[fx.Node]:
    """Copy a traced function to the insertion point of a graph; return its results."""
    copies = dict(zip(function.graph.find_nodes(op="placeholder"), inputs, strict=True))
    results: list[fx.Node] = []
    for node in function.graph.nodes:
        if node.op == "output":
            found = node.args[0]
            results = [copies[result] for result in (found if isinstance(found, (tuple, list)) else (found,))]
        elif node.op == "get_attr":
            name = f"_pyactcomp_{len(list(owner.buffers()))}"
            owner.register_buffer(name, getattr(function, str(node.target)))
            copies[node] = owner.graph.get_attr(name)
        elif node.op != "placeholder":
            copies[node] = owner.graph.node_copy(node, copies.__getitem__)
        if node.op not in ("placeholder", "output"):
            copies[node].meta = dict(node.meta)
            tensor = value(node)
            if tensor is not None:
                # AOTAutograd compares storages, and equal blocks share a trace.
                copies[node].meta["val"] = tensor.new_empty_strided(tensor.shape, tensor.stride())
    return results
