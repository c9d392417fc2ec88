"""Where the steps of a recording begin, and what was kept from earlier ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from allocator_cases import KIB, MIB
from explain_cases import LAYER, alloc, explained, free, steps_of
from snapshot_cases import content, read

from pyactcomp.snapshots.explanation import Crossing, Group
from pyactcomp.snapshots.lifetimes import find_lifetimes
from pyactcomp.snapshots.steps import Steps, find_steps

BLOCKS = 20


@pytest.mark.parametrize("count", [50, 100, 400])
@pytest.mark.parametrize("kept", [1, -1, 5])
def test_steps_are_found_however_far_the_number_of_blocks_drifts(count: int, kept: int, tmp_path: Path) -> None:
    # Each step allocates 30 blocks, and frees all of them but ``kept``, or one of those from before too.
    rows = [alloc(number * MIB, KIB) for number in range(count if kept < 0 else 0)]
    begins = []
    at = 1000
    for step in range(count):
        begins.append(len(rows))
        rows += [alloc((at + place) * MIB, KIB) for place in range(30)]
        rows += [entry for place in range(max(kept, 0), 30) for entry in free((at + place) * MIB, KIB)]
        rows += free(step * MIB, KIB) if kept < 0 else []
        at += 30
    trace = read(tmp_path, content(rows)).devices[0]
    found = find_steps(trace, find_lifetimes(trace), ())
    # The first rise is setup's.
    assert found.starts == tuple(begin - 1 for begin in begins[1:])


def test_blocks_kept_from_earlier_steps_are_found_whatever_the_shapes(tmp_path: Path) -> None:
    rows = [*steps_of(10, leak=True), alloc(0x10000 * MIB, MIB, LAYER)]
    found = explained(tmp_path, rows, at=len(rows) - 1)
    # The first rise is setup's, with the block that its step keeps. Those of the other nine begin at their kept block.
    first, length = 4 + 61, 61
    assert found.steps.starts == tuple(range(first - 1, first + 9 * length - 1, length))
    # The last of them is of the step that the recording ends in.
    assert found.crossing == (
        Crossing("model.py:40 loss", ("/home/me/model.py:40 loss",), 8, 8 * KIB, oldest=1, steps=8),
    )
    assert found.by_age == (
        Group("this step", 2, MIB + KIB),
        Group("one step", 1, KIB),
        Group("2 to 9 steps", 7, 7 * KIB),
        Group("before the first step", 5, 4 * MIB + KIB),
    )


def test_program_that_keeps_nothing_has_no_crossing_blocks(tmp_path: Path) -> None:
    rows = steps_of(10, leak=False)
    found = explained(tmp_path, rows, at=len(rows) - 1)
    assert len(found.steps.starts) == 9
    assert found.crossing == ()


def test_annotations_of_steps_are_believed(tmp_path: Path) -> None:
    rows = [alloc(number * MIB, KIB, LAYER, time_us=100 + 10 * number) for number in range(10)]
    annotations = [
        {"device": 0, "name": f"ProfilerStep#{number}", "stage": stage, "time_us": time}
        for number, begin in enumerate((100, 130, 160))
        for stage, time in (("START", begin), ("END", begin + 29))
    ]
    found = explained(tmp_path, rows, at=9, external_annotations=annotations)
    assert found.steps.starts == (0, 3, 6)
    assert found.crossing[0].blocks == 6


def annotation(name: str, stage: str, time: int) -> dict[str, Any]:
    return {"device": 0, "name": name, "stage": stage, "time_us": time}


def test_steps_follow_the_optimizer_that_steps_least_often(tmp_path: Path) -> None:
    rows = [alloc(number * MIB, KIB, LAYER, time_us=100 + 10 * number) for number in range(12)]
    calls = {"Optimizer.step#SGD.step": (105, 135, 165, 195), "Optimizer.step#Adam.step": (125, 175)}
    annotations = [
        annotation(name, stage, begin + late)
        for name, begins in calls.items()
        for begin in begins
        for stage, late in (("START", 0), ("END", 10))
    ]
    found = explained(tmp_path, rows, at=11, external_annotations=annotations)
    # Adam's end at 135 and 185, before the events of 140 and 190.
    assert found.steps == Steps((4, 9), "annotations: steps follow Optimizer.step")


def test_annotations_from_outside_of_the_recording_begin_no_step(tmp_path: Path) -> None:
    rows = [alloc(number * MIB, KIB, LAYER, time_us=100 + 10 * number) for number in range(10)]
    annotations = [annotation(f"ProfilerStep#{time}", "START", time) for time in (50, 99, 120, 160, 191, 500)]
    assert explained(tmp_path, rows, at=9, external_annotations=annotations).steps.starts == (2, 6)


def test_annotations_that_mark_no_step_are_named(tmp_path: Path) -> None:
    rows = [alloc(number * MIB, KIB, LAYER, time_us=100 + 10 * number) for number in range(10)]
    names = ["Optimizer.step#SGD.step", "forward", "forward", "loss\x1b[2J", "data"]
    annotations = [annotation(name, stage, 105) for name in names for stage in ("START", "END")]
    found = explained(tmp_path, rows, at=9, external_annotations=annotations).steps
    assert found.starts == ()
    assert "none of the annotations marks two steps" in found.found_by
    assert "forward (4), Optimizer.step#SGD.step (2), loss\ufffd[2J (2), ..." in found.found_by
    # Steps that the live blocks show are believed, and the annotations still named.
    rows = steps_of(10, leak=False)
    found = explained(tmp_path, rows, external_annotations=annotations[:2]).steps
    assert len(found.starts) == 9
    assert found.found_by.startswith("the number of live blocks")
    assert "Optimizer.step#SGD.step (2)" in found.found_by
    without = explained(tmp_path, rows).steps
    assert without.found_by == "the number of live blocks, which rises and falls once a step"


def test_thousands_of_steps_are_written_with_separators(tmp_path: Path) -> None:
    rows = [alloc(number * MIB, KIB, time_us=number) for number in range(1200)]
    annotations = [annotation(f"ProfilerStep#{number}", "START", number) for number in range(1200)]
    found = explained(tmp_path, rows, at=1199, external_annotations=annotations)
    assert found.by_age[-1] == Group("1,000 to 9,999 steps", 200, 200 * KIB)


def steps(tmp_path: Path, turns: tuple[int, ...]) -> tuple[Steps, list[int]]:
    """Return the steps found where each allocates its blocks, one more so often in turn, and frees them; and theirs."""
    rows: list[dict[str, Any]] = []
    begins = []
    for count in turns:
        begins.append(len(rows))
        rows += [alloc(place * MIB, KIB) for place in range(BLOCKS)]
        rows += [entry for _ in range(count) for entry in (alloc(BLOCKS * MIB, KIB), *free(BLOCKS * MIB, KIB))]
        rows += [entry for place in range(BLOCKS) for entry in free(place * MIB, KIB)]
    trace = read(tmp_path, content(rows)).devices[0]
    return find_steps(trace, find_lifetimes(trace), ()), begins


def test_short_rises_in_front_of_the_first_step_are_setup(tmp_path: Path) -> None:
    found, begins = steps(tmp_path, (0, 0, 0, *[100] * 5, 0, 100))
    # A step begins after the last event of the one before.
    assert found.starts == tuple(begin - 1 for begin in begins[3:])


@pytest.mark.parametrize(
    ("turns", "regular"),
    [((100,) * 6, True), ((0, 100, 140, 90, 900, 120, 100), True), ((0, 10, 40, 120, 280, 600, 1240), False)],
)
def test_steps_are_believed_where_most_are_about_as_long(tmp_path: Path, turns: tuple[int, ...], regular: bool) -> None:
    found, begins = steps(tmp_path, turns)
    assert found.starts == (tuple(begin - 1 for begin in begins[1:]) if regular else ())
    assert ("no steps found" in found.found_by) is not regular
