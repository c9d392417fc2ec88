"""Reads a memory snapshot of PyTorch, from an untrusted file, into columns.

``torch.cuda.memory._dump_snapshot`` writes a pickle; memory_viz takes JSON too. The list of segments that
``torch.cuda.memory_snapshot`` returns is read as a recording without events. Nothing in a file is run or imported. A
contradiction (two live memory blocks at one address, a block freed twice) is refused, with the place in the file. An
incomplete recording (events dropped, a late begin) is taken, and the notes name the gap.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import tempfile
from array import array
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from .._core import PlainData
from .beginning import find_beginning
from .model import ACTIONS, Block, DeviceTrace, Events, Frame, Segment, Settings, Snapshot
from .releases import find_releases
from .wrapped import unwrapped

__all__ = ["DeviceTrace", "Frame", "Settings", "Snapshot", "read_snapshot"]

# A file may have so many lists and objects, however short it is.
_OF_ANY_FILE = 1 << 14
_TRACEBACK_LINE = re.compile(r'File "([^"\n]+)", line (\d{1,9}), in ([^\n]+)')
LIMIT = 1 << 62  # bytes; older versions write a larger number for no limit
_Q, _I = array("q"), array("i")
NO_EVENTS = Events(array("B"), _Q, _Q, _Q, _Q, _I, _I, _I, has_pools=True)


def read_snapshot(path: str | os.PathLike[str]) -> Snapshot:
    """Read a memory snapshot, running nothing in it.

    Parameters
    ----------
    path : str or path
        A file of ``torch.cuda.memory._dump_snapshot`` (pickle, protocol 2 to 5), or the same as JSON, by gzip, or in a
        page of ``torch.cuda._memory_viz``; or a pickle of ``torch.cuda.memory_snapshot()``.

    Returns
    -------
    Snapshot

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If the file is no snapshot, or contradicts itself; the message names the file, the place and the expected value.

    Examples
    --------
    >>> import json, tempfile
    >>> event = {"action": "alloc", "addr": 4096, "size": 100, "stream": 0, "time_us": 7, "frames": []}
    >>> with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
    ...     json.dump({"segments": [], "device_traces": [[event]]}, file)
    ...     file.flush()
    ...     snapshot = read_snapshot(file.name)
    >>> snapshot.devices[0].events.size
    array('q', [100])
    """
    source = Path(path)
    size = source.stat().st_size
    try:
        with source.open("rb") as file, unwrapped(file, size) as (inner, inner_size):
            return _snapshot(_read(inner, inner_size))
    except ValueError as error:
        raise ValueError(f"{source.name}: {error}") from error


def _read(file: BinaryIO, size: int) -> PlainData:
    first = os.pread(file.fileno(), 64, 0)
    if first[:1] == b"\x80":
        return PlainData.from_pickle(file.fileno(), size)
    if first.lstrip()[:1] in (b"{", b"["):
        try:
            return _read_json(file, size)
        except (ValueError, RecursionError) as error:
            deep = isinstance(error, RecursionError)
            raise ValueError(f"not JSON, or cut off: {'nested deeper than any snapshot' if deep else error}") from error
    what = "is empty" if not first else f"begins with {first[:8]!r}"
    raise ValueError(
        f"not a memory snapshot: it {what}, where a pickle begins with b'\\x80' and JSON with {{; "
        "write one with torch.cuda.memory._dump_snapshot"
    )


def _read_json(file: BinaryIO, size: int) -> PlainData:
    """Read JSON by way of a pickle, in memory proportional to the file."""
    pieces = []
    while piece := file.read(1 << 20):
        if b"\0" in piece:
            raise ValueError(f"a zero byte (byte {file.tell() - len(piece) + piece.index(0)})")
        pieces.append(piece)
    text = b"".join(pieces).decode(errors="replace")
    del pieces
    # An empty list takes two characters of the text, and 56 bytes of memory.
    if text.count("[") + text.count("{") > max(_OF_ANY_FILE, size // 8):
        raise ValueError("more lists and objects than a snapshot of this size holds")
    data = json.loads(text, strict=False, parse_constant=_refuse_constant)
    del text
    with tempfile.TemporaryFile() as pickled:
        pickle.dump(data, pickled, protocol=4)
        del data
        pickled.seek(0)
        try:
            return PlainData.from_pickle(pickled.fileno(), os.fstat(pickled.fileno()).st_size)
        except ValueError as error:
            # The error names a byte of the pickle, not of the file.
            raise ValueError(str(error).partition(" (byte ")[0]) from error


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


def _snapshot(data: PlainData) -> Snapshot:
    found = data.recording(ACTIONS)
    settings = _settings(data.get("allocator_settings"))
    annotations = data.get("external_annotations") or []
    if type(annotations) is not list:
        raise ValueError(f"external_annotations is {_described(annotations)}, expected a list")
    for index, entry in enumerate(annotations):
        if type(entry) is not dict:
            raise ValueError(f"external_annotations[{index}] is {_described(entry)}, expected a dict")
    notes = [
        f"{key}, of the CPU's pinned memory, are left out" for key in ("host_segments", "host_traces") if data.has(key)
    ]
    frames = tuple(
        Frame(_shown(filename), line, _shown(name), _original(trace)) for filename, line, name, trace in found["frames"]
    )
    ends = _segments(found["segments"])
    devices = []
    for index in range(max([len(found["devices"]), *(device + 1 for device in ends)])):
        events, unusual = _events(found["devices"][index], index) if index < len(found["devices"]) else (NO_EVENTS, [])
        end = ends.get(index, ())
        if not events and not end:
            continue
        if not events.has_pools and any(segment.pool for segment in end):
            events = events.with_pools(end)
        beginning, paused, unclear = find_beginning(events, end, index)
        notes += unusual + unclear
        releases = find_releases(events, beginning, frames, found["stacks"], settings, paused)
        devices.append(DeviceTrace(index, events, end, beginning, releases, paused))
    if len(devices) > 1:
        notes.append(f"{len(devices)} devices: {', '.join(str(device.index) for device in devices)}")
    if settings.overflowed:
        notes.append(
            "the recording was full and dropped its oldest events: the trace begins mid-run "
            "(record with a larger max_entries to have all)"
        )
    return Snapshot(
        devices=tuple(devices),
        frames=frames,
        stacks=tuple(found["stacks"]),
        pools=tuple(found["pools"]),
        settings=settings,
        annotations=tuple(
            {**entry, "name": _shown(name)} if isinstance(name := entry.get("name"), str) else entry
            for entry in annotations
        ),
        notes=tuple(notes),
        metadata=tuple(map(_shown, found["metadata"])),
    )


def _events(columns: dict[str, Any], device: int) -> tuple[Events, list[str]]:
    """Return a device's events, and notes on anything unusual."""
    unknown, no_text, (backwards, first) = (columns.pop(key) for key in ("unknown", "other_metadata", "backwards"))
    notes = []
    if unknown:
        names = ", ".join(map(_shown, sorted(unknown)[:5]))
        notes.append(f"device {device}: {sum(unknown.values())} events of unknown kind are left out: {names}")
    if no_text:
        notes.append(f"device {device}: {no_text} events carry a user_metadata that is no text: left out")
    if backwards:
        notes.append(
            f"device {device}: the clock goes backwards, first at event {first} ({backwards} in all); "
            "the order in the file counts"
        )
    return Events(**columns), notes


def _segments(rows: Iterable[tuple[Any, ...]]) -> dict[int, tuple[Segment, ...]]:
    """Return each device's segments by address."""
    found: dict[int, list[Segment]] = {}
    for device, address, size, stream, pool, small, expandable, stack, rows_of_blocks in rows:
        blocks = tuple(Block(*row) for row in rows_of_blocks)
        segment = Segment(address, size, stream, pool, small, expandable, stack, blocks)
        found.setdefault(device, []).append(segment)
    for device, segments in found.items():
        segments.sort(key=lambda segment: segment.address)
        for left, right in pairwise(segments):
            if left.address + left.size > right.address:
                raise ValueError(
                    f"segments of device {device} overlap: {left.size} bytes at {left.address:#x} and "
                    f"{right.size} at {right.address:#x}"
                )
    return {device: tuple(segments) for device, segments in found.items()}


def _settings(entry: Any) -> Settings:
    where = "allocator_settings"
    if entry is None:
        return Settings()
    if type(entry) is not dict:
        raise ValueError(f"{where} is {_described(entry)}, expected a dict")
    conf = next((entry[key] for key in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if entry.get(key)), "")
    split = entry.get("max_split_size", -1)
    threshold = entry.get("garbage_collection_threshold", 0.0)
    divisions = entry.get("roundup_power2_divisions", {})
    expandable = entry.get("expandable_segments", False)
    overflowed = entry.get("trace_alloc_overflowed")
    expected: Iterable[tuple[str, object, tuple[type, ...]]] = (
        ("PYTORCH_CUDA_ALLOC_CONF", conf, (str,)),
        ("max_split_size", split, (int,)),
        ("garbage_collection_threshold", threshold, (int, float)),
        ("roundup_power2_divisions", divisions, (dict,)),
        ("expandable_segments", expandable, (bool,)),
        ("trace_alloc_overflowed", overflowed, (bool, type(None))),
    )
    for key, value, types in expected:
        if type(value) not in types:
            raise ValueError(f"{where}: {key!r} is {_described(value)}, expected {types[0].__name__}")
    for key, value in divisions.items():
        if not (key.isascii() and key.isdigit() and len(key) < 19):
            raise ValueError(f"{where}: roundup_power2_divisions of {_described(key)}, expected a number of MiB")
        if type(value) is not int or value < 0:
            raise ValueError(f"{where}: roundup_power2_divisions of {key} is {_described(value)}, expected an integer")
    return Settings(
        conf,
        split if 0 <= split < LIMIT else None,
        float(threshold),
        expandable,
        {int(key): value for key, value in divisions.items() if value} or None,
        overflowed,
    )


def _original(trace: str) -> tuple[Frame, ...]:
    """Return the lines of a traceback as Python prints one, innermost first."""
    lines = _TRACEBACK_LINE.findall(trace)
    return tuple(Frame(_shown(filename), int(line), _shown(name)) for filename, line, name in reversed(lines))


def _shown(text: str) -> str:
    """Return a text without a terminal's control characters."""
    return text if text.isprintable() else "".join(each if each.isprintable() else "\ufffd" for each in text)


def _described(value: object) -> str:
    """Describe any value in few words."""
    if isinstance(value, str):
        return repr(value[:40])
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    return f"a {type(value).__name__}"
