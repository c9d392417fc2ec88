"""CPU time against size: readers, replays and the allocator, each where a slip would be quadratic.

A row has the seconds at a small and at a large size, and the exponent of time in size between them: 1 for work in
proportion, 2 for quadratic work. Between sizes of which one leaves the processor's caches, work in proportion shows up
to about 1.4. Tests do not time anything: on a busy machine any bound fails.
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .rows import Options, Row

MIB = 1 << 20
BASE = 1 << 46
ROUNDS = 3
TINY = 64
"""By how much sizes, which stay powers of two where they are, are divided to test the harness."""

Work = Callable[[], object]


def _event(action: str, address: int, size: int, frames: Iterable[dict[str, Any]] = ()) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 1, "frames": list(frames)}


def _written(folder: Path, events: list[dict[str, Any]], segments: Iterable[dict[str, Any]] = ()) -> Path:
    path = folder / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": list(segments), "device_traces": [events]}, protocol=4))
    return path


def live_blocks(size: int, folder: Path) -> Work:
    """Read ``size`` blocks that stay in use, from the highest address down."""
    from pyactcomp.snapshots import read_snapshot

    path = _written(folder, [_event("alloc", BASE - 512 * index, 512) for index in range(size)])
    return lambda: read_snapshot(path)


def colliding_frames(size: int, folder: Path) -> Work:
    """Read ``size`` frames whose two names have numbers that a plain mixture of the two would not tell apart."""
    from pyactcomp.snapshots import read_snapshot

    # The numbers are those of the first appearance: a file's table of names comes first.
    names = [f"name {index}" for index in range(size)]
    frames = [{"filename": names[i], "line": 1, "name": names[i ^ (size - 1)]} for i in range(size)]
    path = folder / "snapshot.pickle"
    content = {"names": names, "segments": [], "device_traces": [[_event("alloc", BASE, 512, frames)]]}
    path.write_bytes(pickle.dumps(content, protocol=4))
    return lambda: read_snapshot(path)


def blocks_of_a_segment(size: int, folder: Path) -> Work:
    """Replay a recording that begins with ``size`` blocks in one segment."""
    from pyactcomp.snapshots import read_snapshot, replay

    blocks = [
        {"address": BASE + 512 * i, "size": 512, "requested_size": 512, "state": "active_allocated", "frames": []}
        for i in range(size)
    ]
    segment = {"device": 0, "address": BASE, "total_size": 512 * size, "stream": 0, "segment_type": "large"}
    more = {"segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "blocks": blocks}
    snapshot = read_snapshot(_written(folder, [], [{**segment, **more}]))
    return lambda: replay(snapshot, "native")


def segments_elsewhere(size: int, folder: Path) -> Work:
    """Replay ``size`` adjacent blocks under rounding: the segments need more room than there was between them."""
    from pyactcomp.snapshots import read_snapshot, replay

    events = [_event("alloc", BASE + 3 * MIB * index, 3 * MIB) for index in range(size)]
    snapshot = read_snapshot(_written(folder, events))
    return lambda: replay(snapshot, "native[roundup_power2_divisions:1]")


def pending_blocks(size: int, folder: Path) -> Work:
    """Replay one event after another while another stream still uses up to ``size`` blocks, ``20 * size`` events."""
    from pyactcomp.snapshots import read_snapshot, replay

    events = []
    for index in range(20 * size // 3):
        address = BASE + index % (size + 1) * 4 * MIB
        if index > size:
            events.append(_event("free_completed", address, 3 * MIB))
        events += [_event("alloc", address, 3 * MIB), _event("free_requested", address, 3 * MIB)]
    snapshot = read_snapshot(_written(folder, events))
    return lambda: replay(snapshot, "native")


def pools_given_back(growth: str) -> Callable[[int, Path], Work]:
    """Return the work of ``empty_cache`` with one unused block in each of so many dead pools."""

    def prepared(size: int, folder: Path) -> Work:
        from pyactcomp.allocator import AllocatorConfig, CachingAllocator, SimulatedDevice

        allocator = CachingAllocator(SimulatedDevice("1TiB"), AllocatorConfig(growth=growth))
        for number in range(1, size + 1):
            allocator.begin_allocate_to_pool((0, number))
            allocator.free(allocator.allocate(2 * MIB))
            allocator.end_allocate_to_pool((0, number))
            allocator.release_pool((0, number))
        return allocator.empty_cache

    return prepared


CASES: dict[str, tuple[Callable[[int, Path], Work], tuple[int, int]]] = {
    "live_blocks": (live_blocks, (20_000, 320_000)),
    "colliding_frames": (colliding_frames, (1 << 12, 1 << 15)),
    "blocks_of_a_segment": (blocks_of_a_segment, (20_000, 80_000)),
    "segments_elsewhere": (segments_elsewhere, (4000, 16_000)),
    "pending_blocks": (pending_blocks, (1000, 8000)),
    "pools_given_back/malloc": (pools_given_back("malloc"), (2000, 32_000)),
    "pools_given_back/vmm": (pools_given_back("vmm"), (2000, 32_000)),
}


def seconds(prepare: Callable[[int, Path], Work], size: int) -> float:
    """Return the least CPU time of the work in some rounds, each prepared anew and not timed itself."""
    tries = []
    for _ in range(ROUNDS):
        with TemporaryDirectory(prefix="pyactcomp-bench-") as folder:
            work = prepare(size, Path(folder))
            begin = time.process_time()
            work()
            tries.append(time.process_time() - begin)
    return max(min(tries), 1e-6)  # a clock may not tick meanwhile


def measure(name: str, tiny: bool) -> Row:
    """Return a case's sizes, seconds and exponent."""
    prepare, full = CASES[name]
    sizes = [size // TINY for size in full] if tiny else list(full)
    took = [seconds(prepare, size) for size in sizes]
    exponent = math.log(took[1] / took[0]) / math.log(sizes[1] / sizes[0])
    return {"status": "ok", "sizes": sizes, "seconds": took, "exponent": round(exponent, 2)}


def run(options: Options) -> None:
    """Measure every case that has no row of this commit."""
    store = options.store("scaling")
    for name in CASES:
        wanted = {"workload": name, "scale": options.scale}
        if not options.selects(name) or (store.has(**wanted) and not options.again):
            continue
        row = measure(name, options.tiny)
        store.append({**wanted, **row})
        print(f"scaling {name}: {row['seconds'][0]:.4f} s and {row['seconds'][1]:.4f} s, exponent {row['exponent']}")
