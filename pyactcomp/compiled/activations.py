"""GELU in the kernel that packs its operand, and its derivative in the kernel that restores the operand.

Packing is the library's kernel, so Inductor cannot fuse it with what else reads the operand. On an H200, GELU of
16384 x 4096 bfloat16 takes 100 us and packing 52. In backward Inductor's code takes 168 us for GELU and the derivative
from codes, bound by arithmetic: it reads a group's parameters for each element, and computes the error function and the
codes of infinities for all of them. The bytes take 113 us at a copy's rate.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from .. import codec
from ..functional.activations.gelu.operator import gelu_quantize, gelu_restore
from ..torch_private.partitions import traced
from .codec import parts_of
from .joint import is_elementwise, name_of, value

_VIEWS = {"view", "_unsafe_view"}
_ORDERS = {"permute", "t", "transpose"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
Traces = dict[tuple[object, ...], fx.GraphModule]


class Gelu(NamedTuple):
    """A GELU in a forward graph: its result, and whether it is the approximation by tanh."""

    result: fx.Node
    tanh: bool

    @property
    def variant(self) -> tuple[object, ...]:
        """Return what the packing function depends on, beside the operand and the group size."""
        return "gelu", self.tanh, _shape(self.result)

    def packing(self, group_size: int) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
        """Return the function from the operand to codes, parameters of the groups, and the result."""
        shape = _shape(self.result)

        def pack(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            out, packed = gelu_quantize(x, self.tanh, group_size)
            return *parts_of(packed, x.shape), out.view(shape)

        return pack

    def replace_by(self, computed: fx.Node) -> None:
        """Let the readers read what packing computed, and remove the operators of GELU."""
        _replace(self.result, computed)


def _replace(result: fx.Node, computed: fx.Node) -> None:
    result.replace_all_uses_with(computed)
    waiting = {result: None}
    while waiting:
        node, _ = waiting.popitem()
        if not node.users:
            sources = [source for source in node.all_input_nodes if source.op == "call_function"]
            node.graph.erase_node(node)
            waiting.update(dict.fromkeys(sources))


def gelu_of(node: fx.Node, traces: Traces) -> Gelu | None:
    """Return the GELU of all elements of a contiguous value, where a kernel serves, if only products read its result.

    With a pointwise reader Inductor computes GELU in the reader's kernel and writes no result.
    """
    tensor = value(node)
    assert tensor is not None
    static = all(isinstance(size, int) for size in tensor.shape)
    if not static or not tensor.is_contiguous() or codec.unavailable_reason("triton", tensor.device) is not None:
        return None
    operands = _views_of(node)
    results = [result for result in _computed_from(operands) if _is_read_by(result, _PRODUCTS)]
    for tanh in (False, True) if results else ():
        for result in _gelus(results, operands, tanh, traces):
            return Gelu(result, tanh)
    return None


def differentiate(restored: fx.Node, parts: Sequence[fx.Node], tanh: bool, group_size: int, traces: Traces) -> None:
    """Let the kernel that restores the operand of a GELU of :func:`gelu_of` compute the derivative, and GELU again.

    Parameters
    ----------
    restored : fx.Node
        The operand in the backward graph.
    parts : two fx.Node
        The codes and the parameters of the groups of ``group_size`` elements that the operand is restored from.
    tanh : bool
        As of the forward's GELU.
    """
    operands = _views_of(restored)
    again = _gelus(_computed_from(operands), operands, tanh, traces)
    derivative = _derivative_of(operands, tanh, traces) if again else None
    if derivative is not None:
        _compute_together(*derivative, again, parts, tanh, group_size)


def _compute_together(
    derivative: fx.Node, grad: fx.Node, again: list[fx.Node], parts: Sequence[fx.Node], tanh: bool, group_size: int
) -> None:
    graph, like = grad.graph, value(derivative)
    assert like is not None
    earlier = _readers(again, grad)
    if grad in earlier:
        # Backward recomputes the second projection for the gradient.
        return
    with graph.inserting_after(grad):
        both = graph.call_function(gelu_restore, (*parts, grad, tanh, group_size))
    results = [like.new_empty(like.shape) for _ in range(2)]
    both.meta["val"] = tuple(results)
    last = both
    for node, index in [(derivative, 0), *((result, 1) for result in again)]:
        with graph.inserting_after(last):
            last = graph.call_function(operator.getitem, (both, index))
        last.meta["val"] = results[index]
        if _shape(node) != like.shape:
            with graph.inserting_after(last):
                last = graph.call_function(torch.ops.aten.view.default, (last, list(_shape(node))))
            last.meta["val"] = results[index].view(_shape(node))
        _replace(node, last)
    for node in earlier:
        last.append(node)
        last = node


def _readers(results: Collection[fx.Node], last: fx.Node) -> list[fx.Node]:
    """Return the nodes up to a last one that are computed from results."""
    found = dict.fromkeys(results)
    for node in last.graph.nodes:
        if any(source in found for source in node.all_input_nodes):
            found[node] = None
        if node is last:
            break
    return [node for node in found if node not in results]


def _views_of(node: fx.Node) -> list[fx.Node]:
    operands = [node]
    for each in operands:
        operands.extend(user for user in each.users if name_of(user) in _VIEWS)
    return operands


def _gelus(results: Iterable[fx.Node], operands: Sequence[fx.Node], tanh: bool, traces: Traces) -> list[fx.Node]:
    """Return the results that are GELU of one of the operands."""
    (x,), wanted = _decomposed(_gelu, operands[0], 1, tanh, traces)
    return [result for result in results if _matches(result, wanted, {x: operands}, {})]


def _derivative_of(operands: Sequence[fx.Node], tanh: bool, traces: Traces) -> tuple[fx.Node, fx.Node] | None:
    """Return the derivative of GELU at one of the operands and the gradient, if products read the derivative."""
    (grad, x), wanted = _decomposed(_gelu_backward, operands[0], 2, tanh, traces)
    for node in _computed_from(operands, alone=False):
        found: dict[fx.Node, fx.Node] = {}
        if _matches(node, wanted, {x: operands}, found):
            is_written = _is_read_by(node, _PRODUCTS | {"sum"}) and not _is_read_by(node, {"sum"})
            return (node, found[grad]) if is_written and _is_alike(found[grad], node) else None
    return None


def _gelu(x: Tensor, approximate: str) -> Tensor:
    return F.gelu(x, approximate=approximate)


def _gelu_backward(grad: Tensor, x: Tensor, approximate: str) -> Tensor:
    result: Tensor = torch.ops.aten.gelu_backward.default(grad, x, approximate=approximate)
    return result


def _decomposed(
    function: Callable[..., Tensor], node: fx.Node, operands: int, tanh: bool, traces: Traces
) -> tuple[list[fx.Node], fx.Node]:
    """Return a function's operands and result in the operators that Inductor takes it for."""
    tensor = value(node)
    assert tensor is not None
    key = (function.__name__, tensor.dtype, tensor.device, tanh)
    if key not in traces:
        given = [tensor.new_empty(8) for _ in range(operands)]
        traces[key] = traced(lambda *x: function(*x, approximate="tanh" if tanh else "none"), *given)
    result = traces[key].graph.find_nodes(op="output")[0].args[0]
    assert isinstance(result, fx.Node)
    return list(traces[key].graph.find_nodes(op="placeholder")), result


def _computed_from(operands: Collection[fx.Node], alone: bool = True) -> Iterator[fx.Node]:
    """Yield what a graph computes from each element of a value, ``alone`` or with others."""
    waiting, seen = list(operands), set(operands)
    while waiting:
        for user in waiting.pop().users:
            if user not in seen and is_elementwise(user) and (not alone or seen.issuperset(user.all_input_nodes)):
                seen.add(user)
                waiting.append(user)
                yield user


def _matches(
    node: object, wanted: object, given: dict[fx.Node, Collection[fx.Node]], found: dict[fx.Node, fx.Node]
) -> bool:
    """Return whether a node is computed by the operators of another, from given operands; note the other operands."""
    if not isinstance(wanted, fx.Node) or not isinstance(node, fx.Node):
        return node == wanted
    if wanted.op == "placeholder":
        return node in given[wanted] if wanted in given else found.setdefault(wanted, node) is node
    if node.target != wanted.target or node.kwargs != wanted.kwargs:
        return False
    return len(node.args) == len(wanted.args) and all(
        _matches(each, other, given, found) for each, other in zip(node.args, wanted.args, strict=True)
    )


def _is_read_by(result: fx.Node, names: Collection[str]) -> bool:
    """Return whether operators of these names alone read a value, or a view of it."""
    readers: list[fx.Node] = []
    waiting = [result]
    while waiting:
        for user in waiting.pop().users:
            (waiting if name_of(user) in _VIEWS | _ORDERS else readers).append(user)
    return bool(readers) and all(name_of(reader) in names for reader in readers)


def _is_alike(node: fx.Node, other: fx.Node) -> bool:
    a, b = value(node), value(other)
    assert a is not None
    assert b is not None
    return a.dtype is b.dtype and a.shape == b.shape and a.is_contiguous()


def _shape(node: fx.Node) -> torch.Size:
    tensor = value(node)
    assert tensor is not None
    return tensor.shape
