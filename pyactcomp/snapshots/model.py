"""The plain data of a snapshot: events as columns, segments with their blocks, and blocks from before the events."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

#: Names of the actions, which events have by number; ``OTHER`` stands for any other name.
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

#: How often an event of a segment adds its size to the reserved memory.
RESERVES = {SEGMENT_ALLOC: 1, SEGMENT_MAP: 1, SEGMENT_FREE: -1, SEGMENT_UNMAP: -1}

#: Bytes: the size of a segment for requests up to 1 MiB, and of no other.
SMALL_SEGMENT = 2 << 20
#: Bytes: the least size of a segment for larger requests, and of their pages, unless it was set otherwise.
LARGE_SEGMENT = 20 << 20


def rounded(requested: int) -> int:
    """Return the bytes of the least block that holds a request: every block has a multiple of 512."""
    return -(-max(requested, 1) // 512) * 512


@dataclass(frozen=True)
class Events:
    """A device's events in order, oldest first; every column has one entry an event."""

    action: array[int]  #: uint8, into ``ACTIONS``
    address: array[int]  #: int64; of an oom event the device's free bytes
    size: array[int]  #: int64: bytes requested, of a segment's event its own
    stream: array[int]  #: int64
    time_us: array[int]  #: int64, since 1970
    pool: array[int]  #: int32, into ``Snapshot.pools``
    stack: array[int]  #: int32, into ``Snapshot.stacks``
    has_pools: bool  #: False: the version records none, and they are those of the segments at the end

    def __len__(self) -> int:
        return len(self.action)

    def with_pools(self, segments: Sequence[Segment]) -> Events:
        """Return the events, each with the pool of the segment, of these by address, that it lies in."""
        starts = [segment.address for segment in segments]
        pool = array("i", self.pool)
        for index, address in enumerate(self.address):
            at = bisect_right(starts, address) - 1
            if at >= 0 and address < segments[at].address + segments[at].size:
                pool[index] = segments[at].pool
        return replace(self, pool=pool)


@dataclass(frozen=True)
class Block:
    """A block of a segment."""

    address: int
    size: int
    requested: int
    active: bool  #: allocated, or freed while a stream still uses it
    pending: bool  #: freed while a stream still uses it
    stack: int


@dataclass(frozen=True)
class Segment:
    """A range of memory that the driver gave."""

    address: int
    size: int
    stream: int
    pool: int
    small: bool | None  #: whether it serves requests up to 1 MiB; None where that is not known
    expandable: bool
    stack: int = 0
    blocks: tuple[Block, ...] = ()  #: empty where they are not known


@dataclass(frozen=True)
class LiveBlock:
    """A block that was allocated before the first event."""

    address: int
    size: int  #: bytes; where the block is gone at the end, the least that holds the request
    requested: int
    stream: int
    pool: int
    pending: bool  #: freed already, while a stream still used it
    stack: int  #: of its allocation where it is still there at the end, else 0


@dataclass(frozen=True)
class Beginning:
    """The state before the first event, each by address."""

    blocks: tuple[LiveBlock, ...]
    segments: tuple[Segment, ...]
    complete: bool  #: False: the segments at the end are missing, so blocks that no event touched cannot be known


@dataclass(frozen=True)
class Releases:
    """When a recorded allocator gave memory back.

    Attributes
    ----------
    emptied
        The last event of each time that the program emptied the cache, in order, those of ``unclear`` included.
    for_requests
        Times that memory was given back for a request.
    unclear
        Times for which the recording does not tell.
    """

    emptied: array[int] = field(default_factory=lambda: array("Q"))
    for_requests: int = 0
    unclear: int = 0


@dataclass(frozen=True)
class Frame:
    """A line of a call stack."""

    filename: str
    line: int
    name: str


@dataclass(frozen=True)
class Settings:
    """How the allocator was configured; a setting that an older version does not name has its default."""

    conf: str = ""  #: as in ``PYTORCH_ALLOC_CONF``
    max_split_size: int | None = None  #: bytes; None: every block is split
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    roundup_power2_divisions: Mapping[int, int] | None = None  #: MiB, from which on -> divisions
    overflowed: bool | None = None  #: whether the recording dropped its oldest events; None: the version does not say

    @property
    def of_pyactcomp(self) -> bool:
        """Whether they are this package's allocator's.

        It says that its segments expand, and not by PyTorch's key; of its own keys it leaves out ``growth:vmm``.
        """
        own_growth = re.search(r"(^|,)\s*growth\s*:", self.conf) is not None
        return own_growth or (self.expandable_segments and "expandable_segments" not in self.conf)


@dataclass(frozen=True)
class DeviceTrace:
    """The recording of one device's allocator."""

    index: int
    events: Events
    segments: tuple[Segment, ...]  #: at the end, by address
    beginning: Beginning  #: blocks and segments from before the first event
    releases: Releases = field(default_factory=Releases)  #: when and why memory was given back


@dataclass(frozen=True)
class Snapshot:
    """A snapshot as plain data; stacks are numbers into ``stacks``, and these into ``frames``."""

    devices: tuple[DeviceTrace, ...]  #: devices with events or segments
    frames: tuple[Frame, ...]
    stacks: tuple[tuple[int, ...], ...]  #: innermost frame first; stack 0 is empty
    pools: tuple[tuple[int, int], ...]  #: pool 0 is the default one, (0, 0)
    settings: Settings
    annotations: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...]  #: anything unusual or unknown, for the reader of results

    def trace(self, device: int | None = None) -> DeviceTrace:
        """Return a device's trace; its index may be left out where one alone was recorded.

        Raises
        ------
        ValueError
            For a device that was not recorded.
        """
        indices = [trace.index for trace in self.devices]
        if device is None and len(indices) == 1:
            return self.devices[0]
        if device not in indices:
            raise ValueError(f"device is one of those recorded, {indices}, got {device}")
        return self.devices[indices.index(device)]
