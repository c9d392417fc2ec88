"""GELU in the kernel that packs its operand: the operand is read once, not once by each of two kernels.

Packing is the library's kernel, so Inductor cannot fuse it with what else reads the operand. On an H200, GELU of
16384 x 4096 bfloat16 takes 100 us and packing 52.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from .. import codec
from ..functional.activations.operator import gelu_quantize
from ..torch_private.partitions import traced
from .codec import parts_of
from .joint import is_elementwise, name_of, value

_VIEWS = {"view", "_unsafe_view"}
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
        self.result.replace_all_uses_with(computed)
        waiting = [self.result]
        while waiting:
            node = waiting.pop()
            if not node.users:
                sources = [source for source in node.all_input_nodes if source.op == "call_function"]
                node.graph.erase_node(node)
                waiting.extend(sources)


def gelu_of(node: fx.Node, traces: Traces) -> Gelu | None:
    """Return the GELU of all elements of a contiguous value, where a kernel serves, if only products read its result.

    With a pointwise reader Inductor computes GELU in the reader's kernel and writes no result.
    """
    tensor = value(node)
    assert tensor is not None
    static = all(isinstance(size, int) for size in tensor.shape)
    if not static or not tensor.is_contiguous() or codec.unavailable_reason("triton", tensor.device) is not None:
        return None
    operands = [node]
    for each in operands:
        operands.extend(user for user in each.users if name_of(user) in _VIEWS)
    results = [result for result in _computed_from(operands) if _is_read_by_products(result)]
    for tanh in (False, True) if results else ():
        wanted = _decomposed(tensor, tanh, traces)
        for result in results:
            if _matches(result, wanted, operands):
                return Gelu(result, tanh)
    return None


def _decomposed(like: Tensor, tanh: bool, traces: Traces) -> fx.Node:
    """Return the result of GELU in the operators that Inductor takes it for."""
    key = ("gelu", like.dtype, like.device, tanh)
    if key not in traces:
        approximate = "tanh" if tanh else "none"
        traces[key] = traced(lambda x: F.gelu(x, approximate=approximate), like.new_empty(8))
    result = traces[key].graph.find_nodes(op="output")[0].args[0]
    assert isinstance(result, fx.Node)
    return result


def _computed_from(operands: Collection[fx.Node]) -> Iterator[fx.Node]:
    """Yield what the forward computes from each element of a value alone."""
    waiting, seen = list(operands), set(operands)
    while waiting:
        for user in waiting.pop().users:
            if user not in seen and is_elementwise(user) and seen.issuperset(user.all_input_nodes):
                seen.add(user)
                waiting.append(user)
                yield user


def _matches(node: object, wanted: object, operands: Collection[fx.Node]) -> bool:
    """Return whether a node is computed by the operators of another, from one of the operands."""
    if not isinstance(wanted, fx.Node):
        return not isinstance(node, fx.Node) and node == wanted
    if wanted.op == "placeholder":
        return node in operands
    if not isinstance(node, fx.Node) or node.target != wanted.target or node.kwargs != wanted.kwargs:
        return False
    return len(node.args) == len(wanted.args) and all(
        _matches(each, other, operands) for each, other in zip(node.args, wanted.args, strict=True)
    )


def _is_read_by_products(result: fx.Node) -> bool:
    readers: list[fx.Node] = []
    waiting = [result]
    while waiting:
        for user in waiting.pop().users:
            (waiting if name_of(user) in _VIEWS else readers).append(user)
    return bool(readers) and all(name_of(reader) in ("mm", "addmm", "bmm", "baddbmm") for reader in readers)


def _shape(node: fx.Node) -> torch.Size:
    tensor = value(node)
    assert tensor is not None
    return tensor.shape
