"""What a replay of a run under the native allocator predicts for each allocator, beside real runs under them.

A process records all its allocations; others run the same steps from the same seeds under each allocator. All begin
alike (:func:`bench.alloc_methods.use`, then the training), and every peak is the whole process's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory

from .alloc_methods import NATIVE, TRAINING
from .alloc_worker import Job, start
from .alloc_workloads import WORKLOADS
from .rows import Options, Row, Store, failure, select

ROUNDS = 2
USUAL = ("sft_varlen", "moe")
"""What is run unless ``--only`` names another."""
OF_THE_RUN = ("steps", "run_s", "mean_loss", "retries", "peak_allocated_bytes", "peak_reserved_bytes")
"""What a prediction's row has of the real run."""


def workload_of(name: str) -> str:
    """Return what rows call a training here: its own name is that of its rows without a recording."""
    return f"prediction/{name}"


def predict(recording: Path, method: str, real: Row) -> Row:
    """Replay a recorded run under another allocator and return what it would take beside what a real run took."""
    from pyactcomp.snapshots import read_snapshot, replay

    snapshot = read_snapshot(recording)
    begin = time.perf_counter()
    result = replay(snapshot, method)
    return {
        "replay_s": time.perf_counter() - begin,
        "events": len(snapshot.devices[0].events),
        "notes": list(snapshot.notes),
        "predicted_allocated_bytes": result.peak_allocated,
        "predicted_reserved_bytes": result.peak_reserved,
        "error": (result.peak_reserved - real["peak_reserved_bytes"]) / real["peak_reserved_bytes"],
        **{name: real.get(name) for name in OF_THE_RUN},
    }


def run(options: Options, store: Store, methods: Sequence[str] = ()) -> None:
    """Predict in rounds, each of which records anew; every workload has a round before one has two."""
    stamp = f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S}-prediction"
    longest = 0.0
    for number in range(1 if options.tiny else ROUNDS):
        for name in WORKLOADS if options.only else USUAL:
            workload = workload_of(name)
            wanted = [m for m in methods or TRAINING if m in TRAINING and options.selects(workload, m)]
            pending = [
                method
                for method in wanted
                if options.again or not store.has(workload=workload, method=method, round=number, scale=options.scale)
            ]
            if not pending:
                continue
            if not options.budget.allows(longest):
                print(f"alloc {workload} round {number}: not started, the budget is used up")
                continue
            begin = options.budget.clock()
            measure(store, name, pending, number, stamp, options.tiny)
            longest = max(longest, options.budget.clock() - begin)


def measure(store: Store, name: str, methods: Sequence[str], number: int, stamp: str, tiny: bool) -> None:
    """Record a run under native, which is the first row, then run under the other methods and predict each."""
    workload = workload_of(name)
    with TemporaryDirectory(prefix="pyactcomp-bench-") as folder:
        recording, reals = Path(folder) / "snapshot.pickle", Path(folder) / "real.json"
        for method in (NATIVE, *(method for method in methods if method != NATIVE)):
            snapshot = str(recording) if method == NATIVE else None
            job = Job((name,), method, number, stamp, str(reals), store.origin, tiny, snapshot)
            start(job)
            real = select(job.store().rows(), method=method)[-1]
            row = {"status": real["status"], "reason": real.get("reason")}
            if real["status"] == "ok":
                try:
                    row = {"status": "ok", **predict(recording, method, real)}
                except Exception as problem:  # whatever a recording or its replay has wrong is the row
                    row = failure(problem)
            store.append({**job.identity(workload), **row})
            tell(workload, method, number, row)
            if method == NATIVE and row["status"] != "ok":
                print(f"alloc {workload}: without a recording there is nothing to predict from", flush=True)
                return


def tell(workload: str, method: str, number: int, row: Row) -> None:
    """Print one line about a row."""
    text = f"{row['status']} {row.get('reason')}"
    if row["status"] == "ok":
        predicted, real = (row[f"{whose}_reserved_bytes"] / 2**30 for whose in ("predicted", "peak"))
        text = f"reserved GiB predicted {predicted:.4f}  real {real:.4f}  error {row['error']:+.4%}  "
        text += f"events {row['events']}  replay s {row['replay_s']:.3f}  {'; '.join(row['notes'])}"
    print(f"alloc {workload:18} {method:17} round {number}  {text}".rstrip(), flush=True)
