"""What lived before a recording began, against the state that the whole recording had at that event."""

from __future__ import annotations

from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pytest
from allocator_cases import MIB, make, reserved
from hypothesis import given
from hypothesis import strategies as st
from replay_cases import as_snapshot
from snapshot_cases import BASE, RECORDED, block, content, event, read, rerun, segment

from pyactcomp.allocator import CachingAllocator, SimulatedDevice
from pyactcomp.snapshots.mapped_segments import MappedSegments
from pyactcomp.snapshots.model import Beginning, Paused, Segment

CUTS = (0.3, 0.6)


def live(snapshot: dict[str, Any]) -> dict[int, tuple[int, int, tuple[int, int], bool]]:
    """Return address -> requested bytes, stream, pool and whether it is pending, of the blocks in use."""
    return {
        entry["address"]: (
            entry["requested_size"],
            found["stream"],
            found["segment_pool_id"],
            entry["state"] == "active_pending_free",
        )
        for found in snapshot["segments"]
        for entry in found["blocks"]
        if entry["state"] != "inactive"
    }


def ranges(snapshot: dict[str, Any]) -> list[tuple[int, int, int, tuple[int, int], bool]]:
    return [
        (found["address"], found["total_size"], found["stream"], found["segment_pool_id"], found["is_expandable"])
        for found in snapshot["segments"]
    ]


def check(found: Beginning, pools: tuple[tuple[int, int], ...], truth: dict[str, Any], end: dict[str, Any]) -> None:
    assert {
        entry.address: (entry.requested, entry.stream, pools[entry.pool], entry.pending) for entry in found.blocks
    } == live(truth)
    kept = {
        entry["address"]: entry["size"]
        for part in truth["segments"]
        for entry in part["blocks"]
        if entry["state"] != "inactive"
    }
    for entry in found.blocks:
        # Exact where the block is there at the end; else the least that holds the request.
        assert -(-entry.requested // 512) * 512 <= entry.size <= kept[entry.address]
    assert [
        (part.address, part.size, part.stream, pools[part.pool], part.expandable) for part in found.segments
    ] == sorted(ranges(truth))
    assert found.complete


# Every recorded run once, and every growth with short and with long runs.
@pytest.mark.parametrize(("name", "growth"), list(zip(RECORDED, cycle(["malloc", "vmm"]))))
def test_a_cut_recording_begins_with_what_the_whole_one_had_there(name: str, growth: str, tmp_path: Path) -> None:
    end, states = rerun(name, growth, CUTS)
    assert len(states) == len(CUTS)
    for at, truth in states:
        assert live(truth)
        cut = {**end, "device_traces": [end["device_traces"][0][at:]]}
        snapshot = read(tmp_path, cut)
        check(snapshot.devices[0].beginning, snapshot.pools, truth, end)
        assert any("from before the recording:" in note for note in snapshot.notes)


def test_blocks_of_streams_and_private_pools_that_are_freed_late(tmp_path: Path) -> None:
    allocator, device = make("malloc")
    allocator.record_history("all", stacks=None)
    waiting, finished, kept, freed = (allocator.allocate(size, 3) for size in (3 * MIB, 100, 5 * MIB, 30 * MIB))
    allocator.begin_allocate_to_pool((0, 7))
    pooled = allocator.allocate(600)
    allocator.end_allocate_to_pool((0, 7))
    for address in (waiting, finished, kept):
        allocator.record_stream(address, 4)
    allocator.free(waiting)
    allocator.free(finished)
    truth = allocator.snapshot()
    at = len(truth["device_traces"][0])
    device.complete_all()
    allocator.allocate(200, 3)  # sees that both are free
    allocator.free(kept)
    allocator.free(freed)
    allocator.free(pooled)
    allocator.empty_cache()
    allocator.allocate(40 * MIB)
    end = allocator.snapshot()
    snapshot = read(tmp_path, {**end, "device_traces": [end["device_traces"][0][at:]]})
    check(snapshot.devices[0].beginning, snapshot.pools, truth, end)
    assert {entry.pending for entry in snapshot.devices[0].beginning.blocks} == {True, False}


def test_a_block_whose_free_began_in_the_recording_was_not_pending_before_it(tmp_path: Path) -> None:
    parts = [block(BASE, 512, "active_pending_free"), block(BASE + 512, 512, "active_pending_free")]
    snapshot = read(tmp_path, content([event("free_requested", BASE, 512)], [segment(BASE, *parts)]))
    assert [entry.pending for entry in snapshot.devices[0].beginning.blocks] == [False, True]


def test_without_requests_to_free_no_block_is_pending(tmp_path: Path) -> None:
    snapshot = read(tmp_path, content([event("free_completed", BASE, 512)]))
    assert [entry.pending for entry in snapshot.devices[0].beginning.blocks] == [False]


def test_expandable_segments_are_cut_and_joined(tmp_path: Path) -> None:
    def piece(at: int, size: int) -> dict[str, Any]:
        return segment(BASE + at * MIB, block(BASE + at * MIB, size * MIB, "inactive"), is_expandable=True)

    undone = [
        event("segment_map", BASE + 20 * MIB, 4 * MIB),  # ends at 24
        event("segment_unmap", BASE + 4 * MIB, 2 * MIB),  # between both pieces
        event("segment_map", BASE + 40 * MIB, 2 * MIB),
        event("segment_unmap", BASE + 60 * MIB, 2 * MIB),
    ]
    snapshot = read(tmp_path, content(undone, [piece(0, 4), piece(6, 18), piece(38, 6)]))
    found = [(part.address - BASE, part.size) for part in snapshot.devices[0].beginning.segments]
    assert [(address // MIB, size // MIB) for address, size in found] == [(0, 20), (38, 2), (42, 2), (60, 2)]


def test_segments_taken_later_than_the_events_are_told_and_not_believed(tmp_path: Path) -> None:
    parts = [
        block(BASE, 512),  # allocated again after its recorded free
        block(BASE + 512, 512, "inactive"),  # freed after its recorded allocation
        block(BASE + 1024, 1024),  # over what an event freed
        block(BASE + 2048, 512),
    ]
    events = [
        event("alloc", BASE, 512),
        event("free_completed", BASE, 512),
        event("alloc", BASE + 512, 512),
        event("free_completed", BASE + 1536, 512),
    ]
    snapshot = read(tmp_path, content(events, [segment(BASE, *parts)]))
    beginning = snapshot.devices[0].beginning
    assert [entry.address - BASE for entry in beginning.blocks] == [1536, 2048]
    assert any("(3 memory blocks in all)" in note for note in snapshot.notes)


def test_a_recording_without_segments_of_its_own_says_what_it_cannot_know(tmp_path: Path) -> None:
    other = segment(BASE, block(BASE, 512))
    snapshot = read(tmp_path, content([event("alloc", BASE + MIB, 512)], [other]))
    assert not snapshot.devices[0].beginning.complete
    assert [entry.address for entry in snapshot.devices[0].beginning.blocks] == [BASE]
    assert any("are unknown unless" in note for note in snapshot.notes)


def test_what_was_recorded_from_the_start_begins_empty(tmp_path: Path) -> None:
    end, _ = rerun("moe", "malloc", ())
    snapshot = read(tmp_path, end)
    assert snapshot.devices[0].beginning == Beginning((), (), True)
    assert snapshot.notes == ()


def test_pages_mapped_over_a_segment_at_the_end_are_one_range_with_it(tmp_path: Path) -> None:
    """A file may list a segment whose pages its own events unmapped: of memory that is paused, say."""
    end = segment(BASE, block(BASE, 120 * MIB), is_expandable=True)
    undone = [event("segment_unmap", BASE + at * MIB, size * MIB) for at, size in ((0, 40), (20, 40), (110, 20))]
    found = read(tmp_path, content(undone, [end])).devices[0].beginning.segments
    assert [(part.address - BASE, part.size) for part in found] == [(0, 130 * MIB)]


@given(
    rows=st.lists(
        st.tuples(st.sampled_from(["join", "cut"]), st.integers(0, 20), st.integers(1, 8), st.integers(0, 1)),
        max_size=30,
    )
)
def test_ranges_stay_apart_whatever_is_mapped_and_unmapped(rows: list[tuple[str, int, int, int]]) -> None:
    ranges = MappedSegments([])
    owners: dict[int, int] = {}  # of each page
    for action, begin, size, stream in rows:
        pages = range(begin, begin + size)
        if action == "join":
            ranges.join(Segment(begin, size, stream, 0, None, True))
            owners |= dict.fromkeys(pages, stream)
        else:
            ranges.cut(begin, begin + size)
            owners = {page: owner for page, owner in owners.items() if page not in pages}
    found = sorted(ranges, key=lambda part: part.address)
    assert {page: part.stream for part in found for page in range(part.address, part.address + part.size)} == owners
    for left, right in pairwise(found):
        end = left.address + left.size
        assert end < right.address or (end == right.address and left.stream != right.stream)


def pausing() -> tuple[CachingAllocator, SimulatedDevice, int, int, int]:
    """Record blocks of a tag that is paused while another block takes the memory, and resumed; one is freed paused."""
    allocator, device = make("vmm", "1GiB")
    allocator.record_history("all", stacks=None)
    kept = allocator.allocate(500 * MIB, tag="training")
    freed = allocator.allocate(200 * MIB, tag="training")
    allocator.pause({"training": True})
    allocator.free(allocator.allocate(800 * MIB))
    allocator.free(freed)
    allocator.empty_cache()
    events_while_paused = len(allocator.snapshot()["device_traces"][0])
    return allocator, device, kept, freed, events_while_paused


def test_paused_memory_is_known_at_every_cut(tmp_path: Path) -> None:
    allocator, device, kept, freed, count = pausing()
    paused = as_snapshot(allocator, tmp_path).devices[0].paused
    assert (paused.most, paused.before, paused.at_end) == (700 * MIB, {}, {kept: 500 * MIB})
    allocator.resume(["training"])
    snapshot = as_snapshot(allocator, tmp_path)
    trace = snapshot.devices[0]
    assert (trace.paused.most, trace.paused.before, trace.paused.at_end) == (700 * MIB, {}, {})
    assert sum(part.size for part in trace.segments) == reserved(allocator) == device.reserved
    assert trace.beginning.segments == ()
    assert any("memory was paused, at most 734,003,200 bytes" in note for note in snapshot.notes)
    assert not any("contradict" in note or "outside" in note for note in snapshot.notes)
    # Recorded from within the pause, the block is known by its resumed pages.
    late = as_snapshot(allocator, tmp_path, count).devices[0]
    assert (late.paused.most, late.paused.before) == (500 * MIB, {kept: 500 * MIB})
    assert [found.address for found in late.beginning.blocks] == [kept]
    assert late.beginning.segments == ()
    assert freed != kept


def test_blocks_paused_at_the_end_are_noted_and_no_block_is_lost(tmp_path: Path) -> None:
    allocator, *_ = pausing()
    notes = as_snapshot(allocator, tmp_path).notes
    assert any("paused after the last event: 1, of 524,288,000 bytes" in note for note in notes)
    assert not any("unless the recording frees them" in note for note in notes)


def test_expandable_segments_that_unmap_free_pages_pause_nothing(tmp_path: Path) -> None:
    rows = [
        event("segment_map", BASE, 40 * MIB),
        event("alloc", BASE, 20 * MIB),
        event("segment_unmap", BASE + 20 * MIB, 20 * MIB),
        event("segment_map", BASE + 20 * MIB, 20 * MIB),
    ]
    assert read(tmp_path, content(rows)).devices[0].paused == Paused()
