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
from ..errors import PyactcompError
from ..readers.forms import CODES
from ..readers.nodes import CAST, VIEWS
from ..readers.observer import observer
from ..torch_private import running_node
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
from .marks import SHARDS
from .packing import Packing
from .saved import Recent, Region, Storing

_LONGEST_WALK = 8
# Autocast casts what was gathered.
_PASSED = VIEWS | {CAST}
GATHERED = frozenset((REDISTRIBUTED, TO_LOCAL, FROM_LOCAL, ""))
"""Names of the producer of a tensor that may hold the result of an all-gather; a local tensor's base has none."""


class Shards:
    """On the node of a DTensor: the stored form of the tensor gathered from the DTensor.

    Projections that gather one DTensor each for itself store the codes of its shards once.
    """

    __slots__ = ("_region", "_versions")

    def __init__(self, tensor: Tensor) -> None:
        # A write to a DTensor moves no counter of the local tensor, nor the other way round.
        self._versions = observer().version(tensor), observer().version(local_tensor(tensor))
        self._region: ref[Sharded] | None = None

    def region(self, storing: Storing, stream: int) -> Sharded | None:
        """Return the region of another result of gathering the DTensor, if that was not written to since."""
        region = None if self._region is None else self._region()
        if region is None or region.stream != stream or any(version.moved for version in self._versions):
            return None
        same = region.layout == storing.layout and region.dtype is storing.dtype
        return region if same and region.form.serves(storing.form) else None

    def hold(self, region: Sharded) -> None:
        """Remember a region while something holds it."""
        self._region = ref(region)


def mark_as_shards(tensor: Tensor) -> None:
    """Let all results of gathering a DTensor that was not written to share one region."""
    SHARDS.set(tensor.grad_fn, Shards(tensor))


class Gathering(NamedTuple):
    """The all-gather that made a saved tensor, and the mark of the gathered DTensor, if the DTensor has one."""

    gather: Gather
    shards: Shards | None


def gathering(tensor: Tensor, saved: Tensor) -> Gathering | None:
    """Return the all-gather whose result, or cast, a saved tensor holds, in the same order and not written to.

    Parameters
    ----------
    tensor : Tensor
        The plain tensor to pack.
    saved : Tensor
        The DTensor around ``tensor``, or ``tensor``.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    base = saved._base
    # Not from a view: Python's object for the view's node would live as long as the graph. The base of a local tensor
    # has no node.
    start = saved if base is None or base.grad_fn is None else base
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
    if node is None or not placements or saved._version != 0 or tensor._version != 0 or not tensor.is_contiguous():
        return None
    gather = gather_of(node, placements)
    if gather is None or math.prod(gather.shape) != tensor.numel():
        return None
    source = node.next_functions[0][0]
    return Gathering(gather, None if source is None else SHARDS.on(source))


class Sharded(Region):
    """The codes of this process's shard of a gathered tensor; restoring gathers the codes of all processes.

    All processes of the group restore in the same order, as they run the operators of a DTensor in the same order. If a
    later reader needs more than these codes, the whole tensor is stored anew.
    """

    __slots__ = ("_gather", "_shard")

    def __init__(
        self, source: Tensor, storing: Storing, seed: int, stream: int, recent: Recent, gather: Gather, shard: Storing
    ) -> None:
        self._gather: Gather | None = gather
        self._shard = shard
        super().__init__(source, storing, seed, stream, recent)

    def store(self, source: Tensor, storing: Storing, seed: int) -> None:
        """Pack the shard of ``source``, or the whole if ``storing`` has another form than the shard's."""
        gather, shard = self._gather, self._shard
        if gather is None or storing.form is not shard.form:
            self._gather = None
            return super().store(source, storing, seed)
        own = _own_shard(source, gather)
        self.form, self._storing = shard.form, shard
        # Padded, so that the codes of each process are aligned where they are gathered: kernels are faster then.
        self._packed = observer().buffer(own, shard.nbytes + -shard.nbytes % fmt.ALIGNMENT)
        shard.kernel.encode(
            own if shard.carrier is self.dtype else own.to(shard.carrier), self._codes(self._packed), seed
        )

    def hold(self, source: Tensor) -> None:
        """Hold the whole original instead of codes."""
        self._gather = None
        super().hold(source)

    def _codes(self, buffer: Tensor) -> Tensor:
        return buffer[: self._shard.nbytes]

    def _make(self) -> Tensor:
        gather, shard = self._gather, self._shard
        if gather is None:
            return super()._make()
        if running_node() is None:
            raise PyactcompError(
                f"a saved tensor of shape {tuple(self.layout.shape)} was read outside of backward, but each process "
                "stores only its shard of the tensor, and one process alone cannot gather the others: read saved "
                "tensors in backward, which every process runs, or name the module that saves it in skip=[...]"
            )
        count = gather.group.size()
        gathered = observer().buffer(self._packed, count * self._packed.nbytes)
        all_gather(gathered, self._packed, gather.group)
        out = torch.empty(gather.shape, dtype=shard.carrier, device=self._packed.device)
        for place, codes in zip(out.chunk(count, gather.dim), gathered.chunk(count), strict=True):
            part = place if place.is_contiguous() else observer().empty_as(shard.like, self._packed)
            shard.kernel.decode(self._codes(codes), part)
            if part is not place:
                place.copy_(part)
        restored: Tensor = out.to(self.dtype)
        return restored.as_strided(self.layout.shape, self.layout.stride)


def new_region(
    source: Tensor, storing: Storing, seed: int, stream: int, recent: Recent, packing: Packing, found: Gathering | None
) -> tuple[Region, int]:
    """Return the region of a tensor, and how many bytes were stored before.

    Of a gathered tensor that takes codes, it is the region of this process's shard, one for all that were gathered from
    the same shards.
    """
    if found is None or storing.form.need != CODES:
        return Region(source, storing, seed, stream, recent), 0
    gather, shards = found
    known = None if shards is None else shards.region(storing, stream)
    if known is not None:
        known.uses += 1
        return known, known.nbytes
    shape = list(gather.shape)
    shape[gather.dim] //= gather.group.size()
    # Any tensor of this shape will do, such as the first elements.
    shard = packing.storing(source.detach().view(-1)[: math.prod(shape)].view(shape), storing.form)
    region = Sharded(source, storing, seed, stream, recent, gather, shard)
    if shards is not None:
        shards.hold(region)
    return region, 0


def _own_shard(tensor: Tensor, gather: Gather) -> Tensor:
    """Return this process's shard of a gathered tensor, contiguous."""
    shards = tensor.detach().view(gather.shape).chunk(gather.group.size(), gather.dim)
    own: Tensor = shards[gather.group.rank()]
    return own.contiguous()
