"""Partitions a joint graph, and compresses the values that its forward saves for its backward."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import fx

from ..config import Config
from ..torch_private.partitions import cost_of, min_cut, partitioning
from .budget import save_within
from .checkpointed import checkpointed_blocks
from .costs import Costs
from .graphs import SavedValue
from .joint import Joint
from .overwritten import copy_overwritten
from .rewrite import rewrite
from .sharing import separate_indices, share_computed
from .standardized import standardized
from .uses import Uses


def partition(
    joint: fx.GraphModule, joint_inputs: object, config: Config, tape: int = 0, **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule, tuple[SavedValue, ...]]:
    """Partition a joint graph with torch's min-cut, knowing what codes cost, and rewrite both graphs.

    Parameters
    ----------
    joint : fx.GraphModule
        Forward and backward in one graph.
    joint_inputs : object
        Its inputs, as AOTAutograd gives them.
    config : Config
        ``mode``, ``group_size``, ``min_bytes`` and ``attention`` apply.
    tape : int, optional
        Where the stored values leave the device, the number of the model's graphs.
    **kwargs
        As AOTAutograd gives them: ``num_fwd_outputs``, ``static_lifetime_input_indices``, ...

    Returns
    -------
    forward, backward : fx.GraphModule
    saved : tuple of SavedValue
        Everything saved, parameters and other static inputs aside.
    """
    num_outputs = kwargs["num_fwd_outputs"]
    static = frozenset(kwargs.get("static_lifetime_input_indices") or ())
    known = Joint(joint, num_outputs, static)
    if copy_overwritten(joint, known.tangent):
        known = Joint(joint, num_outputs, static)
    if config.mode == "int8":
        share_computed(joint, known)
        separate_indices(joint, known)
        known = Joint(joint, num_outputs, static)
    blocks = checkpointed_blocks(joint.graph, known.tangent)
    uses = Uses(joint.graph, known, config, blocks, standardized(joint.graph, known, config.group_size))
    costs = Costs(joint, known, config, uses)

    def within(
        budget: float, banned: list[fx.Node], solve: Callable[[Collection[fx.Node]], list[fx.Node]]
    ) -> list[fx.Node] | None:
        def solved(again: Collection[fx.Node]) -> tuple[list[fx.Node], int]:
            costs.run_again(again)
            saved = solve(again)
            return saved, costs.total(saved)

        return save_within(budget, banned, solved, cost_of)

    with partitioning(costs, within):
        forward, backward = min_cut(joint, joint_inputs, **kwargs)
    return forward, backward, rewrite(forward, backward, num_outputs, known, config, uses, tape)
