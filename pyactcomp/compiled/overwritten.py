"""Inputs that the forward overwrites, as a buffer with a moving average: backward must not compute from them again."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..torch_private.partitions import input_infos, is_primal
from .joint import value


def copy_overwritten(joint: fx.GraphModule, tangent: Collection[str]) -> bool:
    """Let all operators read a copy of each input that the forward overwrites and that backward may read.

    The partitioner takes an input for free in backward, where the input has its new value; it may save the copy, but
    not make the copy again.

    Parameters
    ----------
    joint : fx.GraphModule
        Changed in place.
    tangent : collection of str
        Nodes that depend on a tangent.

    Returns
    -------
    bool
        Whether the graph has changed.
    """
    changed = False
    primals = [node for node in joint.graph.find_nodes(op="placeholder") if is_primal(node)]
    for primal, info in zip(primals, input_infos(len(primals)) or (), strict=False):
        tensor = value(primal)
        if tensor is None or not info.mutates_data or not _reaches(primal, tangent):
            continue
        with joint.graph.inserting_after(primals[-1]):
            copy = joint.graph.call_function(torch.ops.aten.clone.default, (primal,))
        copy.meta = {**primal.meta, "val": tensor.clone(), "recompute": CheckpointPolicy.MUST_SAVE}
        changed = True
        primal.replace_all_uses_with(copy, lambda user, copy=copy: user is not copy and not _writes(user))
    if changed:
        joint.recompile()
    return changed


def _writes(user: fx.Node) -> bool:
    return user.op == "output" or user.target is torch.ops.aten.copy_.default


def _reaches(primal: fx.Node, tangent: Collection[str]) -> bool:
    """Return whether a node that depends on a tangent may read a value computed from an input."""
    seen: set[fx.Node] = set()
    waiting = [primal]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name in tangent:
            return True
        waiting.extend(user for user in node.users if not _writes(user))
    return False
