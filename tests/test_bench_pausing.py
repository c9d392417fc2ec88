"""The bench of pausing: by hand on a CPU, where storages are freed and filled as on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import alloc_pausing, alloc_pausing_report, plots


def test_a_pause_by_hand_frees_the_storages_and_keeps_the_contents() -> None:
    tensors = [torch.randn(16, 3), torch.arange(5.0), torch.randn(8).bfloat16()]
    expected = [tensor.clone() for tensor in tensors]
    way = alloc_pausing.ByHand("cpu")
    way.own("state", "cpu", tensors)
    for _ in range(2):
        way.pause("state")
        assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0, 0, 0]
        way.resume("state")
        assert all(torch.equal(tensor, before) for tensor, before in zip(tensors, expected, strict=True))


def test_contents_that_do_not_come_back_are_an_error() -> None:
    class Forgetful(alloc_pausing.ByHand):
        def resume(self, tag: str) -> None:
            super().resume(tag)
            self._tags[tag][1][0].data.zero_()

    alloc_pausing.measure_state(alloc_pausing.ByHand("cpu"), alloc_pausing.TINY, "cpu")
    with pytest.raises(RuntimeError, match="the contents are not those from before the pauses"):
        alloc_pausing.measure_state(Forgetful("cpu"), alloc_pausing.TINY, "cpu")


def test_rows_count_what_was_paused() -> None:
    sizes = alloc_pausing.TINY
    (drop,) = alloc_pausing.measure("pause_drop", "native", tiny=True, device="cpu")
    assert (drop["nbytes"], drop["blocks"]) == (sizes.drop * sizes.unit, sizes.drop)
    assert len(drop["pause_s"]) == len(drop["resume_s"]) == sizes.repeats
    (state,) = alloc_pausing.measure("pause_state", "native", tiny=True, device="cpu")
    hidden, layers, heads, shared, inner, vocabulary = sizes.state
    narrow = hidden * shared // heads
    of_layer = 2 * hidden * hidden + 2 * hidden * narrow + sizes.experts * (3 * hidden * inner + hidden) + 2 * hidden
    parameters = layers * of_layer + 2 * vocabulary * hidden + hidden
    tensors = layers * (4 + 1 + 3 * sizes.experts + 2) + 3
    assert state["blocks"] == 4 * tensors  # two moments and a step for each parameter
    assert state["nbytes"] == 3 * 2 * parameters + 4 * tensors  # bf16; steps in float32


def test_a_loop_computes_with_pauses_what_it_computes_without() -> None:
    resident, paused = alloc_pausing.measure("pause_loop", "native", tiny=True, device="cpu")
    assert (resident["paused"], paused["paused"]) == (False, True)
    assert resident["mean_result"] == paused["mean_result"]
    assert [half for _, _, half in paused["samples"]] == [0, 1] * alloc_pausing.TINY.cycles


ORIGIN = {"commit": "c0ffee", "dirty": False, "device": "NVIDIA H200", "torch": "2.11.0", "command": "python -m bench"}


def measured(workload: str, method: str, **fields: object) -> dict[str, object]:
    row = {"workload": workload, "method": method, "status": "ok", "scale": "full", "time": "2026-01-01T00:00:00+00:00"}
    return {**row, "origin": ORIGIN, **fields}


def test_tables_leave_the_first_cycle_out_and_the_picture_shows_both_ways(tmp_path: Path) -> None:
    timed = {"pause_s": [9.0, 0.2, 0.4], "resume_s": [9.0, 0.1, 0.1], "released_share": 0.995, "blocks": 5001}
    link = {"to_host_bytes_per_s": 50e9, "from_host_bytes_per_s": 40e9}
    ended = {
        "cycles": 50, "cycle_s": 0.25, "peak_used_bytes": 7 << 30,
        "device_growth_bytes": 0, "host_growth_bytes": 3 << 20,
        "samples": [[0.1 * i, (1 + i % 2) << 30, i % 2] for i in range(12)],
    }  # fmt: skip
    rows = [
        measured("pause_drop", "pyactcomp", nbytes=60 << 30, **timed),
        measured("pause_state", "native", nbytes=3e9, **timed, **link),
        measured("pause_loop", "native", paused=False, **ended),
        measured("pause_loop", "pyactcomp", paused=True, **ended),
    ]
    text = alloc_pausing_report.pausing_table(rows)
    for line in (
        "| pyactcomp | 60 | 0.300 | 0.100 | 99.5 |",
        "| by hand | 2.8 | 5,001 | 9.00 | 0.300 | 0.100 | 20 | 75 | 99.5 |",
        "| native, no pauses | 50 | 7.0 | 250 | 0 | 3 |",
        "| pyactcomp | 50 | 7.0 | 250 | 0 | 3 |",
    ):
        assert line in text
    assert alloc_pausing_report.loop_lines(rows[:3]) == {}
    lines = alloc_pausing_report.loop_lines(rows)
    plots.pausing_loop(lines, tmp_path / "loop.png")
    assert (tmp_path / "loop.png").read_bytes().startswith(b"\x89PNG")
