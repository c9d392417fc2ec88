"""Dependencies of each node of a joint graph: on data, on an input that requires grad, on tangents."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from ..torch_private.partitions import input_infos, is_primal, is_tangent

CASTS = {"_to_copy", "convert_element_type"}
# Operators whose result has the elements of their operands.
MERGING = {"cat", "where"}
VIEWS = {"view", "_unsafe_view", "reshape", "permute", "transpose", "t", "expand", "squeeze", "unsqueeze", "slice"}
VIEWS |= {"select", "clone", "alias", "detach", "split", "split_with_sizes"} | CASTS
# Where it is faster, Inductor pads the operands of a matrix product and slices its result.
VIEWS |= {"unbind", "constant_pad_nd"} | MERGING
COMPARISONS = {"le", "lt", "ge", "gt", "eq", "ne", "isinf", "isnan", "signbit"}


def value(node: object) -> Tensor | None:
    """Return the fake tensor of a node, or None if the node is no tensor."""
    found = node.meta.get("val") if isinstance(node, fx.Node) else None
    return found if isinstance(found, Tensor) else None


def name_of(node: object) -> str:
    """Return the name of a node's operator, without overload."""
    # A placeholder may have the name of an operator.
    target = node.target if isinstance(node, fx.Node) and node.op == "call_function" else None
    if target is operator.getitem:
        return "getitem"
    packet = getattr(target, "_overloadpacket", None)
    return str(getattr(packet, "__name__", target))


def is_view(node: fx.Node) -> bool:
    """Return whether a node only rearranges its first argument: a view, a copy, a cast, or a pad with zeros.

    Such are views, copies, casts and pads by zero.
    """
    name = name_of(node)
    if name == "constant_pad_nd":
        return not any(node.args[2:])
    return name in VIEWS - MERGING


def is_multiple(node: fx.Node) -> bool:
    """Return whether a value is another one, its first argument, times a constant; the first power counts as one."""
    name = name_of(node)
    if name == "pow":
        return bool(node.args[1] == 1)
    return name in ("mul", "div", "neg") and value(node.args[0]) is not None and not any(map(_is_tensor, node.args[1:]))


def unscaled(node: fx.Node) -> fx.Node:
    """Return the value that a node is a view or a multiple of."""
    while (is_view(node) or is_multiple(node)) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _is_tensor(argument: object) -> bool:
    return value(argument) is not None


def is_elementwise(node: fx.Node) -> bool:
    """Return whether each element of a result is computed from one element of each operand."""
    tags = getattr(node.target, "tags", ()) if node.op == "call_function" else ()
    return torch.Tag.pointwise in tags or name_of(node) in VIEWS


def fewest(shape: Iterable[object]) -> int:
    """Return the elements of a shape; a dynamic size counts as one, the fewest."""
    return math.prod(size if isinstance(size, int) else 1 for size in shape)


def is_smaller(other: object, node: object) -> bool:
    """Return whether a value has fewer elements than another one, as a statistic that rows share."""
    small, large = value(other), value(node)
    return small is not None and large is not None and fewest(small.shape) < fewest(large.shape)


def first_operator(graph: fx.GraphModule) -> fx.Node:
    """Return the first node of a graph that is no input."""
    first: fx.Node = next(node for node in graph.graph.nodes if node.op != "placeholder")
    return first


def new_input(backward: fx.GraphModule, place: fx.Node | None, stored: fx.Node) -> fx.Node:
    """Return a new input of the backward for a node of the forward, in front of a node."""
    with backward.graph.inserting_before(place):
        placeholder = backward.graph.placeholder(stored.name)
    placeholder.meta = {key: stored.meta[key] for key in ("val", "tensor_meta") if key in stored.meta}
    return placeholder


def outputs_of(graph: fx.GraphModule) -> list[Any]:
    """Return the outputs of a graph, symbolic sizes and None among them."""
    found: Any = graph.graph.find_nodes(op="output")[0].args[0]
    return list(found)


def storage_order(tensor: Tensor) -> list[int] | None:
    """Return the dimensions from outermost to innermost in memory; None where elements overlap or none are neighbours.

    A view with gaps, as queries and keys of one projection, is stored without them.
    """
    if not tensor.dim():
        return None
    if tensor.is_contiguous():
        return list(range(tensor.dim()))
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        if isinstance(stride, int) and stride == 0 and not (isinstance(size, int) and size == 1):
            return None
    order = sorted(range(tensor.dim()), key=lambda dim: (-hint(tensor.stride(dim)), dim))
    innermost = tensor.stride(order[-1])
    return order if isinstance(innermost, int) and innermost == 1 else None


def hint(size: object) -> int:
    """Return a size; for a dynamic one its value in the call that compiles, without a guard."""
    if isinstance(size, int):
        return size
    hint = getattr(getattr(size, "node", None), "hint", None)
    return 4096 if hint is None else int(hint)


def nbytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements; a dynamic size counts as in the call that compiles."""
    return math.prod(map(hint, tensor.shape)) * tensor.element_size()


def adjacent(tensor: Tensor, dims: Collection[int]) -> int:
    """Return the adjacent elements in memory that lie along some dimensions alone."""
    if all(isinstance(stride, int) for stride in tensor.stride()):
        order = sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), -dim))
    else:
        order = list(reversed(range(tensor.dim()))) if tensor.is_contiguous() else []
    elements = 1
    for dim in order:
        own = tensor.shape[dim]
        if isinstance(own, int) and own == 1:
            continue
        if dim not in dims or not isinstance(own, int):
            break
        elements *= own
    return elements


class Joint:
    """Names of the nodes of a joint graph, by dependency.

    Attributes
    ----------
    static : set of str
        Inputs that live as long as the model.
    kept_inputs : set of str
        Inputs that are leaves or need no gradient: another owner keeps them in memory anyway.
    data : set of str
        Depend on an input that is no parameter.
    learns : set of str
        Floating-point values that depend on an input that requires grad.
    backward : set of str
        Depend on a tangent, or serve no output of the forward.
    tangent : set of str
        Depend on a tangent.
    """

    def __init__(self, joint: fx.GraphModule, num_fwd_outputs: int, static_inputs: Collection[int]) -> None:
        placeholders = joint.graph.find_nodes(op="placeholder")
        primals = [node for node in placeholders if is_primal(node)]
        outputs = outputs_of(joint)
        gradients = outputs[num_fwd_outputs:]
        wanting = {p.name for p, gradient in zip(primals, gradients, strict=False) if gradient is not None}
        self.static = {p.name for index, p in enumerate(primals) if index in static_inputs}
        parameters = set()
        infos = input_infos(len(primals))
        if infos is None:
            self.kept_inputs = {p.name for p in primals}
        else:
            pairs = list(zip(primals, infos, strict=True))
            self.kept_inputs = {p.name for p, info in pairs if info.is_leaf or not info.requires_grad}
            # No parameter of FSDP is static. Where some inputs are static, another leaf is data that requires grad.
            if not self.static:
                parameters = {p.name for p, info in pairs if info.is_leaf and info.requires_grad}
        self.data: set[str] = set()
        self.learns: set[str] = set()
        self.tangent: set[str] = set()
        self._follow(joint, parameters, wanting)
        forward: set[fx.Node] = set()
        waiting = [node for node in outputs[:num_fwd_outputs] if isinstance(node, fx.Node)]
        while waiting:
            node = waiting.pop()
            if node not in forward:
                forward.add(node)
                waiting.extend(node.all_input_nodes)
        self.backward = {node.name for node in joint.graph.nodes if node not in forward}

    def _follow(self, joint: fx.GraphModule, parameters: set[str], wanting: set[str]) -> None:
        for node in joint.graph.nodes:
            if node.op == "placeholder":
                if is_tangent(node):
                    self.tangent.add(node.name)
                elif node.name not in self.static and node.name not in parameters and value(node) is not None:
                    self.data.add(node.name)
                if node.name in wanting:
                    self.learns.add(node.name)
                continue
            for names in (self.data, self.learns, self.tangent):
                if any(source.name in names for source in node.all_input_nodes):
                    names.add(node.name)
            tensor = value(node)
            if tensor is not None and not tensor.is_floating_point():
                self.learns.discard(node.name)
