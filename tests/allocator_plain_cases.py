"""Cases of test_allocator_plain_gpu.py, a process each: the allocator as the PyTorch manual attaches it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import threading
import traceback
from collections.abc import Iterable

import child_script
import pluggable_library
import pytest
import torch

from pyactcomp import _core
from pyactcomp.errors import PyactcompError

MIB = 1 << 20
OUT_OF_MEMORY = r"^CUDA out of memory\. Tried to allocate"
LIBRARY = pluggable_library.load(_core.__file__)


def install(setters: Iterable[str] = ()) -> None:
    """Make ours the allocator, by the two functions and the setters named; it lives as long as the process."""
    allocator = torch.cuda.memory.CUDAPluggableAllocator(_core.__file__, "pyactcomp_malloc", "pyactcomp_free")
    for setter in setters:
        function = pluggable_library.SETTERS[setter]
        getattr(allocator._allocator, setter)(pluggable_library.address_of(LIBRARY, function))
    torch.cuda.memory.change_current_allocator(allocator)


def counter(name: str, device: int = 0) -> int:
    return int(_core.runtime_device(device).stats()[name])


def cycles_per_second() -> float:
    """How fast ``torch.cuda._sleep`` counts, measured."""
    torch.cuda._sleep(1000)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 20_000_000
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize()
    return cycles / (begin.elapsed_time(end) * 1e-3)


def no_faults() -> None:
    assert LIBRARY.pyactcomp_fault_count() == 0, LIBRARY.pyactcomp_last_error()


def training(route: str) -> None:
    """Print a hash of the losses and weights of some steps."""
    if route == "plain":
        install()
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    digest = hashlib.sha256()
    for step in range(20):
        x = torch.randn(32 + 16 * (step % 3), 64, device="cuda")
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        digest.update(loss.item().hex().encode())
    for parameter in model.parameters():
        digest.update(bytes(parameter.detach().cpu().view(torch.uint8).flatten().tolist()))
    if route == "plain":
        assert counter("allocated_bytes.all.current") > 0
        no_faults()
    sys.stdout.write(digest.hexdigest())


def race(protected: str) -> None:
    """A side stream reads a block late; meanwhile it is freed, asked for again and overwritten on the main stream."""
    install(["set_record_stream_fn"] if protected == "protected" else [])
    rate = cycles_per_second()
    side = torch.cuda.Stream()
    numel = 8 * MIB
    read = torch.empty(numel, device="cuda")
    for _ in range(2):  # the first round loads the kernels, which would wait for the device
        block = torch.full((numel,), 1.0, device="cuda")
        torch.cuda.synchronize()
        address = block.data_ptr()
        with torch.cuda.stream(side):
            torch.cuda._sleep(int(0.2 * rate))
            read.copy_(block)
        block.record_stream(side)
        del block
        again = torch.full((numel,), 2.0, device="cuda")
        reused = again.data_ptr() == address
        torch.cuda.synchronize()
        del again
    seen = (read == 1.0).all().item()
    if protected == "protected":
        assert seen, "the block was overwritten while a stream that was recorded still read it"
        assert not reused
    else:
        # Without this the test above would prove nothing.
        assert reused
        assert (read == 2.0).all().item()
    no_faults()


def frees_behind_a_spin() -> None:
    install(["set_record_stream_fn"])
    rate = cycles_per_second()
    side = torch.cuda.Stream()
    tensors = [torch.empty(1 << (9 + index % 12), device="cuda") for index in range(1000)]
    torch.cuda.synchronize()
    torch.cuda._sleep(int(0.2 * rate))
    with torch.cuda.stream(side):
        torch.cuda._sleep(int(0.2 * rate))
    for tensor in tensors:
        tensor.record_stream(side)
    behind = [torch.cuda.Event(), torch.cuda.Event()]
    behind[0].record()
    behind[1].record(side)
    del tensor
    tensors.clear()
    assert not any(event.query() for event in behind), "the frees waited for the kernels"
    torch.cuda.synchronize()
    no_faults()


def graph() -> None:
    """A replay is right after eager code used all the memory it can get, and leaves that code's tensors alone."""
    pools = ["set_begin_allocate_to_pool", "set_end_allocate_to_pool_fn", "set_release_pool"]
    install([*pools, "set_record_stream_fn", "set_reset_fn"])
    numel = 4 * MIB

    def work(x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        return (doubled.sin() + doubled).clone() + x

    side = torch.cuda.Stream()
    x = torch.zeros(numel, device="cuda")
    with torch.cuda.stream(side):
        work(x)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=side):
        y = work(x)
        # Another thread's driver calls do not invalidate the capture: they are made in relaxed mode.
        other = threading.Thread(
            target=lambda: LIBRARY.pyactcomp_free(LIBRARY.pyactcomp_malloc(512 * MIB, 0, None), 0, 0, None)
        )
        other.start()
        other.join()
    for step in range(3):
        # On the capture's own stream, where blocks that the graph had let go would be taken again.
        with torch.cuda.stream(side):
            kept = [torch.full((numel,), 7.0, device="cuda") for _ in range(8)]
        torch.cuda.synchronize()
        x.fill_(step)
        captured.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, work(torch.full((numel,), float(step), device="cuda")))
        assert all((tensor == 7.0).all().item() for tensor in kept)
        del kept
    torch.cuda.empty_cache()
    reserved = counter("reserved_bytes.all.current")
    size = y.nbytes
    del y
    captured.reset()
    torch.cuda.empty_cache()
    assert counter("reserved_bytes.all.current") <= reserved - size
    no_faults()


def out_of_memory() -> None:
    install()
    keep = torch.ones(MIB, device="cuda")
    before = {name: counter(name) for name in ("allocated_bytes.all.current", "num_ooms")}
    total = torch.cuda.mem_get_info()[1]
    with pytest.raises(RuntimeError, match=OUT_OF_MEMORY):
        torch.empty(2 * total, dtype=torch.uint8, device="cuda")
    assert counter("allocated_bytes.all.current") == before["allocated_bytes.all.current"]
    assert counter("num_ooms") == before["num_ooms"] + 1
    assert (keep + 1).sum().item() == 2 * MIB
    no_faults()


def setters() -> None:
    """Initialisation, reset, fraction and base allocation reach the allocator."""
    install(["set_init_fn", "set_reset_fn", "set_memory_fraction_fn", "set_base_alloc_fn"])
    block = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    size = ctypes.c_size_t()
    base = LIBRARY.pyactcomp_base_alloc(block.data_ptr(), ctypes.byref(size))
    assert base <= block.data_ptr()
    assert base + size.value >= block.data_ptr() + 64 * MIB
    del block
    assert counter("reserved_bytes.all.current") >= 64 * MIB
    torch.cuda.empty_cache()
    assert counter("reserved_bytes.all.current") == 0

    # A thousandth of the device does not hold a hundredth of it.
    torch.cuda.set_per_process_memory_fraction(0.001)
    with pytest.raises(RuntimeError, match=OUT_OF_MEMORY):
        torch.empty(torch.cuda.mem_get_info()[1] // 100, dtype=torch.uint8, device="cuda")
    no_faults()


def malformed_settings(setter: str = "") -> None:
    """The bare route hears of CUDA's initialisation by the first allocation only."""
    install(filter(None, [setter]))
    with pytest.raises((RuntimeError, ValueError), match="PYACTCOMP_ALLOC_CONF"):  # noqa: PT012
        torch.cuda.init()
        assert not setter, "CUDA was initialised with malformed settings"
        torch.empty(1, device="cuda")


def mem_pool() -> None:
    """Segments of a MemPool under torch's own allocator, which keeps its statistics, its ladder and its errors."""
    source = torch.cuda.memory.CUDAPluggableAllocator(_core.__file__, "pyactcomp_pool_malloc", "pyactcomp_pool_free")
    pool = torch.cuda.MemPool(source._allocator)
    # Other processes take and give memory meanwhile, but not half of this.
    size = torch.cuda.mem_get_info()[1] // 4 // MIB * MIB
    torch.ones(1, device="cuda")
    free = torch.cuda.mem_get_info()[0]
    with torch.cuda.use_mem_pool(pool):
        block = torch.full((size // 4,), 3.0, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * torch.cuda.mem_get_info()[1], dtype=torch.uint8, device="cuda")
    assert bool((block[-MIB:] == 3).all())
    segments = pool.snapshot()
    assert any(0 <= block.data_ptr() - each["address"] < each["total_size"] for each in segments)
    assert free - torch.cuda.mem_get_info()[0] >= size // 2
    del block, pool
    torch.cuda.empty_cache()
    assert free - torch.cuda.mem_get_info()[0] < size // 2
    no_faults()


def bare_in_mem_pool() -> None:
    """Under a MemPool the throwing function is survived, too."""
    source = torch.cuda.memory.CUDAPluggableAllocator(_core.__file__, "pyactcomp_malloc", "pyactcomp_free")
    pool = torch.cuda.MemPool(source._allocator)
    with torch.cuda.use_mem_pool(pool):
        with pytest.raises(RuntimeError, match=OUT_OF_MEMORY):
            torch.empty(2 * torch.cuda.mem_get_info()[1], dtype=torch.uint8, device="cuda")
        block = torch.full((MIB,), 3.0, device="cuda")
    assert block.sum().item() == 3.0 * MIB
    assert counter("allocated_bytes.all.current") >= 4 * MIB
    del block, pool
    no_faults()


def peers() -> None:
    """Copies, kernels and streams reach across, for memory mapped before and after the other device was first used."""
    install(["set_record_stream_fn"])
    early = torch.arange(MIB, device="cuda:0")
    far = early.to("cuda:1")
    late = torch.arange(64 * MIB, device="cuda:0")
    assert torch.equal(far.cpu(), early.cpu())
    assert torch.equal(late.to("cuda:1").cpu(), late.cpu())
    assert torch.equal((far + 1).to("cuda:0"), early + 1)
    late.record_stream(torch.cuda.Stream(1))
    with torch.cuda.device(1):
        del early, late
        assert torch.cuda.current_device() == 1
    assert counter("allocated_bytes.all.current", 0) == 0
    assert counter("allocated_bytes.all.current", 1) > 0
    no_faults()


def free_from_a_thread() -> None:
    """A thread that never used CUDA frees, and asks the driver for what must wait for another stream."""
    install(["set_record_stream_fn"])
    side = torch.cuda.Stream()
    tensors = [torch.empty(MIB, device="cuda") for _ in range(16)]
    for tensor in tensors[::2]:
        tensor.record_stream(side)
    del tensor
    thread = threading.Thread(target=tensors.clear)
    thread.start()
    thread.join()
    assert counter("allocated_bytes.all.current") == 0
    assert torch.ones(MIB, device="cuda").sum().item() == MIB
    no_faults()


def fork() -> None:
    install(["set_record_stream_fn"])
    tensors = [torch.ones(MIB, device="cuda")]
    torch.cuda.synchronize()
    child = os.fork()
    if child == 0:
        try:
            _check_forked_child(tensors)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (tensors[0] + 1).sum().item() == 2 * MIB
    no_faults()


def _check_forked_child(tensors: list[torch.Tensor]) -> None:
    tensors.clear()  # the parent's: neither an error nor a deadlock
    no_faults()
    assert LIBRARY.pyactcomp_pool_malloc(MIB, 0, None) is None
    assert b"spawn" in LIBRARY.pyactcomp_last_error()
    with pytest.raises(PyactcompError, match="spawn"):
        _core.runtime_device(0)


def live_at_exit(route: str) -> None:
    """What is left at the end is freed when the interpreter, or the process, takes it down."""
    if route == "plain":
        install(["set_record_stream_fn"])
    side = torch.cuda.Stream()
    left = [torch.ones(1 << (9 + index % 12), device="cuda") for index in range(100)]
    for tensor in left[::2]:
        tensor.record_stream(side)
    module = sys.modules["__main__"]
    module.left = left  # type: ignore[attr-defined]
    module.cycle = [left, lambda: module]  # type: ignore[attr-defined]


def wrong_frees() -> None:
    install()
    torch.ones(1, device="cuda")
    address = LIBRARY.pyactcomp_malloc(MIB, 0, None)
    LIBRARY.pyactcomp_free(address, MIB, 0, None)
    no_faults()
    before = counter("allocated_bytes.all.current")
    for fault, wrong in enumerate((address, address + 512, 0x1000), start=1):
        LIBRARY.pyactcomp_free(wrong, MIB, 0, None)
        assert LIBRARY.pyactcomp_fault_count() == fault
        assert f"{wrong:#x}".encode() in LIBRARY.pyactcomp_last_error()
    assert counter("allocated_bytes.all.current") == before
    _core.runtime_device(0).check_invariants()


if __name__ == "__main__":
    child_script.main(globals())
