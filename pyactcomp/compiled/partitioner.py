"""The partitioner given to Inductor: compresses the graphs of marked modules, and leaves other graphs to torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from ..readers.lookup import registered_operators
from ..torch_private.partitions import (
    count_whole,
    installed_partitioner,
    installed_pre_grad_passes,
    min_cut,
    missing,
    remember,
    set_partitioner,
    set_pre_grad_pass,
)
from .context import digest_of_sources, partitioned_mark
from .graphs import GraphRecord
from .head import HeadPass
from .partition import partition
from .plans import SHARED_PARTS

Graphs = tuple[fx.GraphModule, fx.GraphModule]


class Partitioner(CustomPartitionerFn):
    """Partition as torch does, or as a partitioner set before; compress what graphs of marked modules save.

    Torch pickles the object into the keys of its caches, so it holds no state but the partitioner set before.
    """

    def __init__(self, inner: Callable[..., Graphs] | None) -> None:
        self.inner = inner

    def _as_without(self, joint: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Graphs:
        return (self.inner or min_cut)(joint, joint_inputs, **kwargs)

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Graphs:
        """Return the forward and the backward graph of a joint graph."""
        mark = partitioned_mark()
        if mark is None:
            return self._as_without(gm, joint_inputs, **kwargs)
        untouched = _copy(gm)
        try:
            forward, backward, saved = partition(gm, joint_inputs, mark.graphs.config, mark.graphs.tape, **kwargs)
        except Exception as problem:
            _warn_of_failure(mark.name, f"{type(problem).__name__}: {problem}")
            return self._as_without(untouched, joint_inputs, **kwargs)
        record = GraphRecord(mark.name, saved)
        mark.graphs.add(record)
        remember(Remembered(record))
        return forward, backward

    def uuid(self) -> object:
        """Return the key of the graph at hand in torch's caches: a compressed graph is another graph."""
        mark = partitioned_mark()
        inner = getattr(self.inner, "uuid", None)
        return (
            digest_of_sources(),
            None if mark is None else (repr(mark.graphs.config), mark.graphs.tape, registered_operators()),
            None if inner is None else inner(),
        )


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        nodes[node] = graph.node_copy(node, nodes.__getitem__)
    copied = fx.GraphModule(module, graph)
    copied.meta = dict(module.meta)
    return copied


class Remembered:
    """A record inside an entry of torch's cache: reading the entry adds the record to the module being traced."""

    def __init__(self, record: GraphRecord) -> None:
        self.record = record

    def __reduce__(self) -> tuple[Any, ...]:
        return _recall, (self.record,)


def _recall(record: GraphRecord) -> Remembered:
    mark = partitioned_mark()
    if mark is not None:
        mark.graphs.add(record)
    return Remembered(record)


def _warn_of_failure(name: str, cause: str) -> None:
    warnings.warn(
        f"pyactcomp could not compress a graph of {name} ({cause}); the graph saves what torch.compile chose. "
        "Please report this.",
        stacklevel=2,
    )


def install() -> str | None:
    """Give Inductor the partitioner, the pass over losses and the size of parts; return why it cannot be, or None."""
    reason = missing()
    if reason is None:
        before = installed_partitioner()
        if not isinstance(before, Partitioner):
            set_partitioner(Partitioner(before))
        passes = installed_pre_grad_passes()
        if not any(isinstance(graph_pass, HeadPass) for graph_pass in passes):
            set_pre_grad_pass(HeadPass(passes))
        count_whole(SHARED_PARTS)
    return reason
