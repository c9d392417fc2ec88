"""Suite `holds`: does training hold? Two trainings, vanilla and compressed, from the same start on the same data.

Each task and seed is a process of its own, ``python -m bench.holds SPEC``, that trains the arms in turn; several share
the one GPU, because a training this small leaves most of it idle. The parent alone writes rows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace

from .holds_training import ARMS, TASKS, Task, train
from .rows import ROOT, Budget, Options, Row, Store, failure
from .worker import RESTART

SEEDS = 5


@dataclass(frozen=True)
class Spec:
    """What one process is to train."""

    task: str
    seed: int
    arms: tuple[str, ...]
    device: str
    tiny: bool
    budget_s: float | None

    def identity(self, arm: str) -> Row:
        """Return the fields that say what a row is about."""
        scale = "tiny" if self.tiny else "full"
        return {"suite": "holds", "workload": self.task, "method": arm, "seed": self.seed, "scale": scale}


def pending(options: Options, store: Store, arms: tuple[str, ...], seeds: int) -> list[Spec]:
    """Return what is left to train, seed by seed: a budget that ends early leaves whole pairs."""
    specs = []
    for seed in range(seeds):
        for task in filter(options.selects, TASKS):
            spec = Spec(task, seed, arms, options.device, options.tiny, None)
            left = [
                arm
                for arm in arms
                if options.selects(task, arm) and (options.again or not store.has(**spec.identity(arm)))
            ]
            if left:
                specs.append(replace(spec, arms=tuple(left)))
    return specs


def workers(device: str) -> int:
    """Return how many processes share the device: one per seed on a GPU; a CPU is used up by one."""
    return SEEDS if device == "cuda" else 1


def run(options: Options, arms: tuple[str, ...], seeds: int, processes: int) -> None:
    """Train what is left, a few tasks at a time."""
    store = options.store("holds")
    lock = threading.Lock()
    lasted: list[float] = []

    def write(row: Row) -> None:
        with lock:
            store.append(row)
        tell(row)

    def one(spec: Spec) -> None:
        if not options.budget.allows(min(lasted, default=0.0)):
            print(f"holds {spec.task} seed {spec.seed}: not started, the budget is used up", flush=True)
            return
        begin = time.monotonic()
        for row in supervise(spec, options.budget):
            write(row)
        lasted.append(time.monotonic() - begin)

    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(one, pending(options, store, arms or tuple(ARMS), seeds)))


def supervise(spec: Spec, budget: Budget) -> Iterator[Row]:
    """Yield the rows of a task and seed as its processes print them, until every arm has one or the budget ends."""
    left = list(spec.arms)
    while left:
        remaining = replace(spec, arms=tuple(left), budget_s=budget.remaining())
        command = [sys.executable, "-m", "bench.holds", json.dumps(asdict(remaining))]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith('{"suite"'):
                    row = json.loads(line)
                    left.remove(row["method"])
                    yield row
                else:
                    print(line, end="", flush=True)
        if process.returncode == 0:
            return
        if process.returncode != RESTART and left:
            reason = f"the process ended with exit code {process.returncode}"
            yield {**spec.identity(left.pop(0)), "status": "error", "reason": reason}


def work(spec: Spec) -> int:
    """Train the arms in turn, printing a row for each; return the exit code."""
    budget = Budget(spec.budget_s)
    task: Task | None = None
    slowest = 0.0
    for arm in spec.arms:
        if not budget.allows(slowest):
            print(f"holds {spec.task} {arm} seed {spec.seed}: not started, the budget is used up", flush=True)
            return 0
        begin = time.monotonic()
        try:
            if task is None:
                task = TASKS[spec.task](spec.device, spec.tiny)
            row = {"status": "ok", **train(task, arm, spec.seed)}
        except Exception as problem:  # whatever an arm does wrong is its row, not the end of the bench
            row = failure(problem)
        print(json.dumps({**spec.identity(arm), **row}, allow_nan=False), flush=True)
        if row["status"] == "error" and arm != spec.arms[-1]:
            return RESTART
        slowest = max(slowest, time.monotonic() - begin)
    return 0


def tell(row: Row) -> None:
    """Print one line about a row."""
    figures = {"loss": row.get("loss"), row.get("metric"): row.get("value"), "s": row.get("train_s")}
    text = "  ".join(f"{name} {value:.5g}" for name, value in figures.items() if value is not None)
    where = f"{row['workload']:16} {row['method']:9} seed {row['seed']}"
    print(f"holds {where} {row['status']:11} {text}{row.get('reason', '')}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    fields = json.loads(sys.argv[1])
    sys.exit(work(Spec(**{**fields, "arms": tuple(fields["arms"])})))
