"""Recorded allocations of real trainings, replayed on the simulated device: what each setting would have reserved."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .alloc_methods import OURS
from .rows import ROOT, Options, Row, Store, failure, provenance

if TYPE_CHECKING:
    from pyactcomp.allocator import CachingAllocator, SimulatedDevice

FOLDER = ROOT / "tests" / "data" / "traces"
MIB = 2**20
TINY_EVENTS = 2000
SEGMENT_S = 60e-6
"""Host time of one cudaMalloc on an H200, measured: 54 us for 2 MiB, 62 us for 1 GiB."""
EXPANDABLE = {
    "sft_varlen": 15_734_931_456,
    "bert_accum_eval": 19_262_341_120,
    "multiscale_resnet": 6_660_554_752,
    "moe": 6_369_050_624,
}
"""Peak reserved bytes of the traces' trainings under expandable_segments:True, on the H200 they were recorded on."""
GROWTH = {OURS: "vmm", "pyactcomp-malloc": "malloc"}
PICTURED = "sft_varlen"
"""The trace whose rows carry a timeline, for the picture."""
POINTS = 400
"""Of a picture's line, which is about a thousand pixels wide."""
FACTORS = (0.8, 0.87, 0.93, 1.07, 1.14, 1.21, 1.3, 1.6, 2.1)
"""Each trace is also replayed with all sizes above 1 MiB times one of these: a decision that fits the recorded sizes by
luck does not fit the others."""


@dataclass(frozen=True)
class Trace:
    """One recorded run: its allocations and frees in their order, and its own peaks as torch counted them."""

    name: str
    events: list[tuple[str, int, int]]
    """"alloc" or "free_completed", address, requested bytes."""
    meta: Row


def load(path: Path, limit: int | None = None) -> Trace:
    import numpy as np

    with np.load(path) as data:
        meta = json.loads(str(data["meta"]))
        columns = [data[key][:limit].tolist() for key in ("action", "addr", "size")]
    events = [(meta["actions"][action], address, size) for action, address, size in zip(*columns, strict=True)]
    return Trace(path.stem, events, meta)


def requested(trace: Trace) -> Iterator[int]:
    """Yield after each event the bytes that the run had asked for and not yet freed."""
    held = 0
    for action, _, size in trace.events:
        held += size if action == "alloc" else -size
        yield held


def thin(values: list[int], points: int = POINTS) -> list[int]:
    """Return the largest value of each of ``points`` equal stretches, so that no peak is lost."""
    edges = [len(values) * i // points for i in range(points + 1)]
    return [max(values[begin:end]) for begin, end in itertools.pairwise(edges) if end > begin]


def resized(trace: Trace, factor: float) -> Trace:
    """Return the trace of the same program with larger or smaller tensors; small requests stay."""
    events = [(action, address, int(size * factor) if size > MIB else size) for action, address, size in trace.events]
    return replace(trace, events=events)


def feed(trace: Trace, growth: str, capacity: str) -> tuple[CachingAllocator, SimulatedDevice, list[int]]:
    """Feed a trace's allocations and frees to the allocator on a simulated device; return what each event reserved."""
    from pyactcomp.allocator import AllocatorConfig, CachingAllocator, SimulatedDevice

    device = SimulatedDevice(capacity=capacity, asynchronous=False)
    allocator = CachingAllocator(device, AllocatorConfig(growth=growth))
    live: dict[int, int] = {}
    reserved = []
    for action, address, size in trace.events:
        if action == "alloc":
            live[address] = allocator.allocate(size)
        else:
            allocator.free(live.pop(address))
        reserved.append(device.reserved)
    return allocator, device, reserved


def reserved_over_allocated(trace: Trace, growth: str) -> float:
    """Return the peak reserved over the peak allocated of a replay."""
    allocator, *_ = feed(trace, growth, "1TiB")
    stats = allocator.stats()
    return float(stats["reserved_bytes.all.peak"] / stats["allocated_bytes.all.peak"])


def replay(trace: Trace, growth: str) -> Row:
    """Replay a trace on a device of an H200's size and return what the allocator reserved."""
    allocator, device, reserved = feed(trace, growth, "139GiB")
    allocator.check_invariants()

    stats = allocator.stats()
    asked = list(requested(trace))
    if stats["requested_bytes.all.peak"] != max(asked) or stats["reserved_bytes.all.current"] != device.reserved:
        raise RuntimeError(
            f"{trace.name}: the peak of requested bytes is {stats['requested_bytes.all.peak']}, the trace's is "
            f"{max(asked)}; reserved are {stats['reserved_bytes.all.current']}, the device says {device.reserved}"
        )
    calls = device.calls()
    return {
        "growth": growth,
        "events": len(trace.events),
        "peak_reserved_bytes": stats["reserved_bytes.all.peak"],
        "peak_allocated_bytes": stats["allocated_bytes.all.peak"],
        "driver_s": device.driver_seconds,
        "driver_calls": stats["num_device_alloc"] + stats["num_device_free"],
        "created": calls["create"] + calls["acquire"],
        "pieces_moved": stats["pieces_moved"],
        "recorded_allocated_bytes": trace.meta["peak_alloc"],
        "recorded_reserved_bytes": trace.meta["peak_reserved"],
        "recorded_driver_s": SEGMENT_S * trace.meta["segs"],
        "expandable_reserved_bytes": EXPANDABLE.get(trace.name),
        "resized_ratios": [reserved_over_allocated(resized(trace, factor), growth) for factor in FACTORS],
        **({"timeline": {"requested": thin(asked), "reserved": thin(reserved)}} if trace.name == PICTURED else {}),
    }


def workload_of(path: Path) -> str:
    """Return what rows call a trace: not by its training's own name, which the part on the GPU has too."""
    return f"trace/{path.stem}"


def run(options: Options, methods: Sequence[str] = ()) -> None:
    """Replay every trace under every growth that is selected and missing; the longest takes a second."""
    # Nothing here touches a GPU, and a figure of the simulated device does not depend on the machine.
    store = Store(options.out / "alloc.json", provenance("cpu"))
    paths = sorted(FOLDER.glob("*.npz"))
    if not paths:
        print(f"alloc traces: none in {FOLDER}")
    for path in paths[:1] if options.tiny else paths:
        workload = workload_of(path)
        wanted = [method for method in methods or GROWTH if method in GROWTH and options.selects(workload, method)]
        pending = [
            m for m in wanted if options.again or not store.has(workload=workload, method=m, scale=options.scale)
        ]
        if not pending:
            continue
        if not options.budget.allows(0.0):
            print(f"alloc {workload}: not started, the budget is used up")
            return
        trace = load(path, TINY_EVENTS if options.tiny else None)
        for method in pending:
            try:
                row: Row = {"status": "ok", **replay(trace, GROWTH[method])}
            except Exception as problem:  # whatever the allocator does wrong is its row, not the end of the bench
                row = failure(problem)
            store.append({"suite": "alloc", "workload": workload, "method": method, "scale": options.scale, **row})
            figures = ""
            if row["status"] == "ok":
                ratio = row["peak_reserved_bytes"] / row["recorded_allocated_bytes"]
                figures = f"reserved / recorded allocated {ratio:.4f}  driver {row['driver_s'] * 1e3:.1f} ms"
            print(f"alloc {workload:24} {method:17} {row['status']} {figures}{row.get('reason', '')}", flush=True)
