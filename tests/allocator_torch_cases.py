"""Cases of test_allocator_torch_gpu.py, a process each: torch at work on the allocator as a subclass of torch's.

Where numbers are compared exactly, they are small integers, which float32 adds without rounding in any order.
"""

from __future__ import annotations

import gc
import time
import warnings

import child_script
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pyactcomp import PyactcompError, allocator

KIB, MIB = 1 << 10, 1 << 20


def enable(growth: str = "vmm", **settings: object) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the plain route is announced by a warning
        allocator.enable(growth=growth, **settings)  # type: ignore[arg-type]
    assert torch.cuda.get_allocator_backend() == "pyactcomp"


def filled(size: int, value: float = 0.0) -> torch.Tensor:
    """A tensor of so many bytes."""
    return torch.full((size // 4,), value, dtype=torch.float32, device="cuda")


def integers(*shape: int, limit: int = 3, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-limit, limit + 1, shape, generator=generator).float().cuda()


def with_integers(model: nn.Module) -> nn.Module:
    for seed, parameter in enumerate(model.parameters()):
        parameter.data = integers(*parameter.shape, limit=2, seed=seed)
    return model.cuda()


def spin(seconds: float) -> None:
    """Keep the current stream busy for at least so long: no GPU's clock reaches 3 GHz."""
    torch.cuda._sleep(int(seconds * 3e9))


def no_split(growth: str) -> None:
    enable(growth)
    pool = torch.cuda.MemPool(no_split=True)
    seen = []
    for _ in range(5):
        with torch.cuda.use_mem_pool(pool):
            made = [torch.empty(4 * MIB, dtype=torch.uint8, device="cuda") for _ in range(10)]
        del made
        seen.append(len(pool.snapshot()))
    assert seen == [10] * 5


def convolution() -> None:
    enable()
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False
    convolution = with_integers(nn.Conv2d(16, 32, 3, padding=1))
    for size in (32, 48, 64):
        images = integers(4, 16, size, size)
        expected = nn.functional.conv2d(
            images.cpu().double(), convolution.weight.cpu().double(), convolution.bias.cpu().double(), padding=1
        )
        # Integers below 2^10, which the rounding of any algorithm misses by far less than a half.
        assert torch.equal(convolution(images).round().cpu().double(), expected)


def graph(growth: str) -> None:
    enable(growth)
    filled(MIB)
    torch.cuda.empty_cache()
    static = filled(8 * MIB, 1)

    def work() -> torch.Tensor:
        twice = static * 2
        return (twice + 1) * (twice + 2)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        result = work()
    pools = {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()}
    assert pools == {(0, 0), tuple(captured.pool())}
    for value in range(5):
        # As large as the graph's temporaries, which are free by now and must not be handed out.
        eager = [filled(8 * MIB, -1) for _ in range(4)]
        static.fill_(value)
        captured.replay()
        assert torch.equal(result, torch.full_like(result, (2 * value + 1) * (2 * value + 2)))
        assert all(bool((tensor == -1).all()) for tensor in eager)
        del eager
    second = torch.cuda.CUDAGraph()
    with torch.cuda.graph(second, pool=captured.pool()):
        other = static - 1
    second.replay()
    assert torch.equal(other, static - 1)
    del result, other
    captured.reset()
    second.reset()
    del captured, second
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before


def reduce_overhead(growth: str) -> None:
    enable(growth)
    model = with_integers(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))
    compiled = torch.compile(model, mode="reduce-overhead")
    kept = None
    for step in range(12):
        torch.compiler.cudagraph_mark_step_begin()
        # A second shape is recorded while the first one's outputs are alive, and in steps where they are not.
        inputs = integers(32 if step % 4 < 2 else 48, 64, seed=step)
        weights = integers(inputs.shape[0], 8, seed=100 + step)
        outputs = compiled(inputs)
        expected = model(inputs)
        assert torch.equal(outputs, expected)
        wanted = torch.autograd.grad((expected * weights).sum(), list(model.parameters()))
        got = torch.autograd.grad((outputs * weights).sum(), list(model.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        kept = None if step % 3 else outputs.clone()
        del outputs, got
    assert kept is None
    with torch.no_grad():
        for step in range(6):
            inputs = integers(32, 64, seed=step)
            first = compiled(inputs)
            assert torch.equal(first, model(inputs))
            if step % 2:
                del first
    skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    assert skipped == 0
    assert any(tuple(segment["segment_pool_id"]) != (0, 0) for segment in torch.cuda.memory_snapshot())


def pool_or_capture(growth: str) -> None:
    """Within a MemPool memory is given back and collected as ever; within a capture the device is not waited for."""
    enable(growth)
    cached = filled(512 * MIB, 1)
    del cached
    side = torch.cuda.Stream()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() < 512 * MIB
        for _ in range(8):
            block = filled(64 * MIB, 2)
            block.record_stream(side)
            del block
            side.synchronize()
    assert sum(segment["total_size"] for segment in pool.snapshot()) == 64 * MIB
    given, taken = filled(4 * MIB, 3), filled(4 * MIB, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.cuda.empty_cache()
        twice = given + given
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            taken.copy_(twice)
        twice.record_stream(side)
        torch.cuda.current_stream().wait_stream(side)
        del twice
    graph.replay()
    assert torch.equal(taken, given + given)


def mem_pool(growth: str) -> None:
    enable(growth)
    outside = filled(MIB, 1)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = filled(4 * MIB, 2)
    after = filled(4 * MIB, 3)

    def holds(segments: list[dict[str, object]], tensor: torch.Tensor) -> bool:
        return any(block["address"] == tensor.data_ptr() for segment in segments for block in segment["blocks"])  # type: ignore[attr-defined]

    segments = pool.snapshot()
    assert holds(segments, inside)
    assert not holds(segments, outside)
    assert not holds(segments, after)
    assert {tuple(segment["segment_pool_id"]) for segment in segments} == {tuple(pool.id)}
    assert pool.use_count() == 1
    reserved = torch.cuda.memory_reserved()
    in_pool = sum(segment["total_size"] for segment in segments)
    del inside, pool
    gc.collect()
    assert torch.cuda.memory_reserved() == reserved - in_pool

    # The plain pair would ask this allocator for its own lock, were it not to notice.
    for names in (("pyactcomp_pool_malloc", "pyactcomp_pool_free"), ("pyactcomp_malloc", "pyactcomp_free")):
        source = torch.cuda.memory.CUDAPluggableAllocator(allocator.library_path(), *names)
        pool = torch.cuda.MemPool(source.allocator(), no_split=True)
        with torch.cuda.use_mem_pool(pool):
            inside = filled(4 * MIB, 5)
        assert holds(pool.snapshot(), inside)
        assert not any(segment["is_expandable"] for segment in pool.snapshot())
        assert inside.sum().item() == 5 * MIB
        del inside, pool
        gc.collect()
        assert {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()} == {(0, 0)}


def profiled() -> None:
    enable()
    filled(MIB)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        kept = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
        gone = torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
        del gone
    by_name = {entry.key: entry for entry in profile.key_averages()}
    assert by_name["aten::empty"].self_device_memory_usage == 6 * MIB
    assert by_name["[memory]"].self_device_memory_usage == -2 * MIB
    assert kept.numel() == 4 * MIB


def gpu_trace() -> None:
    enable()
    from torch.cuda import _gpu_trace

    seen: list[tuple[str, int]] = []
    _gpu_trace.register_callback_for_memory_allocation(lambda address: seen.append(("alloc", address)))
    _gpu_trace.register_callback_for_memory_deallocation(lambda address: seen.append(("free", address)))
    torch._C._activate_gpu_trace()
    tensor = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    address = tensor.data_ptr()
    del tensor
    assert seen == [("alloc", address), ("free", address)]


def after_initialisation(growth: str) -> None:
    pool = torch.cuda.MemPool()
    early = filled(32 * MIB, 1)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        doubled = early[:1024] * 2
    native_allocated, native_reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    peak = torch.cuda.max_memory_allocated()
    enable(growth)
    assert torch.cuda.memory_allocated() == native_allocated
    assert torch.cuda.memory_reserved() == native_reserved
    assert torch.cuda.max_memory_allocated() == peak

    late = filled(4 * MIB, 2)
    assert torch.cuda.memory_allocated() - native_allocated == 4 * MIB, (
        torch.cuda.memory_allocated(),
        native_allocated,
        torch.cuda.memory_snapshot(),
    )
    segments = torch.cuda.memory_snapshot()
    assert sum(segment["total_size"] for segment in segments) == torch.cuda.memory_reserved() > native_reserved
    early.add_(late[0])
    early.record_stream(torch.cuda.Stream())
    captured.replay()
    assert torch.equal(doubled, torch.full_like(doubled, 6))
    with pytest.raises(RuntimeError, match="before pyactcomp's allocator was enabled"), torch.cuda.use_mem_pool(pool):
        pass
    del doubled, pool
    captured.reset()
    assert bool((early == 3).all())
    del early, captured
    torch.cuda.synchronize()
    # What the random generator keeps for graphs may be native still.
    assert 4 * MIB <= torch.cuda.memory_allocated() <= 4 * MIB + native_allocated - 32 * MIB - 4 * KIB
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == sum(segment["total_size"] for segment in torch.cuda.memory_snapshot())
    assert torch.cuda.memory_reserved() < native_reserved
    assert bool((late == 2).all())
    with pytest.raises(PyactcompError, match="enabled already"):
        allocator.enable()


def raw() -> None:
    enable()
    torch.cuda.init()
    pointer = torch.cuda.caching_allocator_alloc(1000)
    assert torch.cuda.memory_allocated() == 1024
    torch.cuda.caching_allocator_delete(pointer)
    before = torch.cuda.memory_stats()
    for unknown in (pointer, pointer + 512, 12345):
        with pytest.raises(RuntimeError, match="invalid device pointer"):
            torch.cuda.caching_allocator_delete(unknown)
    assert torch.cuda.memory_stats() == before
    assert torch.cuda.caching_allocator_alloc(0) == 0

    torch.cuda.memory.caching_allocator_enable(False)
    straight = filled(MIB, 7)
    assert torch.cuda.memory_allocated() == 0
    assert straight.sum().item() == 7 * MIB // 4
    del straight
    torch.cuda.memory.caching_allocator_enable(True)


def race(growth: str, protection: str) -> None:
    enable(growth)
    size = 8 * MIB
    side = torch.cuda.Stream()
    source, read = filled(size, 7), filled(size, 0)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        spin(0.1)
        read.copy_(source)
    if protection == "protected":
        source.record_stream(side)
    address = source.data_ptr()
    del source
    overwriting = filled(size, 1)
    reused = overwriting.data_ptr() == address
    torch.cuda.synchronize()
    # Without protection the block is reused at once: what the protection is tested against does happen.
    assert reused == (protection == "unprotected")
    assert bool((read == (1 if reused else 7)).all())
    del overwriting
    again = filled(size, 2)
    assert bool((again == 2).all())


def frees_behind_a_spin(growth: str) -> None:
    enable(growth)
    side = torch.cuda.Stream()
    tensors = [filled(4 * KIB) for _ in range(1000)]
    allocated = torch.cuda.memory_allocated()
    with torch.cuda.stream(side):
        spin(0.2)
    for tensor in tensors:
        tensor.record_stream(side)
    del tensor
    # This thread's own time: tests that run beside take the processor away for longer than the frees last.
    begin = time.thread_time()
    tensors.clear()
    seconds = time.thread_time() - begin
    assert not side.query()
    assert seconds < 0.010
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] == allocated - 1000 * 4 * KIB
    assert stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"] == 1000 * 4 * KIB
    torch.cuda.synchronize()


def _reduce(rank: int, world: int, path: str) -> None:
    torch.cuda.set_device(rank)
    enable()
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=world)
    for step in range(50):
        # Each is freed while the communication's stream may still use it, and its memory asked for again at once.
        tensor = torch.full((MIB,), float(rank + step), device="cuda")
        work = dist.all_reduce(tensor, async_op=True)
        filler = torch.full((MIB,), -1.0, device="cuda")
        work.wait()
        total = tensor.double().mean().item()
        assert total == sum(other + step for other in range(world))
        del tensor, filler, work
    dist.destroy_process_group()


def nccl(world: str, path: str) -> None:
    torch.multiprocessing.spawn(_reduce, (int(world), path), nprocs=int(world))


def pinned_loader() -> None:
    enable()
    data = torch.arange(4096.0).reshape(256, 16)
    total = 0.0
    for (batch,) in DataLoader(TensorDataset(data), batch_size=32, pin_memory=True):
        assert batch.is_pinned()
        total += batch.cuda(non_blocking=True).double().sum().item()
    assert total == data.double().sum().item()


def live_at_exit(route: str) -> None:
    if route == "pyactcomp":
        enable()
    globals()["kept"] = [filled(MIB, 1), torch.cuda.Stream()]
    globals()["kept"][0].record_stream(globals()["kept"][1])


if __name__ == "__main__":
    child_script.main(globals())
