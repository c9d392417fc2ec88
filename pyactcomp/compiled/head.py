"""Takes the loss of language models in chunks inside a graph: replaces a Linear and the cross-entropy of its result.

The pass runs over the graph that Dynamo traced, before autograd: there the loss is one call of
``torch.nn.functional.cross_entropy``, whatever module or function made the call.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from ..functional.head.operator import linear_cross_entropy
from .context import digest_of_sources, partitioned_mark

_LINEAR = (F.linear, torch._C._nn.linear)
_OPTIONS = {"weight": None, "size_average": None, "reduce": None, "label_smoothing": 0.0}
_ARGUMENTS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


class HeadPass(CustomGraphPass):
    """Chunk the losses in graphs of models compressed with ``fuse_head=True``, after the passes set before.

    Torch pickles the object into the keys of its caches, so it holds no state but the passes set before.
    """

    def __init__(self, before: Sequence[Callable[[fx.Graph], None]]) -> None:
        self.before = tuple(before)

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite a graph in place."""
        for graph_pass in self.before:
            graph_pass(graph)
        mark = partitioned_mark()
        if mark is None or not mark.graphs.config.fuse_head:
            return
        for reason in chunk_losses(graph):
            warnings.warn(f"a graph of {mark.name} computes the logits of the whole batch: {reason}", stacklevel=2)

    def uuid(self) -> object:
        """Return the key of the graph at hand in torch's caches."""
        mark = partitioned_mark()
        keys = [getattr(graph_pass, "uuid", None) for graph_pass in self.before]
        if any(key is None for key in keys):
            return None  # torch then takes no graph from its caches
        return digest_of_sources(), mark is not None and mark.graphs.config.fuse_head, *(key() for key in keys if key)


def chunk_losses(graph: fx.Graph) -> list[str]:
    """Replace each cross-entropy of a Linear's result; return the reason for each left as it is."""
    reasons = []
    for loss in graph.find_nodes(op="call_function", target=F.cross_entropy):
        problem = _chunk(graph, loss)
        if problem is not None:
            reasons.append(problem)
    return reasons


def _value(node: object) -> Tensor | None:
    found = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return found if isinstance(found, Tensor) else None


def _chunk(graph: fx.Graph, loss: fx.Node) -> str | None:
    """Replace one loss, or return the reason against it."""
    given = dict(zip(_ARGUMENTS, loss.args, strict=False)) | loss.kwargs
    for name, default in _OPTIONS.items():
        if given.get(name, default) != default:
            return f"the loss has {name}={given[name]}"
    reduction = given.get("reduction", "mean")
    if reduction not in ("mean", "sum"):
        return f"the loss has reduction={reduction!r}"
    logits, labels = _value(given["input"]), _value(given["target"])
    if logits is None or labels is None or logits.dim() != 2 or labels.dtype is not torch.int64:
        return "the loss does not take rows of logits and one class for each"
    found = _walk(given["input"])
    if isinstance(found, str):
        return found
    linear, steps = found
    x, weight, bias = _linear_operands(linear)
    projected, rows, result = _value(linear), _value(x), _value(loss)
    if projected is None or rows is None or result is None:
        return "an operand of the head has no known shape"
    needs = [getattr(_value(node), "requires_grad", False) for node in (x, weight, bias)]
    with graph.inserting_before(loss):
        for step in reversed(steps):
            x = _applied(graph, step, x, rows.shape[-1])
        arguments = (x, weight, bias, given["target"], given.get("ignore_index", -100), reduction == "mean")
        results = graph.call_function(linear_cross_entropy, (*arguments, projected.dtype, needs))
        chunked = graph.call_function(operator.getitem, (results, 0))
        if result.dtype is not torch.float32 and result.dtype is not torch.float64:
            chunked = graph.call_method("to", (chunked, result.dtype))
    loss.replace_all_uses_with(chunked)
    for node in (loss, *steps, linear):
        graph.erase_node(node)
    return None


def _linear_operands(linear: fx.Node) -> tuple[Any, Any, Any]:
    names = ("input", "weight", "bias")
    given = dict(zip(names, linear.args, strict=False)) | linear.kwargs
    return given["input"], given["weight"], given.get("bias")


def _walk(node: Any) -> tuple[fx.Node, list[fx.Node]] | str:
    """Return the Linear of the logits and the nodes from it to the loss, the last one first; or why there is none."""
    steps: list[fx.Node] = []
    while isinstance(node, fx.Node):
        others = [user for user in node.users if user.op == "output"]
        if others:
            return "the graph returns the logits"
        if len(node.users) > 1:
            return f"the logits have {len(node.users)} readers"
        if node.op == "call_function" and node.target in _LINEAR:
            return node, steps
        if not _keeps_columns(node):
            return f"{node.name} is between the head and the loss"
        steps.append(node)
        node = node.args[0]
    return "the logits are an input of the graph"


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _keeps_columns(node: fx.Node) -> bool:
    """Return whether an operation casts to float32, or selects and regroups rows alone."""
    source, result = _value(node.args[0]) if node.args else None, _value(node)
    if source is None or result is None or not result.dim() or not source.dim():
        return False
    name, columns = _name(node), source.shape[-1]
    if name in ("float", "to", "type", "contiguous"):
        return result.dtype in (source.dtype, torch.float32) and result.device == source.device
    if name in ("view", "reshape"):
        sizes = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
        return bool(len(sizes) > 1 and sizes[-1] == columns and result.shape[-1] == columns)
    if name == "flatten":
        last = node.args[2] if len(node.args) > 2 else node.kwargs.get("end_dim", -1)
        return isinstance(last, int) and last % source.dim() < source.dim() - 1
    if name == "getitem":
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        if not all(part is Ellipsis or isinstance(part, slice) for part in index):
            return False
        return index[-1:] == (slice(None),) or (Ellipsis not in index and len(index) < source.dim())
    return False


def _applied(graph: fx.Graph, step: fx.Node, rows: Any, columns: Any) -> fx.Node:
    """Apply a step to the input of the head in place of the logits."""
    name = _name(step)
    if name in ("view", "reshape"):
        sizes = step.args[1] if isinstance(step.args[1], (tuple, list)) else step.args[1:]
        return graph.call_method("reshape", (rows, (*sizes[:-1], columns)))
    if name == "flatten":
        return graph.call_method("flatten", (rows, *step.args[1:]), dict(step.kwargs))
    if name == "getitem":
        return graph.call_function(operator.getitem, (rows, step.args[1]))
    assert isinstance(rows, fx.Node)
    return rows
