"""Suite `context`: the longest sequence that a language model of 8 billion parameters trains on, and how fast.

All weights with an 8-bit AdamW, or LoRA; one sequence a step, on a card capped to 80 GiB.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from .context_methods import METHODS, reason_unavailable
from .context_worker import LONG_S, STEPS, WARM_UP, Job
from .rows import GIB, ROOT, Options, Row
from .training import LOSS_TOLERANCE

MEMORY_GIB = 80.0
SHAPES = ("llama8b", "qwen8b")
TRAINS = ("full", "lora")
LENGTHS = tuple(1024 * count for count in (4, 8, 16, 32, 64, 128, 256, 384))
TINY_LENGTHS = (64, 128)
ROW_S = 45.0
"""Seconds after which a row begins no further step, so that a call of nine minutes measures several."""
READY_S = 25.0
"""Seconds to import, build and compare."""
HOST_SHARE = 0.8
"""Of the host's free memory, what may be pinned."""

_OURS = ("int8+offload", "int8", "int8+ckpt+offload")
FIRST = (
    ("llama8b", "full", 16384, (*_OURS, "ckpt", "unsloth", "liger+ckpt", "plain")),
    ("llama8b", "full", 32768, ("int8+offload", "ckpt", "int8+ckpt+offload", "unsloth", "ckpt+offload")),
    ("llama8b", "lora", 32768, ("int8+offload", "unsloth", "plain", "int8", "int8+ckpt+offload", "ckpt")),
    ("llama8b", "full", 65536, ("int8+offload", "ckpt+offload", "int8+ckpt+offload", "unsloth")),
    ("llama8b", "full", 8192, ("plain", "int8", "int8+offload", "ckpt", "trl", "liger", "deepspeed", "compile0.5")),
    ("llama8b", "lora", 131072, ("int8+ckpt+offload", "unsloth", "int8+offload")),
    ("qwen8b", "full", 16384, ("int8+offload", "int8", "ckpt", "unsloth", "liger+ckpt", "plain")),
)
"""What tells most, first: a budget that ends early keeps it. All other rows follow, short sequences first."""


def _combinations(options: Options) -> Iterator[tuple[str, str, int, str]]:
    if not options.tiny:
        for shape, train, tokens, methods in FIRST:
            yield from ((shape, train, tokens, method) for method in methods)
    for tokens in TINY_LENGTHS if options.tiny else LENGTHS:
        yield from ((shape, train, tokens, method) for shape in SHAPES for train in TRAINS for method in METHODS)


def plan(options: Options, methods: tuple[str, ...], memory_gib: float) -> list[Job]:
    """Return the selected rows in the order in which they are measured."""
    jobs = [
        Job(shape, train, tokens, method, options.device, options.tiny, memory_gib)
        for shape, train, tokens, method in dict.fromkeys(_combinations(options))
    ]
    return [job for job in jobs if options.selects(job.workload, job.method) and (not methods or job.method in methods)]


def expected_s(job: Job) -> float:
    """Return about how long a row takes."""
    if job.tiny:
        return 0.0
    method = METHODS[job.method]
    step = job.sizes.seconds(job.tokens, job.train == "full", method.reruns)
    steps = 1.0 if step > LONG_S else min(WARM_UP + STEPS, max(WARM_UP + 1, ROW_S / step))
    return READY_S + method.compile_s + steps * step


def _host_available() -> int:
    """Return the bytes of memory that the host has free, within the limit of this container."""
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in Path("/proc/meminfo").read_text().splitlines()}
    available = found["MemAvailable"]
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.exists() and used.exists() and (most := limit.read_text().strip()) != "max":
        available = min(available, int(most) - int(used.read_text()))
    return available


def _not_started(job: Job) -> Row | None:
    """Return the row of a job that needs no process: the device lacks something, or its bytes would fill the host."""
    reason = reason_unavailable(METHODS[job.method], job.device)
    if reason is not None:
        return {"status": "unavailable", "reason": reason}
    sizes = job.sizes
    leaves = METHODS[job.method].leaves * job.tokens * sizes.width * sizes.layers
    room = HOST_SHARE * _host_available()
    if job.device != "cuda" or leaves <= room:
        return None
    text = f"about {leaves / GIB:.0f} GiB would go to the host, which has {room / GIB:.0f} GiB to pin"
    return {"status": "oom", "reason": text}


def _measure(job: Job, limit_s: float | None) -> Row | None:
    """Measure a row in a process of its own; None if the time was over before there was one."""
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        command = [sys.executable, "-m", "bench.context_worker", json.dumps(asdict(job)), str(path)]
        try:
            code = subprocess.run(command, cwd=ROOT, env=environment, timeout=limit_s).returncode
        except subprocess.TimeoutExpired:
            return None
        if path.exists():
            row: Row = json.loads(path.read_text())
            return row
    return {"status": "error", "reason": f"the process ended with exit code {code}"}


def _checked(row: Row, others: list[Row]) -> Row:
    """Return the row, an error if its first loss is not that of another method on the same sequence."""
    if row["status"] != "ok" or not others:
        return row
    other = others[0]
    if abs(row["first_loss"] - other["first_loss"]) <= LOSS_TOLERANCE * abs(other["first_loss"]):
        return row
    text = f"the first loss is {row['first_loss']}, and {other['first_loss']} with {other['method']}"
    return {"status": "error", "reason": text}


def run(options: Options, methods: tuple[str, ...] = (), memory_gib: float = MEMORY_GIB) -> None:
    """Measure what is selected and not there yet, each row in a process of its own."""
    store = options.store("context")
    unavailable: set[tuple[str, str]] = set()
    left: list[Job] = []
    for job in plan(options, methods, memory_gib):
        setting: Row = {"train": job.train, "method": job.method, "scale": options.scale, "memory_gib": memory_gib}
        key: Row = {"workload": job.workload, **setting}
        before = store.current(shape=job.shape, **setting)
        if any(row["status"] == "oom" and row["tokens"] < job.tokens for row in before):
            continue
        if (job.train, job.method) in unavailable or (not options.again and store.has(**key)):
            continue
        if not options.budget.allows(expected_s(job)):
            left.append(job)
            continue
        compared = any("grad_error" in row for row in store.current(**setting))
        job = replace(job, row_s=ROW_S, compare=not compared and not METHODS[job.method].compile_s)
        begin = options.budget.clock()
        row = _not_started(job) or _measure(job, options.budget.remaining())
        if row is None:
            print(f"context {job.workload} {job.method}: ended, the budget is used up", flush=True)
            return
        row = _checked(row, store.current(workload=job.workload, scale=options.scale, status="ok"))
        if row["status"] == "unavailable":
            unavailable.add((job.train, job.method))
        taken = round(options.budget.clock() - begin, 1)
        identity = {"suite": "context", "shape": job.shape, "tokens": job.tokens, **key}
        store.append({**identity, **row, "row_s": taken})
        tell(job, row)
    if left:
        first, expected = left[0], expected_s(left[0])
        rest = f"the first, {first.workload} {first.method}, takes about {expected:.0f} s"
        print(f"context: {len(left)} rows not started, the budget is used up; {rest}", flush=True)


def tell(job: Job, row: Row) -> None:
    """Print one line about a row."""
    figures = {
        "tokens/s": row.get("tokens_per_s"),
        "ms": row.get("median_ms"),
        "peak GiB": row["peak_bytes"] / GIB if "peak_bytes" in row else None,
        "host GiB": row["host_bytes"] / GIB if "host_bytes" in row else None,
        "gradient error": row.get("grad_error"),
    }
    text = "  ".join(f"{name} {value:.4g}" for name, value in figures.items() if value is not None)
    print(f"context {job.workload:20} {job.method:18} {row['status']:11} {text}{row.get('reason', '')}", flush=True)
