"""Growth by virtual memory on the simulated device: handles, pieces mapped together, and whose memory is whose."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from allocator_cases import MIB, blocks, make, overlap, physical, reserved

from pyactcomp.allocator import AllocatorConfig, CachingAllocator, SimulatedDevice

PUBLISHED = Path(__file__).parent / "data" / "published"


def assert_no_memory_is_shared(allocator: CachingAllocator, device: SimulatedDevice) -> None:
    """Two live blocks, or a live and a pending one, never stand on the same bytes."""
    taken: list[tuple[int, int, int]] = []
    for state in ("active_allocated", "active_pending_free"):
        for address, size in blocks(allocator, state).items():
            memory = physical(device, address, size)
            assert not overlap(memory, taken)
            taken += memory


@pytest.mark.parametrize("mebibytes", [2, 19, 20, 21, 64, 100, 333, 1024])
def test_handles_follow_the_request(mebibytes: int) -> None:
    allocator, device = make("vmm")
    allocator.allocate(mebibytes * MIB)
    handles = device.calls()["create"]
    # Rounded up to 2 MiB, or one handle of the least size more than is needed; never many small ones.
    assert mebibytes * MIB <= device.reserved < mebibytes * MIB + 20 * MIB
    assert handles <= -(-mebibytes // 20)
    if mebibytes >= 128:
        assert device.reserved / handles > 40 * MIB  # twice the least handle, where the request allows it
    assert device.calls()["map"] == handles
    assert device.calls()["acquire"] == 0


def test_the_pool_grows_where_it_ends() -> None:
    allocator, device = make("vmm")
    first = allocator.allocate(30 * MIB)
    second = allocator.allocate(30 * MIB)
    assert second == first + 30 * MIB
    allocator.free(first)
    allocator.free(second)
    # Two requests' memory is one free block, which serves a larger request without asking for more.
    assert allocator.allocate(60 * MIB) == first
    assert device.reserved == 60 * MIB
    assert len(allocator.snapshot()["segments"]) == 1


def test_only_what_a_free_end_lacks_is_asked_for() -> None:
    allocator, device = make("vmm")
    address = allocator.allocate(100 * MIB)
    allocator.free(address)
    assert allocator.allocate(140 * MIB) == address
    assert device.reserved == 140 * MIB


@pytest.mark.parametrize("capacity", [8 << 30, 260 * MIB])
def test_pieces_that_are_free_apart_serve_a_request_together(capacity: int) -> None:
    allocator, device = make("vmm", capacity=capacity)
    quarters = [allocator.allocate(64 * MIB) for _ in range(4)]
    allocator.free(quarters[0])
    allocator.free(quarters[2])
    before = device.calls()
    large = allocator.allocate(128 * MIB)
    assert device.calls()["create"] == before["create"]
    assert device.calls()["synchronising"] == before["synchronising"]
    assert device.reserved == reserved(allocator) == 256 * MIB
    assert allocator.stats()["pieces_moved"] == 2
    assert_no_memory_is_shared(allocator, device)
    allocator.check_invariants()
    for address in (large, quarters[1], quarters[3]):
        allocator.free(address)
    device.complete_all()
    allocator.empty_cache()
    assert device.reserved == 0
    allocator.check_invariants()


def test_a_gap_is_filled_where_its_free_edges_serve_the_request() -> None:
    allocator, device = make("vmm", capacity="1GiB")
    first = allocator.allocate(10 * MIB)  # its handle of 20 MiB reaches into the next block
    whole = allocator.allocate(148 * MIB)
    allocator.allocate(10 * MIB)  # in the last handle too
    allocator.free(whole)
    allocator.allocate(170 * MIB)  # takes the whole handles of the free block, not its edges
    device.complete_all()
    before = device.reserved
    assert allocator.allocate(148 * MIB) == first + 10 * MIB
    assert device.reserved - before < 148 * MIB  # the edges serve the rest
    assert_no_memory_is_shared(allocator, device)
    allocator.check_invariants()


@pytest.mark.parametrize("blocks_of_model", [3, 12])
def test_blocks_of_a_transformer_leave_no_edges(blocks_of_model: int) -> None:
    """Freed blocks of 96 MiB keep their handles for the next request of 96 MiB, also while the stream lags behind."""
    steps = (
        "+0:96 +1:96 +2:96 -1 +3:96 +4:96 +5:96 -4 +6:288 +7:96 +8:96 +9:96 +10:96 +11:384 -8 +12:384 -11 +13:96 "
        "+14:96 -7 +15:96 -14 +16:96 -6 +17:96 +18:96 -17 +19:96 +20:96 +21:96 -20 +22:384 +23:384"
    )
    peaks = {}
    for growth in ("malloc", "vmm"):
        allocator, _ = make(growth, capacity="200GiB")
        allocator.allocate(MIB + MIB // 2)  # the blocks begin off their handles' boundaries
        for _ in range(blocks_of_model):
            live: dict[str, int] = {}
            for step in steps.split():
                number, _, size = step[1:].partition(":")
                if step[0] == "+":
                    live[number] = allocator.allocate(int(size) * MIB)
                else:
                    allocator.free(live.pop(number))
        peaks[growth] = allocator.stats()["reserved_bytes.all.peak"]
    # No block of the model leaves an edge behind: the difference does not grow with their number.
    assert peaks["vmm"] <= peaks["malloc"] + 20 * MIB


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("trace", "most"),
    [("real_01", 1.0039), ("real_08", 1.0040), ("real_10", 1.0085), ("real_11", 1.0006), ("real_13", 1.0045)],
)
def test_published_trainings_reserve_little_more_than_is_live(trace: str, most: float, asynchronous: bool) -> None:
    """A replay is exact, so the bound is the figure, rounded up; a stream that never passes reserves no more."""
    with np.load(PUBLISHED / f"{trace}.npz") as data:
        actions = json.loads(str(data["meta"]))["actions"]
        events = list(zip(*(data[key].tolist() for key in ("action", "addr", "size")), strict=True))
    device = SimulatedDevice(capacity="1TiB", asynchronous=asynchronous)
    allocator = CachingAllocator(device, AllocatorConfig(growth="vmm"))
    live: dict[int, int] = {}
    for action, address, size in events:
        if actions[action] == "alloc":
            live[address] = allocator.allocate(size)
        elif actions[action] == "free_completed" and address in live:
            allocator.free(live.pop(address))
    allocator.check_invariants()
    stats = allocator.stats()
    assert stats["reserved_bytes.all.peak"] <= most * stats["allocated_bytes.all.peak"]


def test_a_piece_that_moved_is_not_unmapped_before_its_stream_has_passed() -> None:
    allocator, device = make("vmm")
    quarters = [allocator.allocate(64 * MIB) for _ in range(4)]
    allocator.free(quarters[0])
    allocator.free(quarters[2])
    old = physical(device, quarters[0], 64 * MIB)
    allocator.allocate(128 * MIB)
    allocator.allocate(300 * MIB)
    # Kernels launched before the free may still touch the old address.
    assert device.calls()["unmap"] == 0
    assert physical(device, quarters[0], 64 * MIB) == old
    device.complete_all()
    allocator.allocate(300 * MIB)  # whatever grows next finds that the stream has passed
    assert device.calls()["unmap"] == 2
    allocator.check_invariants()


def test_a_piece_changes_its_stream_only_when_that_has_passed() -> None:
    allocator, device = make("vmm", capacity=200 * MIB)
    address = allocator.allocate(128 * MIB, stream=1)
    memory = physical(device, address, 128 * MIB)
    allocator.free(address)
    point = device.now()
    other = allocator.allocate(180 * MIB, stream=2)
    assert overlap(memory, physical(device, other, 180 * MIB))
    assert device.finished(1, point)
    assert allocator.stats()["stream_steals"] >= 1
    allocator.check_invariants()


@pytest.mark.parametrize("skip", range(6))
@pytest.mark.parametrize("call", ["create", "map", "reserve"])
def test_a_failure_while_pieces_move_loses_nothing(call: str, skip: int) -> None:
    allocator, device = make("vmm", capacity=300 * MIB)
    kept = [allocator.allocate(64 * MIB, stream=index % 2) for index in range(4)]
    for index in (0, 2):
        allocator.free(kept[index])
    device.fail(call, count=1, skip=skip)
    try:
        kept.append(allocator.allocate(160 * MIB))
    except RuntimeError:
        kept.append(allocator.allocate(160 * MIB))
    allocator.check_invariants()
    assert reserved(allocator) == device.reserved
    assert_no_memory_is_shared(allocator, device)
    for index in (1, 3, 4):
        allocator.free(kept[index])
    device.complete_all()
    allocator.empty_cache()
    assert device.reserved == 0


@pytest.mark.parametrize("capacity", [8 << 30, 1340 * MIB])
def test_a_handle_larger_than_the_hole_is_not_mapped_there(capacity: int) -> None:
    """A handle of an earlier, larger large_segment_size serves no request in a gap between live blocks."""
    allocator, device = make("vmm", capacity=capacity)
    usual = allocator.config
    before, hole, behind = (allocator.allocate(size * MIB, stream=1) for size in (20, 200, 60))
    for address in (behind, behind + 20 * MIB, behind + 40 * MIB):
        device.write(address, address)
    allocator.free(hole)
    allocator.empty_cache()
    allocator.configure(usual.replace(large_segment_size=1 << 30))
    large = allocator.allocate(2 * MIB, stream=2)
    allocator.free(large)
    allocator.configure(usual)
    allocator.allocate(MIB + 1, stream=3)  # asks where stream 2 is
    device.complete_all()
    address = allocator.allocate(100 * MIB, stream=1)
    assert before < address
    assert_no_memory_is_shared(allocator, device)
    allocator.check_invariants()
    assert [device.read(at) for at in (behind, behind + 20 * MIB, behind + 40 * MIB)] == [
        behind,
        behind + 20 * MIB,
        behind + 40 * MIB,
    ]


@pytest.mark.parametrize("large", [2 << 30, 1 << 40, (1 << 56) - 2 * MIB])
def test_a_least_handle_beyond_the_device_falls_back_to_the_request(large: int) -> None:
    allocator, device = make("vmm", capacity="1GiB", large_segment_size=large)
    first = allocator.allocate(5 * MIB)
    assert device.reserved == reserved(allocator) == 6 * MIB
    assert allocator.allocate(300 * MIB) == first + 5 * MIB  # in one range of addresses
    assert reserved(allocator) == 6 * MIB + 300 * MIB
    allocator.check_invariants()


@pytest.mark.parametrize("initial", [2 << 30, 1 << 45, (1 << 56) - 1])
@pytest.mark.parametrize("growth", ["vmm", "malloc"])
def test_a_first_growth_beyond_the_device_falls_back_to_the_request(growth: str, initial: int) -> None:
    allocator, device = make(growth, capacity="1GiB", initial_pool_size=initial)
    assert allocator.allocate(5 * MIB)
    assert (device.reserved, device.calls()["reserve"]) == (20 * MIB, int(growth == "vmm"))
    allocator.check_invariants()
