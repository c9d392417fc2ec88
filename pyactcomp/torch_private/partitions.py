"""The private names of AOTAutograd's partitioner; imported only where graphs are compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import fx
from torch._functorch import partitioners
from torch.utils._ordered_set import OrderedSet

__all__ = [
    "autograd_number",
    "cost_of",
    "count_whole",
    "input_infos",
    "installed_partitioner",
    "installed_pre_grad_passes",
    "is_of_derivative",
    "is_primal",
    "is_tangent",
    "min_cut",
    "missing",
    "original_operator",
    "partitioning",
    "remember",
    "running_graph",
    "set_partitioner",
    "set_pre_grad_pass",
    "traced",
]

Within = Callable[[float, list[fx.Node], Callable[[Collection[fx.Node]], list[fx.Node]]], "list[fx.Node] | None"]
# In the paths of the files that run compiled graphs.
_AOT_AUTOGRAD = "_aot_autograd"
# The arguments of torch's MinCutOptions, in order.
_BANS = (
    "ban_recompute_used_far_apart",
    "ban_recompute_long_fusible_chains",
    "ban_recompute_materialized_backward",
    "ban_recompute_not_in_allowlist",
    "ban_recompute_reductions",
)


def min_cut(joint: fx.GraphModule, joint_inputs: object, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Partition a joint graph as torch does."""
    forward, backward = partitioners.min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)
    return forward, backward


def is_primal(node: fx.Node) -> bool:
    """Return whether a node of the joint graph is an input of the forward."""
    return bool(partitioners._is_primal(node))  # type: ignore[attr-defined]


def is_tangent(node: fx.Node) -> bool:
    """Return whether a node of the joint graph is the gradient of an output."""
    return bool(partitioners._is_tangent(node))  # type: ignore[attr-defined]


def original_operator(node: fx.Node) -> Any:
    """Return the operator that a node of the joint graph was decomposed from, or None where torch notes none."""
    return node.meta.get("original_aten")


def autograd_number(node: fx.Node) -> int | None:
    """Return the number of autograd's node for an operator of the forward and its derivative; None if torch notes none.

    Operators without a derivative have the number of the last one with one.
    """
    number = node.meta.get("seq_nr")
    return number if isinstance(number, int) else None


def is_of_derivative(node: fx.Node) -> bool:
    """Return whether a node runs for autograd's own derivative, not in the backward of an autograd function."""
    return node.meta.get("partitioner_tag") == "is_backward"


@contextmanager
def partitioning(size: Callable[[fx.Node, int], int], within: Within) -> Iterator[None]:
    """Partition with other sizes and another plan for a budget, and recompute for backward's matrix products too.

    Torch saves the operand of a product of the backward, since a recomputed one is written out again. So is one
    restored from codes, and lossless mode prefers its bytes.

    Parameters
    ----------
    size : callable
        Maps a node and its size in bytes to the bytes to count.
    within : callable
        Plans for an ``activation_memory_budget`` between 0 and 1: maps the budget, the operators that torch would not
        run again, and a function from some of these to the values to save, to the values to save, or to None for
        torch's own plan.
    """
    original, choose = partitioners._size_of, partitioners.choose_saved_values_set
    replaced: Any = partitioners
    partitioners._size_of = lambda node: size(node, original(node))

    def chosen(graph: fx.Graph, node_info: Any, memory_budget: float = 1.0) -> list[fx.Node]:
        found = None
        if 0.0 < memory_budget < 1.0:
            operators = partitioners.get_default_op_list()
            banned = [n for n in node_info.required_fw_nodes if not operators.is_recomputable(n)]
            bans = partitioners.MinCutOptions(*(getattr(functorch_config, name) for name in _BANS))

            def solve(again: Collection[fx.Node]) -> list[fx.Node]:
                return list(partitioners.solve_min_cut(graph, node_info, bans, OrderedSet(again))[0])

            found = within(memory_budget, banned, solve)
        return list(choose(graph, node_info, memory_budget)) if found is None else found

    replaced.choose_saved_values_set = chosen
    try:
        with functorch_config.patch({"ban_recompute_materialized_backward": False}):
            yield
    finally:
        partitioners._size_of, replaced.choose_saved_values_set = original, choose


def cost_of(node: fx.Node) -> float:
    """Return what it costs to run a node again, by torch's estimate: FLOPs, or as the user has set."""
    return float(partitioners.estimate_runtime(node))


def missing() -> str | None:
    """Return the name that this release of torch does not have, or None."""
    for owner, name in (
        (partitioners, "min_cut_rematerialization_partition"),
        (partitioners, "_size_of"),
        (partitioners, "choose_saved_values_set"),
        (partitioners, "solve_min_cut"),
        (partitioners, "MinCutOptions"),
        (partitioners, "estimate_runtime"),
        (partitioners, "get_default_op_list"),
        (partitioners, "_is_primal"),
        (partitioners, "_is_tangent"),
        (functorch_config, "ban_recompute_materialized_backward"),
        (_inductor_config(), "custom_partitioner_fn"),
        (_inductor_config(), "pre_grad_custom_pass"),
    ):
        if not hasattr(owner, name):
            return f"torch {torch.__version__} has no {owner.__name__}.{name}"
    return None


def _inductor_config() -> Any:
    import torch._inductor.config

    return torch._inductor.config


def installed_partitioner() -> Any:
    """Return the partitioner that Inductor calls in place of torch's, or None."""
    return _inductor_config().custom_partitioner_fn


def set_partitioner(partitioner: object) -> None:
    """Let Inductor call a partitioner in place of torch's."""
    _inductor_config().custom_partitioner_fn = partitioner


def installed_pre_grad_passes() -> list[Any]:
    """Return the passes that Inductor runs over a graph before autograd."""
    found = _inductor_config().pre_grad_custom_pass
    return [] if found is None else list(found) if isinstance(found, (list, tuple)) else [found]


def set_pre_grad_pass(graph_pass: object) -> None:
    """Let Inductor run a pass over each graph before autograd."""
    _inductor_config().pre_grad_custom_pass = graph_pass


_whole: tuple[str, ...] = ()


def count_whole(prefixes: tuple[str, ...]) -> None:
    """Let Inductor count inputs with these prefixes of their names by their own elements.

    Inductor counts an element for each element of the kernel that reads an input, so parameters that 64 elements share
    count 64 times. The schedule then takes restoring for the way to free memory, and restores all values first.
    """
    global _whole
    from torch._inductor.dependencies import MemoryDep
    from torch._inductor.virtualized import V

    _whole = tuple({*_whole, *prefixes})
    counted = getattr(MemoryDep, "get_numel", None)
    if counted is None or counted.__module__ == __name__:
        return

    def get_numel(self: Any) -> Any:
        return V.graph.get_numel(self.name) if self.name.startswith(_whole) else counted(self)

    MemoryDep.get_numel = get_numel  # type: ignore[method-assign]


def _metadata(names: tuple[str, ...]) -> Iterator[Any]:
    """Yield AOTAutograd's metadata of the graph being partitioned.

    AOTAutograd gives the partitioner no metadata of the inputs, but has them on the stack (2.11 to 2.13).
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        for name in names:
            metadata = frame.f_locals.get(name)
            if getattr(metadata, "input_info", None):
                yield metadata
        frame = frame.f_back


def input_infos(count: int) -> list[Any] | None:
    """Return torch's ``InputAliasInfo`` of each input, or None where unknown or the inputs are wrapped."""
    metadata = next(_metadata(("inner_meta", "fw_metadata")), None)
    infos = [] if metadata is None else list(metadata.input_info)
    return infos if len(infos) == count else None


def remember(note: object) -> None:
    """Attach a note to the graph being partitioned; AOTAutograd's cache pickles the note with the graph."""
    metadata = next(_metadata(("fw_metadata",)), None)
    if metadata is not None:
        metadata._pyactcomp_note = note


def running_graph() -> tuple[object, object] | None:
    """Return the run of a compiled graph for which a saved-tensor hook is called, with the note on the graph, or None.

    Each run is another object, which keeps the run's inputs alive.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _AOT_AUTOGRAD in frame.f_code.co_filename:
            for function in frame.f_locals.values():
                # The bound ``apply`` of the autograd function around the graph.
                metadata = getattr(getattr(function, "__self__", None), "metadata", None)
                if metadata is not None:
                    return frame, getattr(metadata, "_pyactcomp_note", None)
        frame = frame.f_back
    return None


def traced(function: Callable[..., object], *arguments: torch.Tensor) -> fx.GraphModule:
    """Trace a function on fake tensors, with Inductor's decompositions and without autocast."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch._C._DisableAutocast(), torch.no_grad():
        return make_fx(function, decomposition_table=select_decomp_table(), _allow_non_fake_inputs=True)(*arguments)
