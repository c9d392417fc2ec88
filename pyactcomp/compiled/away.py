"""Saved values of graphs that leave the device: two operators, which hand tensors to the tape of the eager engine.

``torch.ops.pyactcomp.send(tensors, tape) -> handles`` in the forward, and ``torch.ops.pyactcomp.take(handle) ->
tensor`` in front of the first reader in the backward. The graphs save the handles: a handle owns the stored bytes,
and the tape decides when they leave and come back, so a graph may run any number of times before, or without, its
backward.

``send`` copies, on the device. Inductor writes other values to the memory of a tensor after its last reader, the bytes
leave later, and memory that an operator may keep would stay until the forward ends. At 2.6 TB/s the copies take about
1 % of a step of an 8B model's widths (arithmetic, not measured). What ``take`` returns is the memory that the handle
owns, as the schema says, so Inductor writes nothing to it. It takes one handle: Inductor gives what such an operator
returns to the CUDA graph that reads it, and that may be no list.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from ..engine import saved
from ..engine.offloading import serving
from ..functional.head.operator import linear_cross_entropy
from .joint import first_operator, nbytes, new_input, outputs_of, storage_order, value
from .sharing import first_use

# Copies to the host in a CUDA graph would write to memory that other steps use: Inductor runs both outside of one.
_UNSAFE = [torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else []

_library: Any = torch.library.Library("pyactcomp", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("send(Tensor[] tensors, int tape) -> Tensor[]", tags=(torch.Tag.needs_exact_strides, *_UNSAFE))
# A handle has no elements: no layout is better than another.
_library.define("take(Tensor(a) handle) -> Tensor(a)", tags=(torch.Tag.flexible_layout, *_UNSAFE))


def _send(tensors: list[Tensor], tape: int) -> list[Tensor]:
    offloading = serving(tape)
    if offloading is not None:
        offloading.read_timings()
    return saved.library().send(tensors, None if offloading is None else offloading.tape(tensors[0].device))


def _send_fake(tensors: list[Tensor], tape: int) -> list[Tensor]:
    return [each.new_empty((0, *each.shape)) for each in tensors]


def _take(handle: Tensor) -> Tensor:
    return saved.library().take(handle)


def _take_fake(handle: Tensor) -> Tensor:
    return handle.new_empty(handle.shape[1:])


_library.impl("send", _send, "CompositeExplicitAutograd")
_library.impl("take", _take, "CompositeExplicitAutograd")
torch.library.register_fake("pyactcomp::send", _send_fake, lib=_library)
torch.library.register_fake("pyactcomp::take", _take_fake, lib=_library)


def may_leave(parts: list[fx.Node], min_bytes: int) -> bool:
    """Return whether the stored tensors of one saved value are plain ones that together have so many bytes.

    Gradients that the head computed in the forward stay: backward begins with them.
    """
    makers = (part.args[0] for part in parts if part.target is operator.getitem)
    if any(isinstance(maker, fx.Node) and maker.target is linear_cross_entropy for maker in makers):
        return False
    tensors = [value(part) for part in parts]
    plain = all(type(each) is torch._subclasses.FakeTensor and storage_order(each) is not None for each in tensors)
    return plain and sum(nbytes(each) for each in tensors if each is not None) >= min_bytes


def leave(
    forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int, values: list[list[fx.Node]], tape: int
) -> None:
    """Send saved values from the forward, and take them in front of their first readers in the backward.

    Parameters
    ----------
    forward, backward : fx.GraphModule
        Changed in place.
    num_outputs : int
        How many results of the forward are the program's.
    values : list of list of fx.Node
        The stored tensors of each value, results of the forward.
    tape : int
        The number of the model's graphs.
    """
    entries = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    handles: dict[fx.Node, fx.Node] = {}
    for parts in values:
        orders = [order for part in parts if (order := storage_order(part.meta["val"])) is not None]
        last = max(parts)
        with forward.graph.inserting_before(first_operator(forward) if last.op == "placeholder" else last.next):
            dense = [_permuted(part, order) for part, order in zip(parts, orders, strict=True)]
            sent = _sent(dense, tape)
        for part, handle in zip(parts, sent, strict=True):
            handle._rename(f"handle_of_{part.name}")
            if part.meta.get("saved_tensor_with_no_vc_check"):
                handle.meta["saved_tensor_with_no_vc_check"] = True
            handles[part] = handle
        read = [entries[part.name] for part in parts]
        given = [new_input(backward, entry, handles[part]) for entry, part in zip(read, parts, strict=True)]
        with backward.graph.inserting_before(min(first_use(backward, entry) for entry in read)):
            for entry, handle, order in zip(read, given, orders, strict=True):
                tensor = backward.graph.call_function(torch.ops.pyactcomp.take.default, (handle,))
                tensor.meta["val"] = _take_fake(handle.meta["val"])
                back = [order.index(dim) for dim in range(len(order))]
                entry.replace_all_uses_with(_permuted(tensor, back))
                backward.graph.erase_node(entry)
    end = forward.graph.find_nodes(op="output")[0]
    outputs = outputs_of(forward)
    end.args = ((*outputs[:num_outputs], *(handles.get(each, each) for each in outputs[num_outputs:])),)


def _sent(nodes: list[fx.Node], tape: int) -> list[fx.Node]:
    """Insert a call of ``send``; return the nodes of the handles."""
    graph = nodes[0].graph
    call = graph.call_function(torch.ops.pyactcomp.send.default, (nodes, tape))
    call.meta["val"] = _send_fake([node.meta["val"] for node in nodes], tape)
    handles = [graph.call_function(operator.getitem, (call, index)) for index in range(len(nodes))]
    for handle, found in zip(handles, call.meta["val"], strict=True):
        handle.meta["val"] = found
    return handles


def _permuted(node: fx.Node, order: list[int]) -> fx.Node:
    """Insert a permutation of a value's dimensions, unless they are in order."""
    if order == sorted(order):
        return node
    permuted = node.graph.call_function(torch.ops.aten.permute.default, (node, order))
    permuted.meta["val"] = torch.ops.aten.permute.default(node.meta["val"], order)
    return permuted
