"""The bench's part `prediction`: a recorded run's replay beside other runs, which here are on the simulated device."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from replay_cases import Program

from bench import __main__ as command_line
from bench import alloc, alloc_methods, alloc_prediction, alloc_report, alloc_training, alloc_worker, report, rows
from pyactcomp.allocator import AllocatorConfig, CachingAllocator

ORIGIN = {
    "commit": "c0ffee", "dirty": False, "sources": "s1", "device": "NVIDIA H200", "driver": "580", "torch": "2.11.0",
    "command": "python -m bench alloc --parts prediction",
}  # fmt: skip
GIB = 2**30
MOE = "prediction/moe"
# Fewer events than the host runs ahead of a stream, so that only what the recording completes is complete.
STEPS = 380


class FixedOrigin(rows.Options):
    def store(self, suite: str) -> rows.Store:
        return rows.Store(self.out / f"{suite}.json", ORIGIN)


def options(out: Path, **fields: Any) -> rows.Options:
    return replace(FixedOrigin(out, "cuda", rows.Budget(None)), **fields)


def written(folder: Path) -> list[rows.Row]:
    path = folder / "alloc.json"
    found: list[rows.Row] = json.loads(path.read_text())["rows"] if path.exists() else []
    return found


def core(method: str, seed: int) -> CachingAllocator:
    """Run one program on the simulated device, under the decisions of native or of this package."""
    growth = "malloc" if method == "native" else "vmm"
    return Program(seed, STEPS).run(AllocatorConfig(growth=growth), 64 * GIB)[0]


def peaks(allocator: CachingAllocator) -> rows.Row:
    names = ("allocated", "reserved")
    return {f"peak_{name}_bytes": allocator.counters()[f"{name}_bytes.all.peak"] for name in names}


def processes(started: list[alloc_worker.Job], **failing: str) -> Callable[[alloc_worker.Job], bool]:
    """Return what takes the place of starting a process: a run of the core; methods may fail for a reason."""

    def start(job: alloc_worker.Job) -> bool:
        started.append(job)
        identity = job.identity(job.workloads[0])
        if reason := failing.get(job.method):
            job.store().append({**identity, "status": "error", "reason": reason})
            return False
        allocator = core(job.method, job.round)
        if job.snapshot is not None:
            Path(job.snapshot).write_text(json.dumps(allocator.snapshot()))
        job.store().append({**identity, "status": "ok", "steps": STEPS, **peaks(allocator)})
        return True

    return start


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", ["native", "pyactcomp"])
def test_prediction_is_what_a_run_under_the_method_takes(method: str, seed: int, tmp_path: Path) -> None:
    recording = tmp_path / "snapshot.json"
    recorded = core("native", seed).snapshot()
    recording.write_text(json.dumps(recorded))
    real = {**peaks(core(method, seed)), "steps": STEPS, "samples_ms": [1.0]}
    row = alloc_prediction.predict(recording, method, real)
    assert row["predicted_reserved_bytes"] == row["peak_reserved_bytes"] == real["peak_reserved_bytes"]
    assert row["predicted_allocated_bytes"] == row["peak_allocated_bytes"] == real["peak_allocated_bytes"]
    assert (row["error"], row["steps"]) == (0.0, STEPS)
    assert row["events"] == len(recorded["device_traces"][0])
    assert row["replay_s"] > 0
    assert "samples_ms" not in row


def test_error_is_signed_and_relative_to_the_real_run(tmp_path: Path) -> None:
    recording = tmp_path / "snapshot.json"
    event = {"action": "alloc", "addr": 4096, "size": 600, "stream": 0, "time_us": 7, "frames": []}
    recording.write_text(json.dumps({"segments": [], "device_traces": [[event]]}))
    # 600 bytes take a segment, a page or a handle of 2 MiB.
    for real, error in ((2 << 20, 0.0), (4 << 20, -0.5), (1 << 20, 1.0)):
        figures = {"peak_reserved_bytes": real, "peak_allocated_bytes": 1024}
        for method in alloc_methods.TRAINING:
            assert alloc_prediction.predict(recording, method, figures)["error"] == error


def test_rounds_record_natively_and_are_not_measured_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[alloc_worker.Job] = []
    monkeypatch.setattr(alloc_prediction, "start", processes(started))
    chosen = options(tmp_path)
    alloc.run(chosen, ("prediction",))
    found = written(tmp_path)
    order = [(number, name) for number in range(alloc_prediction.ROUNDS) for name in alloc_prediction.USUAL]
    assert [(row["round"], row["workload"], row["method"], row["status"]) for row in found] == [
        (number, f"prediction/{name}", method, "ok") for number, name in order for method in alloc_methods.TRAINING
    ]
    assert {row["error"] for row in found if row["method"] != "expandable"} == {0.0}
    assert len({row["run"] for row in found}) == 1
    assert [job.method for job in started if job.snapshot is not None] == ["native"] * len(order)
    assert not any(Path(job.path).parent.exists() for job in started)

    alloc.run(chosen, ("prediction",))
    alloc.run(replace(chosen, only=("moe",)), ("prediction",))
    alloc.run(replace(chosen, again=True), ("prediction",), ("rmm-pool",))
    assert len(started) == len(found)
    started.clear()
    alloc.run(replace(chosen, again=True, tiny=True, only=("prediction/graphs", "pyactcomp")), ("prediction",))
    assert [(job.workloads, job.method, job.tiny) for job in started] == [
        (("graphs",), method, True) for method in ("native", "pyactcomp")
    ]


def test_what_the_budget_leaves_out_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[alloc_worker.Job] = []
    monkeypatch.setattr(alloc_prediction, "start", processes(started))
    # A round takes 20 s by this clock: the first begins at once, the second does not fit into what is left of 30 s.
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 10.0 * bool(started)
        return now

    alloc.run(options(tmp_path, budget=rows.Budget(30.0, clock)), ("prediction",))
    assert [job.workloads for job in started] == [("sft_varlen",)] * 3
    told = capsys.readouterr().out
    for number, name in ((0, "moe"), (1, "sft_varlen"), (1, "moe")):
        assert f"alloc prediction/{name} round {number}: not started, the budget is used up" in told


def test_worker_that_fails_is_a_row_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[alloc_worker.Job] = []
    only = options(tmp_path, only=(MOE,), tiny=True)
    monkeypatch.setattr(alloc_prediction, "start", processes(started, expandable="exit code -6"))
    alloc.run(only, ("prediction",))
    assert [(row["method"], row["status"], row.get("reason")) for row in written(tmp_path)] == [
        ("native", "ok", None), ("expandable", "error", "exit code -6"), ("pyactcomp", "ok", None)
    ]  # fmt: skip

    started.clear()
    monkeypatch.setattr(alloc_prediction, "start", processes(started, native="no context"))
    alloc.run(replace(only, again=True), ("prediction",))
    assert [job.method for job in started] == ["native"]
    assert written(tmp_path)[3:] == [{**written(tmp_path)[3], "status": "error", "reason": "no context"}]


def test_recording_that_cannot_be_read_is_a_row_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(job: alloc_worker.Job) -> bool:
        assert job.snapshot is not None
        Path(job.snapshot).write_text("[]")
        job.store().append({**job.identity("moe"), "status": "ok", "peak_reserved_bytes": 1, "peak_allocated_bytes": 1})
        return True

    monkeypatch.setattr(alloc_prediction, "start", start)
    alloc.run(options(tmp_path, only=(MOE,), tiny=True), ("prediction",))
    (row,) = written(tmp_path)
    assert (row["method"], row["status"]) == ("native", "error")
    assert row["reason"].startswith("ValueError: snapshot.pickle: ")


@pytest.mark.parametrize("snapshot", [None, "moe.pickle"])
def test_worker_records_from_before_its_first_allocation(
    snapshot: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[Any] = []
    monkeypatch.setattr(torch.cuda, "init", lambda: order.append("init"))
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *a, **k: order.append((a, k)))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", order.append)
    monkeypatch.setattr(alloc_methods, "use", lambda method: order.append(method.name))
    monkeypatch.setattr(alloc_training, "measure", lambda *given: order.append(given[0]) or {"mean_loss": 2.5})
    path = str(tmp_path / "alloc.json")
    alloc_worker.work(alloc_worker.Job(("moe",), "native", 0, "run", path, ORIGIN, True, snapshot))
    measured: list[Any] = ["native", "moe"]
    recorded = ["init", (("all",), {"context": None}), *measured, snapshot]
    assert order == (measured if snapshot is None else recorded)
    assert [row["status"] for row in written(tmp_path)] == ["ok"]


def test_command_line_knows_the_part_and_its_workloads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert MOE in alloc.selectable()
    with pytest.raises(SystemExit) as ended:
        command_line.main(["alloc", "--device", "cpu", "--out", str(tmp_path), "--parts", "prediction"])
    assert ended.value.code == 2
    assert "only traces can be measured without a GPU" in capsys.readouterr().err


def row_of(method: str, predicted: int, real: int, number: int = 0, **fields: Any) -> rows.Row:
    return {
        "suite": "alloc", "run": "r", "round": number, "workload": MOE, "method": method, "scale": "full",
        "status": "ok", "time": "2026-01-02T03:04:05+00:00", "origin": ORIGIN, "events": 93976, "replay_s": 0.0421,
        "predicted_reserved_bytes": predicted, "peak_reserved_bytes": real, "error": (predicted - real) / real,
        **fields,
    }  # fmt: skip


def test_table_shows_the_worst_round_and_what_is_beyond_the_bar() -> None:
    real = 1000 * GIB
    found = [
        row_of("native", real, real),
        row_of("expandable", 1010 * GIB, real),
        row_of("pyactcomp", 1005 * GIB, real),
        row_of("pyactcomp", 999 * GIB, real, 1),
    ]
    text = alloc_report.prediction_table(found)
    assert "| `moe` | native | 1000.000 | 1000.000 | exact | 93,976 | 0.042 |" in text
    assert "|  | expandable | 1010.000 | 1000.000 | +1.000 | 93,976 | 0.042 |" in text
    assert "|  | pyactcomp | 1005.000 | 1000.000 | +0.500 | 93,976 | 0.042 |" in text
    assert "Measured on NVIDIA H200; driver 580; torch 2.11.0; commit c0ffee; 2026-01-02; " in text
    assert "**" not in text

    beyond = [row_of("native", real + 1, real), row_of("pyactcomp", math.floor(0.9949 * real), real)]
    text = alloc_report.prediction_table([*found, *beyond])
    assert "| 1000.000 | **+0.000** |" in text
    assert "| **-0.510** |" in text


def test_table_lists_what_failed_and_is_empty_without_rows(tmp_path: Path) -> None:
    failed = row_of("pyactcomp", 1, 1, status="error", reason="exit code -6")
    text = alloc_report.prediction_table([row_of("native", GIB, GIB), failed])
    assert "- prediction/moe pyactcomp: error (exit code -6)" in text
    assert alloc_report.prediction_table([row_of("native", GIB, GIB, scale="tiny")]) == ""
    assert alloc_report.training_table([row_of("native", GIB, GIB)]) == ""

    page = tmp_path / "benchmarks.md"
    page.write_text("<!-- bench:alloc-prediction -->\n<!-- /bench:alloc-prediction -->\n")
    report.run(tmp_path, page, tmp_path)
    assert page.read_text() == "<!-- bench:alloc-prediction -->\n<!-- /bench:alloc-prediction -->\n"
    (tmp_path / "alloc.json").write_text(json.dumps({"schema": 1, "rows": [row_of("native", GIB, GIB)]}))
    report.run(tmp_path, page, tmp_path)
    assert "| `moe` | native | 1.000 | 1.000 | exact |" in page.read_text()


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.slow
def test_part_predicts_real_runs_on_a_gpu(tmp_path: Path) -> None:
    chosen = rows.Options(tmp_path, "cuda", rows.Budget(None), only=(MOE,), tiny=True)
    alloc.run(chosen, ("prediction",))
    found = {row["method"]: row for row in written(tmp_path)}
    assert {method: row["status"] for method, row in found.items()} == dict.fromkeys(alloc_methods.TRAINING, "ok"), [
        row.get("reason") for row in found.values()
    ]
    native = found["native"]
    assert native["predicted_reserved_bytes"] == native["peak_reserved_bytes"]
    assert native["predicted_allocated_bytes"] == native["peak_allocated_bytes"]
    assert not any("from before the recording:" in note for note in native["notes"])
    for row in found.values():
        assert row["predicted_reserved_bytes"] >= row["predicted_allocated_bytes"] > 0
        assert row["events"] == native["events"]
