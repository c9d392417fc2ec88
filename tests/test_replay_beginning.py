"""Contract under test: a replay goes on from what existed when the recording began, and bears odd recordings."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from allocator_cases import KIB, MIB
from replay_cases import as_snapshot, events
from snapshot_cases import BASE, block, content, event, read, segment

from pyactcomp._core import Replay
from pyactcomp.allocator import AllocatorConfig, CachingAllocator, SimulatedDevice
from pyactcomp.snapshots.replay import replay

GIB = 1 << 30
CONFIGS = ("native", "expandable", "pyactcomp")


def freed(address: int, size: int) -> list[dict[str, object]]:
    return [event("free_requested", address, size), event("free_completed", address, size)]


@pytest.mark.parametrize(("config", "page"), [("expandable", 20 * MIB), ("pyactcomp", 64 * MIB)])
def test_pages_that_were_mapped_and_free_are_there(config: str, page: int, tmp_path: Path) -> None:
    free = BASE + 2 * GIB
    parts = [block(BASE, 2 * GIB), block(free, 7 * GIB, "inactive"), block(free + 7 * GIB, GIB)]
    small = [block(BASE - 8 * MIB, 600 * KIB), block(BASE - 8 * MIB + 600 * KIB, 8 * MIB - 600 * KIB, "inactive")]
    ends = [
        segment(BASE, *parts, is_expandable=True),
        segment(BASE - 8 * MIB, *small, is_expandable=True, segment_type="small"),
    ]
    # Half of what was free is asked for, and fits.
    rows = [
        event("alloc", free, 3 * GIB),
        *freed(free, 3 * GIB),
        event("alloc", free, 500 * MIB),
        *freed(free, 500 * MIB),
    ]
    result = replay(read(tmp_path, content(rows, ends)), config, points=10)
    # Each of the two large blocks and what is free between may end within a page.
    assert 10 * GIB + 8 * MIB <= result.timeline[0].reserved <= 10 * GIB + 8 * MIB + 3 * page
    assert result.peak_reserved == result.timeline[0].reserved
    assert result.peak_allocated == 6 * GIB + 600 * KIB
    # What was only kept is not what memory runs out of.
    tight = replay(read(tmp_path, content(rows, ends)), config, "6200MiB")
    assert (tight.oom_at, tight.retries) == (None, 0)


def expanding(*blocks: dict[str, object], begin: int = BASE, **others: object) -> dict[str, object]:
    return segment(begin, *blocks, is_expandable=True, **others)


@pytest.mark.parametrize("config", ["expandable", "pyactcomp"])
@pytest.mark.parametrize("capacity", [62, 82, 102])
def test_pages_that_were_only_kept_give_way_to_what_lives(config: str, capacity: int, tmp_path: Path) -> None:
    kept = expanding(block(BASE, 60 * MIB, "inactive"), block(BASE + 60 * MIB, 20 * MIB))
    live = expanding(block(BASE + GIB, 40 * MIB), begin=BASE + GIB)
    rows = [event("alloc", BASE + 2 * GIB, 512), *freed(BASE + 2 * GIB, 512)]
    result = replay(read(tmp_path, content(rows, [kept, live])), config, capacity * MIB)
    assert (result.oom_at, result.peak_reserved) == (None, 62 * MIB)


@pytest.mark.parametrize("config", ["expandable", "pyactcomp"])
def test_pages_that_were_kept_are_as_many_under_any_rounding(config: str, tmp_path: Path) -> None:
    parts = [block(BASE, 260 * MIB, "inactive"), block(BASE + 260 * MIB, 20 * MIB)]
    snapshot = read(tmp_path, content([event("alloc", BASE, 512)], [expanding(*parts)]))
    plain = replay(snapshot, config).peak_reserved
    # The live block alone is rounded: to 32 MiB, which takes another page.
    assert replay(snapshot, f"{config}[roundup_power2_divisions:2]").peak_reserved <= plain + 20 * MIB


@pytest.mark.parametrize("config", ["expandable", "pyactcomp"])
def test_pages_that_a_share_of_the_memory_has_no_room_for_are_left_out(config: str, tmp_path: Path) -> None:
    parts = [block(BASE, 20 * MIB), block(BASE + 20 * MIB, 260 * MIB, "inactive")]
    snapshot = read(tmp_path, content([event("alloc", BASE + 20 * MIB, 512)], [expanding(*parts)]))
    result = replay(snapshot, f"{config}[per_process_memory_fraction:0.5]", 300 * MIB)
    assert (result.oom_at, result.retries, result.peak_reserved) == (None, 0, 22 * MIB)


@pytest.mark.parametrize("config", ["expandable", "pyactcomp"])
def test_pages_of_the_small_pool_are_told_by_their_size(config: str, tmp_path: Path) -> None:
    """All of a segment's pages are gone at the end: nothing else says which pool they were of."""
    rows = [*freed(BASE, KIB), event("segment_unmap", BASE, 10 * MIB)]
    assert replay(read(tmp_path, content(rows)), config).peak_reserved == 10 * MIB


def test_a_file_that_claims_endless_small_pages_takes_no_memory(tmp_path: Path) -> None:
    parts = [block(BASE, 512), block(BASE + 512, 256 * GIB - 512, "inactive")]
    snapshot = read(tmp_path, content([], [expanding(*parts, segment_type="small")]))
    # No more pages are filled than kMostSmall of csrc/snapshots/replay.cpp; the live block takes one of 2 MiB.
    assert replay(snapshot, "pyactcomp").peak_reserved == 4 * GIB + 2 * MIB


def test_more_pools_than_there_are_addresses_for_are_named(tmp_path: Path) -> None:
    rows = [event("alloc", BASE + index * GIB, 2 * MIB, segment_pool_id=(0, index + 1)) for index in range(12)]
    with pytest.raises(ValueError, match=r"'expandable' cannot replay this: .*no hole"):
        replay(read(tmp_path, content(rows)), "expandable", "1048576GiB")


@pytest.mark.parametrize("config", CONFIGS)
def test_many_private_pools_have_room_for_their_addresses(config: str, tmp_path: Path) -> None:
    allocator = CachingAllocator(SimulatedDevice(64 * GIB), AllocatorConfig(growth="malloc"))
    allocator.record_history("all", max_entries=1 << 20, stacks=None)
    for number in range(1, 101):
        allocator.begin_allocate_to_pool((0, number))
        for size in (KIB, 3 * MIB):
            allocator.allocate(size)
        allocator.end_allocate_to_pool((0, number))
    result = replay(as_snapshot(allocator, tmp_path), config)
    # Of every pool a small segment and a large one.
    assert result.peak_reserved == 100 * (2 + 20) * MIB


def test_segments_that_begin_anywhere_are_taken_over(tmp_path: Path) -> None:
    """What a MemPool's own allocator gave need not begin at a multiple of 2 MiB."""
    begin = BASE + 512 * KIB
    ends = [segment(begin, block(begin, 2 * MIB), block(begin + 2 * MIB, 18 * MIB, "inactive"))]
    result = replay(read(tmp_path, content([event("alloc", begin, 2 * MIB)], ends)), "native")
    assert (result.peak_reserved, result.peak_allocated, result.allocations) == (20 * MIB, 2 * MIB, 1)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_block_without_bytes_may_have_existed(config: str, tmp_path: Path) -> None:
    result = replay(read(tmp_path, content(freed(BASE, 0))), config)
    assert (result.peak_allocated, result.unknown_frees) == (512, 0)


@pytest.mark.parametrize("stream", [0, 9])
def test_each_stream_runs_whatever_its_number(stream: int, tmp_path: Path) -> None:
    """Where memory is short, freed pages of this package's allocator wait for their stream."""
    rows = []
    for index in range(2500):
        address, size = BASE + (index + 1) * GIB, (1 + index * 7 % 40) * MIB
        rows += [event("alloc", address, size, stream=stream)]
        if index >= 12:
            rows += [
                event(action, BASE + (index - 11) * GIB, (1 + (index - 12) * 7 % 40) * MIB, stream=stream)
                for action in ("free_requested", "free_completed")
            ]
    own = segment(BASE, block(BASE, 2 * MIB), stream=7)
    results = [replay(read(tmp_path, content(rows, [own])), "pyactcomp", "700MiB")]
    elsewhere = [dict(row, stream=3) for row in rows]
    results.append(replay(read(tmp_path, content(elsewhere, [own])), "pyactcomp", "700MiB"))
    assert results[0] == results[1]


def test_a_replay_advances_in_one_thread_at_a_time() -> None:
    address = [BASE + index % 3000 * 4 * MIB for index in range(100_000)]
    rows = [
        (action, at, 3 * MIB)
        for index, at in enumerate(address)
        for action in (("alloc",) if index < 3000 else ("free_completed", "alloc"))
    ]
    snapshot = events(rows)
    columns = snapshot.devices[0].events

    def start() -> Replay:
        return Replay(
            columns.action, columns.address, columns.size, columns.stream, columns.pool, snapshot.pools,
            snapshot.devices[0].releases.emptied, [], [], AllocatorConfig(growth="malloc"), False, 64 * GIB, 0,
        )  # fmt: skip

    def run(replaying: Replay) -> None:
        while replaying.advance(1000):
            pass

    alone, shared = start(), start()
    run(alone)
    threads = [threading.Thread(target=run, args=(shared,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shared.result() == alone.result()
    assert shared.position == len(rows)
