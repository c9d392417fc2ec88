"""Why a recorded allocator gave memory back: the program emptied the cache, or a request needed it.

A replay repeats the first and decides the second for itself. The events look the same where ``empty_cache`` is followed
by a request that fits nowhere: call stacks tell them apart, and so does what the device is known to have had, at
another time or where memory ran out.
What stays unclear is repeated, which is what the recorded allocator did in either case.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence

from .recording import (
    FREE_REQUESTED,
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    SMALL_SEGMENT,
    Beginning,
    Events,
    Frame,
    Releases,
)

_SIGN = {SEGMENT_ALLOC: 1, SEGMENT_MAP: 1, SEGMENT_FREE: -1, SEGMENT_UNMAP: -1}
# torch.cuda.empty_cache, and what it calls.
_EMPTYING = ("empty_cache", "emptyCache")


def find_releases(
    events: Events,
    beginning: Beginning,
    frames: Sequence[Frame],
    stacks: Sequence[Sequence[int]],
    collects_garbage: bool,
) -> Releases:
    """Return when and why memory was given back.

    Parameters
    ----------
    events, beginning, frames, stacks
        A device's, of a recording.
    collects_garbage
        Whether the allocator gave memory back before there was none left.
    """
    emptying_frames = {number for number, frame in enumerate(frames) if any(name in frame.name for name in _EMPTYING)}
    emptying = {number for number, stack in enumerate(stacks) if not emptying_frames.isdisjoint(stack)}
    # Otherwise the stack of memory given back is that of its allocation.
    tells = any(stack for action, stack in zip(events.action, events.stack, strict=True) if action == FREE_REQUESTED)
    reserved = _reserved_before(events, beginning)
    most = max(reserved.values())
    limit = _limit(events, reserved)
    emptied, for_requests, unclear = array("Q"), 0, 0
    for first, end in _runs(events):
        # Pages that were mapped elsewhere first have moved.
        if first and events.action[first - 1] == SEGMENT_MAP:
            continue
        follows = events.action[end] if end < len(events) else None
        grows = follows in (SEGMENT_ALLOC, SEGMENT_MAP)
        is_told = not emptying.isdisjoint(events.stack[first:end])
        wanted = reserved[first] + events.size[end] if grows else 0
        if not is_told and (follows == OOM or (grows and (tells or collects_garbage or wanted > limit))):
            for_requests += 1
            continue
        emptied.append(end - 1)
        # The device had as much at another time: then the request had room.
        unclear += not is_told and wanted > most
    return Releases(emptied, for_requests, unclear)


def _reserved_before(events: Events, beginning: Beginning) -> dict[int, int]:
    """Return the bytes reserved before each event of a segment and where memory ran out, and at the end."""
    total = sum(segment.size for segment in beginning.segments)
    reserved = {}
    for index, action in enumerate(events.action):
        if action in _SIGN or action == OOM:
            reserved[index] = total
            total += _SIGN.get(action, 0) * events.size[index]
    reserved[len(events)] = total
    return reserved


def _limit(events: Events, reserved: Mapping[int, int]) -> float:
    """Return the most bytes that the device can have had: no more were free, and some request did not fit."""
    ran_out = (index for index, action in enumerate(events.action) if action == OOM)
    # The address of such an event is what was free.
    return min(
        (
            reserved[index] + min(events.address[index], -(-events.size[index] // SMALL_SEGMENT) * SMALL_SEGMENT - 1)
            for index in ran_out
        ),
        default=math.inf,
    )


def _runs(events: Events) -> Iterator[tuple[int, int]]:
    """Yield the first event of each row of events that give memory back, and the event after the last."""
    first = None
    for index, action in enumerate(events.action):
        if action in (SEGMENT_FREE, SEGMENT_UNMAP):
            first = index if first is None else first
        elif first is not None:
            yield first, index
            first = None
    if first is not None:
        yield first, len(events)
