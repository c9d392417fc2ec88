"""Cases of test_allocator_torch_gpu.py, a process each: reuse within a capture."""

from __future__ import annotations

import child_script
import torch

from pyactcomp import allocator

MIB = 1 << 20


def graph_takes_the_memory_of_one_step(growth: str) -> None:
    """Streams that join after each step: with the setting the graph's pool holds one step's memory."""
    allocator.enable(growth=growth)  # type: ignore[arg-type]
    set_settings = torch._C._accelerator_setAllocatorSettings
    main, side = torch.cuda.Stream(), torch.cuda.Stream()
    steps, size = 8, 32 * MIB
    x = torch.arange(size // 4, device="cuda").remainder_(7).float()
    total = torch.zeros_like(x)

    def step(number: int) -> None:
        scaled = x * number
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            total.add_(scaled)
        scaled.record_stream(side)
        del scaled
        torch.cuda.current_stream().wait_stream(side)

    taken = {}
    for reuse in (True, False):
        set_settings(f"graph_capture_record_stream_reuse:{reuse}")
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=main):
            for number in range(1, steps + 1):
                step(number)
        taken[reuse] = sum(
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == tuple(captured.pool())
        )
        total.zero_()
        for _ in range(3):
            captured.replay()
        torch.cuda.synchronize()
        # Small integers, which float32 adds without rounding.
        assert torch.equal(total, x * (3 * sum(range(1, steps + 1))))
        captured.reset()
        del captured
        torch.cuda.empty_cache()
    assert taken[False] >= steps * size
    assert taken[True] <= 2 * size


def streams_that_do_not_join_keep_their_memory(growth: str) -> None:
    """The main stream writes on while the side stream still reads, so a block taken too early would show."""
    allocator.enable(growth=growth, graph_capture_record_stream_reuse=True)  # type: ignore[arg-type]
    main, side = torch.cuda.Stream(), torch.cuda.Stream()
    steps, size = 6, 32 * MIB
    x = torch.ones(size // 4, device="cuda")
    total = torch.zeros_like(x)
    captured = torch.cuda.CUDAGraph()
    addresses = []
    with torch.cuda.graph(captured, stream=main):
        for number in range(1, steps + 1):
            scaled = x * number
            addresses.append(scaled.data_ptr())
            side.wait_stream(main)
            with torch.cuda.stream(side):
                torch.cuda._sleep(10_000_000)
                total.add_(scaled)
            scaled.record_stream(side)
            del scaled
        main.wait_stream(side)
    assert len(set(addresses)) == steps
    total.zero_()
    captured.replay()
    torch.cuda.synchronize()
    assert torch.equal(total, x * sum(range(1, steps + 1)))


if __name__ == "__main__":
    child_script.main(globals())
