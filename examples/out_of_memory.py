"""A training that ran out of memory: where the memory was, and the settings under which it fits.

It needs a snapshot that ``torch.cuda.memory._dump_snapshot`` wrote and no GPU. Without one this example makes one, from
a fine-tuning with random sequence lengths that was recorded on an H200 (``tests/data/traces``), given 14 GiB.
"""

from __future__ import annotations

import argparse
import json
import pickle
import tempfile
from pathlib import Path

import numpy as np
import torch

from pyactcomp.allocator import AllocatorConfig, CachingAllocator, SimulatedDevice
from pyactcomp.snapshots import explain, read_snapshot, tune

TRACE = Path(__file__).parents[1] / "tests" / "data" / "traces" / "sft_varlen.npz"


def record(path: Path, capacity: str) -> None:
    """Write the snapshot of the recorded training on a device of this capacity, with PyTorch's decisions."""
    with np.load(TRACE) as trace:
        names = json.loads(str(trace["meta"]))["actions"]
        rows = list(zip(*(trace[key].tolist() for key in ("action", "addr", "size")), strict=True))
    allocator = CachingAllocator(SimulatedDevice(capacity), AllocatorConfig(growth="malloc"))
    allocator.record_history("all", max_entries=1 << 20, stacks=None)
    live = {}
    try:
        for action, address, size in rows:
            if names[action] == "alloc":
                live[address] = allocator.allocate(size)
            else:
                allocator.free(live.pop(address))
    except torch.OutOfMemoryError as error:
        print(f"the training fails:\n{error}\n")
    snapshot = allocator.snapshot()
    snapshot["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = ""
    for index, event in enumerate(snapshot["device_traces"][0]):
        event["time_us"] = 38 * index  # the trace has none; the run's steps, 3,114 events each, took about 0.12 s
    path.write_bytes(pickle.dumps(snapshot, protocol=4))


def gib(size: int | None) -> str:
    """Return bytes in words."""
    return "unknown" if size is None else f"{size / 2**30:.2f} GiB"


def main() -> None:
    """Explain, and look for settings."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("snapshot", type=Path, nargs="?", help="by default one is made")
    options.add_argument("--capacity", default="14GiB")
    arguments = options.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        path = arguments.snapshot
        if path is None:
            path = Path(folder) / "oom.pickle"
            record(path, arguments.capacity)
        snapshot = read_snapshot(path)

    found = explain(snapshot, capacity=arguments.capacity)
    print(f"live {gib(found.live_bytes)} in {found.live_blocks} blocks, reserved {gib(found.reserved_bytes)}")
    print(f"free {gib(found.free_bytes)} in it, the largest block {gib(found.largest_free)}")
    for group in found.by_size[-3:]:
        print(f"  {group.label}: {group.blocks} blocks, {gib(group.bytes)}")

    print("\nthe same requests under each allocator:")
    for one in found.fits:
        end = "fits" if one.oom_at is None else f"out of memory at event {one.oom_at}"
        print(f"  {one.config}: {gib(one.peak_reserved)} reserved, {end}")

    best = tune(snapshot, arguments.capacity).best
    print(f"\nbest: {best.config}, which needs {gib(best.smallest_capacity)}")


if __name__ == "__main__":
    main()
