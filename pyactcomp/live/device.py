"""What a device tells of its memory: the one place where this package asks CUDA."""

from __future__ import annotations

import functools
import os
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn import Module

from . import nvml


@dataclass(frozen=True)
class Counters:
    """The counters of torch's allocator, in bytes; ``retries`` counts the times that it freed its cache to go on."""

    allocated: int
    peak_allocated: int
    reserved: int
    peak_reserved: int
    retries: int


@dataclass(frozen=True)
class Blocks:
    """The allocator's blocks in use, sorted by address."""

    addresses: list[int]
    sizes: list[int]
    allocated: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "allocated", sum(self.sizes))

    def block_of(self, address: int, nbytes: int) -> tuple[int, int]:
        """Return the start and size of the block that holds an address; of memory from elsewhere, its own."""
        found = bisect_right(self.addresses, address) - 1
        if found >= 0 and address < self.addresses[found] + self.sizes[found]:
            return self.addresses[found], self.sizes[found]
        return address, nbytes


class Cuda:
    """A CUDA device of this process."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = f"cuda:{index}"

    @functools.cached_property
    def _uuid(self) -> str:
        return str(torch.cuda.get_device_properties(self.index).uuid)

    def holds(self, device: torch.device) -> bool:
        """Return whether memory of a tensor's device is on this device."""
        return device.type == "cuda" and device.index == self.index

    def counters(self) -> Counters:
        """Return the allocator's counters; calls no driver."""
        stats = torch.cuda.memory_stats(self.index)
        return Counters(
            stats.get("allocated_bytes.all.current", 0),
            stats.get("allocated_bytes.all.peak", 0),
            stats.get("reserved_bytes.all.current", 0),
            stats.get("reserved_bytes.all.peak", 0),
            stats.get("num_alloc_retries", 0),
        )

    def reset_peaks(self) -> None:
        """Let the peaks start anew from what is in use now."""
        torch.cuda.reset_peak_memory_stats(self.index)

    def blocks(self) -> Blocks:
        """Return the blocks in use: a block may exceed the request, by rounding or a rest too small to split off."""
        try:
            segments = torch.cuda.memory_snapshot(include_traces=False)  # type: ignore[no-untyped-call]
        except TypeError:  # older torch always copies the events too
            segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        found = sorted(
            (block["address"], block["size"])
            for segment in segments
            if segment["device"] == self.index
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        )
        return Blocks([address for address, _ in found], [size for _, size in found])

    def used_and_total(self) -> tuple[int, int]:
        """Return the bytes in use on the whole device, by anybody, and its size."""
        free, total = torch.cuda.mem_get_info(self.index)
        return total - free, total

    def other_processes(self) -> int | None:
        """Return the bytes of other processes, or None where they are not seen: without NVML, or in a container."""
        gpu = nvml.gpu_of(self._uuid)
        if gpu is None or all(each.pid != os.getpid() for each in gpu.processes):
            return None
        others = [each.bytes for each in gpu.processes if each.pid != os.getpid()]
        return None if None in others else sum(filter(None, others))


def find_device(given: torch.device | int | str | None, model: Module | None) -> Cuda | None:
    """Return the device to look at: the one given, else the model's, else the current one; None for the CPU.

    Raises
    ------
    TypeError, ValueError
        If ``given`` is no device, neither CUDA's nor the CPU, or not on this machine.
    """
    if given is None:
        first = next((p.device for p in model.parameters() if p.device.type != "meta"), None) if model else None
        if first is None:
            used = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            first = torch.device("cuda" if used else "cpu")
    elif isinstance(given, (torch.device, int, str)) and not isinstance(given, bool):
        try:
            first = torch.device("cuda", given) if isinstance(given, int) else torch.device(given)
        except RuntimeError as error:
            raise ValueError(f"device must be a CUDA device or the CPU, got {given!r}") from error
    else:
        raise TypeError(f"device must be a torch.device, a number or a name, got {given!r}")
    if first.type == "cpu":
        return None
    if first.type != "cuda":
        raise ValueError(f"device must be a CUDA device or the CPU, got {str(first)!r}")
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if first.index is None and count else first.index or 0
    if index >= count:
        raise ValueError(f"there is no device {given!r}: torch finds {count} CUDA devices")
    return Cuda(index)


def resident_bytes() -> int | None:
    """Return the bytes of host memory that this process uses; None where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
