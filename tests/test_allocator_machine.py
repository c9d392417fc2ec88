"""The allocator as a state machine on the simulated device, against a model of live ranges, streams and counters."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from allocator_cases import MIB, blocks, overlap, physical
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pyactcomp import PyactcompError, _core
from pyactcomp.allocator import AllocatorConfig, CachingAllocator, SimulatedDevice

CAPACITY = 400 * MIB
STREAMS = st.sampled_from([0, 1, 2])
POOLS = st.sampled_from([(0, 1), (0, 2)])
PICKS = st.lists(st.integers(0, 99), min_size=1, max_size=12)
SIZES = st.one_of(
    st.integers(1, 3 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB]),
    st.integers(1, 200 * MIB),
    st.sampled_from([20 * MIB, 40 * MIB, 64 * MIB]),  # whole handles, which can move once they are free
)


@dataclass
class Live:
    size: int
    stream: int
    pool: tuple[int, int]
    uses: set[int] = field(default_factory=set)
    opened: list[_core.OpenedBlock] = field(default_factory=list)  # in another process


@dataclass
class Freed:
    """Memory that each of its streams may use until it has come this far: mapped till then, and handed to no other."""

    address: int
    size: int
    memory: list[tuple[int, int, int]]
    streams: set[int]
    point: int


class Machine(RuleBasedStateMachine):
    growth = ""

    @initialize(
        max_split=st.sampled_from([None, 64 * MIB]),
        divisions=st.sampled_from([None, 4]),
        fraction=st.sampled_from([1.0, 0.75]),
    )
    def start(self, max_split: int | None, divisions: int | None, fraction: float) -> None:
        self.device = SimulatedDevice(CAPACITY)
        config = AllocatorConfig(
            growth=self.growth,
            max_split_size=max_split,
            roundup_power2_divisions=divisions,
            memory_fraction=fraction,
            garbage_collection_threshold=0.5,
        )
        self.limit = int(fraction * CAPACITY)
        self.allocator = CachingAllocator(self.device, config)
        self.receiver = SimulatedDevice(CAPACITY)
        self.importer = _core.Importer(self.receiver)
        self.live: dict[int, Live] = {}
        self.freed: list[Freed] = []
        self.open_pools: list[tuple[tuple[int, int], int]] = []
        self.scopes: list[tuple[int, int, int]] = []
        self.count = 0
        self.total = 0

    def pool_of(self, stream: int) -> tuple[int, int]:
        """Return the pool that was opened last for a stream."""
        return next((pool for pool, only in reversed(self.open_pools) if only == stream), (0, 0))

    def behind(self, freed: Freed) -> set[int]:
        return {stream for stream in freed.streams if not self.device.finished(stream, freed.point)}

    def picked(self, picks: list[int]) -> set[int]:
        """Return blocks in use, by numbers that mean something however many there are."""
        addresses = sorted(self.live)
        return {addresses[pick % len(addresses)] for pick in picks if addresses}

    # Several at a time: of the steps of a run only a few are of one kind.
    @rule(sizes=st.lists(SIZES, min_size=1, max_size=20), stream=STREAMS)
    def allocate(self, sizes: list[int], stream: int) -> None:
        for size in sizes:
            with contextlib.suppress(torch.OutOfMemoryError, PyactcompError):
                self.check_allocated(self.allocator.allocate(size, stream), size, stream)

    def check_allocated(self, address: int, size: int, stream: int) -> None:
        block = self.allocator.block(address)
        memory = physical(self.device, address, block["size"])
        assert address not in self.live
        self.live[address] = Live(block["size"], stream, self.pool_of(stream))
        self.count += 1
        self.total += block["size"]
        assert block["requested_size"] == size <= block["size"]
        for freed in self.freed:
            if overlap(memory, freed.memory):
                behind = self.behind(freed) - {stream}
                assert not behind, f"memory that streams {behind} may still use was handed out"
        self.freed = [freed for freed in self.freed if not overlap(memory, freed.memory)]

    @rule(picks=PICKS)
    def free(self, picks: list[int]) -> None:
        waits = self.device.calls()["synchronising"]
        for address in self.picked(picks):
            block = self.live.pop(address)
            for opened in block.opened:  # the owner waits for its receivers
                opened.close()
            memory = physical(self.device, address, block.size)
            self.freed.append(Freed(address, block.size, memory, {block.stream} | block.uses, self.device.now()))
            self.allocator.free(address)
            counters = self.allocator.counters()
            with pytest.raises(ValueError, match="freed before"):
                self.allocator.free(address)
            assert self.allocator.counters() == counters
        assert self.device.calls()["synchronising"] == waits

    @rule(picks=PICKS, stream=STREAMS)
    def record_stream(self, picks: list[int], stream: int) -> None:
        for address in self.picked(picks):
            self.allocator.record_stream(address, stream)
            self.live[address].uses.add(stream)

    @rule(picks=PICKS)
    def share(self, picks: list[int]) -> None:
        for address in self.picked(picks):
            try:
                shared = self.allocator.share(address)
            except PyactcompError:
                continue  # as the device was asked to fail
            assert (shared is None) == (self.growth == "malloc")
            if shared is None:
                continue
            text, offset, _, _ = shared
            opened = self.importer.open(text)
            assert opened is not None
            self.live[address].opened.append(opened)
            mine = physical(self.device, address, self.live[address].size)
            there = physical(self.receiver, opened.address + offset, self.live[address].size)
            assert [piece[1:] for piece in mine] == [piece[1:] for piece in there]
            same = self.receiver.shared_memory(opened.address + offset)
            assert self.device.shared_memory(address) == same != 0

    @rule(picks=PICKS)
    def close(self, picks: list[int]) -> None:
        for address in self.picked(picks):
            if self.live[address].opened:
                self.live[address].opened.pop().close()

    @rule(streams=st.lists(STREAMS, min_size=1, max_size=3), count=st.one_of(st.none(), st.integers(1, 3)))
    def complete(self, streams: list[int], count: int | None) -> None:
        for stream in streams:
            self.device.complete(stream, count)

    @rule()
    def empty_cache(self) -> None:
        self.allocator.empty_cache()

    @rule(
        call=st.sampled_from(["acquire", "create", "map", "reserve", "export"]),
        count=st.integers(0, 2),
        skip=st.integers(0, 3),
    )
    def fail(self, call: str, count: int, skip: int) -> None:
        self.device.fail(call, count, skip)

    @rule(pool=POOLS, stream=STREAMS)
    def open_or_close_pool(self, pool: tuple[int, int], stream: int) -> None:
        if any(pool == opened for opened, _ in self.open_pools):
            self.open_pools = [opened for opened in self.open_pools if opened[0] != pool]
            self.allocator.end_allocate_to_pool(pool)
            self.allocator.release_pool(pool)
        else:
            self.allocator.begin_allocate_to_pool(pool, {stream})
            self.open_pools.append((pool, stream))

    @rule(push=st.booleans(), index=st.integers(0, 3))
    def push_or_pop_scope(self, push: bool, index: int) -> None:
        if push:
            self.scopes.append((self.allocator.push_scope(), self.count, self.total))
        elif self.scopes:
            number, count, total = self.scopes.pop(index % len(self.scopes))
            scope = self.allocator.pop_scope(number)
            assert (scope["allocations"], scope["total_bytes"]) == (self.count - count, self.total - total)

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "allocator"):
            return
        self.allocator.check_invariants()
        assert blocks(self.allocator, "active_allocated") == {a: block.size for a, block in self.live.items()}
        counters = self.allocator.counters()
        assert counters["allocated_bytes.all.current"] == sum(block.size for block in self.live.values())
        assert counters["allocation.all.current"] == len(self.live)
        assert counters["reserved_bytes.all.current"] == self.device.reserved <= self.limit
        for pool, _ in self.open_pools:
            inside = {address for address, block in self.live.items() if block.pool == pool}
            assert set(self.allocator.live_allocations(pool)) == inside
        self.freed = [freed for freed in self.freed if self.behind(freed)]
        for freed in self.freed:
            physical(self.device, freed.address, freed.size)  # is still mapped
        ends = sorted((address, address + block.size) for address, block in self.live.items())
        assert all(end <= begin for (_, end), (begin, _) in pairwise(ends))
        taken = sorted(
            piece for address, block in self.live.items() for piece in physical(self.device, address, block.size)
        )
        assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(taken))

    def teardown(self) -> None:
        if not hasattr(self, "allocator"):
            return
        for call in ("acquire", "create", "map", "reserve", "export"):
            self.device.fail(call, 0)
        for pool, _ in self.open_pools:
            self.allocator.end_allocate_to_pool(pool)
            self.allocator.release_pool(pool)
        for address, block in self.live.items():
            for opened in block.opened:
                opened.close()
            self.allocator.free(address)
        assert (self.importer.mapped, self.device.open_exports) == (0, 0)
        self.allocator.empty_cache()
        self.allocator.check_invariants()
        assert self.device.reserved == 0
        del self.allocator
        assert self.device.live_events == 0


class VmmMachine(Machine):
    growth = "vmm"


class MallocMachine(Machine):
    growth = "malloc"


TestVmmGrowth = VmmMachine.TestCase
TestVmmGrowth.settings = settings(max_examples=100, stateful_step_count=80)
TestMallocGrowth = MallocMachine.TestCase
TestMallocGrowth.settings = settings(max_examples=100, stateful_step_count=80)
