"""The commands ``replay`` and ``tune``."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from allocator_cases import MIB
from snapshot_cases import FRAME, block, content, event, recorded, segment, write

from pyactcomp.snapshots import read_snapshot, tune
from pyactcomp.snapshots import replay as replay_one

for _name in ("typer", "rich"):
    pytest.importorskip(_name)

from click.testing import Result  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from pyactcomp.cli import shared  # noqa: E402
from pyactcomp.cli.commands import app  # noqa: E402
from pyactcomp.cli.tune import _print_tuned  # noqa: E402

GIB = 1 << 30
KEYS = ["trace", "config", "peak_allocated", "peak_reserved", "driver_calls", "oom_at"]


def run(*arguments: object) -> Result:
    # Wide enough that no table is folded.
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(argument) for argument in arguments])


def rows_of(*arguments: object) -> list[dict[str, Any]]:
    ran = run("replay", *arguments, "--json")
    assert ran.exit_code == 0, ran.stderr
    parsed = json.loads(ran.stdout)
    assert list(parsed) == ["rows"]
    return list(parsed["rows"])


def growing(sizes: tuple[int, ...] = (40, 60, 80)) -> list[dict[str, Any]]:
    """Return events of blocks of so many MiB, each freed before the next."""
    return [
        event(action, (number + 1) * GIB, size * MIB, frames=[FRAME, {**FRAME, "name": "train"}])
        for number, size in enumerate(sizes)
        for action in ("alloc", "free_requested", "free_completed")
    ]


def held(at: int, size: int) -> dict[str, Any]:
    return event("alloc", at * GIB, size * MIB)


def freed(at: int, size: int) -> dict[str, Any]:
    return event("free_completed", at * GIB, size * MIB)


# ---- replay ----


def test_replay_has_a_row_of_each_trace_and_configuration(tmp_path: Path) -> None:
    paths = []
    for name in ("moe", "lora_offload"):
        (tmp_path / name).mkdir()
        paths.append(write(tmp_path / name, recorded(name)).rename(tmp_path / f"{name}.pickle"))
    configs = ["native[max_split_size_mb:512]", "pyactcomp"]
    rows = rows_of(*paths, "--config", configs[0], "--config", configs[1], "--capacity", "24GiB")
    assert [(row["trace"], row["config"]) for row in rows] == [(path.name, each) for path in paths for each in configs]
    for row in rows:
        assert list(row)[: len(KEYS)] == KEYS
        result = replay_one(read_snapshot(tmp_path / row["trace"]), row["config"], "24GiB")
        for key in [*KEYS[2:], "peak_active", "utilization", "retries", "driver_seconds"]:
            assert row[key] == getattr(result, key), key


def test_replay_compares_three_allocators_unless_told_otherwise(tmp_path: Path) -> None:
    path = write(tmp_path, content(growing()))
    rows = rows_of(path)
    assert [row["config"] for row in rows] == ["native", "expandable", "pyactcomp"]
    assert [row["peak_reserved"] for row in rows] == [180 * MIB, 80 * MIB, 80 * MIB]
    printed = run("replay", path).stdout
    native = next(line.split() for line in printed.splitlines() if line.split()[:1] == ["native"])
    # 80 of 180 MiB were in use at most.
    assert native[:6] == ["native", "80.00", "MiB", "180.00", "MiB", "44.4%"]


def test_replay_says_where_memory_runs_out(tmp_path: Path) -> None:
    events = growing()
    path = write(tmp_path, content([entry for entry in events if entry["action"] == "alloc"]))
    row = rows_of(path, "--config", "native", "--capacity", "120MiB")[0]
    assert (row["oom_at"], row["oom_size"]) == (2, 80 * MIB)
    assert row["oom_stack"] == ["model.py:12 forward", "model.py:12 train"]
    printed = run("replay", path, "--config", "native", "--capacity", "120MiB").stdout
    assert (
        "native runs out of memory at event 2, a request of 80.00 MiB, requested by\n  model.py:12 forward\n" in printed
    )


def test_request_that_fails_is_shown_by_the_programs_own_lines(tmp_path: Path) -> None:
    inside = [{"filename": "??", "line": 0, "name": f"c10::cuda::f{number}()"} for number in range(20)]
    path = write(tmp_path, content([event("alloc", GIB, 80 * MIB, frames=[*inside, FRAME])]))
    assert rows_of(path, "--config", "native", "--capacity", "20MiB")[0]["oom_stack"] == ["model.py:12 forward"]


def test_replay_names_what_cannot_be_known(tmp_path: Path) -> None:
    unknown = [event("free_completed", 5 * GIB, MIB), *growing()]
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "trace_alloc_overflowed": True}
    data = content(unknown, device_traces=[unknown, [], [*growing((40,)), held(9, 2)]], allocator_settings=settings)
    path = write(tmp_path, data)
    rows = rows_of(path, "--config", "native")
    # The block that only its free is known of lies in a small segment, 2 MiB.
    assert [(row["device"], row["peak_reserved"]) for row in rows] == [(0, 182 * MIB), (2, 40 * MIB)]
    assert any("dropped its oldest events" in note for note in rows[0]["notes"])
    none = "device 0: no events were recorded: only the blocks that existed at the end are known"
    assert none not in rows[0]["notes"]
    silent = write(tmp_path, content([], [segment(GIB, block(GIB, 2 * MIB))]))
    assert none in rows_of(silent, "--config", "native")[0]["notes"]
    path = write(tmp_path, data)
    printed = run("replay", path, "--config", "native").stdout
    assert f"{path.name}, device 0: {len(unknown)} events" in printed
    assert f"{path.name}, device 2: 4 events" in printed
    # What concerns both devices is said once, what concerns one of them with that one.
    first, second = printed.split("device 2: 4 events")
    assert (first.count("note: 2 devices: 0, 2"), second.count("note: 2 devices")) == (1, 0)
    for mine, other, text in ((0, 2, first), (2, 0, second)):
        assert f"note: device {mine}: " in text
        assert f"note: device {other}: " not in text
        row = next(row for row in rows if row["device"] == mine)
        assert not any(note.startswith(f"device {other}: ") for note in row["notes"])
        assert any("dropped its oldest events" in note for note in row["notes"])


def test_replay_says_what_a_recording_without_stacks_does_not_tell(tmp_path: Path) -> None:
    # Given back, and then more is taken than there ever was: for that, or by the program.
    segments = [event("segment_free", GIB, 40 * MIB), event("segment_alloc", 2 * GIB, 60 * MIB)]
    before = [event("segment_alloc", GIB, 40 * MIB), held(1, 40), freed(1, 40)]
    path = write(tmp_path, content([*before, *segments, held(2, 60)]))
    notes = rows_of(path, "--config", "native")[0]["notes"]
    unclear = "device 0: of these, times that memory was perhaps given back to serve a request"
    assert [note for note in notes if note.startswith(unclear) and ": 1 (" in note]
    emptied = write(tmp_path, content([*before, segments[0]]))
    notes = rows_of(emptied, "--config", "native")[0]["notes"]
    assert any("emptied the cache" in note for note in notes)
    assert not any(note.startswith(unclear) for note in notes)


@pytest.mark.parametrize("columns", [40, 60, 80])
@pytest.mark.parametrize("command", ["replay", "tune"])
def test_narrow_table_loses_no_character(command: str, columns: int, tmp_path: Path) -> None:
    path = write(tmp_path, content(growing()))

    def characters(width: int) -> list[str]:
        runner = CliRunner(env={"COLUMNS": str(width)})
        printed = runner.invoke(app, [command, str(path), "--capacity", "1GiB"]).stdout
        return sorted(printed.replace("─", "").replace(" ", "").replace("\n", ""))

    assert characters(columns) == characters(200)


def test_one_is_not_many(tmp_path: Path) -> None:
    path = write(tmp_path, content([held(1, 40)]))
    assert f"{path.name}: 1 event\n" in run("replay", path).stdout


@pytest.mark.parametrize("command", ["replay", "tune"])
@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "is empty"),
        (b"\x80\x04cos\nsystem\n(S'true'\ntR.", "was not run"),
        (b"\x80\x04}(", "cut off"),
        (b'{"segments": []}', "has no 'device_traces'"),
        (b'{"segments": [], "device_traces": []}', "nothing can be replayed|nothing to replay"),
        (None, "No such file or directory; write one with torch.cuda.memory._dump_snapshot"),
    ],
)
def test_bad_file_is_one_line_and_exit_code_2(command: str, data: bytes | None, told: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.pickle"
    if data is not None:
        path.write_bytes(data)
    ran = run(command, path, "--capacity", "1GiB")
    assert ran.exit_code == 2
    assert isinstance(ran.exception, SystemExit)
    error = ran.stderr.strip().splitlines()
    assert len(error) == 1
    assert re.search(f"^Error: .*broken.pickle: .*({told})", error[0])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("replay", "--config", "tcmalloc"), "native, expandable or pyactcomp"),
        (("replay", "--config", "native[memory_fraction:0.5]"), "give --capacity"),
        (("replay", "--capacity", "lots"), "lots"),
        (("tune", "--capacity", "1MiB"), "at least 2 MiB"),
        (("tune", "--capacity", "1GiB", "--time-limit", "0"), "seconds above 0"),
        (("tune",), "--capacity"),
    ],
)
def test_wrong_option_is_named(arguments: tuple[str, ...], told: str, tmp_path: Path) -> None:
    path = write(tmp_path, content(growing()))
    ran = run(arguments[0], path, *arguments[1:])
    assert ran.exit_code == 2
    assert told in ran.stderr


# ---- tune ----


def test_tune_prints_the_line_to_export(tmp_path: Path) -> None:
    path = write(tmp_path, content(growing()))
    ran = run("tune", path, "--capacity", "1GiB")
    assert ran.exit_code == 0, ran.stderr
    assert "export PYTORCH_ALLOC_CONF=expandable_segments:True\n" in ran.stdout
    assert "PYTORCH_CUDA_ALLOC_CONF" in ran.stdout
    assert "\nexpandable works with 80.00 MiB: with 2 MiB less memory runs out\n" in ran.stdout
    line = next(line for line in ran.stdout.splitlines() if "PyTorch" in line)
    assert re.search(r"expandable +80.00 MiB +100.00 MiB +0 ", line)


def test_tune_as_json_is_what_the_function_returns(tmp_path: Path) -> None:
    path = write(tmp_path, content(growing()))
    parsed = json.loads(run("tune", path, "--capacity", "1GiB", "--json").stdout)
    result = tune(path, "1GiB")
    assert parsed["trace"] == path.name
    assert (parsed["capacity"], parsed["fits"], parsed["stopped"]) == (GIB, True, "finished")
    assert parsed["replays"] == result.replays
    for name in ("best", "recorded", "pytorch", "pyactcomp"):
        for key, value in parsed[name].items():
            assert value == getattr(getattr(result, name), key), (name, key)


def test_tune_says_when_there_is_nothing_to_change(tmp_path: Path) -> None:
    path = write(tmp_path, content(growing((40,))))
    ran = run("tune", path, "--capacity", "1GiB")
    assert "the setting of the recording, native, is the best: there is nothing to change" in ran.stdout
    assert "export" not in ran.stdout
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "expandable_segments": True}
    ran = run("tune", write(tmp_path, content(growing((40,)), allocator_settings=settings)), "--capacity", "1GiB")
    assert "unset PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF" in ran.stdout


def test_tune_says_what_would_do_where_nothing_fits(tmp_path: Path) -> None:
    ran = run("tune", write(tmp_path, content(growing())), "--capacity", "50MiB")
    assert ran.exit_code == 0
    assert "nothing tried fits in 50.00 MiB; the least found to work is 80.00 MiB, with expandable\n" in ran.stdout
    assert "export PYTORCH_ALLOC_CONF=expandable_segments:True\n" in ran.stdout
    ran = run("tune", write(tmp_path, content([held(1, 40)])), "--capacity", "30MiB")
    least = "the least found to work is 40.00 MiB, with native, the setting of the recording\n"
    assert f"nothing tried fits in 30.00 MiB; {least}" in ran.stdout
    assert "nothing to change" not in ran.stdout
    # Expandable segments take whole pages of 20 MiB: they do not work with as little.
    ran = run("tune", write(tmp_path, content(growing((40, 60, 85)))), "--capacity", "50MiB")
    assert ran.stdout.endswith("the least found to work is 86.00 MiB, with pyactcomp\npyactcomp run SCRIPT\n")
    ran = run("tune", write(tmp_path, content(growing((40, 60, 85)))), "--capacity", "1GiB")
    assert "pyactcomp run SCRIPT\nor, for PyTorch's own allocator:\nexport PYTORCH_ALLOC_CONF=" in ran.stdout
    ran = run("tune", write(tmp_path, content([held(1, 1)])), "--capacity", "2MiB")
    assert "native works with 2.00 MiB\n" in ran.stdout


@pytest.mark.parametrize(
    ("size", "limit", "why"),
    [(1 << 61, 120, "more than 512 GiB"), (40 * MIB, 1e-9, "not known: the search ended before")],
)
def test_tune_recommends_nothing_that_is_not_known_to_work(size: int, limit: float, why: str, tmp_path: Path) -> None:
    died = {"action": "oom", "device_free": 0, "size": size, "stream": 0, "time_us": 10, "frames": []}
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "expandable_segments": True}
    path = write(tmp_path, content([*growing((10,)), died], allocator_settings=settings))
    ran = run("tune", path, "--capacity", "30MiB", "--time-limit", limit)
    assert ran.exit_code == 0
    assert ran.stdout.endswith(f"nothing tried fits in 30.00 MiB; the capacity that would be enough is {why}\n")
    for word in ("export", "unset", "the best", "nothing to change"):
        assert word not in ran.stdout


def test_tune_says_what_a_share_of_the_memory_needs(tmp_path: Path) -> None:
    # 182 MiB of 192 are free only once both blocks are given back: garbage collection spares the retry.
    path = write(tmp_path, content([held(1, 22), held(2, 116), freed(1, 22), freed(2, 116), held(3, 182)]))
    ran = run("tune", path, "--capacity", "192MiB")
    line = r"export PYTORCH_ALLOC_CONF=garbage_collection_threshold:0.\d,per_process_memory_fraction:0.99\n"
    assert re.search(line, ran.stdout)
    assert "torch before 2.10" in ran.stdout
    assert "torch.cuda.set_per_process_memory_fraction(0.99)" in ran.stdout
    assert "a share of all the memory that the device has" in ran.stdout
    ran = run("tune", write(tmp_path, content(growing())), "--capacity", "1GiB")
    assert "fraction" not in ran.stdout


def test_tune_names_no_saving_where_there_is_none(tmp_path: Path) -> None:
    found = tune(write(tmp_path, content([held(1, 40)])), "1GiB")
    result = replace(found.recorded.results[0], peak_reserved=64 * MIB)
    more = replace(found.recorded, config="pyactcomp", results=(result,))
    with shared.console.capture() as printed:
        _print_tuned(replace(found, pyactcomp=more))
    line = next(line for line in printed.get().splitlines() if line.startswith(" pyactcomp"))
    assert re.search(r"pyactcomp +64.00 MiB +none +0 ", line)


def test_tune_says_what_the_memory_costs_in_time(tmp_path: Path) -> None:
    found = tune(write(tmp_path, content([held(1, 40)])), "1GiB")
    slow = replace(
        found.recorded, config="expandable", results=(replace(found.recorded.results[0], driver_seconds=0.5),)
    )
    with shared.console.capture() as printed:
        _print_tuned(replace(found, best=slow, pytorch=slow, seconds=4.0))
    said = " ".join(printed.get().split())
    assert (
        "memory comes first: expandable spends 12% of the recorded 4 s in the driver, the recorded setting 0%" in said
    )
    with shared.console.capture() as printed:
        _print_tuned(replace(found, best=slow, pytorch=slow, seconds=4000.0))
    assert "memory comes first" not in printed.get()


def press(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Press Ctrl-C in one of the replays."""
    tried: list[str] = []

    def pressed(snapshot: Any, config: str, *arguments: Any, **others: Any) -> Any:
        tried.append(config)
        if len(tried) == at:
            signal.raise_signal(signal.SIGINT)
        return replay_one(snapshot, config, *arguments, **others)

    monkeypatch.setattr(sys.modules["pyactcomp.snapshots.tune"], "replay_one", pressed)


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Let Ctrl-C arrive: a process that a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_tune_prints_the_best_so_far_on_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    press(monkeypatch, 4)
    ran = run("tune", write(tmp_path, content(growing())), "--capacity", "1GiB")
    assert ran.exit_code == 130
    assert "stopped by Ctrl-C after 4 replays: the best so far" in ran.stdout
    assert "export PYTORCH_ALLOC_CONF=expandable_segments:True\n" in ran.stdout


@pytest.mark.parametrize("at", [2, 3])
def test_tune_recommends_nothing_where_ctrl_c_came_before_anything_fitted(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    press(monkeypatch, at)
    ran = run("tune", write(tmp_path, content(growing())), "--capacity", "50MiB")
    assert ran.exit_code == 130
    why = "the capacity that would be enough is not known: the search ended before"
    assert ran.stdout.endswith(f"stopped by Ctrl-C after {at} replays\nnothing tried fits in 50.00 MiB; {why}\n")
    assert "export" not in ran.stdout
    assert "nothing to change" not in ran.stdout
