"""The allocator's bench: its rows and tables, its workloads and its replays, without a GPU where that is possible."""

from __future__ import annotations

import json
import random
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bench import __main__ as command_line
from bench import (
    alloc,
    alloc_held_out,
    alloc_methods,
    alloc_pairs,
    alloc_report,
    alloc_share,
    alloc_traces,
    alloc_training,
    alloc_worker,
    alloc_workloads,
    report,
    rows,
)

ORIGIN = {
    "commit": "c0ffee", "dirty": False, "sources": "s1", "device": "NVIDIA H200", "driver": "580", "torch": "2.11.0",
    "command": "python -m bench alloc",
}  # fmt: skip
GIB = 2**30


def options(out: Path, **fields: Any) -> rows.Options:
    return replace(rows.Options(out, "cpu", rows.Budget(None), tiny=True), **fields)


def written(folder: Path) -> list[rows.Row]:
    path = folder / "alloc.json"
    found: list[rows.Row] = json.loads(path.read_text())["rows"] if path.exists() else []
    return found


# Traces


class Bump:
    """A simulated device and an allocator in one, that reserves for every allocation anew and gives nothing back."""

    def __init__(self, **_: Any) -> None:
        self.reserved = self.asked = self.peak = 0
        self.sizes: dict[int, int] = {}
        self.driver_seconds = 0.5

    def allocate(self, size: int) -> int:
        address = self.reserved
        self.reserved += size
        self.sizes[address] = size
        self.asked += size
        self.peak = max(self.peak, self.asked)
        return address

    def free(self, address: int) -> None:
        self.asked -= self.sizes.pop(address)

    def check_invariants(self) -> None:
        assert self.asked == sum(self.sizes.values())

    def calls(self) -> dict[str, int]:
        return {"create": 3, "acquire": 1}

    def stats(self) -> dict[str, int]:
        return {
            "requested_bytes.all.peak": self.peak, "allocated_bytes.all.peak": self.peak, "pieces_moved": 0,
            "reserved_bytes.all.current": self.reserved, "reserved_bytes.all.peak": self.reserved,
            "num_device_alloc": 4, "num_device_free": 0,
        }  # fmt: skip


def with_allocator(monkeypatch: pytest.MonkeyPatch, device: type[Bump] = Bump) -> None:
    module = ModuleType("pyactcomp.allocator")
    vars(module).update(
        SimulatedDevice=device, AllocatorConfig=lambda growth: growth, CachingAllocator=lambda device, config: device
    )
    monkeypatch.setitem(sys.modules, "pyactcomp.allocator", module)


def small_trace(name: str = "small") -> alloc_traces.Trace:
    events = [("alloc", 1, 100), ("alloc", 2, 50), ("free_completed", 1, 100), ("alloc", 1, 20)]
    meta = {"peak_alloc": 160, "peak_reserved": 300, "segs": 2}
    return alloc_traces.Trace(name, events, meta)


def test_replay_reports_the_allocators_peaks_beside_the_recorded_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    with_allocator(monkeypatch)
    row = alloc_traces.replay(small_trace(), "vmm")
    assert list(alloc_traces.requested(small_trace())) == [100, 150, 50, 70]
    assert (row["peak_reserved_bytes"], row["peak_allocated_bytes"], row["events"]) == (170, 150, 4)
    assert (row["recorded_allocated_bytes"], row["recorded_reserved_bytes"]) == (160, 300)
    assert (row["driver_s"], row["created"]) == (0.5, 4)
    assert row["recorded_driver_s"] == 2 * alloc_traces.SEGMENT_S
    assert row["resized_ratios"] == [170 / 150] * len(alloc_traces.FACTORS), "small requests keep their size"
    assert "timeline" not in row
    pictured = alloc_traces.replay(small_trace(alloc_traces.PICTURED), "vmm")
    assert pictured["timeline"] == {"requested": [100, 150, 50, 70], "reserved": [100, 150, 150, 170]}


def test_resized_tensors_are_freed_with_their_own_size() -> None:
    events = [("alloc", 1, 3 << 20), ("alloc", 2, 1 << 20), ("free_completed", 1, 3 << 20)]
    larger = alloc_traces.resized(alloc_traces.Trace("any", events, {}), 2.0)
    assert larger.events == [("alloc", 1, 6 << 20), ("alloc", 2, 1 << 20), ("free_completed", 1, 6 << 20)]


def test_replay_refuses_statistics_that_the_trace_contradicts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(Bump):
        def stats(self) -> dict[str, int]:
            return {**super().stats(), "requested_bytes.all.peak": 149}

    with_allocator(monkeypatch, Forgetful)
    with pytest.raises(RuntimeError, match="requested bytes is 149, the trace's is 150"):
        alloc_traces.replay(small_trace(), "vmm")


def test_thinning_keeps_every_stretchs_peak() -> None:
    values = [random.Random(0).randrange(10**6) for _ in range(1003)]
    thin = alloc_traces.thin(values, 100)
    assert len(thin) == 100
    assert max(thin) == max(values)
    assert set(thin) <= set(values)
    assert alloc_traces.thin([3, 1, 2], 100) == [3, 1, 2]


def test_traces_add_up_to_their_recorded_peak() -> None:
    paths = sorted(alloc_traces.FOLDER.glob("*.npz"))
    assert paths
    for path in paths:
        trace = alloc_traces.load(path)
        assert max(alloc_traces.requested(trace)) == trace.meta["peak_requested"]
        assert alloc_traces.workload_of(path) in alloc.selectable()


def test_traces_are_replayed_once_and_failures_become_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_allocator(monkeypatch)
    alloc.run(options(tmp_path), ("traces",))
    found = written(tmp_path)
    name = sorted(alloc_traces.FOLDER.glob("*.npz"))[0].stem
    assert [(row["workload"], row["method"], row["status"], row["events"]) for row in found] == [
        (f"trace/{name}", method, "ok", alloc_traces.TINY_EVENTS) for method in ("pyactcomp", "pyactcomp-malloc")
    ]
    assert {row["origin"]["device"] for row in found} == {"cpu"}
    alloc.run(options(tmp_path), ("traces",))
    assert len(written(tmp_path)) == 2
    alloc.run(options(tmp_path, budget=rows.Budget(0.0), again=True), ("traces",))
    assert len(written(tmp_path)) == 2

    monkeypatch.setattr(Bump, "check_invariants", lambda self: (_ for _ in ()).throw(RuntimeError("overlap")))
    alloc.run(options(tmp_path, again=True, only=(f"trace/{name}", "pyactcomp")), ("traces",))
    assert [(row["method"], row["status"], row["reason"]) for row in written(tmp_path)[2:]] == [
        ("pyactcomp", "error", "RuntimeError: overlap")
    ]


def test_traces_replay_on_the_simulated_device(tmp_path: Path) -> None:
    alloc.run(options(tmp_path), ("traces",))
    found = written(tmp_path)
    assert [row["status"] for row in found] == ["ok", "ok"], found
    for row in found:
        assert row["peak_reserved_bytes"] >= row["peak_allocated_bytes"] > 0
        assert row["created"] > 0


# Trainings


@pytest.mark.parametrize("name", alloc_held_out.TRAININGS)
def test_training_draws_the_same_shapes_and_losses_each_time(name: str) -> None:
    first, second = (alloc_training.measure(name, "native", "cpu", True, None) for _ in range(2))
    assert first["mean_loss"] == second["mean_loss"]
    assert first["steps"] == 3
    other = first["mean_loss"] / (1 - 1.01 * alloc_training.LOSS_TOLERANCE)
    with pytest.raises(RuntimeError, match="under the native allocator"):
        alloc_training.measure(name, "native", "cpu", True, other)


def test_training_refuses_a_loss_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = alloc_workloads.Workload("broken", lambda device, tiny: lambda: torch.tensor(float("nan")), 3, "")
    monkeypatch.setitem(alloc_held_out.TRAININGS, "broken", broken)
    with pytest.raises(RuntimeError, match="mean loss is nan"):
        alloc_training.measure("broken", "native", "cpu", True, None)


def test_training_averages_the_steps_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 9.0, 9.0, 18.0, 20.0, 23.0, 30.0, 31.0])
    monkeypatch.setattr(alloc_training, "WARM_UP", 2)
    monkeypatch.setattr(alloc_training.time, "perf_counter", lambda: next(clock))
    losses = iter([1.0, 2.0, 3.0, 6.0])
    row = alloc_training.train(lambda: torch.tensor(next(losses)), 4, "cpu")
    assert row["samples_ms"] == [3000.0, 1000.0]
    assert (row["mean_ms"], row["run_s"]) == (2000.0, 22.0)
    assert (row["mean_loss"], row["final_loss"]) == (3.0, 6.0)


def test_generation_with_a_cache_gives_the_same_scores_as_without() -> None:
    torch.manual_seed(0)
    model = alloc_workloads.Decoder(64, 2, 4, 2, 128, 512)
    tokens = torch.randint(512, (2, 9))
    cache = alloc_workloads.Cache()
    with torch.no_grad():
        whole = model(tokens)
        parts = torch.cat([model(tokens[:, :5], cache), *(model(tokens[:, i : i + 1], cache) for i in range(5, 9))], 1)
    # The same sums in another order: a few roundings of values of order one, two layers deep.
    assert torch.allclose(whole, parts, rtol=0, atol=64 * torch.finfo(torch.float32).eps)


def test_experts_mix_as_a_dense_sum_over_all_of_them() -> None:
    torch.manual_seed(0)
    layer = alloc_workloads.Experts(16, 32, 4)
    x = torch.randn(2, 7, 16)
    weight, chosen = layer.router(x).softmax(-1).topk(2)
    share = torch.zeros(2, 7, 4).scatter(-1, chosen, weight)
    dense = sum(share[..., i : i + 1] * unit(x) for i, unit in enumerate(layer.experts))
    assert torch.allclose(layer(x), dense, rtol=0, atol=16 * torch.finfo(torch.float32).eps)


# Rounds


def fake_process(statuses: dict[str, str], started: list[tuple[str, int]]) -> Any:
    def start(job: alloc_worker.Job) -> bool:
        started.append((job.method, job.round))
        status = statuses.get(job.method, "ok")
        for workload in job.workloads:
            job.store().append({**job.identity(workload), "status": status})
        return status in rows.FINAL

    return start


def gpu_options(out: Path, **fields: Any) -> rows.Options:
    class Fixed(rows.Options):
        def store(self, suite: str) -> rows.Store:
            return rows.Store(self.out / f"{suite}.json", ORIGIN)

    return replace(Fixed(out, "cuda", rows.Budget(None)), **fields)


def test_rounds_hold_native_and_are_not_measured_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, int]] = []
    monkeypatch.setattr(alloc, "start", fake_process({"rmm-pool": "unavailable"}, started))
    alloc.run(gpu_options(tmp_path), ("pair", "threads"))
    assert started[0] == ("native", 0)
    in_round = {n: [method for method, number in started if number == n] for n in range(alloc.ROUNDS)}
    assert sorted(in_round[0]) == sorted(alloc_methods.CALLS)
    for number in range(1, alloc.ROUNDS):
        assert sorted(in_round[number]) == sorted(set(alloc_methods.CALLS) - {"rmm-pool"})
    assert len({tuple(order) for order in in_round.values()}) > 2
    assert len({row["run"] for row in written(tmp_path)}) == 1

    started.clear()
    alloc.run(gpu_options(tmp_path), ("pair", "threads"), ("native", "async"))
    assert started == []
    alloc.run(gpu_options(tmp_path), ("pair",), ("rmm-pool",))
    assert started == [("native", 0), ("rmm-pool", 0)]


def test_rounds_end_without_native_or_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, int]] = []
    monkeypatch.setattr(alloc, "start", fake_process({"native": "error"}, started))
    alloc.run(gpu_options(tmp_path, only=("graphs",)), ("training",))
    assert started == [("native", 0)]
    started.clear()
    alloc.run(gpu_options(tmp_path, budget=rows.Budget(0.0)), ("training",))
    assert started == []


def job(tmp_path: Path, *workloads: str, method: str = "native") -> alloc_worker.Job:
    return alloc_worker.Job(workloads, method, 0, "run-1", str(tmp_path / "alloc.json"), ORIGIN, True)


def test_worker_holds_losses_against_natives_and_writes_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float | None] = []

    def measure(workload: str, method: str, device: str, tiny: bool, reference: float | None) -> rows.Row:
        seen.append(reference)
        if method == "pyactcomp":
            raise torch.OutOfMemoryError("full on purpose")
        return {"mean_loss": 2.5}

    monkeypatch.setattr(alloc_methods, "use", lambda method: None)
    monkeypatch.setattr(alloc_training, "measure", measure)
    for method in ("native", "expandable", "pyactcomp"):
        alloc_worker.work(job(tmp_path, "graphs", method=method))
    assert seen == [None, 2.5, 2.5]
    assert [(row["method"], row["status"]) for row in written(tmp_path)] == [
        ("native", "ok"), ("expandable", "ok"), ("pyactcomp", "oom")
    ]  # fmt: skip


def test_start_sets_the_methods_environment_and_reports_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, str]] = []

    def process(command: list[str], cwd: Path, env: dict[str, str], timeout: float) -> SimpleNamespace:
        assert json.loads(command[-1])["workloads"] == ["pair", "threads"]
        seen.append(env)
        return SimpleNamespace(returncode=-6)

    for name in alloc_methods.SETTINGS:
        monkeypatch.setenv(name, "max_split_size_mb:64")
    monkeypatch.setattr(alloc_worker.subprocess, "run", process)
    assert not alloc_worker.start(job(tmp_path, "pair", "threads", method="expandable"))
    assert not alloc_worker.start(job(tmp_path, "pair", "threads", method="pyactcomp"))
    set_there = [{name: env[name] for name in alloc_methods.SETTINGS if name in env} for env in seen]
    assert set_there == [{"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, {}]
    assert all("-6" in row["reason"] for row in written(tmp_path))
    job(tmp_path).store().append({**job(tmp_path, method="expandable").identity("pair"), "status": "ok"})
    assert alloc_worker.start(job(tmp_path, "pair", "threads", method="expandable"))


def test_start_ends_a_process_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alloc_worker, "LONGEST_S", 0.01)
    assert not alloc_worker.start(job(tmp_path, "pair"))
    assert "had not ended after 0.01 s" in written(tmp_path)[0]["reason"]


def test_job_survives_its_command_line(tmp_path: Path) -> None:
    given = job(tmp_path, "pair", "threads")
    fields = json.loads(json.dumps(asdict(given)))
    assert alloc_worker.Job(**{**fields, "workloads": tuple(fields["workloads"])}) == given


def test_pairs_are_timed_per_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0, 5000, 10_000, 13_000])
    monkeypatch.setattr(alloc_pairs.time, "perf_counter_ns", lambda: next(clock))
    made: list[int] = []
    row = alloc_pairs.time_pairs(made.append, 100, 2)
    assert made == [100, 100, 100]
    assert (row["samples_ns"], row["best_ns"], row["median_ns"]) == ([50.0, 30.0], 30.0, 40.0)


def test_first_use_in_another_process_is_timed_on_both_sides() -> None:
    found = list(alloc_share.measure("native", tiny=True, device="cpu"))
    assert [(row["call"], row["nbytes"], len(row["samples_ns"])) for row in found] == [
        ("send", 1 << 20, 2),
        ("open", 1 << 20, 2),
    ]
    assert all(0 < row["best_ns"] <= row["median_ns"] for row in found)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--parts", "pairs"], "unknown part ['pairs']; known: pair, threads, share, pause, training, traces"),
        (["--methods", "cuda"], "unknown method ['cuda']; known: native"),
        (["--only", "sft"], "unknown workload ['sft']; known: pair, threads, share, pause_drop"),
        (["--parts", "training"], "only traces can be measured without a GPU"),
    ],
)
def test_command_line_names_what_it_knows(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.main(["alloc", "--device", "cpu", "--out", str(tmp_path), *arguments])
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


# Report


def row_of(workload: str, method: str, number: int = 0, run: str = "r", **fields: Any) -> rows.Row:
    return {
        "suite": "alloc", "run": run, "round": number, "workload": workload, "method": method, "scale": "full",
        "status": "ok", "time": "2026-01-02T03:04:05+00:00", "origin": ORIGIN, **fields,
    }  # fmt: skip


def training_row(method: str, number: int, ms: float, reserved: float, run: str = "r", **fields: Any) -> rows.Row:
    figures = {
        "mean_ms": ms, "peak_reserved_bytes": int(reserved * GIB), "peak_allocated_bytes": 10 * GIB,
        "utilization": 0.5, "drop_bytes": 101, "growth_bytes": 100, "retries": 0, "driver_calls": 30, "driver_s": 0.002,
    }  # fmt: skip
    return row_of("graphs", method, number, run, **{**figures, **fields})


def test_interval_is_students_over_the_paired_ratios() -> None:
    mean, half = alloc_report.interval([0.98, 1.01, 1.0, 0.99, 1.03])
    assert mean == pytest.approx(1.002, rel=1e-12)
    assert half == pytest.approx(2.776 * statistics.stdev([0.98, 1.01, 1.0, 0.99, 1.03]) / 5**0.5, rel=1e-12)
    assert alloc_report.interval([1.5]) == (1.5, float("inf"))


def test_training_table_pairs_the_rounds_of_one_run() -> None:
    found = [
        training_row("native", 0, 100.0, 20), training_row("pyactcomp", 0, 90.0, 10.1),
        training_row("native", 1, 200.0, 22), training_row("pyactcomp", 1, 220.0, 10.3),
        training_row("native", 2, 1000.0, 22, run="s"), training_row("pyactcomp", 3, 1.0, 5, run="s"),
    ]  # fmt: skip
    text = alloc_report.training_table(found)
    mean, half = alloc_report.interval([0.9, 1.1])
    assert (
        "| `graphs` | native | 10.00 | 22.00 | 2.200 | 0.500 | 1.010 | 0 | 200.0 | 1.000 ± 0.000 | 30 | 2.0 |" in text
    )
    assert (
        f"|  | pyactcomp | 10.00 | 10.30 | 1.030 | 0.500 | 1.010 | 0 | 90.0 | {mean:.3f} ± {half:.3f} | 30 | 2.0 |"
        in text
    )
    assert alloc_report.training_table([{**row, "scale": "tiny"} for row in found]) == ""


def test_training_table_lists_what_failed() -> None:
    found = [
        training_row("native", 0, 100.0, 20),
        {**training_row("pyactcomp", 0, 1.0, 1), "status": "error", "reason": "RuntimeError: wrong loss"},
    ]
    assert "- graphs pyactcomp: error (RuntimeError: wrong loss)" in alloc_report.training_table(found)


def test_pair_table_has_the_ratio_to_natives_same_round() -> None:
    found = []
    for number, drift in enumerate((1.0, 3.0)):
        for method, ns in (("native", 800.0), ("pyactcomp", 400.0)):
            for nbytes in alloc_pairs.SIZES:
                for workload, call, threads in (("pair", "raw", 0), ("threads", "native", 1), ("threads", "native", 2)):
                    median = drift * ns * max(threads, 1)
                    own = {"call": call, "nbytes": nbytes, "threads": threads, "median_ns": median, "best_ns": median}
                    own["operations_per_s"] = 2e9 * threads / median
                    found.append(row_of(workload, method, number, **own))
    for method, ns in (("native", 300_000.0), ("pyactcomp", 450_000.0)):
        for call in alloc_share.CALLS:
            own = {"call": call, "nbytes": 64 << 20, "threads": 0, "median_ns": ns, "best_ns": ns}
            found.append(row_of("share", method, 0, **own))
    text = alloc_report.pair_table(found)
    assert "| size | method | describe: us | best | x native | open and read: us | best | x native |" in text
    assert "| 64 MiB | pyactcomp | 450 | 450 | 1.50 | 450 | 450 | 1.50 |" in text
    assert "| size | method | alloc + delete: ns a pair | best | x native | torch.empty: ns a pair |" in text
    assert "| 4 KiB | native | 1600 | 800 | 1.00 |  |  |  |" in text
    assert "| 8 MiB | pyactcomp | 800 | 400 | 0.50 |  |  |  |" in text
    assert "| size | method | 1 thread: ns a pair | best | x native | M operations/s | 2 threads: ns a pair |" in text
    assert "| 8 MiB | pyactcomp | 800 | 400 | 0.50 | 3.33 | 1600 | 800 | 0.50 | 3.33 |  |  |  |  |" in text


def trace_row(method: str, reserved: int, name: str = alloc_traces.PICTURED) -> rows.Row:
    lines = {"requested": [0, 900, 500], "reserved": [0, reserved, reserved]}
    return row_of(
        f"trace/{name}", method, growth=alloc_traces.GROWTH[method], peak_reserved_bytes=reserved,
        recorded_allocated_bytes=1000, recorded_reserved_bytes=2160, expandable_reserved_bytes=None, driver_s=0.01,
        peak_allocated_bytes=1010, resized_ratios=[1.01, 1.03], recorded_driver_s=0.006, created=7, pieces_moved=2,
        timeline=lines, origin={**ORIGIN, "device": "cpu"},
    )  # fmt: skip


def test_traces_table_compares_with_the_recorded_peaks() -> None:
    text = alloc_report.traces_table([trace_row("pyactcomp-malloc", 2160), trace_row("pyactcomp", 1020)])
    for method, figures in (
        ("pyactcomp (vmm)", "1.020 | 1.010 | 1.020, 1.030"),
        ("pyactcomp-malloc (malloc)", "2.160 | 2.139 | 1.020, 1.030"),
    ):
        assert f"| `sft_varlen` | {method} | 0.00 | {figures} | 2.160 | not run | 10.0 | 6.0 | 7 | 2 |" in text


def test_report_fills_the_allocators_blocks_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = [trace_row("pyactcomp", 1020), trace_row("pyactcomp-malloc", 2160)]
    for number in range(3):
        found += [
            training_row("native", number, 100.0, 20),
            training_row("expandable", number, 103.0 + number, 12),
            training_row("pyactcomp", number, 99.0 + number, 10.2),
        ]
        own = {"call": "raw", "nbytes": 4096, "threads": 0, "median_ns": 700.0, "best_ns": 690.0}
        found.append(row_of("pair", "native", number, **own))
    (tmp_path / "alloc.json").write_text(json.dumps({"schema": 1, "rows": found}))
    readme = tmp_path / "README.md"
    blocks = ("alloc-pair", "alloc-training", "alloc-traces")
    readme.write_text("".join(f"<!-- bench:{block} -->\n<!-- /bench:{block} -->\n" for block in blocks))
    report.run(tmp_path, readme, tmp_path / "docs")
    text = readme.read_text()
    for line in (
        "| 4 KiB | native | 700 | 690 | 1.00 |",
        "| `graphs` | native |",
        "| `sft_varlen` | pyactcomp (vmm) |",
    ):
        assert line in text
    for name in ("allocator_training.png", "allocator_timeline.png"):
        assert (tmp_path / "docs" / name).read_bytes().startswith(b"\x89PNG")


# On a GPU


@pytest.mark.gpu
@pytest.mark.slow
def test_suite_measures_every_part_on_a_gpu(tmp_path: Path) -> None:
    chosen = options(tmp_path, device="cuda")
    alloc.run(chosen, ("pair", "threads", "share"), ("native", "pyactcomp"))
    alloc.run(replace(chosen, only=("graphs",)), ("training",), ("native", "expandable", "pyactcomp"))
    found = written(tmp_path)
    assert {row["status"] for row in found} == {"ok"}, [row.get("reason") for row in found]
    cases = {(row.get("call"), row.get("nbytes"), row.get("threads")) for row in found if row["workload"] != "graphs"}
    expected = {(call, size, 0) for call in ("raw", "empty") for size in alloc_pairs.SIZES}
    expected |= {("native", size, threads) for size in alloc_pairs.SIZES for threads in alloc_pairs.THREADS}
    expected |= {(call, 1 << 20, 0) for call in alloc_share.CALLS}
    assert cases == expected
    for row in rows.select(found, workload="graphs"):
        assert row["peak_reserved_bytes"] >= row["peak_allocated_bytes"] > 0
        assert row["growth_bytes"] >= 0
        assert (row["driver_s"] is None) == (row["method"] == "expandable")
