"""Blocks checkpointed inside a graph: backward runs a block again, as a whole, from the block's inputs.

The rule is that of ``engine/frame.py``: an input takes codes, unless the block turns values into decisions. Comparisons
are no such decisions here, since the forward compares (``masks.py``).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from ..readers.forms import ITSELF, Reading, Use
from .joint import COMPARISONS, name_of

CHECKPOINT = "torch.utils.checkpoint"
# Torch's mark on the nodes of a block, since 2.4.
_MARK = "ac_graph_id"
_ROUNDING = {"floor", "ceil", "round", "trunc", "sign", "sgn", "frac", "fmod", "remainder", "heaviside"}


class Block(NamedTuple):
    """A checkpointed block of a graph, and whether it turns values into decisions."""

    number: int
    decides: bool

    @property
    def reading(self) -> Reading:
        """How the second run reads an input."""
        if self.decides:
            return Reading(CHECKPOINT, "input", ITSELF, "the block takes decisions from values")
        return Reading.of(CHECKPOINT, "input", Use.INPUT, "the block reruns from it")


def checkpointed_blocks(graph: fx.Graph, tangent: Collection[str]) -> dict[str, Block]:
    """Return the block of each node in a checkpointed block, of the nodes that depend on no tangent."""
    nodes = [n for n in graph.nodes if n.op == "call_function" and n.name not in tangent and _MARK in n.meta]
    deciding = {node.meta[_MARK] for node in nodes if _decides(node)}
    return {node.name: Block(node.meta[_MARK], node.meta[_MARK] in deciding) for node in nodes}


def _decides(node: fx.Node) -> bool:
    """Return whether an operator's results jump where a floating-point operand moves a little."""
    name = name_of(node)
    if name in _ROUNDING:
        return True
    if name == "bernoulli":  # without a number, the operand is the probability
        return len(node.args) == 1
    # Integers and masks that no value decides: of random numbers, and of a shape.
    drawn = name == "native_dropout" or "scaled_dot_product" in name
    if name in COMPARISONS or drawn or name.endswith("_like") or name.startswith("new_"):
        return False
    read = [source.meta.get("val") for source in node.all_input_nodes]
    made = tree_leaves(node.meta.get("val"))
    return any(isinstance(v, Tensor) and v.is_floating_point() for v in read) and any(
        isinstance(v, Tensor) and not (v.is_floating_point() or v.is_complex()) for v in made
    )
