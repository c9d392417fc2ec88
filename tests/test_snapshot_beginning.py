"""What lived before a recording began, against the state that the whole recording had at that event."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from allocator_cases import MIB, make
from snapshot_cases import BASE, RECORDED, block, content, event, read, rerun, segment

from pyactcomp.snapshots.model import Beginning

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


@pytest.mark.parametrize("growth", ["malloc", "vmm"])
@pytest.mark.parametrize("name", RECORDED)
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
