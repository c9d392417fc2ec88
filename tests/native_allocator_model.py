"""PyTorch's native caching allocator, by its rules: one stream, default settings, memory without end.

Written apart from ours, to compare the two decision by decision.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

MIB = 1 << 20


@dataclass
class _Block:
    size: int
    previous: int | None
    next: int | None


class NativeModel:
    """Says where each request goes. The driver's choice, where a segment lies, is taken from what is compared."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}
        self._pools: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # small or not -> free (size, address)
        self._live: dict[int, bool] = {}
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0

    def allocate(self, size: int, handed_out: int) -> int:
        """Return the address of the best fit, or ``handed_out`` where a segment is needed."""
        rounded = max(512, -(-size // 512) * 512)
        small = rounded <= MIB
        pool = self._pools[small]
        best = bisect_left(pool, (rounded, 0))
        if best < len(pool):
            _, address = pool.pop(best)
        else:
            address = handed_out
            segment = 2 * MIB if small else 20 * MIB if rounded < 10 * MIB else -(-rounded // (2 * MIB)) * 2 * MIB
            self._blocks[address] = _Block(segment, None, None)
            self.reserved += segment
            self.peak_reserved = max(self.peak_reserved, self.reserved)
        block = self._blocks[address]
        rest = block.size - rounded
        if rest >= 512 if small else rest > MIB:
            self._blocks[address + rounded] = _Block(rest, address, block.next)
            if block.next is not None:
                self._blocks[block.next].previous = address + rounded
            block.size, block.next = rounded, address + rounded
            insort(pool, (rest, address + rounded))
        self._live[address] = small
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return address

    def free(self, address: int) -> None:
        small = self._live.pop(address)
        block = self._blocks[address]
        self.allocated -= block.size
        if block.next is not None and self._take(small, block.next):
            self._join(address, block.next)
        if block.previous is not None and self._take(small, block.previous):
            self._join(block.previous, address)
            address = block.previous
        insort(self._pools[small], (self._blocks[address].size, address))

    def _take(self, small: bool, address: int) -> bool:
        """Remove a block from its free ones, if it is free."""
        if address in self._live:
            return False
        pool = self._pools[small]
        del pool[bisect_left(pool, (self._blocks[address].size, address))]
        return True

    def _join(self, left: int, right: int) -> None:
        gone = self._blocks.pop(right)
        kept = self._blocks[left]
        kept.size, kept.next = kept.size + gone.size, gone.next
        if gone.next is not None:
            self._blocks[gone.next].previous = left
