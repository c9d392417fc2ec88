"""The unpack hook: restores a saved tensor, unless the running backward asks for no gradient that reads it.

A node unpacks all its saved tensors, also where autograd computes the gradients of some of its inputs alone. The zero
bubble schedules of torch's pipelines run the node of a product twice: for its input, and later for its weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..readers.observer import observer
from ..readers.table import FACTORS
from ..torch_private import never_traced, profiled_range, running_node, saved_form
from .recipes import FromRecipe
from .saved import Kept, Pending, Region, Same, Saved, View


@never_traced
def unpack(saved: Saved) -> Tensor:
    """Restore a saved tensor: the unpack hook."""
    if type(saved) is not Kept and (asked := observer().asked()) is not None:
        unread = _unread(saved, asked)
        if unread is not None:
            return unread
    return saved.restore()


@never_traced
def unpack_profiled(saved: Saved) -> Tensor:
    """Restore a saved tensor, and show the restoring as a range in the profile."""
    with profiled_range("pyactcomp::unpack"):
        return unpack(saved)


def _unread(saved: Saved, asked: tuple[bool, ...]) -> Tensor | None:
    """Return uninitialised memory in place of a factor that the running node does not read, else None.

    ``asked`` tells of each input of the node whether its gradient is computed.
    """
    node = running_node()
    factors = None if node is None else FACTORS.get(node.name())
    if node is None or factors is None:
        return None
    readers = [reader for name, reader in factors.items() if saved_form(node, name) is saved]
    if not readers or any(asked[reader] for reader in readers):
        return None
    while isinstance(saved, (Same, Pending)):
        saved = saved.stored
    shared = saved.region if isinstance(saved, View) else saved
    if not isinstance(saved, (View, Region, FromRecipe)) or not isinstance(shared, (Region, FromRecipe)):
        return None
    device = node._input_metadata[0].device
    return torch.empty_strided(saved.layout.shape, saved.layout.stride, dtype=shared.dtype, device=device)
