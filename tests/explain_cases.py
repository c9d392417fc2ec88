"""What the tests of explanations share: recordings by hand, whose numbers can be added up."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from allocator_cases import KIB, MIB
from snapshot_cases import BASE, content, event, read

from pyactcomp.snapshots.explain import explain
from pyactcomp.snapshots.explanation import Explanation

TORCH = {"filename": "/v/lib/python3.11/site-packages/torch/nn/functional.py", "line": 9, "name": "linear"}
CPP = {"filename": "??", "line": 0, "name": "torch::unwind::unwind()"}
BACKWARD = {"filename": "??", "line": 0, "name": "MmBackward0::apply"}
LAYER = {"filename": "/home/me/model.py", "line": 12, "name": "forward"}
LOSS = {"filename": "/home/me/model.py", "line": 40, "name": "loss"}
MAIN = {"filename": "/home/me/train.py", "line": 3, "name": "main"}


def failure(size: int, left: int) -> dict[str, Any]:
    return {"action": "oom", "device_free": left, "size": size, "stream": 0, "time_us": 10, "frames": []}


def explained(tmp_path: Path, events: list[dict[str, Any]], at: str | int | None = None, **others: Any) -> Explanation:
    return explain(read(tmp_path, content(events, **others)), at)


def large(number: int, size: int = 20 * MIB) -> dict[str, Any]:
    return event("segment_alloc", BASE + number * 64 * MIB, size)


def alloc(offset: int, size: int, *frames: dict[str, Any], **others: Any) -> dict[str, Any]:
    return event("alloc", BASE + offset, size, frames=list(frames), **others)


def free(offset: int, size: int) -> list[dict[str, Any]]:
    return [event("free_requested", BASE + offset, size), event("free_completed", BASE + offset, size)]


def steps_of(count: int, leak: bool) -> list[dict[str, Any]]:
    """Return setup, and steps of 20 blocks of changing sizes; each keeps a block if ``leak``."""
    rng = random.Random(5)
    rows = [alloc(number * MIB, MIB, MAIN) for number in range(4)]
    for step in range(count):
        sizes = [rng.randint(1, 60) * 512 for _ in range(20)]
        if leak:
            rows.append(alloc((900 + step) * MIB, KIB, LOSS))
        rows += [alloc((100 + place) * MIB, size, LAYER) for place, size in enumerate(sizes)]
        rows += [entry for place, size in enumerate(sizes) for entry in free((100 + place) * MIB, size)]
    return rows


def out_of_memory(tmp_path: Path) -> Explanation:
    """Return what is said of two segments of 100 MiB, 40 free in each, where 70 are asked for and the device has 20."""
    first, second = 0, 128 * MIB
    return explained(
        tmp_path,
        [
            event("segment_alloc", BASE + first, 100 * MIB),
            alloc(first, 100 * MIB),
            event("segment_alloc", BASE + second, 100 * MIB),
            alloc(second, 100 * MIB),
            *free(first, 100 * MIB),
            *free(second, 100 * MIB),
            alloc(first, 60 * MIB),
            alloc(second, 60 * MIB),
            failure(70 * MIB, 20 * MIB),
        ],
    )
