"""Why a recorded allocator gave memory back: the program emptied the cache or paused memory, or a request needed it.

A replay empties its cache for the first two, and decides the third for itself. Only a pause takes pages from live
blocks. If ``empty_cache`` is followed by a request that fits nowhere, the events look the same as for a request. Call
stacks tell the two apart, and so does the memory the device is known to have had, at another time or where memory ran
out. An unclear release is repeated: the recorded allocator did give the memory back.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from .model import (
    FREE_COMPLETED,
    FREE_REQUESTED,
    LARGE_SEGMENT,
    OOM,
    RESERVES,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    SMALL_SEGMENT,
    Beginning,
    Events,
    Frame,
    Paused,
    Releases,
    Settings,
)

_NOTHING_PAUSED = Paused()


def find_releases(
    events: Events,
    beginning: Beginning,
    frames: Sequence[Frame],
    stacks: Sequence[Sequence[int]],
    settings: Settings,
    paused: Paused = _NOTHING_PAUSED,
) -> Releases:
    """Return when and why memory was given back.

    Parameters
    ----------
    events, beginning
        One device's.
    frames, stacks, settings
        The recording's.
    paused
        The device's; to pause memory gives it back as emptying the cache does.
    """
    emptying_frames = {number for number, frame in enumerate(frames) if _empties(frame.name)}
    emptying = {number for number, stack in enumerate(stacks) if not emptying_frames.isdisjoint(stack)}
    # Without stacks of frees, a release has the stack of the allocation, as always with this package's allocator.
    rows = zip(events.action, events.stack, strict=True)
    tells = not settings.of_pyactcomp and any(stack for action, stack in rows if action == FREE_REQUESTED)
    reserved = _reserved_before(events, beginning)
    most = max(reserved.values())
    # If other processes use the device too, there may have been more memory before the out-of-memory event.
    limit = max(most, _limit(events, reserved))
    emptied, for_requests, unclear = array("Q"), 0, 0
    for first, end in _runs(events):
        # Pages mapped elsewhere just before have moved.
        if first and events.action[first - 1] == SEGMENT_MAP:
            continue
        after = end
        # Memory blocks of other streams come back while a request waits for memory.
        while after < len(events) and events.action[after] == FREE_COMPLETED:
            after += 1
        follows = events.action[after] if after < len(events) else None
        grows = follows in (SEGMENT_ALLOC, SEGMENT_MAP, SEGMENT_FREE, SEGMENT_UNMAP)
        # A destroyed MemPool gives back no other pool's memory, from any call stack.
        of_pool = events.pool[first] != 0 and len({*events.pool[first:end]}) == 1
        pauses = bisect_left(paused.rows, end) > bisect_left(paused.rows, first)
        is_told = pauses or of_pool or not emptying.isdisjoint(events.stack[first:end])
        wanted = reserved[first]
        while after < len(events) and events.action[after] in (SEGMENT_ALLOC, SEGMENT_MAP):
            wanted += events.size[after]
            after += 1
        if not is_told and (follows == OOM or (grows and (tells or settings.collects_garbage or wanted > limit))):
            for_requests += 1
            continue
        emptied.append(end - 1)
        # If the device had as much at another time, the request had room.
        unclear += not is_told and grows and wanted > most
    return Releases(emptied, for_requests, unclear)


def _reserved_before(events: Events, beginning: Beginning) -> dict[int, int]:
    """Return the bytes reserved before each segment event and each out-of-memory event, and at the end."""
    total = sum(segment.size for segment in beginning.segments)
    reserved = {}
    for index, action in enumerate(events.action):
        if action in RESERVES or action == OOM:
            reserved[index] = total
            total += RESERVES.get(action, 0) * events.size[index]
    reserved[len(events)] = total
    return reserved


def _limit(events: Events, reserved: Mapping[int, int]) -> float:
    """Return the most bytes the device can have had: the free ones are known, and some request did not fit."""
    ran_out = (index for index, action in enumerate(events.action) if action == OOM)
    # The address of an out-of-memory event is the number of free bytes.
    return min(
        (reserved[index] + min(events.address[index], _segment_for(events.size[index]) - 1) for index in ran_out),
        default=math.inf,
    )


def _segment_for(size: int) -> int:
    """Return the most bytes of a segment that PyTorch takes for a request."""
    least = SMALL_SEGMENT if size <= SMALL_SEGMENT // 2 else LARGE_SEGMENT
    return max(least, -(-size // SMALL_SEGMENT) * SMALL_SEGMENT)


def _empties(name: str) -> bool:
    """Return whether a function is torch.cuda.empty_cache or one of its callees."""
    return name.rpartition(".")[2] == "empty_cache" or "emptyCache" in name


def _runs(events: Events) -> Iterator[tuple[int, int]]:
    """Yield the first event of each run of releases, and the event after the last."""
    first = None
    for index, action in enumerate(events.action):
        if action in (SEGMENT_FREE, SEGMENT_UNMAP):
            first = index if first is None else first
        elif first is not None:
            yield first, index
            first = None
    if first is not None:
        yield first, len(events)
