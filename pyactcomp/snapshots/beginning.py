"""Memory blocks and segments from before a recording's first event, from the events and the segments at the end.

A block without an allocation lived before: the events free it, or it is there at the end. For segments the events are
undone from the last to the first: from the segments at the end, an allocation removes a segment and a release adds one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from .._core import check_overlaps, open_lifetimes
from .mapped_segments import MappedSegments
from .model import (
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    SMALL_SEGMENT,
    Beginning,
    Events,
    LiveBlock,
    Paused,
    Segment,
    rounded,
)
from .pauses import find_paused, notes_on


def find_beginning(events: Events, end: Sequence[Segment], device: int) -> tuple[Beginning, Paused, list[str]]:
    """Return the blocks and segments from before the first event, paused memory, and notes on anything unusual.

    Parameters
    ----------
    events : Events
        A device's events.
    end : sequence of Segment
        The device's segments after the last event, by address.
    device : int
        The device's index, for messages.

    Raises
    ------
    ValueError
        If no allocator can have these events: a block freed twice, or allocated over another.
    """
    firsts, left = open_lifetimes(events, device)
    freed = _freed(events, firsts)
    survivors = _survivors(end, left)
    for address in freed.keys() & left.keys() & survivors.keys():
        freed[address] = survivors.pop(address)
    existing = [(block.address, block.size, False) for block in freed.values()]
    existing += [(block.address, block.size, True) for block in survivors.values()]
    contradicted = set(check_overlaps(events, existing, device))
    outside, lost = _missing(left, end)
    blocks = {**freed, **{at: block for at, block in survivors.items() if at not in contradicted}}
    before = tuple(blocks[address] for address in sorted(blocks))
    segments = _segments_before(events, end)
    paused = find_paused(events, before, segments)
    outside = [address for address in outside if address not in paused.at_end]
    notes = list(notes_on(paused))
    if blocks:
        notes.append(
            f"memory blocks from before the recording: {len(blocks):,}, of "
            f"{sum(block.size for block in blocks.values()):,} bytes; freed during the recording: {len(freed):,}"
        )
    if outside:
        notes.append(
            f"memory blocks alive after the last event but outside the file's segments: {len(outside):,}, the first at "
            f"{outside[0]:#x}; blocks from before the recording are unknown unless the recording frees them"
        )
    different = len(contradicted) + len(lost)
    if different:
        first = min([*contradicted, *lost])
        notes.append(
            f"the segments contradict the events, first at {first:#x} ({different:,} memory blocks in all): "
            "the segments are from a little after the last event, so the events count"
        )
    return Beginning(before, segments, not outside), paused, [f"device {device}: {note}" for note in notes]


def _freed(events: Events, firsts: dict[int, int]) -> dict[int, LiveBlock]:
    """Return the blocks whose first event is a free; ``firsts`` has this event's index."""
    # Without free requests in the recording, a completed free does not say whether the block was pending.
    has_requests = FREE_REQUESTED in events.action
    return {
        address: LiveBlock(
            address,
            rounded(events.size[index]),
            events.size[index],
            events.stream[index],
            events.pool[index],
            has_requests and events.action[index] == FREE_COMPLETED,
            0,
        )
        for address, index in firsts.items()
    }


def _survivors(end: Sequence[Segment], left: dict[int, int]) -> dict[int, LiveBlock]:
    """Return the blocks at the end that no event allocated."""
    return {
        block.address: LiveBlock(
            block.address,
            block.size,
            block.requested,
            segment.stream,
            segment.pool,
            block.pending and block.address not in left,
            block.stack,
        )
        for segment in end
        for block in segment.blocks
        if block.active and left.get(block.address, -1) == -1
    }


def _missing(left: dict[int, int], end: Sequence[Segment]) -> tuple[list[int], list[int]]:
    """Return the blocks live at the end outside every segment, and the blocks that are free in a segment."""
    starts = [segment.address for segment in end]
    active = {block.address for segment in end for block in segment.blocks if block.active}
    outside: list[int] = []
    lost: list[int] = []
    for address in left.keys() - active:
        at = bisect_right(starts, address) - 1
        within = at >= 0 and address < end[at].address + end[at].size
        (lost if within else outside).append(address)
    return sorted(outside), sorted(lost)


def _segments_before(events: Events, end: Sequence[Segment]) -> tuple[Segment, ...]:
    """Undo the events of segments, last first."""
    fixed = {segment.address: replace(segment, blocks=()) for segment in end if not segment.expandable}
    mapped = MappedSegments(replace(segment, blocks=()) for segment in end if segment.expandable)
    of_segments = [index for index, action in enumerate(events.action) if SEGMENT_ALLOC <= action <= SEGMENT_UNMAP]
    for index in reversed(of_segments):
        action = events.action[index]
        address, size = events.address[index], events.size[index]
        stream, pool = events.stream[index], events.pool[index]
        if action == SEGMENT_ALLOC:
            fixed.pop(address, None)
        elif action == SEGMENT_FREE:
            fixed.setdefault(address, Segment(address, size, stream, pool, size == SMALL_SEGMENT, False))
        elif action == SEGMENT_MAP:
            mapped.cut(address, address + size)
        else:
            mapped.join(Segment(address, size, stream, pool, None, True))
    return tuple(sorted([*fixed.values(), *mapped], key=lambda segment: segment.address))
