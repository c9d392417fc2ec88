"""Memory that other streams used, reused within the capture of a graph once they have joined (simulated device)."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from allocator_cases import GROWTHS, MIB, POOL, make, overlap, physical, reserved, stat
from child_script import run_case

from pyactcomp import _core
from pyactcomp.allocator import CachingAllocator, SimulatedDevice

pytestmark = pytest.mark.parametrize("growth", GROWTHS)

MAIN, SIDE, OTHER = 1, 2, 3
SIZE = 16 * MIB


def capturing(growth: str, reuse: bool = True) -> tuple[CachingAllocator, SimulatedDevice]:
    """Return an allocator and a device where MAIN and SIDE are part of one capture, with some work on each."""
    allocator, device = make(growth, graph_capture_record_stream_reuse=reuse)
    allocator.begin_allocate_to_pool(POOL, {MAIN, SIDE})
    device.begin_capture(MAIN)
    device.launch(MAIN)
    device.join(SIDE, MAIN)
    return allocator, device


def used_on(allocator: CachingAllocator, device: SimulatedDevice, *streams: int) -> int:
    """Allocate on MAIN, use the block there and on the streams, and free it."""
    address = allocator.allocate(SIZE, stream=MAIN)
    device.launch(MAIN)
    for stream in streams:
        device.join(stream, MAIN)
        device.launch(stream)
        allocator.record_stream(address, stream)
    allocator.free(address)
    return address


def test_a_block_is_reused_once_its_streams_have_joined(growth: str) -> None:
    allocator, device = capturing(growth)
    first = used_on(allocator, device, SIDE)
    assert allocator.allocate(SIZE, stream=MAIN) != first
    device.join(MAIN, SIDE)
    assert allocator.allocate(SIZE, stream=MAIN) == first
    allocator.check_invariants()
    assert device.calls()["record"] == 0


def test_later_work_of_the_other_stream_need_not_join(growth: str) -> None:
    allocator, device = capturing(growth)
    first = used_on(allocator, device, SIDE)
    device.join(OTHER, SIDE)
    device.launch(SIDE)
    device.join(MAIN, OTHER)  # through a third stream, that has seen the use and nothing later
    assert allocator.allocate(SIZE, stream=MAIN) == first


def test_work_before_the_use_is_no_join(growth: str) -> None:
    allocator, device = capturing(growth)
    device.join(OTHER, SIDE)
    first = used_on(allocator, device, SIDE)
    device.join(MAIN, OTHER)
    assert allocator.allocate(SIZE, stream=MAIN) != first


def test_every_stream_has_to_join(growth: str) -> None:
    allocator, device = capturing(growth)
    device.join(OTHER, MAIN)
    first = used_on(allocator, device, SIDE, OTHER)
    device.join(MAIN, SIDE)
    assert allocator.allocate(SIZE, stream=MAIN) != first
    device.join(MAIN, OTHER)
    assert allocator.allocate(SIZE, stream=MAIN) == first


def test_the_block_waits_for_its_own_stream(growth: str) -> None:
    allocator, device = capturing(growth)
    first = used_on(allocator, device, SIDE)
    device.join(MAIN, SIDE)
    # SIDE has a range of its own, and the block is MAIN's.
    assert allocator.allocate(SIZE, stream=SIDE) != first
    assert allocator.allocate(SIZE, stream=MAIN) == first


def test_without_the_setting_the_block_waits_for_the_end_of_the_capture(growth: str) -> None:
    allocator, device = capturing(growth, reuse=False)
    first = used_on(allocator, device, SIDE)
    device.join(MAIN, SIDE)
    assert allocator.allocate(SIZE, stream=MAIN) != first
    device.end_capture(MAIN)
    allocator.end_allocate_to_pool(POOL)
    allocator.allocate(MIB)
    assert device.calls()["record"] == 1
    device.complete_all()
    allocator.begin_allocate_to_pool(POOL, {MAIN, SIDE})
    assert allocator.allocate(SIZE, stream=MAIN) == first


def test_a_setting_changed_within_the_capture_holds_from_then_on(growth: str) -> None:
    allocator, device = capturing(growth, reuse=False)
    early = used_on(allocator, device, SIDE)
    allocator.configure(allocator.config.replace(graph_capture_record_stream_reuse=True))
    late = used_on(allocator, device, SIDE)
    device.join(MAIN, SIDE)
    assert allocator.allocate(SIZE, stream=MAIN) == late
    assert allocator.allocate(SIZE, stream=MAIN) not in (early, late)


def test_a_stream_outside_the_capture_keeps_the_block_until_its_end(growth: str) -> None:
    allocator, device = capturing(growth)
    address = allocator.allocate(SIZE, stream=MAIN)
    allocator.record_stream(address, OTHER)
    allocator.free(address)
    assert allocator.allocate(SIZE, stream=MAIN) != address
    device.end_capture(MAIN)
    allocator.end_allocate_to_pool(POOL)
    allocator.allocate(MIB)
    assert device.calls()["record"] == 1
    device.complete_all()
    allocator.allocate(MIB)
    assert stat(allocator, "active_bytes.all.current") == SIZE + 2 * MIB


def test_a_block_from_before_the_capture_waits_for_its_end(growth: str) -> None:
    """A stream may use the block outside the graph, and no node shows that."""
    allocator, device = make(growth, graph_capture_record_stream_reuse=True)
    allocator.begin_allocate_to_pool(POOL, {MAIN, SIDE})
    address = allocator.allocate(SIZE, stream=MAIN)
    allocator.record_stream(address, SIDE)
    device.begin_capture(MAIN)
    device.launch(MAIN)
    device.join(SIDE, MAIN)
    device.join(MAIN, SIDE)
    allocator.free(address)
    assert allocator.allocate(SIZE, stream=MAIN) != address


def test_two_captures_at_once_do_not_mix(growth: str) -> None:
    allocator, device = make(growth, graph_capture_record_stream_reuse=True)
    allocator.begin_allocate_to_pool(POOL, {MAIN})
    allocator.begin_allocate_to_pool((0, 2), {SIDE})
    device.begin_capture(MAIN)
    device.begin_capture(SIDE)
    address = allocator.allocate(SIZE, stream=MAIN)
    device.launch(MAIN)
    allocator.record_stream(address, SIDE)
    allocator.free(address)  # SIDE's graph is empty yet
    later = allocator.allocate(SIZE, stream=MAIN)
    assert later != address
    device.launch(SIDE)
    allocator.record_stream(later, SIDE)
    allocator.free(later)
    assert allocator.allocate(SIZE, stream=MAIN) not in (address, later)
    device.end_capture(SIDE)
    allocator.end_allocate_to_pool((0, 2))
    assert allocator.allocate(SIZE, stream=MAIN) not in (address, later)
    allocator.check_invariants()


def test_nodes_of_an_ended_capture_are_forgotten(growth: str) -> None:
    """The driver may give a new graph's node the address of an old one's; the simulated device counts them anew."""
    allocator, device = capturing(growth)
    early = used_on(allocator, device, SIDE)
    allocator.begin_allocate_to_pool((0, 2), {OTHER})  # keeps freed blocks from their events
    device.end_capture(MAIN)
    allocator.end_allocate_to_pool(POOL)
    allocator.begin_allocate_to_pool(POOL, {MAIN, SIDE})
    device.begin_capture(MAIN)
    for _ in range(8):
        device.launch(MAIN)
    device.join(SIDE, MAIN)
    assert allocator.allocate(SIZE, stream=MAIN) != early
    late = used_on(allocator, device, SIDE)
    device.join(MAIN, SIDE)
    assert allocator.allocate(SIZE, stream=MAIN) == late


def test_a_second_capture_into_the_same_pool_knows_nothing_of_the_first(growth: str) -> None:
    allocator, device = capturing(growth)
    first = used_on(allocator, device, SIDE)
    for _ in range(8):
        device.launch(SIDE)
    device.join(MAIN, SIDE)
    assert allocator.allocate(SIZE, stream=MAIN) == first
    device.end_capture(MAIN)
    device.begin_capture(MAIN)
    device.launch(MAIN)
    device.join(SIDE, MAIN)
    second = used_on(allocator, device, SIDE)
    assert allocator.allocate(SIZE, stream=MAIN) != second


def test_a_long_capture_takes_the_memory_of_one_step(growth: str) -> None:
    peaks = {}
    for reuse in (True, False):
        allocator, device = capturing(growth, reuse)
        for _ in range(20):
            used_on(allocator, device, SIDE)
            device.join(MAIN, SIDE)
        peaks[reuse] = reserved(allocator)
        allocator.check_invariants()
    assert peaks[False] >= 20 * SIZE
    # One block; a segment or handle of 20 MiB at most.
    assert peaks[True] <= 20 * MIB


def test_the_walk_over_the_graph_sees_each_node_once(growth: str) -> None:
    allocator, device = capturing(growth)
    steps = 200
    for _ in range(steps):
        used_on(allocator, device, SIDE)
        device.join(MAIN, SIDE)
    # A step has a node on each stream.
    assert device.calls()["dependencies"] <= 2 * steps + 1


@pytest.mark.parametrize("seed", range(20))
def test_random_captures_reuse_what_is_ordered_and_nothing_else(seed: int, growth: str) -> None:
    """The order is kept here as sets of earlier uses, without a graph."""
    draw = random.Random(seed)
    allocator, device = make(growth, graph_capture_record_stream_reuse=True)
    streams = [1, 2, 3, 4]
    allocator.begin_allocate_to_pool(POOL, set(streams))
    device.begin_capture(1)
    device.launch(1)
    for stream in streams[1:]:
        device.join(stream, 1)
    before: dict[int, set[int]] = {stream: set() for stream in streams}  # the uses before a stream's next work
    live: dict[int, tuple[int, set[int]]] = {}  # address -> size, uses
    freed: list[tuple[list[tuple[int, int, int]], set[int]]] = []  # memory, uses
    uses = reused = 0
    for _ in range(300):
        action = draw.choice(["allocate", "use", "free", "join", "join"])
        if action == "allocate" and len(live) < 12:
            stream, size = draw.choice(streams), draw.choice([4 * MIB, 8 * MIB])
            address = allocator.allocate(size, stream=stream)
            memory = physical(device, address, size)
            for earlier, its_uses in freed:
                if overlap(memory, earlier):
                    assert its_uses <= before[stream]
                    reused += 1
            live[address] = size, set()
        elif action == "use" and live:
            address, stream = draw.choice(sorted(live)), draw.choice(streams)
            allocator.record_stream(address, stream)
            device.launch(stream)
            uses += 1
            before[stream].add(uses)
            live[address][1].add(uses)
        elif action == "free" and live:
            address = draw.choice(sorted(live))
            size, its_uses = live.pop(address)
            freed.append((physical(device, address, size), its_uses))
            allocator.free(address)
        elif action == "join":
            stream, awaited = draw.sample(streams, 2)
            device.join(stream, awaited)
            before[stream] |= before[awaited]
        allocator.check_invariants()
    assert reused > 0
    device.end_capture(1)
    allocator.end_allocate_to_pool(POOL)
    for address in live:
        allocator.free(address)
    allocator.release_pool(POOL)
    allocator.empty_cache()
    assert reserved(allocator) == 0


def test_the_simulated_device_refuses_what_the_driver_refuses(growth: str) -> None:
    device = SimulatedDevice("64MiB")
    device.begin_capture(MAIN)
    device.begin_capture(OTHER)
    for wrong in (
        lambda: device.begin_capture(MAIN),  # captured already
        lambda: device.launch(SIDE),  # no part of a capture
        lambda: device.join(MAIN, SIDE),  # work outside of the capture
        lambda: device.join(MAIN, OTHER),  # of another capture
        lambda: device.end_capture(SIDE),
    ):
        with pytest.raises(RuntimeError, match="simulated device"):
            wrong()


@pytest.mark.skipif(not _core.has_cuda_allocator, reason="pyactcomp._core was built without cuda.h")
@pytest.mark.parametrize("order", ["known", "unknown", "not told"])
def test_the_order_comes_from_the_driver(order: str, growth: str, fake_driver: Callable[..., str]) -> None:
    options = ["-DcuStreamGetCaptureInfo_v2=absent"] if order == "not told" else []
    settings = f"growth:{growth},graph_capture_record_stream_reuse:True"
    run_case(
        "capture_driver_cases.py",
        "on_a_driver",
        order,
        CUDA_VISIBLE_DEVICES="",
        LD_LIBRARY_PATH=fake_driver(*options),
        PYACTCOMP_ALLOC_CONF=settings,
    )
