"""Pausing and resuming memory on the simulated device, which keeps the contents of memory."""

from __future__ import annotations

import random

import pytest
import torch
from allocator_cases import MIB, POOL, allocated, make, reserved

from pyactcomp import PyactcompError
from pyactcomp.allocator import AllocatorConfig, CachingAllocator, SimulatedDevice

STEP = 512
KEEP, DROP = {"": True}, {"": False}


def fill(device: SimulatedDevice, address: int, size: int, value: int) -> None:
    """Write the first, the last and a middle unit of a block."""
    for at in {0, size // 2 // STEP * STEP, (size - 1) // STEP * STEP}:
        device.write(address + at, value)


def holds(device: SimulatedDevice, address: int, size: int, value: int) -> bool:
    return all(device.read(address + at) == value for at in {0, size // 2 // STEP * STEP, (size - 1) // STEP * STEP})


def filled(allocator: CachingAllocator, device: SimulatedDevice, size: int, value: int, tag: str = "") -> int:
    address = allocator.allocate(size, tag=tag)
    fill(device, address, size, value)
    return address


def test_pausing_gives_all_memory_back_and_resuming_restores_the_contents() -> None:
    allocator, device = make("vmm")
    sizes = [512, 3 * MIB, 700 * MIB, 41 * MIB, 2 * MIB - 512]
    blocks = {filled(allocator, device, size, number + 1): (size, number + 1) for number, size in enumerate(sizes)}
    gap = filled(allocator, device, 90 * MIB, 99)
    allocator.free(gap)
    before, counted = device.reserved, allocated(allocator)
    report = allocator.pause(KEEP)
    assert device.reserved == reserved(allocator) == 0
    assert allocated(allocator) == counted
    assert report["saved"] == counted
    allocator.check_invariants()
    mapped = allocator.resume([""])
    assert mapped == {"mapped": report["released"], "restored": counted}
    # The free block's whole handles were given back, and nobody asked for them again.
    assert before - 90 * MIB <= device.reserved <= before
    assert all(holds(device, address, size, value) for address, (size, value) in blocks.items())
    allocator.check_invariants()


def test_dropped_contents_are_not_saved() -> None:
    allocator, device = make("vmm")
    filled(allocator, device, 100 * MIB, 7)
    report = allocator.pause(DROP)
    assert (report["saved"], report["pinned"], device.pinned) == (0, 0, 0)
    assert allocator.resume([""])["restored"] == 0


def test_host_memory_is_pinned_once() -> None:
    allocator, device = make("vmm")
    address = filled(allocator, device, 600 * MIB, 5)
    first = allocator.pause(KEEP)
    assert first["pinned"] == device.pinned == 600 * MIB
    allocator.resume([""])
    for _ in range(3):
        assert allocator.pause(KEEP)["pinned"] == 0
        allocator.resume([""])
    assert holds(device, address, 600 * MIB, 5)
    allocator.trim_host()
    assert device.pinned == 0


def test_a_block_freed_while_paused_is_not_restored() -> None:
    allocator, device = make("vmm")
    kept, freed = filled(allocator, device, 64 * MIB, 1), filled(allocator, device, 64 * MIB, 2)
    allocator.pause(KEEP)
    calls = device.calls()
    allocator.free(freed)
    assert device.calls() == calls
    assert allocated(allocator) == 64 * MIB
    assert allocator.resume([""]) == {"mapped": 64 * MIB, "restored": 64 * MIB}
    assert holds(device, kept, 64 * MIB, 1)
    allocator.check_invariants()


def test_a_tag_has_memory_of_its_own() -> None:
    allocator, device = make("vmm")
    cache = [filled(allocator, device, 30 * MIB, 10 + each, tag="kv") for each in range(5)]
    rest = [filled(allocator, device, 30 * MIB, 20 + each) for each in range(5)]
    before = device.reserved
    report = allocator.pause({"kv": True})
    assert before - device.reserved == report["released"] >= 150 * MIB
    assert report["released"] <= 150 * MIB + 64 * MIB
    assert all(holds(device, address, 30 * MIB, 20 + each) for each, address in enumerate(rest))
    # Memory without a tag goes on.
    allocator.free(rest.pop())
    allocator.free(allocator.allocate(50 * MIB))
    with pytest.raises(PyactcompError, match=r"tag 'kv' is paused; call resume"):
        allocator.allocate(MIB, tag="kv")
    assert allocator.paused() == {"kv": (report["released"], 150 * MIB)}
    allocator.check_invariants()
    allocator.resume(["kv"])
    assert all(holds(device, address, 30 * MIB, 10 + each) for each, address in enumerate(cache))
    assert allocator.paused() == {}
    allocator.free(allocator.allocate(MIB, tag="kv"))
    allocator.check_invariants()


def test_free_memory_of_a_tag_serves_nobody_else() -> None:
    allocator, device = make("vmm")
    allocator.free(allocator.allocate(100 * MIB, tag="kv"))
    allocator.allocate(100 * MIB)
    assert device.reserved >= 200 * MIB


def test_an_allocation_resumes_the_tag_where_set_so() -> None:
    allocator, device = make("vmm")
    address = filled(allocator, device, 30 * MIB, 3, tag="kv")
    allocator.pause({"kv": True, "": True}, resume_on_allocation=True)
    allocator.allocate(MIB, tag="kv")
    assert list(allocator.paused()) == [""]
    assert holds(device, address, 30 * MIB, 3)
    allocator.check_invariants()


def test_a_pool_in_use_is_paused_and_resumed_as_other_memory_is() -> None:
    allocator, device = make("vmm")
    allocator.begin_allocate_to_pool(POOL, tag="kv", captures=False)
    address = filled(allocator, device, 40 * MIB, 6)
    allocator.pause({"kv": True}, resume_on_allocation=True)
    assert device.reserved == 0
    allocator.allocate(1 * MIB)
    assert allocator.paused() == {}
    assert holds(device, address, 40 * MIB, 6)
    allocator.end_allocate_to_pool(POOL)
    allocator.check_invariants()


def test_a_tag_without_memory_is_paused_too() -> None:
    allocator, _ = make("vmm")
    allocator.pause({"later": False})
    with pytest.raises(PyactcompError, match="tag 'later' is paused"):
        allocator.allocate(MIB, tag="later")
    allocator.resume(["later"])
    allocator.allocate(MIB, tag="later")


def test_private_pools_keep_their_addresses_and_go_with_their_tag() -> None:
    allocator, device = make("vmm")
    allocator.begin_allocate_to_pool(POOL, tag="graphs")
    inside = filled(allocator, device, 24 * MIB, 1)
    temporary = allocator.allocate(24 * MIB)
    allocator.free(temporary)
    allocator.end_allocate_to_pool(POOL)
    before = device.reserved
    allocator.pause({"": True})
    assert device.reserved == before, "the pool belongs to another tag"
    allocator.pause({"graphs": True})
    assert device.reserved == 0
    allocator.resume(["", "graphs"])
    assert holds(device, inside, 24 * MIB, 1)
    # A graph writes where its temporary was: memory is there again.
    device.write(temporary, 5)
    allocator.check_invariants()


def test_a_pool_that_died_while_paused_gives_its_memory_up() -> None:
    allocator, device = make("vmm")
    allocator.begin_allocate_to_pool(POOL)
    inside = allocator.allocate(24 * MIB)
    allocator.end_allocate_to_pool(POOL)
    allocator.pause(KEEP)
    allocator.free(inside)
    allocator.release_pool(POOL)
    allocator.check_invariants()
    assert allocator.resume([""]) == {"mapped": 0, "restored": 0}
    allocator.empty_cache()
    assert device.reserved == 0
    allocator.check_invariants()


def test_a_held_pool_stays_and_is_named() -> None:
    allocator, device = make("vmm")
    allocator.begin_allocate_to_pool(POOL)
    inside = filled(allocator, device, 24 * MIB, 4)
    allocator.end_allocate_to_pool(POOL)
    allocator.hold(POOL, True)
    report = allocator.pause(KEEP)
    assert report["skipped"] == [(POOL, device.reserved, "is held")]
    assert holds(device, inside, 24 * MIB, 4)
    allocator.resume([""])
    allocator.hold(POOL, False)
    assert allocator.pause(KEEP)["skipped"] == []
    with pytest.raises(PyactcompError, match="memory that is not there"):
        allocator.hold(POOL, True)


def test_memory_open_in_other_processes_stays_and_is_named() -> None:
    allocator, device = make("vmm")
    alone = filled(allocator, device, 300 * MIB, 1)
    shared = filled(allocator, device, 5 * MIB, 2)
    beside = filled(allocator, device, 3 * MIB, 3)
    freed = filled(allocator, device, 30 * MIB, 4)
    for address in (shared, freed):
        assert allocator.share(address)
    before = device.reserved
    report = allocator.pause(KEEP)
    [(pool, stayed, reason)] = report["skipped"]
    assert (pool, reason) == ((0, 0), "is open in other processes")
    # The handles of 20 to 64 MiB under the two blocks, which are not saved.
    assert 35 * MIB <= stayed == device.reserved <= 4 * 64 * MIB
    assert report["released"] == before - stayed
    assert report["saved"] == 303 * MIB
    assert allocator.paused() == {"": (before - stayed, 303 * MIB)}
    assert holds(device, shared, 5 * MIB, 2)
    assert holds(device, beside, 3 * MIB, 3)  # in the first handle of `shared`
    allocator.check_invariants()
    with pytest.raises(PyactcompError, match="memory that is paused cannot be shared"):
        allocator.share(alone)
    fill(device, shared, 5 * MIB, 5)  # another process writes
    allocator.free(freed)
    assert device.open_exports == 1
    allocator.check_invariants()
    allocator.resume([""])
    contents = {(alone, 300): 1, (shared, 5): 5, (beside, 3): 3}
    assert all(holds(device, address, size * MIB, value) for (address, size), value in contents.items())
    allocator.check_invariants()
    allocator.free(shared)
    assert allocator.pause(KEEP)["skipped"] == []


def test_too_little_host_memory_changes_nothing() -> None:
    allocator, device = make("vmm")
    address = filled(allocator, device, 300 * MIB, 9)
    device.limit_host("300MiB")
    with pytest.raises(PyactcompError, match=r"too little host memory to keep 300\.00 MiB"):
        allocator.pause(KEEP)
    device.limit_host("4GiB")
    device.fail("acquire_host", 1, 1)
    with pytest.raises(PyactcompError, match="too little host memory"):
        allocator.pause(KEEP)
    assert device.pinned == 0
    assert holds(device, address, 300 * MIB, 9)
    assert allocator.paused() == {}
    allocator.check_invariants()


@pytest.mark.parametrize("call", ["create", "map", "copy"])
def test_a_resume_that_fails_leaves_everything_paused(call: str) -> None:
    allocator, device = make("vmm")
    addresses = [filled(allocator, device, 90 * MIB, value) for value in (1, 2, 3)]
    allocator.pause(KEEP)
    # Memory is asked for once more after giving back what other tags cached.
    device.fail(call, 1 if call == "copy" else 1000, 0 if call == "copy" else 3)
    with pytest.raises(PyactcompError if call == "copy" else torch.OutOfMemoryError, match=r"copy|still paused"):
        allocator.resume([""])
    assert device.reserved == reserved(allocator) == 0
    assert list(allocator.paused()) == [""]
    allocator.check_invariants()
    device.fail(call, 0)
    allocator.resume([""])
    assert all(holds(device, address, 90 * MIB, value) for address, value in zip(addresses, (1, 2, 3), strict=True))


def test_a_mapping_refused_once_is_asked_for_again() -> None:
    allocator, device = make("vmm")
    address = filled(allocator, device, 90 * MIB, 4)
    allocator.pause(KEEP)
    device.fail("map", 1, 2)
    allocator.resume([""])
    assert holds(device, address, 90 * MIB, 4)
    allocator.check_invariants()


def test_contents_of_a_freed_block_never_reach_another() -> None:
    allocator, device = make("vmm", "1GiB")
    freed = filled(allocator, device, 100 * MIB, 1, tag="weights")
    stays = allocator.allocate(800 * MIB, stream=5, tag="weights")
    fill(device, stays, 800 * MIB, 2)
    allocator.pause({"weights": True})
    allocator.free(freed)
    assert allocator.paused()["weights"][1] == 800 * MIB  # the freed block's contents went with it
    other = allocator.allocate(300 * MIB, tag="kv")
    with pytest.raises(torch.OutOfMemoryError):
        allocator.resume(["weights"])
    there = filled(allocator, device, 100 * MIB, 3, tag="cache")
    assert there == freed, "the addresses of the freed block serve another tag"
    assert allocator.saved(there, 100 * MIB) == []
    allocator.free(other)
    assert allocator.resume(["weights"])["restored"] == 800 * MIB
    assert holds(device, there, 100 * MIB, 3)
    assert holds(device, stays, 800 * MIB, 2)
    allocator.check_invariants()


def test_resuming_takes_what_others_cached() -> None:
    device = SimulatedDevice("1GiB")
    allocator = CachingAllocator(device, AllocatorConfig(growth="vmm"))
    address = filled(allocator, device, 600 * MIB, 8, tag="kv")
    allocator.pause({"kv": True})
    allocator.free(allocator.allocate(800 * MIB))
    allocator.resume(["kv"])
    assert holds(device, address, 600 * MIB, 8)


def test_resuming_into_a_full_device_says_what_is_missing() -> None:
    device = SimulatedDevice("1GiB")
    allocator = CachingAllocator(device, AllocatorConfig(growth="vmm"))
    allocator.allocate(600 * MIB, tag="kv")
    allocator.pause({"kv": False})
    other = allocator.allocate(800 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"resume 6\d\d.\d\d MiB of the tag 'kv'.*still paused"):
        allocator.resume(["kv"])
    allocator.free(other)
    allocator.resume(["kv"])


@pytest.mark.parametrize(
    ("prepare", "call", "message"),
    [
        (lambda a: a.pause(KEEP), lambda a: a.pause(KEEP), "paused already: memory without a tag"),
        (lambda a: None, lambda a: a.resume([""]), "not paused: memory without a tag"),
        (lambda a: a.pause({"kv": True}), lambda a: a.pause({"": True, "kv": True}), "paused already: the tag 'kv'"),
        (lambda a: a.begin_allocate_to_pool(POOL), lambda a: a.pause(KEEP), "while a CUDA graph is captured"),
        (
            lambda a: (a.pause(KEEP), a.begin_allocate_to_pool(POOL)),
            lambda a: a.resume([""]),
            "resumed while a CUDA graph is captured",
        ),
    ],
)
def test_pausing_at_the_wrong_time_changes_nothing(prepare, call, message: str) -> None:  # type: ignore[no-untyped-def]
    allocator, device = make("vmm")
    allocator.allocate(40 * MIB)
    prepare(allocator)
    before, paused = device.reserved, allocator.paused()
    with pytest.raises(PyactcompError, match=message):
        call(allocator)
    assert device.reserved == before
    assert allocator.paused() == paused
    allocator.check_invariants()


def test_memory_of_cuda_malloc_cannot_be_paused() -> None:
    allocator, _ = make("malloc")
    allocator.allocate(40 * MIB)
    with pytest.raises(PyactcompError, match='growth="vmm"'):
        allocator.pause(KEEP)


def test_reports_while_paused() -> None:
    allocator, device = make("vmm")
    allocator.allocate(40 * MIB)
    allocator.free(allocator.allocate(100 * MIB))
    allocator.record_history(stacks=None)
    allocator.pause(KEEP)
    stats = allocator.stats()
    assert stats["reserved_bytes.all.current"] == device.reserved == 0
    assert stats["allocated_bytes.all.current"] == 40 * MIB
    assert stats["free_bytes.largest"] == 0
    assert stats["paused_bytes"] == 40 * MIB
    assert stats["utilization"] <= 1
    assert allocator.snapshot()["segments"] == []
    allocator.empty_cache()
    assert allocator.largest_available() == device.capacity
    allocator.resume([""])
    actions = [entry["action"] for entry in allocator.snapshot()["device_traces"][0]]
    assert {"segment_unmap", "segment_map"} <= set(actions)


def segments_add_up(allocator: CachingAllocator, device: SimulatedDevice) -> bool:
    """Whether the segments of a snapshot are the reserved memory, and their blocks tile them."""
    segments = allocator.snapshot()["segments"]
    for segment in segments:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            assert block["requested_size"] <= block["size"]
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]
        device.physical(segment["address"])  # memory lies there
        device.physical(at - 1)
    return sum(segment["total_size"] for segment in segments) == reserved(allocator) == device.reserved


def test_snapshots_list_the_memory_beside_paused_memory() -> None:
    allocator, device = make("vmm")
    filled(allocator, device, 300 * MIB, 1, tag="kv")
    allocator.allocate(100 * MIB)
    freed = filled(allocator, device, 150 * MIB, 2, tag="kv")
    filled(allocator, device, 30 * MIB, 3, tag="kv")
    shared = filled(allocator, device, 5 * MIB, 4, tag="kv")
    filled(allocator, device, 200 * MIB, 5, tag="kv")
    allocator.free(freed)
    assert allocator.share(shared)
    allocator.pause({"kv": True})
    assert segments_add_up(allocator, device)
    # Parts of the neighbours lie in the handle of the shared block.
    parts = {
        block["address"]: block["size"]
        for segment in allocator.snapshot()["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    assert parts[shared] == 5 * MIB
    [default] = [size for address, size in parts.items() if size == 100 * MIB]
    assert 5 * MIB < sum(parts.values()) - default < 5 * MIB + 64 * MIB
    assert allocator.stats()["paused_bytes"] == 535 * MIB + default - sum(parts.values())
    allocator.resume(["kv"])
    assert segments_add_up(allocator, device)
    assert allocator.stats()["paused_bytes"] == 0


def test_a_checkpoint_taken_while_paused_restores_all_blocks() -> None:
    allocator, device = make("vmm")
    allocator.begin_allocate_to_pool(POOL, tag="graph")
    kept = filled(allocator, device, 30 * MIB, 1)
    allocator.end_allocate_to_pool(POOL)
    allocator.pause({"graph": True})
    state = allocator.checkpoint(POOL)
    assert allocator.snapshot(POOL)["segments"] == []
    allocator.resume(["graph"])
    assert allocator.restore(state) == {"freed": [kept], "allocated": [kept]}
    assert segments_add_up(allocator, device)


def test_out_of_memory_while_paused_names_the_paused_bytes() -> None:
    allocator, _ = make("vmm", "1GiB")
    allocator.allocate(700 * MIB, tag="training")
    allocator.allocate(100 * MIB)
    allocator.pause({"training": True})
    with pytest.raises(torch.OutOfMemoryError) as raised:
        allocator.allocate(1000 * MIB)
    assert "has reserved 100.00 MiB: 100.00 MiB are allocated" in str(raised.value)
    assert "700.00 MiB more are allocated and paused" in str(raised.value)
    allocator.resume(["training"])
    with pytest.raises(torch.OutOfMemoryError) as raised:
        allocator.allocate(1000 * MIB)
    assert "paused" not in str(raised.value)


def test_saved_contents_can_be_found() -> None:
    allocator, _device = make("vmm")
    address = allocator.allocate(600 * MIB)
    assert allocator.saved(address, MIB) == []
    allocator.pause(KEEP)
    ranges = allocator.saved(address + 200 * MIB, 300 * MIB)
    assert sum(size for _, size in ranges) == 300 * MIB
    assert len(ranges) >= 2, "chunks of 256 MiB"


@pytest.mark.parametrize("seed", range(20))
def test_random_operations_between_pauses(seed: int) -> None:
    draw = random.Random(seed)
    device = SimulatedDevice("2GiB")
    allocator = CachingAllocator(device, AllocatorConfig(growth="vmm"))
    tags = ["", "kv", "weights"]
    live: dict[int, tuple[int, int, str]] = {}
    dropped: set[int] = set()
    paused: dict[str, bool] = {}
    for number in range(300):
        action = draw.random()
        tag = draw.choice(tags)
        if action < 0.45:
            size = draw.choice([draw.randint(1, 2 * MIB), draw.randint(1, 90 * MIB), 64 * MIB])
            size = (size + STEP - 1) // STEP * STEP
            if tag in paused:
                with pytest.raises(PyactcompError, match="paused"):
                    allocator.allocate(size, stream=draw.randrange(2), tag=tag)
                continue
            if sum(size for size, _, _ in live.values()) + size > 1024 * MIB:
                continue
            address = allocator.allocate(size, stream=draw.randrange(2), tag=tag)
            assert address not in live
            fill(device, address, size, number + 1)
            live[address] = (size, number + 1, tag)
        elif action < 0.75 and live:
            address = draw.choice(sorted(live))
            allocator.free(address)
            del live[address]
            dropped.discard(address)
        elif action < 0.85 and tag not in paused:
            paused[tag] = draw.random() < 0.7
            report = allocator.pause({tag: paused[tag]})
            mine = {address for address, (_, _, of) in live.items() if of == tag}
            assert report["saved"] == (sum(live[address][0] for address in mine) if paused[tag] else 0)
            dropped |= set() if paused[tag] else mine
        elif tag in paused:
            allocator.resume([tag])
            del paused[tag]
        allocator.check_invariants()
        assert segments_add_up(allocator, device)
        assert allocator.stats()["paused_bytes"] == sum(size for size, _, of in live.values() if of in paused)
        for address, (size, value, of) in live.items():
            if of not in paused and address not in dropped:
                assert holds(device, address, size, value)
