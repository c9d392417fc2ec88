"""Explanations of recordings by hand, whose numbers can be added up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from allocator_cases import KIB, MIB, make
from explain_cases import BACKWARD, CPP, LAYER, LOSS, MAIN, TORCH, alloc, explained, failure, free, large, out_of_memory
from replay_cases import as_snapshot
from snapshot_cases import BASE, block, content, event, read, segment

from pyactcomp.snapshots.candidates import FAMILIES
from pyactcomp.snapshots.explain import explain
from pyactcomp.snapshots.explanation import FreeMemory, Group


def test_live_blocks_are_grouped_by_the_users_own_lines(tmp_path: Path) -> None:
    found = explained(
        tmp_path,
        [
            large(0),
            alloc(0, 2 * MIB, CPP, TORCH, LAYER, TORCH, MAIN),
            alloc(2 * MIB, 3 * MIB, CPP, LAYER, MAIN),
            alloc(5 * MIB, MIB, LOSS, MAIN),
            alloc(6 * MIB, 4 * MIB, CPP, BACKWARD),
        ],
    )
    lines = ("/home/me/model.py:12 forward", "/home/me/train.py:3 main")
    assert found.by_stack[0] == Group("model.py:12 forward < train.py:3 main", 2, 5 * MIB, lines)
    assert [(group.label, group.blocks, group.bytes) for group in found.by_stack[1:]] == [
        ("MmBackward0", 1, 4 * MIB),
        ("model.py:40 loss < train.py:3 main", 1, MIB),
    ]


def test_live_blocks_are_grouped_by_size_and_by_age(tmp_path: Path) -> None:
    kept = [alloc(0, 600), alloc(KIB, 3 * MIB)]
    passing = [entry for _ in range(6) for entry in (alloc(8 * MIB, MIB), *free(8 * MIB, MIB))]
    found = explained(tmp_path, [*kept, *passing, alloc(4 * MIB, 2 * MIB)], at="peak")
    # Event 20 allocates the last; the first two are 20 and 19 events older.
    assert found.event == 20
    assert found.by_size == (Group("1 KiB to 2 KiB", 1, KIB), Group("2 MiB to 4 MiB", 2, 5 * MIB))
    assert found.by_age == (Group("0 to 9 events", 1, 2 * MIB), Group("10 to 99 events", 2, 3 * MIB + KIB))
    assert not found.steps.starts
    assert "no steps found" in found.steps.found_by


def test_free_blocks_and_fragmentation_are_those_between_live_blocks(tmp_path: Path) -> None:
    # Two segments of 20 MiB: free are 3 MiB in front, 7 MiB between, 4 MiB behind; and 19 MiB.
    found = explained(
        tmp_path,
        [
            large(0),
            large(1),
            alloc(3 * MIB, 5 * MIB - 100),
            alloc(15 * MIB, MIB),
            alloc(64 * MIB, MIB),
        ],
        at=4,
    )
    assert (found.reserved_bytes, found.live_bytes, found.free_bytes) == (40 * MIB, 7 * MIB, 33 * MIB)
    assert found.largest_free == 19 * MIB
    assert found.external == 1 - 19 / 33
    assert found.internal == 100 / (7 * MIB)


def test_block_still_there_at_the_end_has_its_real_size(tmp_path: Path) -> None:
    # A request of a large segment whose rest, up to 1 MiB, is not split off.
    end = [segment(BASE, block(BASE, 20 * MIB, requested_size=20 * MIB - 512 * KIB))]
    found = explained(tmp_path, [large(0), alloc(0, 20 * MIB - 512 * KIB)], segments=end)
    assert (found.live_bytes, found.free_bytes, found.internal) == (20 * MIB, 0, 0.5 / 20)


def test_pins_are_the_segments_that_live_blocks_keep_most_free_first(tmp_path: Path) -> None:
    found = explained(
        tmp_path,
        [
            large(0),
            large(1, 60 * MIB),
            large(2),
            large(3),
            alloc(0, 2 * MIB, LAYER),
            alloc(2 * MIB, MIB, LOSS),
            alloc(64 * MIB, MIB, LOSS, MAIN),
            alloc(128 * MIB, 20 * MIB, MAIN),
        ],
        at=7,
    )
    # Full and empty segments are not pinned: nothing is gained, or nothing keeps them.
    assert [(pin.address - BASE, pin.size, pin.free_bytes, pin.live_bytes) for pin in found.pins] == [
        (64 * MIB, 60 * MIB, 59 * MIB, MIB),
        (0, 20 * MIB, 17 * MIB, 3 * MIB),
    ]
    assert [(pin.blocks, pin.largest, pin.label, pin.since) for pin in found.pins] == [
        (1, MIB, "model.py:40 loss", 6),
        (2, 2 * MIB, "model.py:12 forward", 4),
    ]
    assert found.pinned_bytes == 76 * MIB


def test_expandable_segments_grow_and_shrink_and_are_not_pinned(tmp_path: Path) -> None:
    found = explained(
        tmp_path,
        [
            event("segment_map", BASE, 20 * MIB),
            event("segment_map", BASE + 20 * MIB, 20 * MIB),
            alloc(18 * MIB, 4 * MIB),
            event("segment_map", BASE + 40 * MIB, 20 * MIB),
            event("segment_unmap", BASE, 10 * MIB),
        ],
        at=4,
    )
    # 10 to 60 MiB are mapped, 18 to 22 live: no boundary of a mapping divides what is free.
    assert (found.reserved_bytes, found.free_bytes, found.largest_free) == (50 * MIB, 46 * MIB, 38 * MIB)
    assert found.pins == ()
    assert any("expandable" in note for note in found.notes)


def test_free_memory_is_told_apart_by_the_stream_and_pool_that_may_use_it(tmp_path: Path) -> None:
    def filled(number: int, live: int, **others: Any) -> dict[str, Any]:
        at = BASE + number * 64 * MIB
        free = block(at + live * MIB, (20 - live) * MIB, "inactive")
        return segment(at, *([block(at, live * MIB)] if live else []), free, **others)

    pool = {"segment_pool_id": (2, 0)}
    segments = [filled(0, 19), filled(1, 15), filled(2, 0, stream=7), filled(3, 12, stream=7), filled(4, 3, **pool)]
    found = explained(tmp_path, [], segments=segments)
    assert found.stream == 0
    assert found.free_memory == (
        FreeMemory(7, (0, 0), 28 * MIB, 20 * MIB),
        FreeMemory(0, (2, 0), 17 * MIB, 17 * MIB),
        FreeMemory(0, (0, 0), 6 * MIB, 5 * MIB),
    )
    assert sum(part.bytes for part in found.free_memory) == found.free_bytes
    # Where memory runs out, the stream that asks.
    failed = explained(tmp_path, [{**failure(64 * MIB, 0), "stream": 7}], segments=segments)
    assert failed.stream == 7


def test_memory_left_on_another_stream_is_named_where_the_most_is_reserved(tmp_path: Path) -> None:
    side = {"stream": 7}
    first = [row for number in range(5) for row in (large(number) | side, alloc(64 * number * MIB, 20 * MIB, **side))]
    freed = [row | side for number in range(5) for row in free(64 * number * MIB, 20 * MIB)]
    then = [row for number in range(8, 11) for row in (large(number), alloc(64 * number * MIB, 20 * MIB))]
    rows = [*first, *freed, *then]
    found = explained(tmp_path, rows)
    # The peak of live memory is before: 100 MiB on stream 7.
    assert (found.event, found.live_bytes, found.free_bytes) == (9, 100 * MIB, 0)
    told = next(note for note in found.notes if note.startswith("most memory is reserved"))
    assert f"after event {len(rows) - 2}: {160 * MIB:,} bytes, {100 * MIB:,} of them free on other streams" in told
    assert "most on stream 7" in told
    # On the stream that asks, or at this very moment, there is nothing to add.
    plain = [{**row, "stream": 0} for row in rows]
    for others in (explained(tmp_path, plain), explained(tmp_path, rows, at=len(rows) - 2)):
        assert not any("most memory is reserved" in note for note in others.notes)


def test_block_that_a_stream_still_uses_is_live_and_named_as_waiting(tmp_path: Path) -> None:
    rows = [alloc(0, MIB), alloc(MIB, 2 * MIB), event("free_requested", BASE, MIB), event("free_completed", BASE, MIB)]
    waiting, after = explained(tmp_path, rows, at=2), explained(tmp_path, rows, at=3)
    assert (waiting.live_bytes, waiting.awaiting_bytes, after.live_bytes, after.awaiting_bytes) == (
        3 * MIB,
        MIB,
        2 * MIB,
        0,
    )


def test_block_freed_before_the_recording_waits_until_its_stream_is_done(tmp_path: Path) -> None:
    rows = [alloc(0, MIB), event("free_completed", BASE + 9 * MIB, 2 * MIB), *free(0, MIB)]
    waiting, after = explained(tmp_path, rows, at=0), explained(tmp_path, rows, at=1)
    assert (waiting.live_bytes, waiting.awaiting_bytes) == (3 * MIB, 2 * MIB)
    assert (after.live_bytes, after.awaiting_bytes) == (MIB, 0)


def test_block_in_none_of_the_segments_takes_no_room_in_the_one_before_it(tmp_path: Path) -> None:
    found = explained(tmp_path, [large(0), alloc(0, MIB), alloc(64 * MIB, 2 * MIB)])
    assert (found.live_bytes, found.free_bytes, found.pinned_bytes) == (3 * MIB, 19 * MIB, 19 * MIB)
    assert [pin.live_bytes for pin in found.pins] == [MIB]


def test_out_of_memory_event_is_found_and_says_who_would_have_fitted(tmp_path: Path) -> None:
    found = out_of_memory(tmp_path)
    assert (found.event, found.action, found.oom_events) == (10, "oom", (10,))
    assert (found.request_bytes, found.capacity, found.largest_free) == (70 * MIB, 220 * MIB, 40 * MIB)
    fits = {fit.config: fit for fit in found.fits}
    assert tuple(fits) == FAMILIES
    # Native needs 70 MiB more in one piece, and can give nothing back.
    assert (fits["native"].oom_at, fits["native"].peak_reserved) == (10, 200 * MIB)
    # The 60 + 60 + 70 that are live then fit in the 220 where free pieces are put together.
    assert fits["pyactcomp"].oom_at is None
    assert 200 * MIB <= fits["pyactcomp"].peak_reserved <= 220 * MIB


def test_recording_without_out_of_memory_says_so(tmp_path: Path) -> None:
    rows = [alloc(0, MIB)]
    found = explained(tmp_path, rows)
    assert (found.event, found.oom_events, found.fits, found.request_bytes) == (0, (), (), None)
    assert any("no out-of-memory event" in note for note in found.notes)
    with pytest.raises(ValueError, match="no out-of-memory event in 1 events"):
        explained(tmp_path, rows, at="oom")
    with pytest.raises(ValueError, match="capacity needs the moment"):
        explain(read(tmp_path, content(rows)), capacity="1GiB")
    with pytest.raises(ValueError, match="expected a size"):
        explain(read(tmp_path, content(rows)), capacity="potato")


@pytest.mark.parametrize("at", ["later", 1, -1, True])
def test_moment_that_is_none_is_refused(tmp_path: Path, at: Any) -> None:
    with pytest.raises(ValueError, match=r"at is peak, oom or|has events 0 to 0"):
        explained(tmp_path, [alloc(0, MIB)], at=at)


def test_recording_without_events_is_explained_from_its_segments(tmp_path: Path) -> None:
    end = [segment(BASE, block(BASE, MIB, frames=[LAYER]), block(BASE + MIB, 19 * MIB, "inactive"))]
    found = explained(tmp_path, [], segments=end)
    assert (found.event, found.live_bytes, found.largest_free) == (-1, MIB, 19 * MIB)
    assert found.by_age == (Group("before the recording", 1, MIB),)
    assert found.by_stack[0].label == "model.py:12 forward"
    assert any("no events" in note for note in found.notes)
    with pytest.raises(ValueError, match="has no events, only the segments at the end"):
        explained(tmp_path, [], segments=end, at=0)


def test_lost_events_and_missing_parts_are_named(tmp_path: Path) -> None:
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "trace_alloc_overflowed": True}
    found = explained(tmp_path, [*free(0, MIB), alloc(MIB, MIB)], allocator_settings=settings)
    text = "\n".join(found.notes)
    assert "dropped its oldest events" in text
    assert "from before the recording:" in text
    assert "no segments" in text
    assert "without call stacks" in text
    assert (found.reserved_bytes, found.external) == (None, None)


def test_each_device_is_explained_on_its_own(tmp_path: Path) -> None:
    data = content() | {"device_traces": [[alloc(0, MIB)], [alloc(0, 2 * MIB), alloc(2 * MIB, MIB)]]}
    recording = read(tmp_path, data)
    found = [explain(recording, device=index) for index in (0, 1)]
    assert [one.live_bytes for one in found] == [MIB, 3 * MIB]
    for one in found:
        assert {note.split(":")[0] for note in one.notes if note.startswith("device ")} == {f"device {one.device}"}
        assert "2 devices: 0, 1" in one.notes
    with pytest.raises(ValueError, match="device"):
        explain(recording)


def test_paused_memory_is_live_and_not_reserved(tmp_path: Path) -> None:
    """Generation runs out of memory while the training is paused."""
    allocator, device = make("vmm", "1GiB")
    allocator.record_history("all", stacks=None)
    allocator.allocate(700 * MIB, tag="training")
    allocator.pause({"training": True})
    allocator.allocate(800 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        allocator.allocate(400 * MIB)
    recording = as_snapshot(allocator, tmp_path)
    found = explain(recording)
    assert (found.live_bytes, found.paused_bytes) == (1500 * MIB, 700 * MIB)
    assert (found.reserved_bytes, found.free_bytes) == (device.reserved, 0) == (800 * MIB, 0)
    assert found.capacity == device.capacity
    # Every allocator serves what the program got, and none what it did not.
    assert {(fit.oom_at, fit.peak_reserved) for fit in found.fits} == {(found.event, 800 * MIB)}
    allocated = next(index for index, size in enumerate(recording.devices[0].events.size) if size == 700 * MIB)
    before = explain(recording, allocated)
    assert (before.live_bytes, before.paused_bytes, before.reserved_bytes) == (700 * MIB, 0, 700 * MIB)


def test_a_file_that_lists_paused_segments_as_mapped_is_explained(tmp_path: Path) -> None:
    """As snapshots did before they left paused memory out."""
    pages = [event("segment_map", BASE + at * MIB, 20 * MIB) for at in range(0, 100, 20)]
    unmapped = [{**entry, "action": "segment_unmap"} for entry in pages]
    end = [segment(BASE, block(BASE, 100 * MIB), is_expandable=True)]
    whole = [*pages, alloc(0, 100 * MIB), *unmapped]
    for rows in (unmapped, whole, [*whole, *pages]):
        found = explained(tmp_path, rows, segments=end, at=len(rows) - 1)
        is_back = rows[-1]["action"] == "segment_map"
        assert (found.live_bytes, found.paused_bytes) == (100 * MIB, 0 if is_back else 100 * MIB)
        assert found.reserved_bytes == (100 * MIB if is_back else 0)
