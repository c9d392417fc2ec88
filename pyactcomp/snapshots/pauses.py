"""Memory that the recorded program paused: blocks that are alive while their pages have no memory."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from .._core import find_pauses
from .model import SEGMENT_MAP, SEGMENT_UNMAP, DeviceTrace, Events, LiveBlock, Paused, Segment


def find_paused(events: Events, blocks: Sequence[LiveBlock], segments: Sequence[Segment]) -> Paused:
    """Return the paused memory of a device's recording.

    Parameters
    ----------
    events : Events
    blocks, segments
        From before the first event, by address.
    """
    if SEGMENT_MAP not in events.action and SEGMENT_UNMAP not in events.action:
        return Paused()
    absent = _without_memory(blocks, segments)
    existing = [(block.address, block.size, absent.get(block.address, 0)) for block in blocks]
    before, at_end, rows, most = find_pauses(events, existing, len(events))
    return Paused(most, {address: absent[address] for address in before}, at_end, array("Q", rows))


def paused_after(trace: DeviceTrace, event: int) -> int:
    """Return the bytes of live blocks that are paused after an event."""
    if not trace.paused.most:
        return 0
    existing = [
        (block.address, block.size, trace.paused.before.get(block.address, 0)) for block in trace.beginning.blocks
    ]
    _, paused, _, _ = find_pauses(trace.events, existing, event + 1)
    return sum(paused.values())


def notes_on(paused: Paused) -> Iterable[str]:
    """Yield what a reader of the recording has to know about its paused memory."""
    if paused.most:
        yield (
            f"memory was paused, at most {paused.most:,} bytes at a time: a replay frees paused blocks, and allocates "
            "them again when they are resumed"
        )
    if paused.at_end:
        yield (
            f"memory blocks paused after the last event: {len(paused.at_end):,}, of "
            f"{sum(paused.at_end.values()):,} bytes outside of the file's segments; paused blocks from before the "
            "recording are unknown"
        )


def _without_memory(blocks: Sequence[LiveBlock], segments: Sequence[Segment]) -> dict[int, int]:
    """Return the bytes outside of every segment, of the blocks that have any."""
    starts = [segment.address for segment in segments]
    found = {}
    for block in blocks:
        end = block.address + block.size
        inside = 0
        for segment in segments[max(0, bisect_right(starts, block.address) - 1) : bisect_right(starts, end)]:
            inside += max(0, min(end, segment.address + segment.size) - max(block.address, segment.address))
        if inside < block.size:
            found[block.address] = block.size - inside
    return found
