"""Cases of test_allocator_torch_gpu.py, a process each: what torch tells of memory on the allocator as its subclass."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
import warnings
from pathlib import Path

import child_script
import pytest
import torch
from allocator_torch_cases import MIB, enable, filled
from torch import nn

from pyactcomp import allocator

OUT_OF_MEMORY = r"^CUDA out of memory\. Tried to allocate"


def unknown(growth: str) -> None:
    """Devices and pools that do not exist raise as under torch's own allocator."""
    enable(growth)
    held = torch.ones(1, device="cuda")
    for call in (
        torch.cuda.memory_allocated,
        torch.cuda.memory_stats,
        torch.cuda.reset_peak_memory_stats,
        torch.cuda.reset_accumulated_memory_stats,
        torch._C._cuda_memoryStats,
        torch._C._cuda_resetPeakMemoryStats,
        torch.cuda.memory.get_per_process_memory_fraction,
    ):
        with pytest.raises((RuntimeError, ValueError)):
            call(99)
    for name in ("_cuda_releasePool", "_cuda_endAllocateToPool"):
        with pytest.raises(RuntimeError):
            getattr(torch._C, name)(0, (7, 7))
    with pytest.raises(RuntimeError):
        torch._C._cuda_checkPoolLiveAllocations(0, (7, 7), set())
    assert torch.cuda.memory_allocated() == 512
    assert float(held) == 1.0


def history_of_frees(growth: str) -> None:
    """What torch's tests of memory plots ask for, at each level of recording."""
    enable(growth)
    for context in ("alloc", "all", "state"):
        torch.cuda.memory.empty_cache()
        torch.cuda.memory._record_memory_history(context=context)
        made: list[torch.Tensor] = []

        def allocating(made: list[torch.Tensor] = made) -> None:
            made.append(torch.rand(3, 4, device="cuda"))

        def freeing(made: list[torch.Tensor] = made) -> None:
            made.clear()

        allocating()
        freeing()
        torch.cuda.memory.empty_cache()
        text = json.dumps(torch.cuda.memory._snapshot())
        torch.cuda.memory._record_memory_history(None)
        assert ("freeing" in text) == (context == "all")
        assert ("allocating" in text) == (context != "state")
        assert ("empty_cache" in text) == (context == "all")


def statistics(growth: str) -> None:
    enable(growth)
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == (0, 0)
    tensor = torch.empty(1000, dtype=torch.uint8, device="cuda")
    stats = torch.cuda.memory_stats()
    assert stats["requested_bytes.all.current"] == 1000
    assert torch.cuda.memory_allocated() == stats["allocated_bytes.small_pool.current"] == 1024
    segments = torch.cuda.memory_snapshot()
    assert sum(segment["total_size"] for segment in segments) == torch.cuda.memory_reserved() > 0
    assert sum(segment["allocated_size"] for segment in segments) == 1024
    assert sum(block["size"] for segment in segments for block in segment["blocks"]) == torch.cuda.memory_reserved()
    assert tensor.data_ptr() in {block["address"] for segment in segments for block in segment["blocks"]}
    assert "Allocated memory" in torch.cuda.memory_summary()

    accelerator = torch.accelerator
    assert accelerator.memory_allocated() == 1024
    assert accelerator.memory_reserved() == torch.cuda.memory_reserved()
    shared = accelerator.memory_stats().keys() & stats.keys()
    assert "active_bytes.large_pool.peak" in shared
    assert {name: accelerator.memory_stats()[name] for name in shared} == {name: stats[name] for name in shared}

    del tensor
    assert (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) == (0, 1024)
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 0
    assert torch.cuda.memory_stats()["allocated_bytes.all.allocated"] == 1024
    torch.cuda.reset_accumulated_memory_stats()
    assert torch.cuda.memory_stats()["allocated_bytes.all.allocated"] == 0

    total = torch.cuda.mem_get_info()[1]
    kept = torch.empty(total // 4, dtype=torch.uint8, device="cuda")
    del kept
    reserved, free = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    assert reserved >= total // 4
    accelerator.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    # Other processes take and give in between, but not an eighth of the device.
    assert torch.cuda.mem_get_info()[0] - free >= total // 8


def small_numbers(growth: str) -> None:
    """The accounting in units of 512 bytes, as differences once cuBLAS has its workspaces."""
    enable(growth)
    assert torch.cuda.memory_allocated() == 0
    for features, bias in ((1, False), (1, True)):
        warm = nn.Linear(features, 1, bias=bias, device="cuda")
        warm(torch.ones(1024, features, device="cuda")).mean().backward()
        warm(torch.ones(1, features, device="cuda")).mean().backward()
        del warm
    base = torch.cuda.memory_allocated()

    def used() -> int:
        return torch.cuda.memory_allocated() - base

    scalars = []
    for expected in (512, 1024, 1536):
        scalars.append(torch.tensor(0.0, device="cuda"))
        assert used() == expected
    scalars.clear()
    for features, expected in ((1, 512), (128, 512), (129, 1024)):
        layer = nn.Linear(features, 1, bias=False, device="cuda")
        assert used() == expected
        del layer
    layers = [nn.Linear(1, 1, bias=False, device="cuda") for _ in range(2)]
    assert used() == 1024
    del layers

    model = nn.Linear(1, 1, device="cuda")
    seen = [used()]
    inputs = torch.ones(1024, 1, device="cuda")
    seen.append(used())
    outputs = model(inputs)
    seen.append(used())
    loss = outputs.mean()
    seen.append(used())
    loss.backward()
    seen.append(used())
    assert seen == [1024, 5120, 9216, 9728, 10752]
    del model, inputs, outputs, loss
    assert used() == 0

    model = nn.Linear(1, 1, bias=False, device="cuda")
    seen = [used()]
    inputs = torch.ones(1, 1, device="cuda")
    seen.append(used())
    outputs = model(inputs)
    seen.append(used())
    loss = outputs.mean()
    seen.append(used())
    loss.backward()
    seen.append(used())
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    seen.append(used())
    assert seen == [512, 1024, 1536, 2048, 2560, 3584]


def history(folder: str) -> None:
    enable()
    memory, before = torch.cuda.memory, time.time()
    memory._record_memory_history(stacks="python", max_entries=1000)
    tensor = filled(3 * MIB)
    address = tensor.data_ptr()
    live = {block["address"]: block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]}
    assert any(frame["name"] == "filled" for frame in live[address]["frames"])
    del tensor

    snapshot = memory._snapshot()
    events = [event for event in snapshot["device_traces"][0] if event.get("addr") == address]
    assert [event["action"] for event in events][-3:] == ["alloc", "free_requested", "free_completed"]
    allocated, _, freed = events[-3:]
    assert allocated["size"] == freed["size"] == 3 * MIB
    assert any(frame["name"] == "history" and frame["filename"] == __file__ for frame in allocated["frames"])
    assert before <= allocated["time_us"] / 1e6 <= time.time()
    assert {"segment_alloc", "segment_map"} & {event["action"] for event in snapshot["device_traces"][0]}

    row = [filled(3 * MIB) for _ in range(3)]
    row[0] = row[2] = None  # type: ignore[call-overload]
    pin = next(pin for pin in allocator.stats()["pins"] if pin["address"] == row[1].data_ptr())
    assert any(frame["name"] == "history" for frame in pin["frames"])

    path = Path(folder) / "snapshot.pickle"
    memory._dump_snapshot(str(path))
    assert pickle.loads(path.read_bytes())["allocator_settings"]["expandable_segments"] is True
    for command in ("stats", "trace"):
        viewer = [sys.executable, "-m", "torch.cuda._memory_viz", command, str(path)]
        shown = subprocess.run(viewer, capture_output=True, text=True, check=False)
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout

    memory._record_memory_history(context="state", stacks="python", clear_history=True)
    tensor = filled(MIB)
    assert not any(event.get("frames") for event in memory._snapshot()["device_traces"][0])
    live = {block["address"]: block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]}
    assert any(frame["name"] == "history" for frame in live[tensor.data_ptr()]["frames"])

    memory._record_memory_history(
        stacks="python", skip_actions=["free_requested"], clear_history=True, global_record_annotations=True
    )
    with torch.profiler.record_function("marked"):
        del tensor
    snapshot = memory._snapshot()
    actions = [event["action"] for event in snapshot["device_traces"][0]]
    assert "free_completed" in actions
    assert "free_requested" not in actions
    assert any("marked" in entry.values() for entry in snapshot["external_annotations"])

    memory._record_memory_history(None)
    assert not torch._C._cuda_isHistoryEnabled()
    filled(MIB)
    assert memory._snapshot()["device_traces"][0] == []


def out_of_memory(growth: str) -> None:
    enable(growth)
    seen: list[tuple[int, ...]] = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *numbers: seen.append(numbers))
    kept = filled(MIB, 3)
    before = torch.cuda.memory_stats()
    total = torch.cuda.mem_get_info()[1]
    with pytest.raises(torch.OutOfMemoryError, match=OUT_OF_MEMORY):
        torch.empty(2 * total, dtype=torch.uint8, device="cuda")
    assert [(device, requested >= 2 * total, limit) for device, requested, limit, _ in seen] == [(0, True, total)]
    after = torch.cuda.memory_stats()
    assert after["num_ooms"] == before["num_ooms"] + 1
    unchanged = [name for name in before if name.endswith(".current") and name.startswith(("alloc", "active", "req"))]
    assert {name: after[name] for name in unchanged} == {name: before[name] for name in unchanged}
    assert filled(MIB, 4).sum().item() == 4 * MIB // 4
    assert kept.sum().item() == 3 * MIB // 4


def limits(growth: str) -> None:
    enable(growth)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(0.1)
    assert torch.cuda.get_per_process_memory_fraction() == 0.1
    with pytest.raises(torch.OutOfMemoryError, match=OUT_OF_MEMORY):
        torch.empty(total // 5, dtype=torch.uint8, device="cuda")
    torch.empty(total // 20, dtype=torch.uint8, device="cuda")

    warnings.simplefilter("ignore", FutureWarning)  # of the deprecation of the very name that programs use
    change = torch.cuda.memory._set_allocator_settings
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    assert settings["max_split_size"] == -1
    change("max_split_size_mb:256")
    assert torch.cuda.memory._snapshot()["allocator_settings"]["max_split_size"] == 256 * MIB
    assert torch.cuda.get_per_process_memory_fraction() == 0.1
    other = "vmm" if growth == "malloc" else "malloc"
    for refused in (f"growth:{other}", "max_split_size_mb:1", "no_such_key:1"):
        with pytest.raises((ValueError, RuntimeError)):
            change(refused)
    assert torch.cuda.memory._snapshot()["allocator_settings"]["max_split_size"] == 256 * MIB
    with pytest.warns(UserWarning, match="'expandable_segments' has no effect"):
        change("expandable_segments:True")
    change("expandable_segments:False,pinned_num_register_threads:8")
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    assert settings["max_split_size"] == -1
    assert settings["expandable_segments"] == (growth == "vmm")
    assert settings["pinned_num_register_threads"] == 8
    change("pinned_num_register_threads:1")


if __name__ == "__main__":
    child_script.main(globals())
