"""The segments of a recording at one moment, with the live allocations and the free blocks inside."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from .lifetimes import Lifetimes
from .mapped_segments import MappedSegments
from .model import RESERVES, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, DeviceTrace, Segment


def segments_after(trace: DeviceTrace, event: int) -> tuple[Segment, ...] | None:
    """Return a device's segments after an event, by address; None if the recording has no segments at all."""
    events = trace.events
    if not has_segments(trace):
        return None
    fixed = {segment.address: segment for segment in trace.beginning.segments if not segment.expandable}
    mapped = MappedSegments(segment for segment in trace.beginning.segments if segment.expandable)
    for index, action in enumerate(events.action[: event + 1]):
        if not SEGMENT_ALLOC <= action <= SEGMENT_UNMAP:
            continue
        address, size = events.address[index], events.size[index]
        segment = Segment(address, size, events.stream[index], events.pool[index], None, action == SEGMENT_MAP)
        if action == SEGMENT_ALLOC:
            fixed[address] = segment
        elif action == SEGMENT_FREE:
            fixed.pop(address, None)
        elif action == SEGMENT_MAP:
            mapped.join(segment)
        else:
            mapped.cut(address, address + size)
    return tuple(sorted([*fixed.values(), *mapped], key=lambda segment: segment.address))


def has_segments(trace: DeviceTrace) -> bool:
    """Return whether a recording tells how much was reserved."""
    return bool(trace.segments) or any(action in trace.events.action for action in RESERVES)


def reserved_after(trace: DeviceTrace) -> array[int] | None:
    """Return the bytes reserved after each event; None if the recording has no segments."""
    if not has_segments(trace):
        return None
    total = sum(segment.size for segment in trace.beginning.segments)
    result = array("q")
    for action, size in zip(trace.events.action, trace.events.size, strict=True):
        total += RESERVES.get(action, 0) * size
        result.append(total)
    return result


def free_blocks(
    segments: Iterable[Segment], lifetimes: Lifetimes, live: Sequence[int]
) -> list[tuple[Segment, list[int]]]:
    """Return the sizes of each segment's free memory blocks: the gaps between live blocks and up to the ends."""
    found = []
    for segment, inside in blocks_inside(segments, lifetimes, live):
        gaps = []
        end = segment.address
        for number in inside:
            gaps.append(lifetimes.address[number] - end)
            end = lifetimes.address[number] + lifetimes.size[number]
        gaps.append(segment.address + segment.size - end)
        found.append((segment, [gap for gap in gaps if gap > 0]))
    return found


def blocks_inside(
    segments: Iterable[Segment], lifetimes: Lifetimes, live: Sequence[int]
) -> list[tuple[Segment, list[int]]]:
    """Return each segment with the live allocations inside, by address."""
    found: list[tuple[Segment, list[int]]] = [(segment, []) for segment in segments]
    starts = [segment.address for segment, _ in found]
    for number in sorted(live, key=lifetimes.address.__getitem__):
        at = bisect_right(starts, lifetimes.address[number]) - 1
        if at >= 0 and lifetimes.address[number] < starts[at] + found[at][0].size:
            found[at][1].append(number)
    return found
