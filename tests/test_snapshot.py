"""Reading snapshots: what is in them, and what is refused, with the place, in time and without running anything."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from allocator_cases import MIB, make
from snapshot_cases import BASE, FRAME, RECORDED, block, content, event, read, recorded, segment, write

from pyactcomp.snapshots.model import ACTIONS
from pyactcomp.snapshots.reader import Frame, Snapshot, read_snapshot

FORMATS = (2, 3, 4, 5, "json")


def rows(snapshot: Snapshot, device: int = 0) -> list[tuple[str, int, int, int, int]]:
    events = next(entry for entry in snapshot.devices if entry.index == device).events
    columns = (events.address, events.size, events.stream, events.time_us)
    return [(ACTIONS[action], *others) for action, *others in zip(events.action, *columns, strict=True)]


def program() -> dict[str, Any]:
    """Return the snapshot of a small program on two streams and a private pool."""
    allocator, device = make("malloc")
    kept = allocator.allocate(5 * MIB)
    allocator.record_history("all")
    freed = allocator.allocate(700, 3)
    allocator.begin_allocate_to_pool((0, 7))
    pooled = allocator.allocate(30 * MIB)
    allocator.end_allocate_to_pool((0, 7))
    allocator.record_stream(freed, 4)
    allocator.free(freed)
    device.complete_all()
    allocator.free(kept)
    allocator.free(pooled)
    allocator.allocate(100)
    return allocator.snapshot()


@pytest.mark.parametrize("protocol", FORMATS)
def test_a_snapshot_is_read_as_it_was_written(protocol: int | str, tmp_path: Path) -> None:
    written = program()
    snapshot = read(tmp_path, written, protocol)
    [device] = snapshot.devices
    trace = written["device_traces"][0]
    assert rows(snapshot) == [
        (entry["action"], entry["addr"], entry["size"], entry["stream"], entry["time_us"]) for entry in trace
    ]
    assert [snapshot.pools[pool] for pool in device.events.pool] == [entry["pool_id"] for entry in trace]
    assert [[snapshot.frames[frame] for frame in snapshot.stacks[stack]] for stack in device.events.stack] == [
        [Frame(**frame) for frame in entry["frames"]] for entry in trace
    ]
    assert any(entry["frames"] for entry in trace)
    assert [
        (part.address, part.size, part.stream, snapshot.pools[part.pool], "small" if part.small else "large")
        for part in device.segments
    ] == sorted(
        (part["address"], part["total_size"], part["stream"], part["segment_pool_id"], part["segment_type"])
        for part in written["segments"]
    )
    states = {(False, False): "inactive", (True, False): "active_allocated", (True, True): "active_pending_free"}
    assert {
        (part.address, part.size, part.requested, states[part.active, part.pending])
        for entry in device.segments
        for part in entry.blocks
    } == {
        (part["address"], part["size"], part["requested_size"], part["state"])
        for entry in written["segments"]
        for part in entry["blocks"]
    }
    assert snapshot.settings.conf == written["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"]
    assert snapshot.settings.overflowed is False


@pytest.mark.parametrize("protocol", FORMATS)
def test_a_frame_without_a_line_has_line_minus_one(protocol: int | str, tmp_path: Path) -> None:
    # So PyTorch 2.11 writes what it knows no line of: -1 in the 64 bits of an unsigned integer.
    frames = [{**FRAME, "line": 2**64 - 1}, FRAME]
    snapshot = read(tmp_path, content([event("alloc", BASE, 512, frames=frames)]), protocol)
    assert [frame.line for frame in snapshot.frames] == [-1, FRAME["line"]]


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_run_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    written = recorded(name)
    snapshot = read(tmp_path, written)
    assert rows(snapshot) == [
        (entry["action"], entry["addr"], entry["size"], entry["stream"], entry["time_us"])
        for entry in written["device_traces"][0]
    ]
    # Its segments are missing, but nothing is freed that was not allocated.
    assert snapshot.devices[0].beginning.blocks == ()
    assert not snapshot.devices[0].beginning.complete
    assert any("are unknown unless" in note for note in snapshot.notes)


def test_older_and_newer_versions_are_read_alike(tmp_path: Path) -> None:
    old = {"action": "alloc", "addr": BASE, "size": 512, "stream": 0}
    new = {
        **event("alloc", BASE + 512, 512, pool_id=(0, 0), compile_context="N/A", user_metadata="step 3"),
        "forward_frames": [],
    }
    others: list[dict[str, Any]] = [
        {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "time_us": 11},
        {"action": "oom", "device_free": 77, "size": 1 << 40, "stream": 0, "time_us": 12},
        {"action": "annotate", "time_us": 13},
        {"action": "segment_sold", "addr": 1, "size": 2, "stream": 0, "time_us": 14},
    ]
    data = {"segments": [], "device_traces": [[old, new, *others], []], "host_segments": [], "host_traces": [[new]]}
    snapshot = read(tmp_path, data)
    [device] = snapshot.devices
    assert list(device.events.address[:4]) == [BASE, BASE + 512, 0, 77]
    assert [device.events.action[index] for index in (2, 3, 4, 5)] == [7, 8, 9, len(ACTIONS)]
    assert [snapshot.metadata[text] for text in device.events.metadata[:3]] == ["", "step 3", ""]
    for word in ("segment_sold", "host_traces"):
        assert any(word in note for note in snapshot.notes), word
    assert snapshot.settings.max_split_size is None
    assert snapshot.settings.overflowed is None


def test_events_without_pools_take_those_of_their_segments(tmp_path: Path) -> None:
    parts = [
        segment(BASE, block(BASE, 2 * MIB)),
        segment(BASE + 4 * MIB, block(BASE + 4 * MIB, 2 * MIB), segment_pool_id=(0, 3)),
    ]
    snapshot = read(tmp_path, content([event("alloc", BASE + at * MIB, 2 * MIB) for at in (0, 4)], parts))
    assert [snapshot.pools[pool] for pool in snapshot.devices[0].events.pool] == [(0, 0), (0, 3)]


def test_settings_devices_and_dropped_events_are_told(tmp_path: Path) -> None:
    data = content(
        device_traces=[[event("alloc", BASE, 512)], [event("alloc", BASE, 1024)]],
        allocator_settings={
            "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64",
            "max_split_size": 64 * MIB,
            "roundup_power2_divisions": {"1": 0, "256": 4},
            "trace_alloc_overflowed": True,
        },
    )
    snapshot = read(tmp_path, data)
    assert snapshot.settings.max_split_size == 64 * MIB
    assert snapshot.settings.roundup_power2_divisions == {256: 4}
    assert rows(snapshot, 1) == [("alloc", BASE, 1024, 0, 10)]
    assert any("2 devices" in note for note in snapshot.notes)
    assert any("dropped its oldest events" in note for note in snapshot.notes)


def alloc(**changes: Any) -> dict[str, Any]:
    made = content([event("alloc", BASE, 512), {**event("alloc", BASE + 512, 512), **changes}])
    made["device_traces"][0][1] = {key: value for key, value in made["device_traces"][0][1].items() if value != "gone"}
    return made


def end(**changes: Any) -> dict[str, Any]:
    return content([], [segment(BASE, {**block(BASE, 512), **changes})])


WRONG = {
    "an empty list": ([], r"an empty list, as torch.cuda.memory_snapshot\(\) returns"),
    "a list of numbers": ([3], "content is a list, expected a dict"),
    "a profiler's trace": ({"traceEvents": []}, "a trace of torch.profiler"),
    "nothing in it": ({}, "no 'device_traces'"),
    "no segments": ({"device_traces": []}, "no 'segments'"),
    "traces of a dict": ({"segments": [], "device_traces": {}}, "device_traces is a dict"),
    "trace of a number": (content(device_traces=[3]), r"device_traces\[0\] is 3"),
    "event of a number": (content([event("alloc", BASE, 512), 7]), r"device_traces\[0\], event 1 is 7"),  # type: ignore[list-item]
    "event without action": (alloc(action="gone"), "event 1 has no 'action'"),
    "event without address": (alloc(addr="gone"), "event 1 has no 'addr'"),
    "event without size": (alloc(size="gone"), "event 1 has no 'size'"),
    "action of a number": (alloc(action=3), "event 1: 'action' is 3"),
    "negative size": (alloc(size=-1), "event 1: 'size' is -1"),
    "negative address": (alloc(addr=-4096), "event 1: 'addr' is -4096"),
    "negative stream": (alloc(stream=-1), "event 1: 'stream' is -1"),
    "size of a string": (alloc(size="512"), "event 1: 'size' is '512'"),
    "size of a fraction": (alloc(size=0.5), "event 1: 'size' is 0.5"),
    "size of 63 bits": (alloc(size=1 << 62), "event 1: 'size'"),
    "time of a list": (alloc(time_us=[]), "event 1: 'time_us' is a list"),
    "pool of one": (alloc(pool_id=[1]), "event 1: the pool's id"),
    "pool of strings": (alloc(pool_id=["a", "b"]), "event 1: the pool's id"),
    "frames of a dict": (alloc(frames={"a": 1}), "event 1: 'frames' is a dict"),
    "frame of a number": (alloc(frames=[1]), "event 1: a stack frame is 1"),
    "frame without a line": (alloc(frames=[{"filename": "", "name": ""}]), "event 1: a stack frame has no 'line'"),
    "one address twice": (alloc(addr=BASE), "event 1: 512 bytes allocated at .* overlap the 512 bytes .* of event 0"),
    "overlap from below": (alloc(addr=BASE - 512, size=513), "event 1: 513 bytes .* overlap the 512 bytes"),
    "overlap from above": (alloc(addr=BASE + 511), "event 1: 512 bytes .* overlap the 512 bytes"),
    "freed twice": (
        content([event("free_completed", BASE, 512)] * 2),
        "event 1: the block at .* was freed before",
    ),
    "free requested twice": (
        content([event("alloc", BASE, 512), *[event("free_requested", BASE, 512)] * 2]),
        "event 2: the block at .* is freed twice",
    ),
    "freed blocks that overlap": (
        content([event("free_completed", BASE, 1024), event("free_completed", BASE + 512, 512)]),
        "two blocks that existed before the recording overlap",
    ),
    "allocated where one is freed later": (
        content([event("alloc", BASE + 512, 512), event("free_completed", BASE, 1024)]),
        "event 0: 512 bytes .* overlap a block that existed before",
    ),
    "segment of a number": (content([], [5]), r"segments\[0\] is 5"),  # type: ignore[list-item]
    "segments that overlap": (
        content([], [segment(BASE, block(BASE, 1024)), segment(BASE + 512, block(BASE + 512, 512))]),
        "segments of device 0 overlap",
    ),
    "segment with a hole": (
        content([], [segment(BASE, block(BASE, 512), block(BASE + 1024, 512))]),
        r"segments\[0\], block 1: 512 bytes at .*, expected one at",
    ),
    "segment without all blocks": (
        content([], [segment(BASE, block(BASE, 512), total_size=1024)]),
        r"segments\[0\]: its blocks hold 512 bytes, its total_size is 1024",
    ),
    "segment of a far device": (content([], [segment(BASE, block(BASE, 512), device=1 << 40)]), "segment of device"),
    "segment of no type": (content([], [segment(BASE, block(BASE, 512), segment_type="big")]), "'segment_type'"),
    "block of no state": (end(state="lost"), "block 0: 'state' is 'lost'"),
    "block smaller than its request": (end(requested_size=513), "block 0: 513 bytes were requested of a block of 512"),
    "settings of a list": (content(allocator_settings=[]), "allocator_settings is a list"),
    "a limit of a string": (content(allocator_settings={"max_split_size": "4"}), "max_split_size"),
    "divisions of a word": (content(allocator_settings={"roundup_power2_divisions": {"x": 1}}), "expected a number"),
    "an annotation of a number": (content(external_annotations=[1]), r"external_annotations\[0\] is 1"),
}


@pytest.mark.parametrize("protocol", [4, "json"])
@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_refused_with_its_place(case: str, protocol: int | str, tmp_path: Path) -> None:
    data, message = WRONG[case]
    path = write(tmp_path, data, protocol)
    with pytest.raises(ValueError, match=message) as caught:
        read_snapshot(path)
    assert str(caught.value).startswith(path.name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("hello", "begins with b'hello'"),
        ("[1, 2]", "content is a list"),
        ('{"segments": [', "not JSON, or cut off"),
        ('{"segments": ' + "[" * 100_000, "more lists|nested deeper|cut off"),
        ('{"segments": "' + "x" * 10_000_000 + '", "device_traces": ' + "[" * 100_000, "nested deeper"),
        ('{"segments": [], "device_traces": [[{"size": NaN}]]}', "NaN is no number"),
        ('{"segments": [], "device_traces": ' + "9" * 1_000_000 + "}", "digits|more than 64 bits"),
        ('{"segments": [], "device_traces": 18446744073709551616}', "integer of more than 64 bits$"),
        ('{"segments": [], "device_traces": -9223372036854775809}', "integer of more than 64 bits$"),
    ],
)
def test_text_that_is_no_snapshot_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "snapshot.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_snapshot(path)


@pytest.mark.parametrize("head", [b"", b"\x80\x04", pickle.dumps({"segments": []})[:-2], b"{", b'{"segments": "'])
def test_gigabytes_of_zeros_are_refused_at_once(head: bytes, tmp_path: Path) -> None:
    path = tmp_path / "zeros"
    with path.open("wb") as file:
        file.write(head)
        file.truncate(8 << 30)  # without disk blocks
    with pytest.raises(ValueError, match=r"not a memory snapshot|no opcode: 0x00|not JSON, or cut off"):
        read_snapshot(path)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    data = pickle.dumps(program(), protocol=4)
    path = tmp_path / "cut"
    for length in range(0, len(data), 97):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match="cut"):
            read_snapshot(path)


def test_one_event_named_a_million_times_is_refused(tmp_path: Path) -> None:
    one = event("snapshot", 0, 0)
    with pytest.raises(ValueError, match="more events and blocks than a file of this size"):
        read(tmp_path, content(device_traces=[[one] * 1000] * 1000))


def test_what_a_free_block_served_last_may_have_been_larger(tmp_path: Path) -> None:
    """PyTorch leaves a block's request as it was when it is freed, and when it is split."""
    rest = block(BASE + 15 * MIB, 5 * MIB, "inactive", requested_size=18 * MIB)
    snapshot = read(tmp_path, content([], [segment(BASE, block(BASE, 15 * MIB), rest)]))
    blocks = snapshot.devices[0].segments[0].blocks
    assert [(part.size, part.requested, part.active) for part in blocks] == [
        (15 * MIB, 15 * MIB, True),
        (5 * MIB, 0, False),
    ]
    with pytest.raises(ValueError, match="18874368 bytes were requested of a block of 5242880"):
        read(tmp_path, content([], [segment(BASE, block(BASE, 5 * MIB, requested_size=18 * MIB))]))


def test_names_hold_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    frame = {"filename": "a\x1b[2J.py", "line": 1, "name": "f\x07"}
    snapshot = read(tmp_path, content([event("alloc", BASE, 512, frames=[frame]), event("\x1b[31m", BASE, 512)]))
    assert snapshot.frames == (Frame("a\ufffd[2J.py", 1, "f\ufffd"),)
    assert [note for note in snapshot.notes if "unknown kind" in note] == [
        "device 0: 1 events of unknown kind are left out: \ufffd[31m"
    ]


def test_expandable_segments_beyond_number_are_refused(tmp_path: Path) -> None:
    unmapped = [event("segment_unmap", BASE + index * 4 * MIB, 2 * MIB) for index in range((1 << 16) + 1)]
    assert len(read(tmp_path, content(unmapped[:-1])).devices[0].beginning.segments) == 1 << 16
    with pytest.raises(ValueError, match="more than 65536 expandable segments at a time"):
        read(tmp_path, content(unmapped))


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nothing"):
        read_snapshot(tmp_path / "nothing")


def test_stacks_named_often_are_kept_once(tmp_path: Path) -> None:
    for protocol in (4, "json"):
        stack = [FRAME, {**FRAME, "line": 13}]
        events = [
            event("alloc", BASE + 512 * index, 512, frames=[dict(frame) for frame in stack]) for index in range(9)
        ]
        snapshot = read(tmp_path, content(events), protocol)
        assert snapshot.stacks == ((), (0, 1))
        assert set(snapshot.devices[0].events.stack) == {1}
