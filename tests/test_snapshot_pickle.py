"""Pickles that would run something, take all memory, or never end; and files damaged at random."""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshot_cases import BASE, FRAME, block, content, event, segment

from pyactcomp._core import PlainData
from pyactcomp.snapshots.reader import read_snapshot


class Canary:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def load(data: bytes) -> Any:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        return PlainData.from_pickle(file.fileno(), len(data)).value()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_nothing_in_a_pickle_is_run(protocol: int, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    data = pickle.dumps(content([event("alloc", BASE, 512, frames=Canary(canary))]), protocol=protocol)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"GLOBAL, which imports.*was not run"):
        read_snapshot(path)
    assert not canary.exists()
    pickle.loads(data)  # would have
    assert canary.exists()


COMMAND = b"X\x04\x00\x00\x00true"
RUN = {
    "global": b"cos\nsystem\n.",
    "stack_global": b"\x8c\x02os\x8c\x06system\x93.",
    "reduce": b"}" + COMMAND + b"\x85R.",
    "inst": b"(" + COMMAND + b"ios\nsystem\n.",
    "obj": b"(}" + COMMAND + b"o.",
    "newobj": b"})\x81.",
    "newobj_ex": b"})}\x92.",
    "build": b"}}b.",
    "ext1": b"\x82\x01.",
    "ext2": b"\x83\x01\x00.",
    "ext4": b"\x84\x01\x00\x00\x00.",
    "persid": b"Pos.system\n.",
    "binpersid": COMMAND + b"Q.",
    "bytes": b"C\x01a.",
    "bytearray": b"\x96" + struct.pack("<Q", 1 << 62) + b".",
    "long bytes": b"\x8e" + struct.pack("<Q", 1 << 62) + b".",
    "set": b"\x8f.",
    "frozenset": b"(\x91.",
    "long string": b"\x8d" + struct.pack("<Q", 1 << 62) + b".",
    "string of 4 GB": b"X\xff\xff\xff\xff.",
    "integer of 2 GB": b"\x8b\xff\xff\xff\x7f.",
    "integer of 255 bytes": b"\x8a\xff" + b"\x01" * 255 + b".",
    "integer of 65 bits": b"\x8a\x09" + b"\x00" * 8 + b"\x01.",
    "negative integer of 65 bits": b"\x8a\x09" + b"\xff" * 7 + b"\x7f\xff.",
    "text integer": b"I" + b"9" * 100 + b"\n.",
    "memo of 32 GB": b"}r\xff\xff\xff\xff.",
    "memo out of order": b"}q\x01.",
    "memo that is not there": b"h\x05.",
    "memo of nothing": b"\x94.",
    "key of a number": b"}K\x01K\x02s.",
    "key of a tuple": b"})K\x02s.",
    "odd items": b"}(\x8c\x01au.",
    "items of a list": b"](\x8c\x01aK\x01u.",
    "append to a dict": b"}K\x01a.",
    "appends to a dict": b"}(K\x01e.",
    "no mark": b"}u.",
    "tuple of nothing": b"\x86.",
    "tuple of too little": b"K\x01\x87.",
    "stop with a mark": b"(}.",
    "stop with two": b"}}.",
    "stop with nothing": b".",
    "nothing": b"",
}


@pytest.mark.parametrize("case", RUN)
def test_opcodes_that_no_snapshot_has_are_refused(case: str) -> None:
    with pytest.raises(ValueError, match=r"byte|cut off"):
        load(b"\x80\x04" + RUN[case])


def nested_key() -> bytes:
    """Return a dict whose key is a pair of pairs of pairs..., which takes 2**60 steps to hash."""
    return b")\x94" + b"".join(b"h%ch%c\x86\x94" % (index, index) for index in range(60)) + b"}h\x3cK\x01s."


FLOODS = {
    "lists": b"]" * 1_000_000,
    "dicts in a list": b"](" + b"}" * 1_000_000 + b"e.",
    "marks": b"(" * 1_000_000,
    "nested lists": b"]" * 500_000 + b"a" * 499_999 + b".",
    "nested tuples": b")" + b"\x85" * 500_000 + b".",
    "a key of tuples": nested_key(),
}


# Prints by how much reading the files raised the most memory that the program had, in bytes, and how each ended. The
# figure of resource.getrusage begins with that of the process that started this one.
MEASURE = """
import re, sys
from pathlib import Path
import native_alone
from pyactcomp.snapshots.reader import read_snapshot
def peak():
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
before = peak()
ends = []
for path in sys.argv[1:]:
    try:
        read_snapshot(path)
        ends.append("read")
    except ValueError as error:
        ends.append(str(error))
print(peak() - before, *ends, sep="\\n")
"""


def measure(*paths: Path) -> tuple[int, list[str]]:
    command = [sys.executable, "-c", MEASURE, *paths]
    result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    used, *ends = result.stdout.splitlines()
    return int(used), ends


def test_a_flood_is_refused_in_little_memory(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in FLOODS]
    for path in paths:
        path.write_bytes(b"\x80\x04" + FLOODS[path.name])
    used, ends = measure(*paths)
    for end in ends:
        assert "more dicts, lists and tuples" in end or "more values" in end or "keys of str" in end
    # A byte in two makes a value of 8 bytes on the stack and one in the memo, a byte in eight a list of 24 with 32 of
    # the heap's own, and each array has three times its content while it doubles; buffers take 4 MiB at most.
    assert used < (4 + 4 + 7) * 3 * max(path.stat().st_size for path in paths) + (4 << 20)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_is_loaded_as_pickle_does(protocol: int) -> None:
    shared: list[Any] = ["shared", (1, 2)]
    data = {
        "integers": [sign * (1 << bits) + one for bits in range(63) for sign in (1, -1) for one in (-1, 0, 1)],
        "floats": [0.0, -1.5, 1e300],
        "others": [None, True, False, (), (1,), (1, 2, 3), (1, 2, 3, 4), {}, []],
        "strings": ["", "é" * 200, "x" * 300, "y" * 70_000],
        "aliases": [shared, shared, {"again": shared}],
        "many": list(range(5000)),
    }
    loaded = load(pickle.dumps(data, protocol=protocol))
    assert loaded == data
    assert loaded["aliases"][0] is loaded["aliases"][2]["again"]


def through_pipe(data: bytes, piece: int) -> Any:
    """Load a pickle that comes in pieces."""
    reader, writer = os.pipe()

    def feed() -> None:
        with open(writer, "wb", buffering=0) as file:
            for at in range(0, len(data), piece):
                file.write(data[at : at + piece])

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        return PlainData.from_pickle(reader, len(data)).value()
    finally:
        feeder.join()
        os.close(reader)


def test_a_pickle_is_read_in_pieces() -> None:
    data = content([event("alloc", BASE + 512 * index, 512, frames=[dict(FRAME, line=index)]) for index in range(300)])
    data["long"] = ["s" * length for length in range(0, 2000, 9)]
    for piece in (301, 512, 1000, 4096):
        for protocol in (2, 4):
            assert through_pipe(pickle.dumps(data, protocol=protocol), piece) == data
    long = ["x" * (3 << 20), 1, "y" * (5 << 20), 2]
    assert load(pickle.dumps(long)) == long


def test_text_that_is_no_utf8_is_kept_readable() -> None:
    assert load(b"\x80\x04\x8c\x02\xffa.") == "\N{REPLACEMENT CHARACTER}a"


def test_a_string_named_often_is_held_once() -> None:
    text = "s" * (1 << 20)
    loaded = load(pickle.dumps([text] * 9000))
    assert all(each is loaded[0] for each in loaded)
    assert loaded[0] == text


def valid() -> dict[str, Any]:
    events = [
        event("segment_alloc", BASE, 4096),
        event("alloc", BASE, 700, frames=[FRAME], pool_id=(0, 1)),
        event("free_requested", BASE + 2048, 512),
        event("free_completed", BASE + 2048, 512),
        event("alloc", BASE + 3072, 1024, frames=[FRAME, {**FRAME, "line": 13}]),
        {"action": "oom", "device_free": 5, "size": 1 << 40, "stream": 0, "time_us": 10, "frames": []},
    ]
    parts = [
        block(BASE, 1024, requested_size=700),
        block(BASE + 1024, 1024),
        block(BASE + 2048, 1024, "inactive"),
        block(BASE + 3072, 1024),
    ]
    return content(events, [segment(BASE, *parts)])


def check_consistent(path: Path) -> bool:
    """Read a file; return whether it is a snapshot, which then must make sense."""
    try:
        snapshot = read_snapshot(path)
    except ValueError:
        return False
    for device in snapshot.devices:
        events = device.events
        columns = (events.address, events.size, events.stream, events.time_us, events.pool, events.stack)
        assert {len(column) for column in columns} == {len(events)}
        assert all(0 <= stack < len(snapshot.stacks) for stack in events.stack)
        assert all(0 <= pool < len(snapshot.pools) for pool in events.pool)
        assert all(0 <= value < 1 << 62 for column in columns[:3] for value in column)
        for blocks in (device.beginning.blocks, *(part.blocks for part in device.segments)):
            assert all(left.address + left.size <= right.address for left, right in pairwise(blocks))
        assert all(left.address + left.size <= right.address for left, right in pairwise(device.segments))
    assert all(0 <= frame < len(snapshot.frames) for stack in snapshot.stacks for frame in stack)
    return True


EDITS = st.lists(
    st.tuples(st.sampled_from(["flip", "cut", "insert", "copy"]), st.integers(0, 1 << 20), st.integers(0, 1 << 20)),
    min_size=1,
    max_size=5,
)


def mutate(data: bytes, edits: list[tuple[str, int, int]], fragments: list[bytes]) -> bytes:
    changed = bytearray(data)
    for kind, where, what in edits:
        at = where % (len(changed) + 1)
        if kind == "flip" and at < len(changed):
            changed[at] ^= 1 + what % 255
        elif kind == "cut":
            del changed[at : at + 1 + what % 40]
        elif kind == "insert":
            changed[at:at] = fragments[what % len(fragments)]
        elif kind == "copy":
            source = what % len(data)
            changed[at:at] = data[source : source + 60]
    return bytes(changed)


@pytest.mark.parametrize("form", [2, 4, "json"])
def test_a_damaged_file_is_refused_or_makes_sense_and_never_runs(form: int | str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    run = pickle.dumps(Canary(canary), protocol=4)[2:-1]
    if form == "json":
        data = json.dumps(valid()).encode()
        fragments = [b"[", b"{", b"]", b"}", b"-1", b"1e9", b'"addr"', b"null", b",", b"9" * 30, b"\\ud83d", b"\xff"]
    else:
        data = pickle.dumps(valid(), protocol=int(form))
        fragments = [run, *RUN.values(), b"(", b"u", b"e", b"0", b"K\x01", b"\x8a\x08" + b"\xff" * 8, b"h\x01"]
    path = tmp_path / "snapshot"
    outcomes = set()

    @settings(max_examples=400, deadline=None, database=None)
    @given(EDITS)
    def check(edits: list[tuple[str, int, int]]) -> None:
        path.write_bytes(mutate(data, edits, fragments))
        outcomes.add(check_consistent(path))

    check()
    assert outcomes == {True, False}
    assert not canary.exists()


def test_lists_that_name_each_other_are_no_more_than_they_are() -> None:
    # 2**60 leaves, 60 lists.
    data: list[Any] = []
    for _ in range(60):
        data = [data, data]
    loaded = load(pickle.dumps(data))
    for _ in range(60):
        assert loaded[0] is loaded[1]
        loaded = loaded[0]
    assert loaded == []


@pytest.mark.parametrize("key", ["frames", "pool_id", "addr", "user_metadata"])
def test_an_event_that_holds_itself_is_refused_or_read(key: str, tmp_path: Path) -> None:
    made = event("alloc", BASE, 512)
    made[key] = [made, made]
    path = tmp_path / "snapshot"
    path.write_bytes(pickle.dumps(content([made])))
    if key == "user_metadata":
        assert any("user_metadata" in note for note in read_snapshot(path).notes)
    else:
        with pytest.raises(ValueError, match=r"device_traces\[0\], event 0"):
            read_snapshot(path)


def test_a_dict_that_events_name_often_takes_no_quadratic_time(tmp_path: Path) -> None:
    wide = {f"key {index}": 0 for index in range(20_000)} | event("snapshot", 0, 0)
    path = tmp_path / "snapshot"
    path.write_bytes(pickle.dumps(content([wide] * 10_000)))
    with pytest.raises(ValueError, match="20006 keys, expected at most 64"):
        read_snapshot(path)


def many_events(count: int, depth: int) -> dict[str, Any]:
    """Return blocks that live for a while, as torch records them: each event has a list of frames that others share."""
    lines = [dict(FRAME, line=line) for line in range(997)]
    trace = []
    for index in range(count // 3):
        address = BASE + 512 * (index % 5000)
        stack = [lines[(index + 31 * level) % len(lines)] for level in range(depth)]
        for action in ("free_requested", "free_completed", "alloc")[0 if index >= 5000 else 2 :]:
            trace.append(event(action, address, 512, time_us=1 << 50 | index, frames=list(stack)))
    return content(trace)


def test_reading_takes_memory_in_proportion_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    path.write_bytes(pickle.dumps(many_events(100_000, 30)))
    events = read_snapshot(path).devices[0].events
    used, end = measure(path)
    assert end == ["read"]
    # A frame that is named takes 2 to 5 bytes of the file, and 8 in memory; the columns take 41 bytes an event, thrice
    # while they become arrays.
    assert used < 4 * path.stat().st_size + 3 * 41 * len(events) + (16 << 20)


def test_json_takes_memory_in_proportion_to_the_file(tmp_path: Path) -> None:
    count = 1 << 21
    texts = {
        "events": json.dumps(many_events(30_000, 10)),
        "lists": '{"segments": [' + "[]," * count + "[]]}",
        "objects": '{"segments": [' + "{}," * count + "{}]}",
        "numbers": '{"segments": [' + "9," * count + "9]}",
        "strings": '{"segments": [' + ",".join(f'"{index}"' for index in range(count // 2)) + "]}",
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.write_text(text)
        used, [end] = measure(path)
        assert end == "read" if name == "events" else "more" in end or "no 'device_traces'" in end, name
        # Of each character Python keeps a copy, or 8 bytes where a value of two has a place in a list; a string of 9
        # is an object of 56, and a frame's, with its dict, are 5 times as large as their text.
        assert used < 14 * path.stat().st_size + (16 << 20), (name, used / path.stat().st_size)
