"""A device in place of CUDA for tests, with blocks of the allocator's core, and a driver in place of NVML."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from pyactcomp.allocator import AllocatorConfig, CachingAllocator, SimulatedDevice
from pyactcomp.live import breakdown, monitor
from pyactcomp.live.device import Blocks, Counters
from pyactcomp.live.held import alive, memory_of

CONTEXT = 300 << 20


class StandIn:
    """Gives each storage of the CPU that it sees a block of a simulated device; the blocks' sizes are the core's."""

    name = "cuda:0"

    def __init__(self, others: int | None = 64 << 20) -> None:
        self.others = others
        self.core = CachingAllocator(SimulatedDevice("1GiB"), AllocatorConfig(growth="malloc"))
        self._blocks: dict[int, int] = {}
        self.retries = 0
        self.resets = 0

    def holds(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def see(self) -> None:
        """Follow the storages that are alive."""
        found = {address: nbytes for each in alive(Tensor) for _, address, nbytes in memory_of(each)}
        for address in self._blocks.keys() - found.keys():
            self.core.free(self._blocks.pop(address))
        for address, nbytes in found.items():
            if address not in self._blocks:
                self._blocks[address] = self.core.allocate(nbytes)

    def counters(self) -> Counters:
        stats = self.core.stats()
        names = ("allocated_bytes.all.current", "allocated_bytes.all.peak")
        more = ("reserved_bytes.all.current", "reserved_bytes.all.peak")
        return Counters(*(stats[name] for name in (*names, *more)), self.retries)

    def reset_peaks(self) -> None:
        self.resets += 1
        self.core.reset_peak_stats()

    def blocks(self) -> Blocks:
        self.see()
        sizes = {
            block["address"]: block["size"]
            for segment in self.core.snapshot()["segments"]
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        }
        pairs = sorted((address, sizes[block]) for address, block in self._blocks.items())
        return Blocks([address for address, _ in pairs], [size for _, size in pairs])

    def used_and_total(self) -> tuple[int, int]:
        return CONTEXT + self.counters().reserved + (self.others or 0), 1 << 30

    def other_processes(self) -> int | None:
        return self.others


def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Let pyactcomp.live find this device in place of CUDA's."""
    device = StandIn()
    for module in (breakdown, monitor):
        monkeypatch.setattr(module, "find_device", lambda given, model: device)
    return device


class Driver(SimpleNamespace):
    """In place of nvidia-ml-py: two GPUs, and processes on the second."""

    class NVMLError(Exception):
        pass

    def __init__(self, processes: dict[int, int | None]) -> None:
        running = [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in processes.items()]
        super().__init__(
            nvmlInit=lambda: None,
            nvmlDeviceGetCount=lambda: 2,
            nvmlDeviceGetHandleByIndex=lambda index: index,
            nvmlDeviceGetName=lambda handle: b"H100",
            nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}00",
            nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=30 << 30, total=80 << 30),
            nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=50),
            nvmlDeviceGetComputeRunningProcesses=lambda handle: running if handle == 1 else [],
            nvmlSystemGetProcessName=self.name_of,
        )

    def name_of(self, pid: int) -> str:
        if pid == 7:
            raise self.NVMLError
        return "python"
