"""Two simulated devices in place of GPUs, for tests of allocator.pause, resume, tag and memory_saver."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pyactcomp import _core
from pyactcomp.allocator import AllocatorConfig, CachingAllocator, SimulatedDevice, memory_saver, pausing


class Meddled:
    """An allocator whose calls a test replaces."""

    def __init__(self, real: CachingAllocator, **calls: Callable[..., Any]) -> None:
        self.real, self.calls = real, calls

    def __getattr__(self, name: str) -> Any:
        return self.calls.get(name) or getattr(self.real, name)


class Machine:
    """Two simulated devices, and a thread whose tag is a number."""

    def __init__(self) -> None:
        self.devices = [SimulatedDevice("2GiB"), SimulatedDevice("2GiB")]
        self.allocators = [CachingAllocator(device, AllocatorConfig(growth="vmm")) for device in self.devices]
        self.used = {0, 1}
        self.tag = 0
        self.names: dict[int, str] = {0: ""}

    def set_tag(self, tag: int) -> int:
        before, self.tag = self.tag, tag
        return before

    def tag_named(self, name: str) -> int:
        tag = _core.tag_named(name)
        self.names[tag] = name
        return tag

    def allocate(self, size: int, device: int = 0) -> int:
        return self.allocators[device].allocate(size, tag=self.names[self.tag])

    def existing(self, index: int) -> CachingAllocator | None:
        return self.allocators[index] if index in self.used else None

    @property
    def reserved(self) -> list[int]:
        return [device.reserved for device in self.devices]

    @property
    def paused(self) -> list[set[str]]:
        return [set(each.paused()) for each in self.allocators]


def installed(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return a machine that the package's functions use until the test ends."""
    made = Machine()
    real = SimpleNamespace(runtime_existing=made.existing, tag_named=made.tag_named, __file__=_core.__file__)
    monkeypatch.setattr(pausing, "_core", real)
    monkeypatch.setattr(pausing, "_kept", {})
    monkeypatch.setattr(pausing, "_options", {})
    monkeypatch.setattr(pausing, "is_enabled", lambda: True)
    monkeypatch.setattr(pausing.extensions, "load", lambda name: (SimpleNamespace(set_tag=made.set_tag), None))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "memory_reserved", lambda index: made.allocators[index].counters()["reserved_bytes.all.current"]
    )
    monkeypatch.setattr(memory_saver.attach, "is_enabled", lambda: True)
    return made
