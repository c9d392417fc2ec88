"""A program that fragments PyTorch's allocator, in processes of its own: recorded, and run under other settings."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 1 << 20


def program(allocate: Callable[[int], Any]) -> None:
    """Steps of another scale each: what one step leaves in the cache fits no request of the next."""
    rng = random.Random(0)
    weights = [allocate(rng.randrange(MIB, 4 * MIB)) for _ in range(20)]
    for _ in range(30):
        scale = rng.uniform(0.3, 1.0)
        saved = [
            allocate(int(scale * rng.uniform(1.0, 1.2) * size * MIB)) for size in (3, 40, 12, 70) for _ in range(5)
        ]
        weights[rng.randrange(len(weights))] = allocate(rng.randrange(MIB, 4 * MIB))
        while saved:
            saved.pop()


def _run(capacity: str) -> None:
    import torch

    # The share is rounded down to bytes; segments are multiples of 2 MiB, so one more changes nothing else.
    share = (int(capacity) + MIB) / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, share))
    program(lambda size: torch.empty(size, dtype=torch.uint8, device="cuda"))


def record(capacity: str, path: str) -> None:
    """Record a run, to its end or until the capacity is used up."""
    import torch

    torch.cuda.init()
    torch.cuda.memory._record_memory_history(stacks="python")
    with contextlib.suppress(torch.OutOfMemoryError):
        _run(capacity)
    torch.cuda.memory._dump_snapshot(path)


def measure(capacity: str, path: str) -> None:
    """Run to the end within the capacity, under what the environment sets, and leave what was reserved."""
    import torch

    _run(capacity)
    Path(path).write_text(str(torch.cuda.max_memory_reserved()))


def record_side_stream(path: str) -> None:
    """Record 400 MiB that a side stream leaves unused, and 240 MiB of the current stream after it."""
    import torch

    def blocks(count: int, size: int) -> list[Any]:
        return [torch.empty(size * MIB, dtype=torch.uint8, device="cuda") for _ in range(count)]

    torch.cuda.init()
    torch.cuda.memory._record_memory_history(stacks="python")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        left = blocks(4, 100)
        del left
    side.synchronize()
    kept = blocks(3, 80)
    torch.cuda.memory._dump_snapshot(path)
    del kept


if __name__ == "__main__":
    from child_script import main

    main(globals())
