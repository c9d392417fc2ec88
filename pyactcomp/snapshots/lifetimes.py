"""The allocations of a recording: first and last event, size and call stack of each."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from .model import ALLOC, FREE_COMPLETED, FREE_REQUESTED, DeviceTrace, rounded


@dataclass(frozen=True)
class Lifetimes:
    """A device's allocations, first the ones from before the recording; every column has one entry per allocation.

    An allocation lives from event ``begin`` to before event ``end``. For a memory block never freed in the recording,
    ``end`` is the number of events.
    """

    events: int
    begin: array[int]  #: -1: before the recording
    asked_free: array[int]  #: the event of the free request, if ``end`` is later: other streams still use the block
    end: array[int]
    address: array[int]
    size: array[int]  #: bytes of the block; of a block gone at the end, the requested bytes rounded up to 512
    requested: array[int]  #: bytes
    stack: array[int]
    stream: array[int]
    pool: array[int]  #: into ``Snapshot.pools``

    def changes(self) -> array[int]:
        """Return the change of the live bytes at each event."""
        change = array("q", bytes(8 * self.events))
        for begin, end, size in zip(self.begin, self.end, self.size, strict=True):
            if begin >= 0:
                change[begin] += size
            if end < self.events:
                change[end] -= size
        return change

    def before(self) -> int:
        """Return the bytes alive before the first event."""
        return sum(size for begin, size in zip(self.begin, self.size, strict=True) if begin < 0)

    def peak(self) -> int:
        """Return the first event after which the most bytes are alive; -1 if the peak is before all events."""
        alive = list(accumulate(self.changes(), initial=self.before()))
        return alive.index(max(alive)) - 1

    def alive_after(self, event: int) -> Iterator[int]:
        """Yield the allocations alive after an event."""
        for number, (begin, end) in enumerate(zip(self.begin, self.end, strict=True)):
            if begin <= event < end:
                yield number


def find_lifetimes(trace: DeviceTrace) -> Lifetimes:
    """Pair a device's allocations with their frees.

    Parameters
    ----------
    trace : DeviceTrace
        From ``read_snapshot``, so every free is of a known block.
    """
    events = trace.events
    count = len(events)
    begin, asked, end = array("q"), array("q"), array("q")
    address, size, requested, stack = array("q"), array("q"), array("q"), array("i")
    stream, pool = array("q"), array("i")
    live: dict[int, int] = {}
    columns = (begin, asked, end, address, size, requested, stack, stream, pool)
    for block in trace.beginning.blocks:
        live[block.address] = len(begin)
        asked_free = -1 if block.pending else count
        of_block = (block.address, block.size, block.requested, block.stack, block.stream, block.pool)
        values = (-1, asked_free, count, *of_block)
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    rows = zip(events.action, events.address, events.size, events.stack, strict=True)
    for index, (action, at, asked_bytes, calls) in enumerate(rows):
        if action == ALLOC:
            live[at] = len(begin)
            begin.append(index)
            asked.append(count)
            end.append(count)
            address.append(at)
            size.append(rounded(asked_bytes))
            requested.append(asked_bytes)
            stack.append(calls)
            stream.append(events.stream[index])
            pool.append(events.pool[index])
        elif action == FREE_REQUESTED:
            asked[live[at]] = index
        elif action == FREE_COMPLETED:
            end[live.pop(at)] = index
    for segment in trace.segments:
        for held in segment.blocks:
            if held.active and (still := live.get(held.address)) is not None:
                size[still] = held.size
    return Lifetimes(count, *columns)
