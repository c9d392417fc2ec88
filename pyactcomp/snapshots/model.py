"""The data of a snapshot: events as columns, segments with their memory blocks, and blocks from before the events."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

#: Names of the actions, in the order of their numbers; ``OTHER`` stands for any other name.
ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "snapshot",
    "oom",
    "annotate",
)
OTHER = len(ACTIONS)
ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP = range(7)
OOM = ACTIONS.index("oom")

#: The sign with which a segment event's size counts in the reserved memory.
RESERVES = {SEGMENT_ALLOC: 1, SEGMENT_MAP: 1, SEGMENT_FREE: -1, SEGMENT_UNMAP: -1}

#: Bytes of a segment for requests up to 1 MiB; no other segment has this size.
SMALL_SEGMENT = 2 << 20
#: Bytes: the least size of a segment for larger requests, and of a page for them, unless set otherwise.
LARGE_SEGMENT = 20 << 20


def rounded(requested: int) -> int:
    """Return the bytes of the smallest memory block for a request: a multiple of 512."""
    return -(-max(requested, 1) // 512) * 512


@dataclass(frozen=True)
class Events:
    """A device's events in order, oldest first; every column has one entry per event."""

    action: array[int]  #: uint8, into ``ACTIONS``
    address: array[int]  #: int64; of an oom event the device's free bytes
    size: array[int]  #: int64: bytes requested; of a segment event, the segment's bytes
    stream: array[int]  #: int64
    time_us: array[int]  #: int64, since 1970
    pool: array[int]  #: int32, into ``Snapshot.pools``
    stack: array[int]  #: int32, into ``Snapshot.stacks``
    metadata: array[int]  #: int32, into ``Snapshot.metadata``
    has_pools: bool  #: False: this version records no pools; they come from the segments at the end

    def __len__(self) -> int:
        return len(self.action)

    def with_pools(self, segments: Sequence[Segment]) -> Events:
        """Return the events, each with the pool of the segment at its address; ``segments`` are by address."""
        starts = [segment.address for segment in segments]
        pool = array("i", self.pool)
        for index, address in enumerate(self.address):
            at = bisect_right(starts, address) - 1
            if at >= 0 and address < segments[at].address + segments[at].size:
                pool[index] = segments[at].pool
        return replace(self, pool=pool)


@dataclass(frozen=True)
class Block:
    """A memory block of a segment."""

    address: int
    size: int
    requested: int
    active: bool  #: allocated, or freed while a stream still uses it
    pending: bool  #: freed while a stream still uses it
    stack: int


@dataclass(frozen=True)
class Segment:
    """A range of memory from the driver."""

    address: int
    size: int
    stream: int
    pool: int
    small: bool | None  #: whether the segment serves requests up to 1 MiB; None if unknown
    expandable: bool
    stack: int = 0
    blocks: tuple[Block, ...] = ()  #: empty if unknown


@dataclass(frozen=True)
class LiveBlock:
    """A memory block allocated before the first event."""

    address: int
    size: int  #: bytes; of a block gone at the end, the requested bytes rounded up to 512
    requested: int
    stream: int
    pool: int
    pending: bool  #: freed already, but still used by a stream
    stack: int  #: of the allocation, if the block is still there at the end, else 0


@dataclass(frozen=True)
class Beginning:
    """The state before the first event, sorted by address."""

    blocks: tuple[LiveBlock, ...]
    segments: tuple[Segment, ...]
    complete: bool  #: False: the segments at the end are missing, so blocks without an event are unknown


@dataclass(frozen=True)
class Releases:
    """When a recorded allocator gave memory back.

    Attributes
    ----------
    emptied
        The last event of each time the program emptied the cache, in order, with the ``unclear`` ones.
    for_requests
        Number of times memory was given back for a request.
    unclear
        Number of times with an unknown reason.
    """

    emptied: array[int] = field(default_factory=lambda: array("Q"))
    for_requests: int = 0
    unclear: int = 0


@dataclass(frozen=True)
class Paused:
    """Blocks that were alive while their pages had no memory: the recorded program had paused them.

    Attributes
    ----------
    most
        The peak of the paused bytes; 0 if the program paused nothing.
    before, at_end
        Address and bytes without memory of each block paused before the first and after the last event.
    rows
        The events that took the memory of blocks, in order.
    """

    most: int = 0
    before: Mapping[int, int] = field(default_factory=dict)
    at_end: Mapping[int, int] = field(default_factory=dict)
    rows: array[int] = field(default_factory=lambda: array("Q"))


@dataclass(frozen=True)
class Frame:
    """A stack frame: a line of a call stack."""

    filename: str
    line: int
    name: str
    original: tuple[Frame, ...] = ()  #: of generated code: the program's lines it comes from, innermost first


@dataclass(frozen=True)
class Settings:
    """The allocator's configuration; a setting missing in an older version has the default."""

    conf: str = ""  #: as in ``PYTORCH_ALLOC_CONF``
    max_split_size: int | None = None  #: bytes; None: every block is split
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    roundup_power2_divisions: Mapping[int, int] | None = None  #: lower bound in MiB -> divisions
    overflowed: bool | None = None  #: whether the oldest events were dropped; None: not recorded by this version

    @property
    def of_pyactcomp(self) -> bool:
        """Whether the settings are of this package's allocator.

        This allocator reports expandable segments without PyTorch's key for them, and leaves the default ``growth:vmm``
        out of the text.
        """
        own_growth = re.search(r"(^|,)\s*growth\s*:", self.conf) is not None
        return own_growth or (self.expandable_segments and "expandable_segments" not in self.conf)

    @property
    def collects_garbage(self) -> bool:
        """Whether the settings make the allocator collect garbage: PyTorch's does only under a memory fraction."""
        limited = self.of_pyactcomp or re.search(r"(^|,)\s*(per_process_)?memory_fraction\s*:", self.conf) is not None
        return self.garbage_collection_threshold > 0 and limited


@dataclass(frozen=True)
class DeviceTrace:
    """The recording of one device's allocator."""

    index: int
    events: Events
    segments: tuple[Segment, ...]  #: at the end, by address
    beginning: Beginning  #: blocks and segments from before the first event
    releases: Releases = field(default_factory=Releases)  #: when and why memory was given back
    paused: Paused = field(default_factory=Paused)  #: live blocks without memory


@dataclass(frozen=True)
class Snapshot:
    """A snapshot as data; stacks are indices into ``stacks``, whose entries are indices into ``frames``."""

    devices: tuple[DeviceTrace, ...]  #: devices with events or segments
    frames: tuple[Frame, ...]
    stacks: tuple[tuple[int, ...], ...]  #: innermost stack frame first; stack 0 is empty
    pools: tuple[tuple[int, int], ...]  #: pool 0 is the default one, (0, 0)
    settings: Settings
    annotations: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...]  #: anything unusual or unknown, for people to read
    metadata: tuple[str, ...] = ("",)  #: the texts that the program gave its events; text 0 is empty

    def trace(self, device: int | None = None) -> DeviceTrace:
        """Return a device's trace; the index may be left out if only one device was recorded.

        Raises
        ------
        ValueError
            If the device was not recorded.
        """
        indices = [trace.index for trace in self.devices]
        if device is None and len(indices) == 1:
            return self.devices[0]
        if device not in indices:
            raise ValueError(f"device must be one of the recorded devices {indices}, got {device}")
        return self.devices[indices.index(device)]
