"""Expandable segments as address ranges: mapped and unmapped pages make them grow, shrink, join and split."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import replace

from .model import Segment

# Far more than there are: a stream has one segment in each pool, in pieces where pages were given back between others.
_MOST = 1 << 16


class MappedSegments:
    """A device's expandable segments, changed by ranges of pages."""

    def __init__(self, segments: Iterable[Segment]):
        self._segments = {segment.address: segment for segment in segments}
        self._starts = sorted(self._segments)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments.values())

    def cut(self, begin: int, end: int) -> None:
        """Remove a range."""
        at = max(0, bisect_right(self._starts, begin) - 1)
        while at < len(self._starts) and self._starts[at] < end:
            segment = self._segments[self._starts[at]]
            stop = segment.address + segment.size
            if stop <= begin:
                at += 1
                continue
            self._remove(segment)
            for left, right in ((segment.address, begin), (end, stop)):
                if left < right:
                    self._insert(replace(segment, address=left, size=right - left))
                    at += left == segment.address
            if stop >= end:
                return

    def join(self, segment: Segment) -> None:
        """Add a range, joined with adjacent segments of the same stream and pool; it replaces parts that overlap."""
        self.cut(segment.address, segment.address + segment.size)
        at = bisect_left(self._starts, segment.address)
        for other in [self._segments[start] for start in self._starts[max(0, at - 1) : at + 1]]:
            touches = other.address + other.size == segment.address or segment.address + segment.size == other.address
            if touches and (other.stream, other.pool) == (segment.stream, segment.pool):
                self._remove(other)
                low = min(other.address, segment.address)
                segment = replace(other, address=low, size=other.size + segment.size)
        self._insert(segment)

    def _insert(self, segment: Segment) -> None:
        if len(self._starts) >= _MOST:
            raise ValueError(f"more than {_MOST} expandable segments at a time: no allocator has as many")
        self._segments[segment.address] = segment
        insort(self._starts, segment.address)

    def _remove(self, segment: Segment) -> None:
        del self._segments[segment.address]
        del self._starts[bisect_left(self._starts, segment.address)]
