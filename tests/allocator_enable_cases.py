"""Cases of test_allocator_enable_gpu.py, a process each: enable() without the torch subclass, and too late."""

from __future__ import annotations

import child_script
import pytest
import torch

from pyactcomp import PyactcompError, allocator
from pyactcomp.torch_private import extensions

MIB = 1 << 20


def enable_plainly() -> None:
    extensions.load = lambda name: (None, "its torch subclass is not built: run pyactcomp build-allocator")
    with pytest.warns(UserWarning, match="not built"):
        allocator.enable()


def statistics() -> None:
    """torch's functions and ours agree, before and after there is anything to count."""
    enable_plainly()
    assert torch.cuda.memory_allocated() == 0
    torch.cuda.init()
    assert torch.cuda.memory_allocated() == torch.accelerator.memory_allocated() == 0
    with allocator.scope("ones") as scope:
        ones = torch.ones(MIB, device="cuda")
    assert scope.allocated_bytes == torch.cuda.memory_allocated() == torch.accelerator.memory_allocated() == 4 * MIB
    stats = torch.cuda.memory_stats()
    assert {name: allocator.stats()[name] for name in stats} == stats
    assert "4096 KiB" in torch.cuda.memory_summary()
    segments = torch.cuda.memory_snapshot()
    assert sum(segment["total_size"] for segment in segments) == torch.cuda.memory_reserved()
    assert sum(segment["allocated_size"] for segment in segments) == 4 * MIB
    del ones
    assert torch.accelerator.max_memory_allocated() == 4 * MIB
    torch.accelerator.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 0
    torch.accelerator.empty_cache()
    assert torch.cuda.memory_reserved() == 0


def settings() -> None:
    enable_plainly()
    torch.ones(1, device="cuda")
    torch.cuda.set_per_process_memory_fraction(0.5)
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:64")
    assert torch.cuda.get_per_process_memory_fraction() == 0.5
    assert allocator.stats()["max_split_size"] == 64 * MIB
    with pytest.raises(ValueError, match="growth"):
        torch._C._accelerator_setAllocatorSettings("growth:malloc")


def out_of_memory() -> None:
    enable_plainly()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(256 * MIB / total)
    held = [torch.ones(16 * MIB, device="cuda")]
    with allocator.on_pressure(lambda missing: bool(held and held.clear() is None)):
        again = torch.ones(56 * MIB, device="cuda")  # with what is held it would be 288 MiB
    assert held == []
    with pytest.raises(RuntimeError, match=r"^CUDA out of memory\. Tried to allocate"):
        torch.ones(64 * MIB, device="cuda")
    del again
    assert torch.cuda.memory_allocated() == 0


def refusals() -> None:
    """What is announced as missing raises, rather than giving a wrong result."""
    enable_plainly()
    images = torch.ones(2, 3, 32, 32, device="cuda")
    convolution = torch.nn.Conv2d(3, 8, 3).cuda()
    with pytest.raises(PyactcompError, match="build-allocator"):
        torch.cuda.memory._record_memory_history()
    with pytest.raises(RuntimeError, match="does not yet support"):
        torch.cuda.MemPool()
    torch.backends.cudnn.benchmark = True
    with pytest.raises(RuntimeError, match="does not yet support cacheInfo"):
        convolution(images)


def reduce_overhead() -> None:
    enable_plainly()
    compiled = torch.compile(torch.nn.Linear(64, 64).cuda(), mode="reduce-overhead")

    def run() -> None:
        with torch.no_grad():
            for _ in range(3):
                compiled(torch.ones(64, 64, device="cuda"))

    with pytest.raises(Exception, match="build-allocator"):
        run()


def too_late() -> None:
    torch.cuda.init()
    extensions.load = lambda name: (None, "its torch subclass is not built")
    with pytest.raises(PyactcompError, match="initialised already"):
        allocator.enable()
    assert not allocator.is_enabled()
    kept = torch.ones(1, device="cuda")
    assert torch.cuda.memory_allocated() == 512, kept


def twice() -> None:
    enable_plainly()
    with pytest.raises(PyactcompError, match="enabled already, with the default settings"):
        allocator.enable()
    assert torch.ones(3, device="cuda").sum().item() == 3


if __name__ == "__main__":
    child_script.main(globals())
