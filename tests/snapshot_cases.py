"""What the tests of snapshots share: snapshots by hand, and of the core on a simulated device."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from allocator_cases import make

from pyactcomp.snapshots.reader import Snapshot, read_snapshot

TRACES = Path(__file__).parent / "data" / "traces"
RECORDED = ("sft_varlen", "bert_accum_eval", "lora_offload", "multiscale_resnet", "moe")

BASE = 1 << 46
FRAME = {"filename": "model.py", "line": 12, "name": "forward"}


def event(action: str, addr: int, size: int, **others: Any) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": 10, "frames": [], **others}


def block(address: int, size: int, state: str = "active_allocated", **others: Any) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": [], **others}


def segment(address: int, *blocks: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {
        "device": 0,
        "address": address,
        "total_size": sum(entry["size"] for entry in blocks),
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": list(blocks),
        **others,
    }


def content(
    events: list[dict[str, Any]] | None = None, segments: list[dict[str, Any]] | None = None, **others: Any
) -> dict[str, Any]:
    return {
        "segments": segments or [],
        "device_traces": [events or []],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1},
        "external_annotations": [],
        **others,
    }


def write(directory: Path, data: object, protocol: int | str = 4) -> Path:
    """Write a snapshot as ``torch.cuda.memory._dump_snapshot`` does, or as JSON."""
    if protocol == "json":
        path = directory / "snapshot.json"
        path.write_text(json.dumps(data))
    else:
        path = directory / "snapshot.pickle"
        path.write_bytes(pickle.dumps(data, protocol=int(protocol)))
    return path


def read(directory: Path, data: object, protocol: int | str = 4) -> Snapshot:
    return read_snapshot(write(directory, data, protocol))


def recorded(name: str) -> dict[str, Any]:
    """Return a recorded trace as the snapshot of its run, which has no segments."""
    with np.load(TRACES / f"{name}.npz") as file:
        meta = json.loads(str(file["meta"]))
        columns = [file[key].tolist() for key in ("action", "addr", "size", "stream")]
    names = meta["actions"]
    trace = [
        event(names[action], addr, size, stream=stream, time_us=index)
        for index, (action, addr, size, stream) in enumerate(zip(*columns, strict=True))
    ]
    return content(trace)


def rerun(name: str, growth: str, cuts: tuple[float, ...]) -> tuple[dict[str, Any], list[tuple[int, dict[str, Any]]]]:
    """Return a recorded trace's snapshot on our core; and, of each cut, its event and the segments there."""
    allocator, _ = make(growth, capacity="140GiB")
    allocator.record_history("all", max_entries=1 << 22, stacks=None, skip_actions=["snapshot"])
    addresses: dict[int, int] = {}
    trace = recorded(name)["device_traces"][0]
    at = [int(len(trace) * cut) for cut in cuts]
    states = []
    for index, entry in enumerate(trace):
        if index in at:
            state = allocator.snapshot()
            states.append((len(state["device_traces"][0]), state))
        if entry["action"] == "alloc":
            addresses[entry["addr"]] = allocator.allocate(entry["size"], entry["stream"])
        else:
            allocator.free(addresses.pop(entry["addr"]))
    return allocator.snapshot(), states
