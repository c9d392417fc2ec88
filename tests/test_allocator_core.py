"""Blocks, pools, streams and settings of the allocator, on the simulated device."""

from __future__ import annotations

import itertools

import pytest
from allocator_cases import GROWTHS, KIB, MIB, allocated, blocks, make, physical, reserved, stat

from pyactcomp.allocator import AllocatorConfig

# Larger than the small pool takes, and little enough to leave a 20 MiB segment mostly free.
SEPARATOR = 3 * MIB // 2


@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize(
    ("size", "rounded"),
    [(1, 512), (512, 512), (513, 1024), (1024, 1024), (MIB - 1, MIB), (MIB, MIB), (MIB + 1, MIB + 512)],
)
def test_sizes_are_rounded_up_to_512_bytes(growth: str, size: int, rounded: int) -> None:
    allocator, _ = make(growth)
    address = allocator.allocate(size)
    assert address % 512 == 0
    assert allocator.block(address)["size"] == rounded
    assert allocator.block(address)["requested_size"] == size
    assert allocated(allocator) == rounded
    assert stat(allocator, "requested_bytes.all.current") == size
    allocator.check_invariants()


@pytest.mark.parametrize("growth", GROWTHS)
def test_nothing_is_allocated_for_no_bytes(growth: str) -> None:
    allocator, device = make(growth)
    assert allocator.allocate(0) == 0
    assert allocated(allocator) == reserved(allocator) == device.reserved == 0


@pytest.mark.parametrize(
    ("size", "segment", "pool"),
    [
        (1, 2 * MIB, "small_pool"),
        (MIB, 2 * MIB, "small_pool"),
        (MIB + 1, 20 * MIB, "large_pool"),
        (10 * MIB - 512, 20 * MIB, "large_pool"),
        (10 * MIB, 10 * MIB, "large_pool"),
        (10 * MIB + 1, 12 * MIB, "large_pool"),
        (333 * MIB + 1, 334 * MIB, "large_pool"),
    ],
)
def test_segments_of_malloc_growth_have_the_native_sizes(size: int, segment: int, pool: str) -> None:
    allocator, device = make("malloc")
    allocator.allocate(size)
    other = {"small_pool": "large_pool", "large_pool": "small_pool"}[pool]
    assert stat(allocator, f"reserved_bytes.{pool}.current") == segment == device.reserved
    assert stat(allocator, f"segment.{pool}.current") == 1
    assert stat(allocator, f"reserved_bytes.{other}.current") == 0


@pytest.mark.parametrize("growth", GROWTHS)
def test_a_block_takes_what_it_needs_and_leaves_the_rest_free(growth: str) -> None:
    allocator, device = make(growth)
    addresses = [allocator.allocate(4 * MIB) for _ in range(5)]
    assert addresses == [addresses[0] + 4 * MIB * index for index in range(5)]
    assert device.reserved == 20 * MIB


@pytest.mark.parametrize(("rest", "split"), [(MIB, False), (MIB + 512, True)])
def test_a_large_block_of_malloc_growth_is_split_if_more_than_one_mebibyte_remains(rest: int, split: bool) -> None:
    allocator, _ = make("malloc")
    address = allocator.allocate(20 * MIB - rest)
    assert allocator.block(address)["size"] == (20 * MIB - rest if split else 20 * MIB)


@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_free_neighbours_become_one_block_in_every_order(growth: str, order: tuple[int, ...]) -> None:
    allocator, _ = make(growth)
    addresses = [allocator.allocate(4 * MIB) for _ in range(3)]
    wall = allocator.allocate(4 * MIB)
    for index in order:
        allocator.free(addresses[index])
        allocator.check_invariants()
    free = blocks(allocator, "inactive")
    assert free[addresses[0]] == 12 * MIB
    allocator.free(wall)
    assert blocks(allocator, "inactive") == {addresses[0]: 20 * MIB}


@pytest.mark.parametrize("growth", GROWTHS)
def test_a_request_takes_the_smallest_free_block_that_holds_it(growth: str) -> None:
    allocator, _ = make(growth)
    holes = {}
    for size in (6 * MIB, 2 * MIB, 4 * MIB):
        holes[size] = allocator.allocate(size)
        allocator.allocate(SEPARATOR)
    allocator.allocate(20 * MIB - 12 * MIB - 3 * SEPARATOR)
    for address in holes.values():
        allocator.free(address)
    assert allocator.allocate(3 * MIB) == holes[4 * MIB]
    assert allocator.allocate(5 * MIB) == holes[6 * MIB]
    assert allocator.allocate(2 * MIB) == holes[2 * MIB]


@pytest.mark.parametrize("growth", GROWTHS)
def test_of_equal_blocks_the_one_at_the_lowest_address_is_taken(growth: str) -> None:
    allocator, _ = make(growth)
    addresses = [allocator.allocate(2 * MIB) for _ in range(10)]
    for index in (7, 3, 5):
        allocator.free(addresses[index])
    assert [allocator.allocate(2 * MIB) for _ in range(3)] == [addresses[index] for index in (3, 5, 7)]


@pytest.mark.parametrize("growth", GROWTHS)
def test_a_block_is_reused_on_its_own_stream_at_once_and_on_no_other(growth: str) -> None:
    allocator, device = make(growth)
    first = allocator.allocate(4 * MIB, stream=1)
    memory = physical(device, first, 4 * MIB)
    allocator.free(first)
    other = allocator.allocate(4 * MIB, stream=2)
    assert physical(device, other, 4 * MIB) != memory
    assert allocator.allocate(4 * MIB, stream=1) == first


@pytest.mark.parametrize("growth", GROWTHS)
def test_a_recorded_stream_defers_reuse_until_its_event_completes(growth: str) -> None:
    allocator, device = make(growth)
    address = allocator.allocate(4 * MIB)
    allocator.record_stream(address, 7)
    allocator.free(address)
    assert blocks(allocator, "active_pending_free") == {address: 4 * MIB}
    assert stat(allocator, "active_bytes.all.current") == 4 * MIB
    assert allocated(allocator) == 0
    assert allocator.allocate(4 * MIB) != address
    device.complete(7)
    assert allocator.allocate(4 * MIB) == address
    allocator.check_invariants()


@pytest.mark.parametrize("growth", GROWTHS)
def test_every_recorded_stream_must_complete(growth: str) -> None:
    allocator, device = make(growth)
    address = allocator.allocate(4 * MIB)
    for stream in (7, 8, 7):
        allocator.record_stream(address, stream)
    allocator.free(address)
    device.complete(8)
    assert allocator.allocate(4 * MIB) != address
    device.complete(7)
    assert allocator.allocate(4 * MIB) == address


@pytest.mark.parametrize("growth", GROWTHS)
def test_events_of_one_stream_complete_in_order(growth: str) -> None:
    allocator, device = make(growth)
    addresses = [allocator.allocate(4 * MIB) for _ in range(5)]
    for address in addresses[:2]:
        allocator.record_stream(address, 7)
        allocator.free(address)
    device.complete(7, count=1)
    assert allocator.allocate(4 * MIB) == addresses[0]
    assert addresses[1] in blocks(allocator, "active_pending_free")


def test_the_own_stream_needs_no_event() -> None:
    allocator, device = make("malloc")
    address = allocator.allocate(4 * MIB, stream=3)
    allocator.record_stream(address, 3)
    allocator.free(address)
    assert device.calls()["record"] == 0
    assert allocator.allocate(4 * MIB, stream=3) == address


@pytest.mark.parametrize("growth", GROWTHS)
def test_events_are_given_back(growth: str) -> None:
    allocator, device = make(growth)
    for _ in range(100):
        address = allocator.allocate(4 * MIB)
        allocator.record_stream(address, 7)
        allocator.free(address)
        device.complete_all()
    allocator.empty_cache()
    assert device.calls()["record"] >= 100
    assert device.live_events == 0


@pytest.mark.parametrize("growth", GROWTHS)
def test_a_free_never_synchronises(growth: str) -> None:
    allocator, device = make(growth)
    addresses = [allocator.allocate(size, stream=size % 3) for size in range(1, 4 * MIB, 4 * MIB // 1000)][:1000]
    for address in addresses[::2]:
        allocator.record_stream(address, 9)
    before = device.calls()
    for address in addresses:
        allocator.free(address)
    after = device.calls()
    assert len(addresses) == 1000
    assert after["record"] - before["record"] >= 500
    for call in ("synchronising", "release", "wait", "unmap", "destroy"):
        assert after[call] == before[call]


@pytest.mark.parametrize("growth", GROWTHS)
def test_empty_cache_gives_unused_memory_back_and_keeps_the_rest(growth: str) -> None:
    allocator, device = make(growth)
    small, large = allocator.allocate(512), allocator.allocate(30 * MIB)
    gone = [allocator.allocate(size) for size in (700 * KIB, 90 * MIB, 200 * MIB)]
    for address in gone:
        allocator.free(address)
    device.complete_all()
    allocator.empty_cache()
    allocator.check_invariants()
    assert device.reserved == reserved(allocator) == 2 * MIB + 30 * MIB
    assert set(blocks(allocator, "active_allocated")) == {small, large}
    allocator.free(small)
    allocator.free(large)
    device.complete_all()
    allocator.empty_cache()
    assert device.reserved == reserved(allocator) == 0
    assert allocator.snapshot()["segments"] == []


@pytest.mark.parametrize("growth", GROWTHS)
def test_empty_cache_waits_for_blocks_that_other_streams_use(growth: str) -> None:
    allocator, device = make(growth)
    address = allocator.allocate(30 * MIB)
    allocator.record_stream(address, 7)
    allocator.free(address)
    allocator.empty_cache()
    assert device.reserved == 0
    assert stat(allocator, "active_bytes.all.current") == 0


def test_max_split_size_of_malloc_growth_keeps_large_blocks_whole() -> None:
    allocator, device = make("malloc", max_split_size="64MiB", max_non_split_rounding="20MiB")
    address = allocator.allocate(100 * MIB)
    allocator.free(address)
    assert stat(allocator, "oversize_segments.current") == 1
    assert allocator.allocate(30 * MIB) != address
    assert device.reserved == 130 * MIB
    # A request of at least max_split_size takes the block whole, if it is less than 20 MiB too large.
    assert allocator.allocate(80 * MIB) != address
    assert device.reserved == 210 * MIB
    assert allocator.allocate(80 * MIB + 512) == address
    assert allocator.block(address)["size"] == 100 * MIB
    assert stat(allocator, "oversize_allocations.current") == 2
    allocator.check_invariants()


def test_max_split_size_of_vmm_growth_keeps_segments_for_large_requests() -> None:
    allocator, _ = make("vmm", max_split_size="64MiB")
    address = allocator.allocate(100 * MIB)
    allocator.free(address)
    smaller = allocator.allocate(30 * MIB)
    assert not address <= smaller < address + 100 * MIB
    assert allocator.allocate(100 * MIB) == address
    allocator.check_invariants()


def test_without_max_split_size_a_large_block_serves_smaller_requests() -> None:
    for growth in GROWTHS:
        allocator, device = make(growth)
        address = allocator.allocate(100 * MIB)
        allocator.free(address)
        assert allocator.allocate(30 * MIB) == address
        assert device.reserved == 100 * MIB


@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize(
    ("divisions", "size", "rounded"),
    [
        # Between 4 and 8 MiB, four steps of 1 MiB and eight of 512 KiB.
        (4, 5 * MIB + 1, 6 * MIB),
        (8, 5 * MIB + 1, 5 * MIB + 512 * KIB),
        (4, 8 * MIB, 8 * MIB),
        (4, 700, 1024),  # not above 512 * divisions: rounded to 512 bytes
        (1, 5 * MIB + 1, 5 * MIB + 512),
        ({4: 4, 8: 2, ">": 1}, 5 * MIB + 1, 6 * MIB),
        ({4: 4, 8: 2, ">": 1}, 9 * MIB, 12 * MIB),
        ({4: 4, 8: 2, ">": 1}, 17 * MIB + 1, 17 * MIB + 512),
    ],
)
def test_roundup_power2_divisions(growth: str, divisions: int | dict[int | str, int], size: int, rounded: int) -> None:
    allocator, _ = make(growth, roundup_power2_divisions=divisions)
    allocator.allocate(100 * MIB)  # so that the block under test is split from a larger one
    allocator.free(next(iter(blocks(allocator, "active_allocated"))))
    assert allocator.block(allocator.allocate(size))["size"] == rounded


def test_divisions_are_read_back_by_interval() -> None:
    config = AllocatorConfig(roundup_power2_divisions={4: 4, 8: 2, ">": 1})
    # As PyTorch reads its list: the first interval's number holds below it too.
    expected = {1 << bit: {0: 4, 1: 4, 2: 4, 3: 2}.get(bit, 1) for bit in range(16)}
    assert config.roundup_power2_divisions == expected
    assert AllocatorConfig(roundup_power2_divisions=expected) == config
    assert AllocatorConfig.parse(str(config)) == config


@pytest.mark.parametrize("growth", GROWTHS)
def test_garbage_collection_keeps_reserved_memory_near_its_threshold(growth: str) -> None:
    limit = 512 * MIB

    def run(threshold: float) -> int:
        allocator, device = make(
            growth, capacity=2 * limit, memory_fraction=0.5, garbage_collection_threshold=threshold
        )
        addresses = [allocator.allocate(60 * MIB, stream=stream) for stream in range(5)]
        for address in addresses:
            allocator.free(address)
        # Under vmm growth the first growth past the threshold marks where the streams are, and the next collects.
        for stream in range(2):
            device.complete_all()
            allocator.allocate(50 * MIB, stream=9 + stream)
        allocator.check_invariants()
        return device.reserved

    assert run(0.25) <= 0.25 * limit + 100 * MIB
    assert run(0.0) >= 5 * 60 * MIB


@pytest.mark.parametrize("growth", GROWTHS)
def test_memory_fraction_limits_what_is_reserved_and_can_be_changed(growth: str) -> None:
    allocator, device = make(growth, capacity="1GiB", memory_fraction=0.25)
    allocator.allocate(180 * MIB)
    with pytest.raises(RuntimeError, match=r"^CUDA out of memory\. Tried to allocate 100\.00 MiB"):
        allocator.allocate(100 * MIB)
    assert 180 * MIB <= device.reserved <= 256 * MIB
    allocator.configure(AllocatorConfig(growth=growth, memory_fraction=1.0))
    allocator.allocate(100 * MIB)
    assert 280 * MIB <= device.reserved


@pytest.mark.parametrize("growth", GROWTHS)
def test_initial_pool_size_is_reserved_at_once(growth: str) -> None:
    allocator, device = make(growth, initial_pool_size="512MiB")
    assert device.reserved == 0
    allocator.allocate(2 * MIB)
    assert device.reserved == 512 * MIB
    before = device.calls()
    allocator.allocate(400 * MIB)
    assert device.reserved == 512 * MIB
    assert [device.calls()[call] for call in ("acquire", "create")] == [before["acquire"], before["create"]]


@pytest.mark.parametrize("growth", GROWTHS)
def test_growth_of_a_running_allocator_cannot_change(growth: str) -> None:
    allocator, _ = make(growth)
    other = "malloc" if growth == "vmm" else "vmm"
    with pytest.raises(ValueError, match="growth"):
        allocator.configure(AllocatorConfig(growth=other))
    assert allocator.config == AllocatorConfig(growth=growth)


def test_base_allocation_is_what_the_driver_knows_of() -> None:
    allocator, _ = make("malloc")
    first, second = allocator.allocate(4 * MIB), allocator.allocate(4 * MIB)
    assert allocator.base_allocation(second) == (first, 20 * MIB)
    # Addresses of mapped handles belong to no driver allocation: the block stands for itself.
    allocator, _ = make("vmm")
    first, second = allocator.allocate(4 * MIB), allocator.allocate(4 * MIB)
    assert allocator.base_allocation(second) == (second, 4 * MIB)


@pytest.mark.parametrize("growth", GROWTHS)
def test_the_largest_available_block_can_be_allocated_and_no_larger_one(growth: str) -> None:
    allocator, _ = make(growth, capacity="256MiB")
    allocator.allocate(50 * MIB)
    largest = allocator.largest_available()
    with pytest.raises(RuntimeError, match="out of memory"):
        allocator.allocate(largest + 2 * MIB)
    allocator.allocate(largest)
