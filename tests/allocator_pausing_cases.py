"""Cases of test_allocator_pausing_gpu.py, a process each: memory of a GPU is paused and resumed."""

from __future__ import annotations

import sys
import threading

import child_script
import pytest
import torch
from torch import nn

from pyactcomp import PyactcompError, allocator
from pyactcomp.allocator import memory_saver

MIB = 1 << 20
# Of what was reserved, given back at least: cudaMemGetInfo counts in its own granules.
RELEASED = 0.99
# The driver takes memory of its own in pieces of this size.
PIECE = 2 * MIB


def free_bytes() -> int:
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


def least_released(reserved: int, pinned: int) -> float:
    """Return by how much the free bytes grow at least where ``pinned`` bytes of host memory were pinned meanwhile.

    The driver maps pinned memory into the addresses of every visible device. It takes 8 bytes of a table for each page
    of 4 KiB, and a piece for the tables above these; what it takes for the other devices may lie on this one, too.
    """
    tables = PIECE * (1 + -(-pinned * 8 // 4096 // PIECE)) if pinned else 0
    return RELEASED * reserved - torch.cuda.device_count() * tables


def tensors(count: int = 200, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (2 ** (24 * torch.rand(count, generator=generator))).long().tolist()
    return [torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).cuda() for size in sizes]


def contents() -> None:
    allocator.enable()
    live = tensors()
    del live[::3]
    expected = [each.cpu() for each in live]
    addresses = [each.data_ptr() for each in live]
    for cycle in range(3):
        reserved, free, allocated = torch.cuda.memory_reserved(), free_bytes(), torch.cuda.memory_allocated()
        paused = allocator.pause()
        assert paused.released == reserved
        grown, least = free_bytes() - free, least_released(reserved, paused.pinned)
        assert grown >= least, f"{reserved=} {paused.pinned=} {grown=} {least=} {torch.cuda.device_count()=} {cycle=}"
        assert torch.cuda.memory_reserved() == 0
        assert torch.cuda.memory_allocated() == paused.saved == allocated
        assert (paused.pinned == 0) == (cycle > 0)
        with pytest.raises(RuntimeError, match=r"paused; call resume\(\) first"):
            torch.ones(1, device="cuda")
        live.pop()
        expected.pop()
        addresses.pop()
        resumed = allocator.resume()
        assert resumed.restored == torch.cuda.memory_allocated()
        assert [each.data_ptr() for each in live] == addresses
        assert all(torch.equal(each.cpu(), before) for each, before in zip(live, expected, strict=True))
    with pytest.raises(PyactcompError, match="nothing is paused"):
        allocator.resume()


def dropped() -> None:
    allocator.enable()
    with allocator.tag("kv", keep="drop"):
        cache = torch.full((512 * MIB,), 7, dtype=torch.uint8, device="cuda")
    kept = torch.full((64 * MIB,), 5, dtype=torch.uint8, device="cuda")
    free = free_bytes()
    paused = allocator.pause("kv")
    assert paused.saved == 0
    assert free_bytes() - free >= RELEASED * 512 * MIB
    assert int(kept.sum()) == 5 * 64 * MIB
    allocator.resume("kv")
    cache.fill_(3)
    assert int(cache[-1]) == 3


def graph() -> None:
    allocator.enable()
    x = torch.ones(1 << 20, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        ((x * 2 + 1).relu() - 1).sum()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with allocator.tag("graphs"), torch.cuda.graph(captured):
        result = ((x * 2 + 1).relu() - 1).sum()
    for tags in (None, "graphs"):
        allocator.pause(tags)
        allocator.resume(tags)
        x.fill_(3)
        captured.replay()
        assert float(result) == 6.0 * (1 << 20)


def backward() -> None:
    """Gradients that autograd's worker thread allocates have the tag of the thread that called backward."""
    allocator.enable()
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8))).cuda()
    loss = model(torch.ones(8, 2048, device="cuda")).sum()
    with allocator.tag("gradients"):
        loss.backward()
    expected = [parameter.grad.cpu() for parameter in model.parameters()]
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert allocator.pause("gradients").released >= size
    allocator.resume("gradients")
    for parameter, before in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad.cpu(), before)


def other_thread() -> None:
    """A thread that opened no tag allocates in none."""
    allocator.enable()
    made: list[torch.Tensor] = []
    with allocator.tag("kv"):
        thread = threading.Thread(target=lambda: made.append(torch.ones(64 * MIB, device="cuda")))
        thread.start()
        thread.join()
    assert allocator.pause("kv").released == 0
    assert float(made[0].sum()) == 64 * MIB


def on_allocation() -> None:
    allocator.enable()
    x = torch.arange(1 << 20, device="cuda")
    allocator.pause(on_allocation="resume")
    y = x + 1
    assert int(y[-1]) == 1 << 20
    assert allocator.paused() == {}


def in_a_capture() -> None:
    allocator.enable()
    x = torch.ones(1 << 20, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x * 2
        with pytest.raises(PyactcompError, match="while a CUDA graph is captured"):
            allocator.pause()
    assert float(x.sum()) == 1 << 20


def cycles(pauses: str) -> None:
    """Write a digest of 50 training steps with generation between; the same with pauses and without."""
    torch.use_deterministic_algorithms(True)
    allocator.enable()
    torch.manual_seed(0)
    with allocator.tag("training"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(6))).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
    with allocator.tag("kv", keep="drop"):
        cache = torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda")
    digest = 0.0
    pinned = 0
    for step in range(50):
        with allocator.tag("training"):
            model(torch.randn(int(torch.randint(8, 512, ())), 512, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            weights = next(model.parameters()).detach().float().sum()
        digest += float(weights)
        if pauses == "True":
            pinned = allocator.pause("training").pinned
        cache.fill_(step % 200)
        digest += float(cache[:: 1 << 20].float().sum())
        if pauses == "True":
            allocator.pause("kv")
            allocator.resume("training")
            allocator.resume("kv")
            if step > 25:
                assert pinned == 0, "host memory grows"
    stats = allocator.stats()
    assert stats["reserved_bytes.all.peak"] <= 1.03 * stats["allocated_bytes.all.peak"] + 64 * MIB
    sys.stdout.write(digest.hex())


def regions() -> None:
    """The contract of torch_memory_saver's example of one region with contents and one without."""
    saver = memory_saver.torch_memory_saver
    saver.hook_mode = "torch"
    with saver.region(enable_cpu_backup=True):
        kept = torch.full((20_000_000,), 10, dtype=torch.uint8, device="cuda")
        typed = torch.randn((10, 20, 30), device="cuda")
        expected = typed.cpu()
    with saver.region(tag="other"):
        torch.full((20_000_000,), 20, dtype=torch.uint8, device="cuda")
    before = free_bytes()
    saver.pause()
    assert free_bytes() - before >= 40_000_000
    backup = saver.get_cpu_backup(typed)
    assert backup is not None
    assert torch.equal(backup, expected)
    unrelated = torch.full((20_000_000,), 30, dtype=torch.uint8, device="cuda")
    saver.resume()
    assert kept[:3].tolist() == [10, 10, 10]
    assert torch.equal(typed.cpu(), expected)
    assert saver.get_cpu_backup(typed) is None
    assert int(unrelated[0]) == 30


if __name__ == "__main__":
    child_script.main(globals())
