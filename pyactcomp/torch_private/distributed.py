"""Private names of torch's distributed tensors; ``distributed_tests.py`` has a test for each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

REDISTRIBUTED, TO_LOCAL, FROM_LOCAL = (
    f"{name}Backward" for name in ("Redistribute", "_ToTorchTensor", "_FromTorchTensor")
)
"""Names of the nodes of ``DTensor.redistribute``, ``to_local`` and ``from_local``."""


def _default_group() -> Callable[[], object] | None:
    if not torch.distributed.is_available():
        return None
    from torch.distributed import distributed_c10d

    return functools.partial(attrgetter("_world.default_pg"), distributed_c10d)


default_group = _default_group()
"""Return the default process group, or None where torch.distributed is not initialized, at one call; None without it.

``torch.distributed.is_initialized`` asks the same by three functions of Python.
"""


def all_gather(gathered: Tensor, tensor: Tensor, group: Any) -> None:
    """Gather ``tensor`` of each process of a group into ``gathered``, in the order of their ranks."""
    # all_gather_into_tensor until 2.13.
    function: Any = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
    function(gathered, tensor, group=group)


class Gather(NamedTuple):
    """An all-gather: the process group, and the shape of the result, which is split evenly along ``dim``."""

    group: Any
    shape: torch.Size
    dim: int


def gather_of(node: Node, placements: tuple[Any, ...]) -> Gather | None:
    """Return the all-gather that ``DTensor.redistribute`` ran if that was all it did, else None.

    Parameters
    ----------
    node : Node
        Named ``REDISTRIBUTED``.
    placements : tuple of Placement
        Those of the result.
    """
    from torch.distributed.tensor import Replicate, Shard

    spec = getattr(node, "current_spec", None)  # a function of somebody else may have the same name
    if spec is None or len(spec.placements) != 1 or not all(isinstance(each, Replicate) for each in placements):
        return None
    (sharded,), shape = spec.placements, torch.Size(spec.tensor_meta.shape)
    if type(sharded) is not Shard:
        return None
    group = spec.mesh.get_group()
    dim = sharded.dim % len(shape)
    return Gather(group, shape, dim) if group.size() > 1 and shape[dim] % group.size() == 0 else None


def placements_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return the placements of a DTensor; none of a plain tensor."""
    placements: tuple[Any, ...] = getattr(tensor, "placements", ())
    return placements


def placements_before(node: Any) -> tuple[Any, ...]:
    """Return the placements of the DTensor from which the node named ``TO_LOCAL`` took the local tensor."""
    spec = getattr(node, "dtensor_spec", None)
    return () if spec is None else tuple(spec.placements)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return a DTensor's local tensor, or any other tensor unchanged."""
    return getattr(tensor, "_local_tensor", tensor)


def wait_for(tensor: Any) -> None:
    """Give a DTensor, the result of a collective, a plain local tensor: ``to_local`` returns it, operators take it."""
    tensor._local_tensor = waited(tensor._local_tensor)


def waited(tensor: Tensor) -> Tensor:
    """Return the result of a collective, an AsyncCollectiveTensor, as a plain tensor; any other tensor unchanged.

    The current stream waits for the collective. Call this only where the tensor is about to be read.
    """
    if type(tensor).__name__ != "AsyncCollectiveTensor":
        return tensor
    wait: Any = getattr(tensor, "trigger_wait", None)
    result: Tensor = tensor if wait is None else wait()
    return result
