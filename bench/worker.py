"""The process that measures one workload: ``python -m bench.worker SPEC``, started by :func:`supervise`.

A process of its own for each workload keeps one model's allocator and library state out of the next one's
figures; within it every method starts from a freshly built model and an emptied allocator.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from .rows import ROOT, Budget, Options, Row, Store, failure, select

RESTART = 75
"""Exit code that asks for a new process for the methods that are left: an error may have spoilt this one's device."""
STOP = 76
"""Exit code that says to measure none of the methods that are left."""


@dataclass(frozen=True)
class Spec:
    """What one worker is to do; its rows carry ``run``, and figures of one run may be compared."""

    suite: str
    workload: str
    methods: tuple[str, ...]
    run: str
    path: str
    origin: Row
    device: str
    tiny: bool
    budget_s: float | None = None
    memory_gib: float | None = None


def spec_for(suite: str, workload: str, methods: list[str], options: Options, store: Store) -> Spec:
    """Return the specification of a new run."""
    run = f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S}-{workload}"
    return Spec(suite, workload, tuple(methods), run, str(store.path), store.origin, options.device, options.tiny)


def ends_method(row: Row) -> bool:
    """Return whether this row is its method's last: in the batch suite a method goes on until it fails."""
    return bool(row["suite"] == "frontier" or row["status"] != "ok")


def together(methods: list[str]) -> list[str]:
    """Return the first of the methods, with those after it that may share its process."""
    from .methods import METHODS

    if METHODS[methods[0]].alone:
        return methods[:1]
    return list(itertools.takewhile(lambda method: not METHODS[method].alone, methods))


def supervise(spec: Spec, budget: Budget) -> None:
    """Run workers until every method has its rows, the budget is used up, or none is left to try."""
    from .methods import METHODS

    store = Store(Path(spec.path), spec.origin)
    left = list(spec.methods)
    while left and budget.allows(0.0):
        methods = together(left)
        job = replace(spec, methods=tuple(methods), budget_s=budget.remaining())
        command = [sys.executable, "-m", "bench.worker", json.dumps(asdict(job))]
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, **METHODS[methods[0]].environment}).returncode
        if code == STOP:
            return
        done = {row["method"] for row in select(store.rows(), run=spec.run) if ends_method(row)}
        undone = [method for method in methods if method not in done and code != 0]
        if code != RESTART and undone:
            reason = f"the process ended with exit code {code}"
            store.append({**identity(spec, undone.pop(0)), "status": "error", "reason": reason})
        left = undone + left[len(methods) :]


def identity(spec: Spec, method: str) -> Row:
    """Return the fields that say what a row is about."""
    return {
        "suite": spec.suite,
        "run": spec.run,
        "workload": spec.workload,
        "method": method,
        "scale": "tiny" if spec.tiny else "full",
    }


def frontier_rows(spec: Spec, name: str, store: Store) -> Iterator[Row]:
    """Yield the one row of a method in the frontier suite."""
    from . import training
    from .methods import METHODS, VANILLA
    from .workloads import WORKLOADS

    workload, method = WORKLOADS[spec.workload], METHODS[name]
    if method.timed:
        vanilla = select(store.rows(), run=spec.run, method=VANILLA, status="ok")
        exact_loss = vanilla[-1]["first_loss"] if vanilla else None
        yield {"status": "ok", **training.measure(workload, method, spec.device, spec.tiny, exact_loss)}
    else:
        yield {"status": "ok", **training.exactness(workload, method, spec.device, spec.tiny)}


def batch_rows(spec: Spec, method: str, budget: Budget) -> Iterator[Row]:
    """Yield one row for each batch size, up to the first that does not fit under the memory cap."""
    import torch

    from . import batch, training
    from .methods import METHODS
    from .workloads import WORKLOADS

    if spec.device == "cuda" and spec.memory_gib is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, spec.memory_gib * 2**30 / total))
    workload = WORKLOADS[spec.workload]
    trainer = None
    slowest = 0.0
    for size in batch.sizes(1 if spec.tiny else workload.first_batch, limit=3 if spec.tiny else None):
        if not budget.allows(2 * slowest):
            return
        begin = time.monotonic()
        try:
            if trainer is None:
                training.clean(spec.device)
                trainer = training.build(workload, size, spec.device, spec.tiny)
                trainer.context = METHODS[method].apply(trainer.module, workload.blocks(trainer.module))
            row = {"status": "ok", **training.throughput(trainer, size, batch.STEPS)}
        except torch.OutOfMemoryError as problem:
            row = {"batch": size, **failure(problem)}
        yield {**row, "memory_gib": spec.memory_gib}
        if row["status"] != "ok":
            return
        slowest = max(slowest, time.monotonic() - begin)


def work(spec: Spec) -> int:
    """Measure the methods in turn, writing each row as soon as it is there; return the exit code."""
    from .methods import METHODS, VANILLA

    store = Store(Path(spec.path), spec.origin)
    budget = Budget(spec.budget_s)
    for method in spec.methods:
        vanilla = select(store.rows(), run=spec.run, method=VANILLA, status="ok")
        unit = vanilla[-1].get("row_s", 0.0) if vanilla else 0.0
        if not budget.allows(METHODS[method].cost * unit + METHODS[method].compile_s):
            print(f"{spec.suite} {spec.workload} {method}: not started, the budget is used up", flush=True)
            return STOP
        begin = time.monotonic()
        rows = frontier_rows(spec, method, store) if spec.suite == "frontier" else batch_rows(spec, method, budget)
        status = "ok"
        try:
            for row in rows:
                store.append({**identity(spec, method), **row, "row_s": round(time.monotonic() - begin, 2)})
                tell(spec, method, row)
        except Exception as problem:  # whatever a method does wrong is its row, not the end of the bench
            row = failure(problem)
            status = row["status"]
            store.append({**identity(spec, method), **row})
            tell(spec, method, row)
        del rows
        gc.collect()
        if spec.suite == "frontier" and method == VANILLA and status in ("error", "unavailable"):
            print(f"frontier {spec.workload}: without a vanilla step there is nothing to compare with", flush=True)
            return STOP
        if status == "error" and method != spec.methods[-1]:
            return RESTART
    return 0


def tell(spec: Spec, method: str, row: Row) -> None:
    """Print one line about a row."""
    figures = {
        "batch": row.get("batch"),
        "ms": row.get("median_ms"),
        "act GiB": row["act_bytes"] / 2**30 if "act_bytes" in row else None,
        "peak GiB": row["peak_minus_base_bytes"] / 2**30 if "peak_minus_base_bytes" in row else None,
        "gradient error": row.get("grad_error"),
        "gradients": row.get("gradient_tensors"),
        "differing": row.get("differing"),
        "vanilla differing": row.get("vanilla_differing"),
        "samples/s": row.get("samples_per_s"),
    }
    text = "  ".join(f"{name} {value:.4g}" for name, value in figures.items() if value is not None)
    print(f"{spec.suite} {spec.workload:16} {method:14} {row['status']:11} {text}{row.get('reason', '')}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    fields = json.loads(sys.argv[1])
    sys.exit(work(Spec(**{**fields, "methods": tuple(fields["methods"])})))
