"""Contract under test: every form in which people have a snapshot is read alike, and other files are named."""

from __future__ import annotations

import base64
import copy
import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from allocator_cases import MIB
from snapshot_cases import BASE, FRAME, block, content, event, segment
from torch.cuda import _memory_viz

from pyactcomp.snapshots.explain import explain
from pyactcomp.snapshots.model import Snapshot
from pyactcomp.snapshots.reader import read_snapshot

SECOND = BASE + 64 * MIB


def snapshot() -> dict[str, Any]:
    """Return a snapshot of two segments and of the events in which the second one was filled."""
    frames = [FRAME, {**FRAME, "name": "train", "line": 40}]
    segments = [
        segment(BASE, block(BASE, 8 * MIB, frames=frames), block(BASE + 8 * MIB, 12 * MIB, "inactive")),
        segment(SECOND, block(SECOND, 20 * MIB, requested_size=20 * MIB - 100, frames=frames)),
    ]
    events = [event("segment_alloc", SECOND, 20 * MIB), event("alloc", SECOND, 20 * MIB - 100, frames=frames)]
    return content(events, segments)


def read(path: Path, data: bytes) -> Snapshot:
    path.write_bytes(data)
    return read_snapshot(path)


def page(data: dict[str, Any]) -> str:
    """Return the page that torch makes of a snapshot."""
    return str(_memory_viz.trace_plot(copy.deepcopy(data)))


FORMS = {
    "JSON": lambda data: json.dumps(data).encode(),
    "gzip": lambda data: gzip.compress(pickle.dumps(data, protocol=4)),
    "gzip of JSON": lambda data: gzip.compress(json.dumps(data).encode()),
    "a page of memory_viz": lambda data: page(data).encode(),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read_as_the_pickle_is(form: str, tmp_path: Path) -> None:
    plain = read(tmp_path / "snapshot.pickle", pickle.dumps(snapshot(), protocol=4))
    assert len(plain.devices[0].events) == 2
    assert read(tmp_path / "other", FORMS[form](snapshot())) == plain


def test_segments_alone_are_a_recording_without_events(tmp_path: Path) -> None:
    """``torch.cuda.memory_snapshot()`` returns them."""
    whole = snapshot()
    alone = read(tmp_path / "segments.pickle", pickle.dumps(whole["segments"], protocol=4))
    without_events = {**whole, "device_traces": []}
    expected = read(tmp_path / "snapshot.pickle", pickle.dumps(without_events, protocol=4))
    assert alone.devices == expected.devices
    found = explain(alone)
    assert (found.live_bytes, found.reserved_bytes, found.free_bytes) == (28 * MIB, 40 * MIB, 12 * MIB)
    assert found.by_stack[0].label == "model.py:12 forward < model.py:40 train"


def of_torch_2_0(whole: dict[str, Any]) -> dict[str, Any]:
    """Return a snapshot as torch 2.0 wrote it: a block has no address, and its last request in a history."""
    old = copy.deepcopy(whole)
    for each in old["segments"]:
        for key in ("segment_pool_id", "is_expandable", "frames"):
            del each[key]
        for held in each["blocks"]:
            address, asked, frames = (held.pop(key) for key in ("address", "requested_size", "frames"))
            last = {"addr": address, "real_size": asked, "frames": frames}
            # What the block was before it was merged with the one in front.
            earlier = {"addr": address + 512, "real_size": 7, "frames": []}
            held["history"] = [last, earlier] if held["state"] != "inactive" else [earlier]
    for row in old["device_traces"][0]:
        del row["time_us"]
    del old["allocator_settings"], old["external_annotations"]
    return old


def test_files_of_torch_2_0_are_read_like_later_ones(tmp_path: Path) -> None:
    new = read(tmp_path / "new.pickle", pickle.dumps(snapshot(), protocol=4)).devices[0]
    old = read(tmp_path / "old.pickle", pickle.dumps(of_torch_2_0(snapshot()), protocol=4)).devices[0]
    assert old.segments == new.segments
    assert old.beginning == new.beginning
    found = explain(read_snapshot(tmp_path / "old.pickle"))
    assert (found.live_bytes, found.by_stack[0].label) == (28 * MIB, "model.py:12 forward < model.py:40 train")


def test_lines_that_compiled_code_comes_from_are_read(tmp_path: Path) -> None:
    """``_dump_snapshot(augment_with_fx_traces=True)`` adds them to frames of generated code."""
    trace = (
        '  File "/home/me/train.py", line 3, in main\n    model(x)\n  File "/home/me/model.py", line 12, in forward\n'
    )
    frame = {"filename": "/tmp/fx_generated_1.py", "line": 9, "name": "forward", "fx_original_trace": trace}
    data = content([event("alloc", BASE, MIB, frames=[frame])])
    found = read(tmp_path / "snapshot.pickle", pickle.dumps(data, protocol=4)).frames[0]
    assert [(line.filename, line.line, line.name) for line in found.original] == [
        ("/home/me/model.py", 12, "forward"),
        ("/home/me/train.py", 3, "main"),
    ]


OTHERS = {
    "zip": (b"PK\x03\x04" + bytes(60), "a zip archive"),
    "bzip2": (b"BZh91AY" + bytes(60), "compressed by bzip2"),
    "xz": (b"\xfd7zXZ\x00" + bytes(60), "compressed by xz"),
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(60), "compressed by zstd"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\noid", "a pointer of Git LFS"),
    "a page": (b"<!DOCTYPE html><html><body>no</body></html>", "a web page without a snapshot"),
    "a picture": (b"<?xml version='1.0'?><svg xmlns='x'></svg>", r"a picture \(SVG\)"),
    "gzip, cut off": (gzip.compress(pickle.dumps(snapshot()))[:-20], "a gzip file that is cut off"),
    "gzip, damaged": (b"\x1f\x8b\x08" + bytes([255] * 60), "a gzip file that cannot be unpacked"),
    "a page, cut off": (b'<html>[{"name": "s", "base64": "' + base64.b64encode(b"12345")[:-3] + b'"}]', "is cut off"),
    "gzip in gzip": (gzip.compress(gzip.compress(b"x")), "begins with"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_files_are_named_for_what_they_are(case: str, tmp_path: Path) -> None:
    data, told = OTHERS[case]
    with pytest.raises(ValueError, match=told):
        read(tmp_path / "file", data)


def test_gzip_file_that_would_fill_the_disk_is_refused(tmp_path: Path) -> None:
    bomb = gzip.compress(bytes(100 << 20), compresslevel=9)  # zeros shrink to a thousandth
    with pytest.raises(ValueError, match="which no snapshot of its size has"):
        read(tmp_path / "file", bomb)
