"""Two recordings compared to the byte, and the ranks of a job in one table."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from allocator_cases import KIB, MIB
from explain_cases import BACKWARD, LAYER, LOSS, MAIN, alloc, failure, free, large
from snapshot_cases import BASE, content, event, read, write

from pyactcomp.snapshots import compare, compare_ranks

for _name in ("typer", "rich"):
    pytest.importorskip(_name)

from click.testing import Result  # noqa: E402
from explain_cli_checks import run, said  # noqa: E402

PUBLISHED = Path(__file__).parent / "data" / "published"


def saved(folder: Path, name: str, events: list[dict[str, Any]], *more: list[dict[str, Any]], **others: Any) -> Path:
    return write(folder, content(**others) | {"device_traces": [events, *more]}).rename(folder / name)


def moved(frame: dict[str, Any], line: int, folder: str = "/home/me") -> dict[str, Any]:
    return {**frame, "filename": folder + "/" + frame["filename"].rsplit("/", 1)[1], "line": line}


def test_differences_by_call_site_add_up_to_the_difference_of_the_peaks(tmp_path: Path) -> None:
    a = saved(
        tmp_path,
        "a",
        [alloc(0, 4 * MIB, LAYER, MAIN), alloc(4 * MIB, MIB, LOSS), alloc(8 * MIB, 3 * MIB, BACKWARD), *free(0, MIB)],
    )
    b = saved(
        tmp_path,
        "b",
        [
            alloc(0, 9 * MIB, LAYER, MAIN),
            alloc(16 * MIB, 2 * MIB, LAYER, MAIN),
            alloc(20 * MIB, 3 * MIB, BACKWARD),
            alloc(32 * MIB, 600, MAIN),
        ],
    )
    found = compare(a, b)
    assert (found.before.bytes, found.after.bytes, found.bytes) == (8 * MIB, 14 * MIB + KIB, 6 * MIB + KIB)
    assert [(each.label, each.before_blocks, each.after_blocks, each.bytes) for each in found.by_stack] == [
        ("model.py:12 forward < train.py:3 main", 1, 2, 7 * MIB),
        ("train.py:3 main", 0, 1, KIB),
        ("MmBackward0", 1, 1, 0),
        ("model.py:40 loss", 1, 0, -MIB),
    ]
    assert [(each.label, each.bytes) for each in found.by_size] == [
        ("1 KiB to 2 KiB", KIB),
        ("1 MiB to 2 MiB", -MIB),
        ("2 MiB to 4 MiB", 2 * MIB),
        ("4 MiB to 8 MiB", -4 * MIB),
        ("8 MiB to 16 MiB", 9 * MIB),
    ]
    back = compare(b, a)
    assert back.bytes == -found.bytes
    assert sorted(each.bytes for each in back.by_stack) == sorted(-each.bytes for each in found.by_stack)


def test_recordings_with_one_peak_are_equal_at_every_call_site(tmp_path: Path) -> None:
    a = saved(tmp_path, "a", [alloc(0, MIB, LAYER), alloc(MIB, MIB, LOSS)])
    found = compare(a, a)
    assert found.bytes == 0
    assert {each.bytes for each in found.by_stack} == {0}


@pytest.mark.parametrize(
    "after", [moved(LAYER, 12, "/root/other"), moved(LAYER, 99), moved(LAYER, 99, "/root/other")], ids=str
)
def test_call_site_is_found_again_in_edited_code_and_elsewhere_on_the_disk(
    tmp_path: Path, after: dict[str, Any]
) -> None:
    a = saved(tmp_path, "a", [alloc(0, MIB, LAYER)])
    b = saved(tmp_path, "b", [alloc(0, 3 * MIB, after)])
    [one] = compare(a, b).by_stack
    assert (one.before_bytes, one.after_bytes) == (MIB, 3 * MIB)
    assert one.stack == (f"{after['filename']}:{after['line']} forward",)


def test_lines_that_moved_are_paired_in_order_and_not_where_one_was_added(tmp_path: Path) -> None:
    a = saved(tmp_path, "a", [alloc(0, MIB, moved(LAYER, 12)), alloc(MIB, 2 * MIB, moved(LAYER, 15))])
    b = saved(tmp_path, "b", [alloc(0, 8 * MIB, moved(LAYER, 25)), alloc(9 * MIB, 4 * MIB, moved(LAYER, 22))])
    assert [(each.before_bytes, each.after_bytes) for each in compare(a, b).by_stack] == [
        (2 * MIB, 8 * MIB),
        (MIB, 4 * MIB),
    ]
    c = saved(tmp_path, "c", [alloc(at * MIB, MIB, moved(LAYER, 22 + at)) for at in range(3)])
    assert sorted(each.bytes for each in compare(a, c).by_stack) == [-2 * MIB, -MIB, MIB, MIB, MIB]


@pytest.mark.parametrize("name", [f"real_{number:02}" for number in range(1, 16)])
def test_differences_of_published_recordings_are_exact(name: str, tmp_path: Path) -> None:
    """Recordings of public programs: no call stacks, so the sizes tell them apart."""

    def published(name: str) -> Path:
        with np.load(PUBLISHED / f"{name}.npz") as file:
            names = json.loads(str(file["meta"]))["actions"]
            columns = [file[key].tolist() for key in ("action", "addr", "size", "stream")]
        # The addresses are numbers from 0: far enough apart that no two blocks meet.
        return saved(
            tmp_path,
            name,
            [
                event(names[action], BASE + (number << 40), size, stream=stream)
                for action, number, size, stream in zip(*columns, strict=True)
            ],
        )

    one, other = published(name), published("real_16")
    found = compare(one, other)
    assert found.bytes == found.after.bytes - found.before.bytes
    for differences in (found.by_stack, found.by_size):
        assert sum(each.bytes for each in differences) == found.bytes
        assert sum(each.after_bytes for each in differences) == found.after.bytes
        assert sum(each.before_blocks for each in differences) == found.before.blocks


def test_ranks_are_compared_by_call_site(tmp_path: Path) -> None:
    paths = [
        saved(tmp_path, f"rank_{rank}", [large(0), alloc(0, size * MIB, moved(LAYER, 12, f"/tmp/{rank}")), *more])
        for rank, size, more in ((0, 3, []), (1, 5, [alloc(6 * MIB, MIB, LOSS), failure(30 * MIB, 7)]), (2, 3, []))
    ]
    found = compare_ranks((path.name, path) for path in paths)
    assert [(rank.name, rank.peak.bytes, rank.label, rank.label_bytes) for rank in found.ranks] == [
        ("rank_0", 3 * MIB, "model.py:12 forward", 3 * MIB),
        ("rank_1", 6 * MIB, "model.py:12 forward", 5 * MIB),
        ("rank_2", 3 * MIB, "model.py:12 forward", 3 * MIB),
    ]
    assert [rank.peak.failed_bytes for rank in found.ranks] == [None, 30 * MIB, None]
    assert [rank.peak.most_reserved for rank in found.ranks] == [20 * MIB] * 3
    assert [(spread.label, spread.bytes, spread.difference) for spread in found.by_stack] == [
        ("model.py:12 forward", (3 * MIB, 5 * MIB, 3 * MIB), 2 * MIB),
        ("model.py:40 loss", (0, MIB, 0), MIB),
    ]


def total(ran: Result) -> int:
    """Return the sum of the last column of the table by call site."""
    table = ran.stdout.split("by call site")[1].split("by size")[0]
    return sum(int(number.replace(",", "")) for number in re.findall(r" ([+-][0-9,]+) *$", table, re.M))


def test_command_compares_two_files_and_its_lines_add_up(tmp_path: Path) -> None:
    a = saved(tmp_path, "a", [alloc(at * MIB, (at + 1) * 512, moved(LAYER, at)) for at in range(9)])
    b = saved(tmp_path, "b", [alloc(at * MIB, (at + 3) * 600, moved(LAYER, at)) for at in range(7)])
    found = compare(a, b)
    for top in (1, 3, 20):
        ran = run(a, b, "--top", top)
        assert ran.exit_code == 0, ran.output
        assert total(ran) == found.bytes
        assert f"b's peak is {found.bytes / 1024:.2f} KiB ({found.bytes:,} bytes) higher than a's" in ran.stdout
    as_json = json.loads(run(a, b, "--json").stdout)["comparison"]
    assert sum(each["bytes"] for each in as_json["by_stack"]) == as_json["bytes"] == found.bytes
    assert "as high as a's" in run(a, a).stdout


def test_command_shows_files_or_a_folder_as_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    paths = [saved(folder, f"rank_{rank}.pickle", [alloc(0, (rank + 1) * MIB, LAYER)]) for rank in (10, 2, 0)]
    for arguments in ((folder,), paths[::-1], (*paths[:0:-1], paths[0], "--ranks")):
        ran = run(*arguments)
        assert ran.exit_code == 0, ran.output
        assert re.findall(r"(?m)^ *(rank_\d+)\.pickle", ran.stdout) == ["rank_0", "rank_2", "rank_10"]
        assert "model.py:12 forward 1.00 MiB rank_0.pickle 11.00 MiB rank_10.pickle 10,485,760" in said(ran)
    two = run(paths[0], paths[1], "--ranks", "--json")
    assert [rank["peak"]["bytes"] for rank in json.loads(two.stdout)["ranks"]["ranks"]] == [11 * MIB, 3 * MIB]
    alike = [saved(folder, f"alike_{rank}", [alloc(0, MIB, LAYER)]) for rank in range(3)]
    assert "every call site holds the same on all ranks" in run(*alike).stdout


def test_command_takes_each_device_of_a_file_as_a_rank(tmp_path: Path) -> None:
    path = saved(tmp_path, "a", [alloc(0, MIB, LAYER)], [alloc(0, 2 * MIB, LAYER)])
    found = json.loads(run(path, "--ranks", "--json").stdout)["ranks"]["ranks"]
    assert [(rank["peak"]["device"], rank["peak"]["bytes"]) for rank in found] == [(0, MIB), (1, 2 * MIB)]
    ran = run(path, path)
    assert ran.exit_code == 2
    assert "holds devices [0, 1]: choose one" in said(ran)
    assert json.loads(run(path, path, "--device", "1", "--json").stdout)["comparison"]["before"]["bytes"] == 2 * MIB


def test_command_refuses_what_belongs_to_one_snapshot_and_names_the_file_at_fault(tmp_path: Path) -> None:
    path = saved(tmp_path, "a", [alloc(0, MIB, LAYER)])
    empty = saved(tmp_path, "empty", [])
    folder = tmp_path / "nothing"
    folder.mkdir()
    for option, value in (("--at", "peak"), ("--plot", "x.png"), ("--capacity", "1GiB")):
        ran = run(path, path, option, value)
        assert ran.exit_code == 2
        assert f"{option}: belongs to one snapshot" in said(ran)
    ran = run(path, path, "--device", "4")
    assert ran.exit_code == 2
    assert "recorded are [0], got 4" in said(ran)
    gone = tmp_path / "gone"
    for bad, words in ((empty, "neither events nor segments"), (folder, "no files"), (gone, "No such file")):
        ran = run(path, bad)
        assert ran.exit_code == 2
        assert re.fullmatch(rf"Error: [^\n]*{bad.name}: [^\n]*{words}[^\n]*", ran.output.strip())


def test_recordings_without_call_stacks_say_how_to_record_them(tmp_path: Path) -> None:
    path = saved(tmp_path, "a", [alloc(0, MIB)])
    assert any("without call stacks" in note for note in compare(path, path).notes)
    assert not any("call stacks" in note for note in compare(path, read(tmp_path, content([alloc(0, 1, LAYER)]))).notes)
