"""Tensors gathered from the shards of a group of processes: each process stores its own shard, and backward gathers.

As in sequence parallelism: the norm's output is a shard of the sequence, and the projections read the whole sequence.
"""

from __future__ import annotations

import math
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from ..codec import format as fmt
from ..codec.layouts import layout_of
from ..errors import PyactcompError
from ..readers.forms import Form
from ..readers.nodes import CAST, VIEWS
from ..readers.observer import observer
from ..torch_private import current_raw_stream, running_node
from ..torch_private.distributed import (
    FROM_LOCAL,
    REDISTRIBUTED,
    TO_LOCAL,
    Gather,
    all_gather,
    gather_of,
    local_tensor,
    placements_before,
    placements_of,
)
from . import saved
from .marks import SHARDS
from .packing import Packing

_LONGEST_WALK = 8
# Autocast casts what was gathered.
_PASSED = VIEWS | {CAST}


class Shards:
    """On the node of a DTensor: the stored form of the tensor gathered from the DTensor.

    Projections that gather one DTensor each for itself store the codes of its shards once.
    """

    __slots__ = ("_region", "_versions")

    def __init__(self, tensor: Tensor) -> None:
        # A write to a DTensor moves no counter of the local tensor, nor the other way round.
        self._versions = saved.Versioned(tensor), saved.Versioned(local_tensor(tensor))
        self._region: ref[saved.Region] | None = None

    def region(self, tensor: Tensor, form: Form, stream: int) -> saved.Region | None:
        """Return the region of another result of gathering the DTensor, if that was not written to since."""
        region = None if self._region is None else self._region()
        if region is None or region.stream != stream or any(version.moved for version in self._versions):
            return None
        same = region.layout == layout_of(tensor) and region.dtype is tensor.dtype
        return region if same and region.form.serves(form) else None

    def hold(self, region: saved.Region) -> None:
        """Remember a region while something holds it."""
        self._region = ref(region)


def mark_as_shards(tensor: Tensor) -> None:
    """Let all results of gathering a DTensor that was not written to share one region."""
    SHARDS.set(tensor.grad_fn, Shards(tensor))


class Gathering(NamedTuple):
    """The all-gather that made a saved tensor, and the mark of the gathered DTensor, if the DTensor has one."""

    gather: Gather
    shards: Shards | None


def gathering(tensor: Tensor, whole: Tensor) -> Gathering | None:
    """Return the all-gather whose result, or cast, a saved tensor holds, in the same order and not written to.

    Parameters
    ----------
    tensor : Tensor
        The plain tensor to pack.
    whole : Tensor
        The DTensor around ``tensor``, or ``tensor``.
    """
    base = whole._base
    # Not from a view: Python's object for the view's node would live as long as the graph. The base of a local tensor
    # has no node.
    start = whole if base is None or base.grad_fn is None else base
    placements, node = placements_of(start), start.grad_fn
    for _ in range(_LONGEST_WALK):
        if node is None:
            return None
        name = node.name()
        if name == REDISTRIBUTED:
            break
        if name == TO_LOCAL:
            placements = placements_before(node)
        elif name == FROM_LOCAL:
            placements = ()
        elif name not in _PASSED:
            return None
        node = node.next_functions[0][0]
    if node is None or not placements or whole._version != 0 or tensor._version != 0 or not tensor.is_contiguous():
        return None
    gather = gather_of(node, placements)
    if gather is None or math.prod(gather.shape) != tensor.numel():
        return None
    source = node.next_functions[0][0]
    return Gathering(gather, None if source is None else SHARDS.on(source))


class _ShardKernel:
    """Packs this process's shard of a gathered tensor; restoring gathers the codes of all processes.

    All processes of the group restore in the same order, as they run the operators of a DTensor in the same order. If a
    later reader needs more than these codes, the whole tensor is stored anew.

    Parameters
    ----------
    gather : Gather
    shard : Storing
        How a shard is stored.
    """

    def __init__(self, gather: Gather, shard: saved.Storing) -> None:
        self._gather, self._shard = gather, shard

    def packed_nbytes(self, numel: int) -> int:
        """Return the size of a shard's buffer, padded so that the codes of each process are aligned once gathered."""
        return self._shard.nbytes + -self._shard.nbytes % fmt.ALIGNMENT

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        """Write the codes of this process's shard of ``source`` to ``out``."""
        own = _own_shard(source, self._gather)
        self._shard.kernel.encode(own, out[: self._shard.nbytes], seed)

    def decode(self, packed: Tensor, out: Tensor) -> None:
        """Gather the codes of all processes, and restore them into ``out``."""
        gather, shard = self._gather, self._shard
        if running_node() is None:
            raise PyactcompError(
                f"a saved tensor of shape {tuple(out.shape)} was read outside of backward, but each process "
                "stores only its shard of the tensor, and one process alone cannot gather the others: read saved "
                "tensors in backward, which every process runs, or name the module that saves it in skip=[...]"
            )
        count = gather.group.size()
        gathered = observer().buffer(packed, count * packed.nbytes)
        all_gather(gathered, packed, gather.group)
        places = out.view(gather.shape).chunk(count, gather.dim)
        for place, codes in zip(places, gathered.chunk(count), strict=True):
            part = place if place.is_contiguous() else torch.empty(place.shape, dtype=out.dtype, device=out.device)
            shard.kernel.decode(codes[: shard.nbytes], part)
            if part is not place:
                place.copy_(part)


def store_shard(
    tensor: Tensor, form: Form, found: Gathering, packing: Packing, hooks: saved.Hooks
) -> saved.Saved | None:
    """Store codes of a gathered tensor: those of this process's shard, once for all gathered from the same shards.

    None if no kernel serves the device.
    """
    gather, shards = found
    index = tensor.get_device()
    stream = current_raw_stream(index) if index >= 0 else 0
    region, added = None if shards is None else shards.region(tensor, form, stream), 0
    if region is None:
        storing = _storing(tensor, form, gather, packing)
        if storing is None:
            return None
        region, added = hooks.region(tensor, storing)
        if shards is not None:
            shards.hold(region)
    else:
        region.uses += 1
    if hooks.recorder is not None:
        hooks.recorder.add(tensor, None, added)
    layout = layout_of(tensor)
    stored = region if region.layout == layout else saved.View(region, layout, 0)
    # A region of another result of gathering the same shards has the version of that.
    return stored if region.is_of(tensor) else saved.Same(stored, tensor)


def _storing(tensor: Tensor, form: Form, gather: Gather, packing: Packing) -> saved.Storing | None:
    shape = list(gather.shape)
    shape[gather.dim] //= gather.group.size()
    # Any tensor of this shape will do, such as the first elements.
    shard = packing.storing(tensor.detach().view(-1)[: math.prod(shape)].view(shape), form)
    if shard is None:
        return None
    kernel = _ShardKernel(gather, shard)
    nbytes = kernel.packed_nbytes(tensor.numel())
    return saved.Storing(tensor.dtype, shard.carrier, form, kernel, nbytes)


def _own_shard(tensor: Tensor, gather: Gather) -> Tensor:
    """Return this process's shard of a gathered tensor, contiguous."""
    shards = tensor.detach().view(gather.shape).chunk(gather.group.size(), gather.dim)
    own: Tensor = shards[gather.group.rank()]
    return own.contiguous()
