"""Cases of test_allocator_pausing.py, a process each, on a driver that checks what it is told."""

from __future__ import annotations

import ctypes

import child_script
import pytest
import torch

from pyactcomp import PyactcompError, _core

MIB = 1 << 20


def on_a_driver() -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    for call in (driver.fake_left, driver.fake_copied, driver.fake_pinned):
        call.restype = ctypes.c_ulonglong
    allocator = _core.runtime_device(0)
    blocks = [allocator.allocate(size * MIB) for size in (1, 300, 5, 90)]
    allocator.free(blocks.pop(2))
    live = (1 + 300 + 90) * MIB
    for cycle in range(3):
        report = allocator.pause({"": True})
        assert driver.fake_left() == 0
        assert report["saved"] == live
        assert report["pinned"] == (driver.fake_pinned() if cycle == 0 else 0)
        ranges = allocator.saved(blocks[1], 300 * MIB)
        assert sum(size for _, size in ranges) == 300 * MIB
        # The driver wrote the address of each unit.
        assert ctypes.c_ulonglong.from_address(ranges[0][0]).value == blocks[1]
        allocator.resume([""])
        assert driver.fake_copied() == 2 * (cycle + 1) * live
        allocator.check_invariants()
    allocator.trim_host()
    assert driver.fake_pinned() == 0
    allocator.pause({"": False})
    other = allocator.allocate(1000 * MIB, tag="other")
    with pytest.raises(torch.OutOfMemoryError, match="still paused"):
        allocator.resume([""])
    allocator.free(other)
    allocator.resume([""])
    allocator.check_invariants()


def malloc_growth() -> None:
    allocator = _core.runtime_device(0)
    allocator.allocate(MIB)
    with pytest.raises(PyactcompError, match="growth"):
        allocator.pause({"": True})


if __name__ == "__main__":
    child_script.main(globals())
