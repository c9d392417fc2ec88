"""The command ``explain``, and the page that shows it and the commands after it."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from allocator_cases import MIB
from explain_cases import LAYER, alloc, failure, free, out_of_memory
from snapshot_cases import BASE, block, content, event, segment, write

for _name in ("typer", "rich"):
    pytest.importorskip(_name)

from explain_cli_checks import run, said  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from pyactcomp.cli.commands import app  # noqa: E402

ROOT = Path(__file__).parents[1]
PNG = b"\x89PNG\r\n\x1a\n"


def devices(tmp_path: Path, *traces: list[dict[str, Any]], **others: Any) -> Path:
    return write(tmp_path, content(**others) | {"device_traces": list(traces)})


def test_command_prints_all_devices_as_json(tmp_path: Path) -> None:
    path = devices(tmp_path, [alloc(0, MIB, LAYER)], [alloc(0, 2 * MIB)])
    ran = run(path, "--json", "--at", "0")
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)["explanations"]
    assert [(one["device"], one["live_bytes"]) for one in found] == [(0, MIB), (1, 2 * MIB)]
    assert found[0]["by_stack"][0]["stack"] == ["/home/me/model.py:12 forward"]


def test_command_says_what_was_asked_for_and_who_would_fit(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out_of_memory(tmp_path)  # writes the snapshot
    picture = tmp_path / "timeline.png"
    ran = run(tmp_path / "snapshot.pickle", "--plot", picture)
    assert ran.exit_code == 0, ran.output
    for part in ("70.00 MiB", "out of memory at event 10", "fits", "--capacity 220MiB", "memory_viz", "picture:"):
        assert part in ran.stdout
    assert picture.read_bytes()[:8] == PNG


@pytest.mark.parametrize(
    ("capacity", "text"), [(2 << 30, "2GiB"), (2050 * MIB, "2050MiB"), (3 * MIB + 1, f"{3 * MIB + 1}")]
)
def test_command_names_the_search_with_a_capacity_as_people_write_it(tmp_path: Path, capacity: int, text: str) -> None:
    path = write(tmp_path, content([alloc(0, MIB), failure(9 << 30, 7)])).rename(tmp_path / "out of memory.pickle")
    ran = run(path, "--capacity", capacity)
    assert f"pyactcomp tune '{path}' --capacity {text}" in [line.split(": ")[-1] for line in ran.stdout.splitlines()]


def test_command_counts_blocks_and_events_in_words_that_fit(tmp_path: Path) -> None:
    passing = [entry for _ in range(400) for entry in (alloc(8 * MIB, MIB), *free(8 * MIB, MIB))]
    ran = run(write(tmp_path, content([alloc(0, MIB), *passing])), "--at", 1200)
    assert "device 0, after event 1,200 (free_completed)" in ran.stdout
    assert "1.00 MiB in 1 block\n" in re.sub(" +\n", "\n", ran.stdout)
    assert "in 2 blocks" in run(tmp_path / "snapshot.pickle").stdout


def test_command_explains_what_was_there_before_the_first_event(tmp_path: Path) -> None:
    end = [segment(BASE, block(BASE, MIB), block(BASE + MIB, 19 * MIB, "inactive"))]
    ran = run(write(tmp_path, content([], end)))
    assert ran.exit_code == 0, ran.output
    assert "device 0, before the first event" in ran.stdout
    assert re.search(r"no call stack +1\.00 MiB +before ", ran.stdout)


def test_command_prints_a_note_where_it_belongs_and_once(tmp_path: Path) -> None:
    ran = run(devices(tmp_path, free(0, MIB), [*free(MIB, 2 * MIB), failure(MIB, 7)]))
    lines = ran.stdout.splitlines()
    place = {
        text: [at for at, line in enumerate(lines) if text in line]
        for text in ("from before the recording:", "2 devices: 0, 1")
    }
    before = place["from before the recording:"]
    second = next(at for at, line in enumerate(lines) if line.startswith("device 1,"))
    assert [at < second for at in before] == [True, False]
    assert [at > before[1] for at in place["2 devices: 0, 1"]] == [True]


def test_command_leaves_out_devices_that_never_ran_out_of_memory_where_that_is_asked_about(tmp_path: Path) -> None:
    path = devices(tmp_path, [alloc(0, MIB)], [alloc(0, 2 * MIB), failure(30 * MIB, 7)], [alloc(0, MIB)])
    for asked in (("--at", "oom"), ("--capacity", "20MiB")):
        ran = run(path, *asked)
        assert ran.exit_code == 0, ran.output
        assert [line for line in ran.stdout.splitlines() if line.startswith("device ")] == [
            "device 1, after event 1 (oom)"
        ]
        assert "memory did not run out on device 0, 2: left out" in ran.stdout
    ran = run(path, "--at", "1")
    assert ran.exit_code == 2
    assert "'--at': device 0 has events 0 to 0, got 1; choose one with --device" in said(ran)


def test_command_names_what_the_picture_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    ran = run(write(tmp_path, content([alloc(0, MIB)])), "--plot", tmp_path / "timeline.png")
    assert ran.exit_code == 2
    assert "pip install matplotlib" in said(ran)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--at", "oom"), "'--at': device 0 has no out-of-memory event"),
        (("--at", "³"), "'--at': at is peak, oom or an event's number, got '³'"),
        (("--at=--5",), "'--at': at is peak, oom or an event's number, got '--5'"),
        (("--at=-5",), "'--at': device 0 has events 0 to 0, got -5"),
        (("--at", "9" * 5000), "'--at': at is peak, oom or an event's number"),
        (("--device", "3"), "--device: recorded are [0], got 3"),
        (("--plot", "picture.jpg"), "--plot: a picture is written as .png, .svg, .pdf"),
        (("--capacity", "potato"), "--capacity: capacity: expected a size"),
        (("--capacity", "0"), "--capacity: capacity is 1 to 2**62 bytes, got 0"),
        (("--capacity", "1GiB"), "'--capacity': capacity needs the moment of an out-of-memory event"),
    ],
)
def test_command_refuses_arguments_by_their_name(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    ran = run(write(tmp_path, content([alloc(0, MIB)])), *arguments)
    assert ran.exit_code == 2
    assert f"Invalid value for {words}" in said(ran)


@pytest.mark.parametrize("what", ["missing", "no snapshot", "nothing recorded"])
def test_command_fails_with_one_line_for_a_file_it_cannot_explain(tmp_path: Path, what: str) -> None:
    path = tmp_path / "file"
    if what == "no snapshot":
        path.write_bytes(b"junk")
    elif what == "nothing recorded":
        write(tmp_path, content()).rename(path)
    picture = tmp_path / "timeline.png"
    for arguments in ((), ("--plot", picture)):
        ran = run(path, *arguments)
        assert ran.exit_code == 2
        assert re.fullmatch(rf"Error: [^\n]*{path.name}: [^\n]+", ran.output.strip())
    assert not picture.exists()


@pytest.mark.parametrize("place", ["folder", "folder/none/timeline.png"])
def test_command_fails_with_one_line_where_it_cannot_write_the_picture(tmp_path: Path, place: str) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "folder").mkdir()
    for traces in ([alloc(0, MIB)],), ([alloc(0, MIB)], [alloc(0, MIB)]):
        ran = run(devices(tmp_path, *traces), "--plot", tmp_path / place)
        assert ran.exit_code == 2
        assert re.fullmatch(rf"Error: {tmp_path}/folder[^ ]*: [^\n]+", ran.output.strip())
    assert {file.name for file in tmp_path.rglob("*")} == {"folder", "snapshot.pickle"}


def test_command_writes_the_picture_to_the_path_given_and_of_several_devices_beside_it(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = write(tmp_path, content([alloc(0, MIB)]))
    for name, begin in (("timeline", PNG), ("timeline.pdf", b"%PDF"), ("timeline.svg", b"<?xml")):
        ran = run(path, "--plot", tmp_path / name)
        assert f"picture: {tmp_path / name}\n" in ran.stdout
        assert (tmp_path / name).read_bytes().startswith(begin)
    two = run(devices(tmp_path, [alloc(0, MIB)], [alloc(0, MIB)]), "--plot", tmp_path / "each.png")
    assert two.exit_code == 0, two.output
    assert {file.name for file in tmp_path.glob("each*")} == {"each-0.png", "each-1.png"}


def test_command_explains_a_recording_without_events_before_it_says_why_there_is_no_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "timeline.png"
    path = write(tmp_path, content([], [segment(BASE, block(BASE, MIB))]))
    for more in ((), ("--json",)):
        ran = run(path, "--plot", picture, *more)
        assert (ran.exit_code, picture.exists()) == (2, False)
        assert ran.stdout == run(path, *more).stdout
        assert "no picture: there are no events to draw" in ran.stderr


def test_command_tells_free_memory_of_other_streams_apart(tmp_path: Path) -> None:
    handle = 0x7F00_1234_5678
    segments = [
        segment(BASE, block(BASE, 20 * MIB), block(BASE + 20 * MIB, 2 * MIB, "inactive")),
        segment(BASE + 64 * MIB, block(BASE + 64 * MIB, 30 * MIB, "inactive"), stream=handle),
        segment(BASE + 128 * MIB, block(BASE + 128 * MIB, 4 * MIB, "inactive"), segment_pool_id=(0, 3)),
    ]
    told = said(run(write(tmp_path, content([], segments))))
    assert "30.00 MiB of it is free on other streams than stream 0" in told
    assert "stream 0x7f0012345678 30.00 MiB 30.00 MiB" in told
    assert "stream 0, private pool (0, 3) 4.00 MiB 4.00 MiB stream 0 2.00 MiB 2.00 MiB" in told
    alone = said(run(write(tmp_path, content([], segments[:1]))))
    assert "other streams" not in alone
    assert "only requests of its stream" not in alone


def test_page_shows_what_its_commands_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    page = (ROOT / "docs" / "replay.md").read_text()
    writes = next(snippet for snippet in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "npz" in snippet)
    shown = re.findall(r"^```console\n\$ pyactcomp (.*?)\n(.*?)^```", page, re.M | re.S)
    assert [line.split()[0] for line, _ in shown] == ["explain", "replay", "tune"]
    # The page is for a checkout; what it writes goes elsewhere.
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    exec(compile(writes, "docs/replay.md", "exec"), {})
    for line, expected in shown:
        ran = CliRunner(env={"COLUMNS": "100"}).invoke(app, line.split())
        assert ran.exit_code == 0, ran.output
        assert [row.rstrip() for row in ran.stdout.rstrip().splitlines()] == expected.rstrip().splitlines()


def test_command_names_the_paused_bytes(tmp_path: Path) -> None:
    pages = [event("segment_map", BASE + at * MIB, 20 * MIB) for at in range(0, 100, 20)]
    unmapped = [{**entry, "action": "segment_unmap"} for entry in pages]
    path = write(tmp_path, content([*pages, alloc(0, 100 * MIB), *unmapped, failure(30 * MIB, 10 * MIB)]))
    ran = run(path)
    assert ran.exit_code == 0, ran.output
    assert "100.00 MiB in 1 block, 100.00 MiB of it paused, without memory" in ran.stdout
    assert "memory was paused, at most 104,857,600 bytes at a time" in ran.stdout
