"""Recordings for the tests of replays: the real runs of tests/data/traces, and programs that the core records."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from allocator_cases import KIB, MIB

from pyactcomp.allocator import AllocatorConfig, CachingAllocator, SimulatedDevice
from pyactcomp.snapshots.model import ACTIONS, Beginning, DeviceTrace, Events, Settings, Snapshot
from pyactcomp.snapshots.reader import read_snapshot
from pyactcomp.snapshots.releases import find_releases

TRACES = Path(__file__).parent / "data" / "traces"
POOL = (0, 1)
SIDE_STREAM = 70

Row = tuple[str, int, int]
GIB = 1 << 30
"""action, address, size"""


def snapshot_of(columns: dict[str, array[int]], times: int = 1) -> Snapshot:
    """Return events of one device and the default pool; nothing existed before."""
    count = times * len(columns["action"])
    zeros = {"time_us": array("q", bytes(8 * count))}
    zeros |= {name: array("i", bytes(4 * count)) for name in ("pool", "stack", "metadata")}
    repeated = {name: column * times for name, column in columns.items()}
    events = Events(**repeated, **zeros, has_pools=True)
    beginning = Beginning((), (), True)
    trace = DeviceTrace(0, events, (), beginning, find_releases(events, beginning, (), ((),), Settings()))
    return Snapshot((trace,), (), ((),), ((0, 0),), Settings(), (), ())


def held(at: int, size: int) -> list[Row]:
    return [("alloc", at * GIB, size * MIB)]


def freed(at: int, size: int) -> list[Row]:
    return [("free_completed", at * GIB, size * MIB)]


def passed(at: int, size: int) -> list[Row]:
    return [*held(at, size), *freed(at, size)]


def events(rows: Iterable[Row]) -> Snapshot:
    """Return a snapshot of events on the default stream."""
    listed = list(rows)
    return snapshot_of(
        {
            "action": array("B", [ACTIONS.index(action) for action, _, _ in listed]),
            "address": array("q", [address for _, address, _ in listed]),
            "size": array("q", [size for _, _, size in listed]),
            "stream": array("q", bytes(8 * len(listed))),
        }
    )


def load(name: str, times: int = 1) -> tuple[dict[str, Any], Snapshot]:
    """Return what torch counted in a real run, and its events; with ``times``, so often one after the other."""
    with np.load(TRACES / f"{name}.npz") as file:
        recorded = json.loads(str(file["meta"]))
        code = np.array([ACTIONS.index(action) for action in recorded["actions"]], dtype=np.uint8)
        columns = {"action": array("B", code[file["action"]].tobytes())}
        for column, key in (("address", "addr"), ("size", "size"), ("stream", "stream")):
            columns[column] = array("q", file[key].astype(np.int64).tobytes())
    return recorded, snapshot_of(columns, times)


def as_snapshot(allocator: CachingAllocator, folder: Path, first: int = 0) -> Snapshot:
    """Return what an allocator recorded, from event ``first`` on, as a user's file has it."""
    recorded = allocator.snapshot()
    recorded["device_traces"] = [recorded["device_traces"][0][first:]]
    path = folder / "snapshot.json"
    path.write_text(json.dumps(recorded))
    return read_snapshot(path)


class Program:
    """Two streams, a private pool and blocks that a side stream still uses: the same calls to whatever allocator."""

    def __init__(self, seed: int, steps: int) -> None:
        self.seed = seed
        self.steps = steps

    def run(self, config: AllocatorConfig, capacity: int) -> tuple[CachingAllocator, SimulatedDevice]:
        """Run until the end, or until memory runs out: torch.OutOfMemoryError passes."""
        device = SimulatedDevice(capacity)
        allocator = CachingAllocator(device, config)
        allocator.record_history("all", max_entries=10 * self.steps, stacks=None)
        self.drive(allocator, device)
        return allocator, device

    def drive(self, allocator: CachingAllocator, device: SimulatedDevice) -> None:
        rng = random.Random(self.seed)
        live: list[int] = []
        for _ in range(self.steps):
            choice = rng.random()
            if choice < 0.5 or not live:
                size = rng.choice((rng.randint(1, 600 * KIB), rng.randint(MIB, 40 * MIB)))
                stream = rng.choice((0, 0, 7))
                if private := rng.random() < 0.15:
                    allocator.begin_allocate_to_pool(POOL)
                try:
                    live.append(allocator.allocate(size, stream))
                finally:
                    if private:
                        allocator.end_allocate_to_pool(POOL)
            elif choice < 0.9:
                address = live.pop(rng.randrange(len(live)))
                if rng.random() < 0.3:
                    allocator.record_stream(address, SIDE_STREAM)
                allocator.free(address)
            else:
                device.complete(SIDE_STREAM, rng.randint(1, 4))
