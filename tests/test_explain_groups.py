"""Explanations by pool, stream, user_metadata and phase, and call stacks that grow from step to step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from allocator_cases import KIB, MIB
from explain_cases import BACKWARD, LAYER, LOSS, MAIN, alloc, explained, free, steps_of
from snapshot_cases import BASE, RECORDED, block, content, event, read, recorded, segment

from pyactcomp.snapshots.explain import explain
from pyactcomp.snapshots.explanation import Group

TORCH = "/v/lib/python3.11/site-packages/torch"
CALL = {"filename": f"{TORCH}/nn/modules/module.py", "line": 7, "name": "_call_impl"}
MOVED = {"filename": f"{TORCH}/nn/modules/module.py", "line": 8, "name": "_apply"}
CROSS_ENTROPY = {"filename": f"{TORCH}/nn/functional.py", "line": 9, "name": "cross_entropy"}
STEP = {"filename": f"{TORCH}/optim/optimizer.py", "line": 5, "name": "wrapper"}
RUN = {"filename": f"{TORCH}/autograd/graph.py", "line": 6, "name": "_engine_run_backward"}
HOOKS = {"filename": f"{TORCH}/autograd/graph.py", "line": 9, "name": "__enter__"}
ENGINE = {"filename": "??", "line": 0, "name": "torch::autograd::Engine::evaluate_function(std::shared_ptr<int>&)"}


def test_live_blocks_are_grouped_by_pool_stream_and_text(tmp_path: Path) -> None:
    rows = [
        alloc(0, MIB, pool_id=(0, 0), user_metadata="layer 1"),
        alloc(MIB, 2 * MIB, pool_id=(0, 3), stream=9, user_metadata=""),
        alloc(4 * MIB, 4 * MIB, pool_id=(0, 3), user_metadata="layer 1"),
        alloc(8 * MIB, 8 * MIB, user_metadata="layer\x1b 2"),
    ]
    before = segment(BASE + 64 * MIB, block(BASE + 64 * MIB, 16 * MIB), segment_pool_id=(0, 5), stream=7)
    found = explained(tmp_path, rows, segments=[before])
    assert set(found.by_pool) == {
        Group("default pool", 2, 9 * MIB),
        Group("private pool (0, 3)", 2, 6 * MIB),
        Group("private pool (0, 5)", 1, 16 * MIB),
    }
    assert found.by_stream == (
        Group("stream 0", 3, 13 * MIB),
        Group("stream 7", 1, 16 * MIB),
        Group("stream 9", 1, 2 * MIB),
    )
    assert found.by_metadata == (
        Group("no user_metadata", 2, 18 * MIB),
        Group("layer 1", 2, 5 * MIB),
        Group("layer\ufffd 2", 1, 8 * MIB),
    )


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        ((LAYER, CALL, MAIN), "forward"),
        ((CROSS_ENTROPY, MAIN), "forward"),
        ((BACKWARD, ENGINE), "backward"),
        ((LOSS, RUN, MAIN), "backward"),
        ((LAYER, CALL, ENGINE), "backward"),  # a checkpointed block runs again
        ((STEP, MAIN), "optimizer"),
        ((STEP, LOSS, BACKWARD, ENGINE), "optimizer"),  # an optimizer inside backward
        ((LAYER, CALL, STEP, MAIN), "forward"),  # a closure
        ((LAYER, CALL, RUN, STEP, MAIN), "backward"),
        ((MOVED, MAIN), "other"),
        ((HOOKS, MAIN), "other"),
        ((), "backward"),  # a thread without Python, where other events have stacks
    ],
)
def test_phase_of_a_block_is_read_from_its_call_stack(
    tmp_path: Path, frames: tuple[dict[str, Any], ...], phase: str
) -> None:
    found = explained(tmp_path, [alloc(0, MIB, MAIN), alloc(MIB, 2 * MIB, *frames)])
    phases = {group.label: group.bytes for group in found.by_phase}
    assert phases == ({"other": 3 * MIB} if phase == "other" else {"other": MIB, phase: 2 * MIB})


def test_phase_without_call_stacks_is_known_in_annotated_optimizer_steps_alone(tmp_path: Path) -> None:
    rows = [alloc(at * MIB, MIB, time_us=10 + at) for at in range(6)]
    step = {"name": "Optimizer.step#AdamW.step", "device": 0}
    annotations = [{**step, "stage": "START", "time_us": 12}, {**step, "stage": "END", "time_us": 14}]
    before = segment(BASE + 64 * MIB, block(BASE + 64 * MIB, 16 * MIB))
    found = explained(tmp_path, rows, segments=[before], external_annotations=annotations)
    assert found.by_phase == (
        Group("optimizer", 3, 3 * MIB),
        Group("before the recording", 1, 16 * MIB),
        Group("unknown", 3, 3 * MIB),
    )
    elsewhere = [{**entry, "device": 1} for entry in annotations]
    assert explained(tmp_path, rows, external_annotations=elsewhere).by_phase == (Group("unknown", 6, 6 * MIB),)


@pytest.mark.parametrize("name", RECORDED)
def test_every_grouping_of_a_recorded_training_adds_up_to_its_peak_and_nothing_grows(name: str, tmp_path: Path) -> None:
    found = explain(read(tmp_path, recorded(name)), at="peak")
    for groups in (found.by_stack, found.by_pool, found.by_stream, found.by_metadata, found.by_phase, found.by_age):
        assert sum(group.bytes for group in groups) == found.live_bytes == found.peak_bytes
        assert sum(group.blocks for group in groups) == found.live_blocks
    assert found.growth == ()


def test_growth_names_the_call_stack_that_keeps_something_of_each_step(tmp_path: Path) -> None:
    found = explained(tmp_path, steps_of(12, leak=True))
    [growth] = found.growth or ()
    steps = len(found.steps.starts)
    assert growth.label == "model.py:40 loss < train.py:3 main" if "<" in growth.label else "model.py:40 loss"
    assert growth.first_bytes == growth.first_blocks * KIB
    assert growth.first_blocks == steps // 4
    # The least of a quarter is what is kept at its begin: a KiB of each step before.
    assert growth.quarters == tuple(growth.quarters[0] + KIB * (steps * quarter // 4) for quarter in range(4))
    assert explained(tmp_path, steps_of(12, leak=False)).growth == ()


def test_growth_needs_no_regular_steps_but_four_of_any_kind(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [alloc(at * MIB, MIB, MAIN) for at in range(4)]
    for turn in range(11):
        blocks = 100 if turn % 2 else 190  # too different for steps of one training
        rows.append(alloc((900 + turn) * MIB, KIB, LOSS))
        rows += [alloc((100 + at) * MIB, 512, LAYER) for at in range(blocks)]
        rows += [entry for at in range(blocks) for entry in free((100 + at) * MIB, 512)]
    found = explained(tmp_path, rows)
    assert not found.steps.starts
    assert [growth.label for growth in found.growth or ()] == ["model.py:40 loss"]
    # Setup alone, which frees nothing, has no steps to grow from.
    assert explained(tmp_path, [alloc(at * MIB, MIB, MAIN) for at in range(400)]).growth is None


def test_memory_that_grows_once_is_not_growing(tmp_path: Path) -> None:
    rows = steps_of(12, leak=False)
    state = [alloc((700 + at) * MIB, MIB, LAYER) for at in range(8)]
    for place in (len(rows) // 5, len(rows) // 2, 9 * len(rows) // 10):
        assert explained(tmp_path, [*rows[:place], *state, *rows[place:]]).growth == ()


def test_text_of_an_event_that_is_no_text_is_left_out_and_named(tmp_path: Path) -> None:
    snapshot = read(tmp_path, content([alloc(0, MIB, user_metadata=7), event("snapshot", 0, 0, user_metadata="end")]))
    assert snapshot.metadata == ("", "end")
    assert list(snapshot.devices[0].events.metadata) == [0, 1]
    assert any("1 events carry a user_metadata that is no text" in note for note in snapshot.notes)
