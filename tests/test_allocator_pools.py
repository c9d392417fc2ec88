"""Private pools, the memory of CUDA graphs and MemPools, on the simulated device."""

from __future__ import annotations

import pytest
import torch
from allocator_cases import GROWTHS, MIB, POOL, allocated, make, overlap, physical, reserved, stat

from pyactcomp.allocator import CachingAllocator

pytestmark = pytest.mark.parametrize("growth", GROWTHS)


def ranges(allocator: CachingAllocator, pool: tuple[int, int]) -> list[tuple[int, int]]:
    return [
        (segment["address"], segment["address"] + segment["total_size"])
        for segment in allocator.snapshot(pool)["segments"]
        if segment["segment_pool_id"] == pool
    ]


def in_pool(allocator: CachingAllocator, address: int, pool: tuple[int, int] = POOL) -> bool:
    return any(begin <= address < end for begin, end in ranges(allocator, pool))


def test_only_the_streams_of_the_filter_allocate_to_the_pool(growth: str) -> None:
    allocator, _ = make(growth)
    allocator.begin_allocate_to_pool(POOL, {5})
    inside, outside = allocator.allocate(4 * MIB, stream=5), allocator.allocate(4 * MIB, stream=6)
    allocator.end_allocate_to_pool(POOL)
    after = allocator.allocate(4 * MIB, stream=5)
    assert in_pool(allocator, inside)
    assert not in_pool(allocator, outside)
    assert not in_pool(allocator, after)
    assert allocator.live_allocations(POOL) == [inside]
    allocator.check_invariants()


def test_without_a_filter_every_stream_allocates_to_the_pool(growth: str) -> None:
    allocator, _ = make(growth)
    allocator.begin_allocate_to_pool(POOL)
    addresses = [allocator.allocate(4 * MIB, stream=stream) for stream in range(3)]
    allocator.end_allocate_to_pool(POOL)
    assert sorted(allocator.live_allocations(POOL)) == sorted(addresses)


def test_the_memory_of_a_pool_serves_nobody_else(growth: str) -> None:
    allocator, device = make(growth)
    outside = allocator.allocate(30 * MIB)
    outside_memory = physical(device, outside, 30 * MIB)
    allocator.free(outside)
    allocator.begin_allocate_to_pool(POOL)
    inside = allocator.allocate(30 * MIB)
    allocator.end_allocate_to_pool(POOL)
    memory = physical(device, inside, 30 * MIB)
    assert not overlap(memory, outside_memory)
    allocator.free(inside)
    device.complete_all()
    # A graph that is replayed writes where the freed block was.
    again = allocator.allocate(30 * MIB)
    assert not overlap(memory, physical(device, again, 30 * MIB))
    assert device.reserved == 60 * MIB
    allocator.begin_allocate_to_pool(POOL)
    assert allocator.allocate(30 * MIB) == inside
    allocator.end_allocate_to_pool(POOL)


@pytest.mark.parametrize("stream", [5, 6], ids=["in the pool", "beside it"])
@pytest.mark.parametrize("captures", [False, True])
def test_cached_memory_serves_others_while_a_pool_is_in_use(growth: str, captures: bool, stream: int) -> None:
    allocator, device = make(growth, "1GiB")
    allocator.free(allocator.allocate(600 * MIB))
    allocator.begin_allocate_to_pool(POOL, {5}, captures=captures)
    if captures:
        with pytest.raises(torch.OutOfMemoryError, match="A CUDA graph is being captured"):
            allocator.allocate(700 * MIB, stream=stream)
    else:
        allocator.allocate(700 * MIB, stream=stream)
        assert device.reserved == 700 * MIB
    allocator.end_allocate_to_pool(POOL)
    allocator.check_invariants()


def test_frees_of_other_streams_are_collected_while_a_pool_is_in_use(growth: str) -> None:
    allocator, device = make(growth)
    allocator.begin_allocate_to_pool(POOL, {5}, captures=False)
    for _ in range(20):
        address = allocator.allocate(64 * MIB)
        allocator.record_stream(address, 7)
        allocator.free(address)
        device.complete(7)
    assert device.reserved == 64 * MIB


def test_the_memory_of_a_pool_stays_where_it_is(growth: str) -> None:
    allocator, device = make(growth)
    allocator.begin_allocate_to_pool(POOL)
    quarters = [allocator.allocate(64 * MIB) for _ in range(4)]
    memory = [physical(device, address, 64 * MIB) for address in quarters]
    for index in (0, 2):
        allocator.free(quarters[index])
    large = allocator.allocate(128 * MIB)
    allocator.end_allocate_to_pool(POOL)
    # A graph that is replayed uses the addresses of its capture, those of freed blocks too.
    assert [physical(device, address, 64 * MIB) for address in quarters] == memory
    assert not any(overlap(physical(device, large, 128 * MIB), each) for each in memory)


def test_a_pool_lives_while_it_is_used(growth: str) -> None:
    allocator, device = make(growth)
    allocator.begin_allocate_to_pool(POOL)
    assert allocator.pool_use_count(POOL) == 1
    address = allocator.allocate(30 * MIB)
    allocator.end_allocate_to_pool(POOL)
    allocator.create_or_incref_pool(POOL)
    assert allocator.pool_use_count(POOL) == 2
    allocator.free(address)
    allocator.release_pool(POOL)
    device.complete_all()
    allocator.empty_cache()
    assert device.reserved == 30 * MIB
    allocator.release_pool(POOL)
    device.complete_all()
    allocator.empty_cache()
    assert device.reserved == reserved(allocator) == 0
    allocator.check_invariants()


def test_a_released_pool_keeps_its_live_blocks(growth: str) -> None:
    allocator, device = make(growth)
    allocator.begin_allocate_to_pool(POOL)
    kept = allocator.allocate(30 * MIB)
    allocator.end_allocate_to_pool(POOL)
    allocator.release_pool(POOL)
    device.complete_all()
    allocator.empty_cache()
    assert device.reserved == 30 * MIB
    assert allocator.block(kept)["state"] == "active_allocated"
    allocator.free(kept)
    device.complete_all()
    allocator.empty_cache()
    assert device.reserved == 0


def test_two_pools_are_two(growth: str) -> None:
    allocator, _ = make(growth)
    addresses = {}
    for pool in ((0, 1), (3, 0)):
        allocator.begin_allocate_to_pool(pool)
        addresses[pool] = allocator.allocate(4 * MIB)
        allocator.end_allocate_to_pool(pool)
    for pool, address in addresses.items():
        assert allocator.live_allocations(pool) == [address]
        assert in_pool(allocator, address, pool)
        name = "_".join(map(str, pool))
        assert stat(allocator, f"reserved_bytes_by_private_pools.{name}.all.current") == 20 * MIB


def test_a_checkpoint_is_restored(growth: str) -> None:
    allocator, _ = make(growth)
    allocator.begin_allocate_to_pool(POOL)
    first, second = allocator.allocate(4 * MIB), allocator.allocate(600)
    saved = allocator.checkpoint(POOL)
    third = allocator.allocate(3 * MIB)
    allocator.free(first)
    fourth = allocator.allocate(1 * MIB + 512)  # where first was, or part of it
    before = set(allocator.live_allocations(POOL))
    assert before == {second, third, fourth}
    changes = allocator.restore(saved)
    allocator.check_invariants()
    assert (before - set(changes["freed"])) | set(changes["allocated"]) == {first, second}
    assert set(allocator.live_allocations(POOL)) == {first, second}
    assert allocated(allocator) == 4 * MIB + 1024
    # What was free then is free again: the same requests get the same addresses.
    assert allocator.allocate(3 * MIB) == third
    allocator.end_allocate_to_pool(POOL)


def test_a_checkpoint_is_restored_where_a_capture_freed_a_recorded_block(growth: str) -> None:
    """As a graph does that hands a tensor to a side stream and frees it while it is captured."""
    allocator, device = make(growth)
    allocator.begin_allocate_to_pool(POOL)
    passed_on, kept = allocator.allocate(4 * MIB), allocator.allocate(4 * MIB)
    allocator.record_stream(passed_on, 7)
    allocator.free(passed_on)
    checkpoint = allocator.checkpoint(POOL)
    allocator.end_allocate_to_pool(POOL)

    device.complete_all()
    for _ in range(2):
        assert allocator.restore(checkpoint) == {"freed": [kept], "allocated": [kept]}
        assert allocator.live_allocations(POOL) == [kept]
        allocator.check_invariants()
    assert device.live_events == 0


def test_restoring_what_the_pool_has_given_back_changes_nothing(growth: str) -> None:
    allocator, _ = make(growth)
    allocator.begin_allocate_to_pool(POOL)
    address = allocator.allocate(40 * MIB)
    checkpoint = allocator.checkpoint(POOL)
    allocator.free(address)
    allocator.end_allocate_to_pool(POOL)
    allocator.release_pool(POOL)
    allocator.empty_cache()
    allocator.begin_allocate_to_pool(POOL)
    live = allocator.allocate(2 * MIB, stream=3)
    allocator.end_allocate_to_pool(POOL)
    with pytest.raises(RuntimeError, match="given back by the pool"):
        allocator.restore(checkpoint)
    assert allocator.live_allocations(POOL) == [live]
    allocator.check_invariants()


def test_a_pool_without_splitting_hands_out_whole_segments(growth: str) -> None:
    allocator, _ = make(growth)
    allocator.create_or_incref_pool(POOL)
    allocator.set_no_split(POOL)
    allocator.begin_allocate_to_pool(POOL)
    first, second = allocator.allocate(4 * MIB), allocator.allocate(4 * MIB)
    allocator.end_allocate_to_pool(POOL)
    sizes = {segment["address"]: segment["total_size"] for segment in allocator.snapshot(POOL)["segments"]}
    assert allocator.block(first)["size"] >= 20 * MIB
    assert abs(second - first) >= 20 * MIB
    assert sum(sizes.values()) >= 40 * MIB


def test_a_pool_may_serve_others_before_memory_runs_out(growth: str) -> None:
    allocator, device = make(growth, capacity=100 * MIB)
    allocator.begin_allocate_to_pool(POOL)
    spare = allocator.allocate(80 * MIB)
    allocator.end_allocate_to_pool(POOL)
    allocator.free(spare)
    device.complete_all()
    with pytest.raises(RuntimeError, match="out of memory"):
        allocator.allocate(60 * MIB)
    allocator.set_use_on_oom(POOL, True)
    assert allocator.allocate(60 * MIB) == spare
    allocator.check_invariants()


def test_a_pool_that_is_unknown_or_the_default_one_is_refused(growth: str) -> None:
    allocator, _ = make(growth)
    with pytest.raises(TypeError, match=r"pair of integers.*got 3"):
        allocator.begin_allocate_to_pool(3)  # type: ignore[arg-type]
    for call in (
        allocator.release_pool,
        allocator.end_allocate_to_pool,
        allocator.checkpoint,
        allocator.live_allocations,
    ):
        with pytest.raises(RuntimeError, match=r"the private pool \(0, 1\)|no private pool \(0, 1\)"):
            call(POOL)
    with pytest.raises(ValueError, match="default pool"):
        allocator.create_or_incref_pool((0, 0))


def test_a_pool_that_is_never_split_reuses_its_blocks(growth: str) -> None:
    allocator, device = make(growth, capacity="64GiB")
    allocator.create_or_incref_pool(POOL)
    allocator.set_no_split(POOL)
    seen = []
    for _ in range(20):
        allocator.begin_allocate_to_pool(POOL)
        addresses = [allocator.allocate(4 * MIB) for _ in range(10)]
        for address in addresses:
            allocator.free(address)
        allocator.end_allocate_to_pool(POOL)
        allocator.release_pool(POOL)
        seen.append(device.reserved)
        allocator.check_invariants()
    assert set(seen) == {10 * 20 * MIB}, "each request of 4 MiB takes a segment of 20 MiB, whole"
    assert len(ranges(allocator, POOL)) == 10


def test_a_pool_that_died_is_forgotten(growth: str) -> None:
    allocator, device = make(growth)
    for number in range(1, 2001):
        pool = (0, number)
        allocator.create_or_incref_pool(pool)
        allocator.begin_allocate_to_pool(pool)
        address = allocator.allocate(MIB)
        allocator.end_allocate_to_pool(pool)
        allocator.release_pool(pool)
        allocator.free(address)
        allocator.release_pool(pool)
        allocator.empty_cache(pool)
    assert device.reserved == 0
    assert not any("private_pool" in name for name in allocator.stats())
    with pytest.raises(RuntimeError, match="no private pool"):
        allocator.live_allocations((0, 7))


def test_thousands_of_live_pools_have_addresses(growth: str) -> None:
    allocator, device = make(growth, capacity="140GiB")
    for number in range(1, 4001):
        allocator.begin_allocate_to_pool((0, number))
        for size in (MIB // 2, 2 * MIB):
            allocator.allocate(size)
        allocator.end_allocate_to_pool((0, number))
    if growth == "vmm":
        # The driver hands out 128 TiB.
        assert device.addresses <= 128 << 40
    # A pool that outgrows its first range goes on.
    allocator.begin_allocate_to_pool((1, 1))
    for _ in range(6):
        allocator.allocate(2 << 30)
    allocator.check_invariants()
