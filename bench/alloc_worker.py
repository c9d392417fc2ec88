"""The process that measures under one allocator: ``python -m bench.alloc_worker JOB``, started by :func:`start`.

An allocator belongs to its process, so every method, workload and round has a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from .rows import FINAL, ROOT, Row, Store, failure, select

LONGEST_S = 90.0
"""A process that takes longer than this has hung: the slowest measurement takes a tenth of it."""


@dataclass(frozen=True)
class Job:
    """What one process is to do; rows with the same ``run`` and ``round`` may be compared."""

    workloads: tuple[str, ...]
    method: str
    round: int
    run: str
    path: str
    origin: Row
    tiny: bool
    snapshot: str | None = None
    """Where the process leaves a recording of all its allocations."""

    def identity(self, workload: str) -> Row:
        """Return the fields that say what a row is about."""
        return {
            "suite": "alloc",
            "run": self.run,
            "round": self.round,
            "workload": workload,
            "method": self.method,
            "scale": "tiny" if self.tiny else "full",
        }

    def store(self) -> Store:
        return Store(Path(self.path), self.origin)


def start(job: Job) -> bool:
    """Run a job in a process of its own, and return whether it has a result."""
    from .alloc_methods import METHODS, SETTINGS

    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    environment |= METHODS[job.method].environment
    command = [sys.executable, "-m", "bench.alloc_worker", json.dumps(asdict(job))]
    try:
        code = subprocess.run(command, cwd=ROOT, env=environment, timeout=LONGEST_S).returncode
        reason = f"the process ended with exit code {code}"
    except subprocess.TimeoutExpired:
        code, reason = None, f"the process had not ended after {LONGEST_S:g} s"
    if code != 0:
        job.store().append({**job.identity(job.workloads[-1]), "status": "error", "reason": reason})
    written = select(job.store().rows(), run=job.run, round=job.round, method=job.method)
    return any(row["status"] in FINAL for row in written)


def rows(job: Job, workload: str) -> Iterator[Row]:
    """Yield a workload's rows."""
    if workload == "pair":
        from .alloc_pairs import measure_pairs

        yield from measure_pairs(job.tiny)
    elif workload == "threads":
        from .alloc_pairs import measure_threads

        yield from measure_threads(job.tiny)
    elif workload == "share":
        from . import alloc_share

        yield from alloc_share.measure(job.method, job.tiny)
    elif workload.startswith("pause_"):
        from . import alloc_pausing

        yield from alloc_pausing.measure(workload, job.method, job.tiny)
    else:
        from . import alloc_training
        from .alloc_methods import NATIVE

        native = select(job.store().rows(), run=job.run, workload=workload, method=NATIVE, status="ok")
        reference_loss = native[0]["mean_loss"] if native else None
        yield alloc_training.measure(workload, job.method, "cuda", job.tiny, reference_loss)


def record() -> None:
    """Record every allocation of torch's allocator from the first on: there is none before CUDA is initialised."""
    torch.cuda.init()
    # No call stacks, which take most of a recording's time; by default it holds any number of events.
    torch.cuda.memory._record_memory_history("all", context=None)


def work(job: Job) -> None:
    """Attach the allocator and measure, writing each row as soon as it is there."""
    from .alloc_methods import METHODS, use

    store = job.store()
    workload = job.workloads[0]
    try:
        if job.snapshot is not None:
            record()
        use(METHODS[job.method])
        for workload in job.workloads:
            for row in rows(job, workload):
                store.append({**job.identity(workload), "status": "ok", **row})
                tell(job, workload, row)
        if job.snapshot is not None:
            torch.cuda.memory._dump_snapshot(job.snapshot)
    except Exception as problem:  # whatever an allocator does wrong is its row, not the end of the bench
        row = failure(problem)
        store.append({**job.identity(workload), **row})
        tell(job, workload, row)


def tell(job: Job, workload: str, row: Row) -> None:
    """Print one line about a row."""
    gib = 2**30
    figures = {
        "bytes": row.get("nbytes"),
        "threads": row.get("threads"),
        "ns": row.get("median_ns"),
        "ms": row.get("mean_ms"),
        "reserved GiB": row["peak_reserved_bytes"] / gib if "peak_reserved_bytes" in row else None,
        "allocated GiB": row["peak_allocated_bytes"] / gib if "peak_allocated_bytes" in row else None,
        "driver calls": row.get("driver_calls"),
        "pause s": median(row["pause_s"][1:]) if "pause_s" in row else None,
        "resume s": median(row["resume_s"][1:]) if "resume_s" in row else None,
        "released": row.get("released_share"),
        "cycle s": row.get("cycle_s"),
        "loss": row.get("mean_loss"),
        "run s": row.get("run_s"),
    }
    text = "  ".join(f"{name} {value:.5g}" for name, value in figures.items() if value is not None)
    what = f"{workload:18} {job.method:17} round {job.round}"
    print(f"alloc {what} {row.get('call', '')} {text}{row.get('status', '')} {row.get('reason', '')}", flush=True)


if __name__ == "__main__":
    fields = json.loads(sys.argv[1])
    work(Job(**{**fields, "workloads": tuple(fields["workloads"])}))
    sys.stdout.flush()
    os._exit(0)  # the rows are written: what an allocator does while the interpreter shuts down is not measured here
