"""Unpack hooks: what the library restores, the profiler's range around it, and tensors that backward does not read.

A node unpacks all its saved tensors, also where autograd computes the gradients of some of its inputs alone. The zero
bubble schedules of torch's pipelines run the node of a product twice: for its input, and later for its weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..readers.observer import observer
from ..readers.table import FACTORS
from ..torch_private import never_traced, profiled_range, running_node, saved_form
from . import saved
from .saved import Pending, Saved, for_library


@never_traced
def unpack_profiled(stored: Saved) -> Tensor:
    """Restore a saved tensor, and show the restoring as a range in the profile."""
    with profiled_range("pyactcomp::unpack"):
        return saved.library().unpack(stored)


@for_library
def unread(stored: Saved) -> Tensor | None:
    """Return uninitialised memory in place of a factor that the running node does not read, else None."""
    node, asked = running_node(), observer().asked()
    factors = None if node is None else FACTORS.get(node.name())
    if node is None or factors is None or asked is None:
        return None
    readers = [reader for name, reader in factors.items() if saved_form(node, name) is stored]
    if not readers or any(asked[reader] for reader in readers):
        return None
    while isinstance(stored, (saved.Same, Pending)):
        stored = stored.stored
    shared = stored.region if isinstance(stored, saved.View) else stored
    if not isinstance(stored, (saved.View, saved.Region, saved.FromRecipe)):
        return None
    if not isinstance(shared, (saved.Region, saved.FromRecipe)):
        return None
    device = node._input_metadata[0].device
    return torch.empty_strided(stored.layout.shape, stored.layout.stride, dtype=shared.dtype, device=device)
