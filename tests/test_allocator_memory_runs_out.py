"""What is tried before memory runs out, what the error says, and calls that cannot be right."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from allocator_cases import GROWTHS, MIB, allocated, blocks, make, reserved

from pyactcomp.allocator import AllocatorConfig, CachingAllocator, SimulatedDevice

STARTS = r"^CUDA out of memory\. Tried to allocate "


def halves(growth: str) -> CachingAllocator:
    """Fill 256 of 260 MiB with four blocks of 64 MiB, two from each of two segments, and free one of each."""
    allocator, _ = make(growth, capacity=260 * MIB)
    allocator.record_history("state")
    whole = [allocator.allocate(128 * MIB) for _ in range(2)]
    for address in whole:
        allocator.free(address)
    quarters = sorted(allocator.allocate(64 * MIB) for _ in range(4))
    allocator.free(quarters[1])
    allocator.free(quarters[3])
    return allocator


def test_free_pieces_are_mapped_together_under_a_large_request() -> None:
    allocator = halves("vmm")
    allocator.allocate(128 * MIB)
    allocator.check_invariants()
    assert allocated(allocator) == 256 * MIB
    assert allocator.stats()["pieces_moved"] >= 1


def test_the_error_says_what_is_free_what_pins_it_and_what_would_have_fitted() -> None:
    allocator = halves("malloc")
    with pytest.raises(torch.OutOfMemoryError, match=STARTS + r"128\.00 MiB") as caught:
        allocator.allocate(128 * MIB)
    text = str(caught.value)
    pin = allocator.stats()["pins"][0]
    assert "largest free block is 64.00 MiB" in text
    assert "external fragmentation is 50.0 %" in text  # 1 - 64 / 128
    assert f"block of 64.00 MiB at {pin['address']:#x} pins the most free memory, 64.00 MiB" in text
    assert "halves" in [frame["name"] for frame in pin["frames"][:2]]
    assert "growth:vmm" in text
    assert allocator.stats()["num_ooms"] == 1
    allocator.check_invariants()


@pytest.mark.parametrize("growth", GROWTHS)
def test_cached_memory_is_given_back_before_the_error(growth: str) -> None:
    allocator, device = make(growth, capacity=100 * MIB)
    # Small blocks and another stream's memory cannot serve the request as they are.
    addresses = [allocator.allocate(MIB) for _ in range(20)] + [allocator.allocate(40 * MIB, stream=3)]
    for address in addresses:
        allocator.free(address)
    assert device.reserved == 60 * MIB
    allocator.allocate(90 * MIB)
    allocator.check_invariants()
    assert reserved(allocator) == device.reserved <= 100 * MIB


@pytest.mark.parametrize("growth", GROWTHS)
def test_pending_blocks_are_waited_for_before_the_error(growth: str) -> None:
    allocator, device = make(growth, capacity=100 * MIB)
    address = allocator.allocate(80 * MIB)
    allocator.record_stream(address, 7)
    allocator.free(address)
    assert device.calls()["wait"] == 0
    allocator.allocate(80 * MIB)
    assert device.calls()["synchronising"] >= 1
    assert allocated(allocator) == 80 * MIB


@pytest.mark.parametrize("growth", GROWTHS)
def test_what_a_pressure_callback_frees_is_used(growth: str) -> None:
    allocator, _ = make(growth, capacity=100 * MIB)
    held = [allocator.allocate(40 * MIB) for _ in range(2)]
    asked: list[int] = []

    def shrink(missing: int) -> bool:
        asked.append(missing)
        allocator.stats()  # the allocator can be used from here
        if not held:
            return False
        allocator.free(held.pop())
        return True

    allocator.add_pressure_callback(shrink)
    allocator.allocate(60 * MIB)
    assert len(asked) == 1
    # 20 MiB are left of the device's, so at least 40 are missing and at most all that was requested.
    assert 40 * MIB <= asked[0] <= 60 * MIB
    assert allocator.stats()["num_ooms"] == 0
    with pytest.raises(torch.OutOfMemoryError, match=STARTS):
        allocator.allocate(100 * MIB)
    assert not held


@pytest.mark.parametrize("growth", GROWTHS)
def test_a_callback_that_is_not_needed_is_not_called(growth: str) -> None:
    allocator, _ = make(growth, capacity=100 * MIB)
    allocator.add_pressure_callback(lambda missing: pytest.fail(f"asked for {missing}"))
    for _ in range(10):
        allocator.free(allocator.allocate(90 * MIB))


@pytest.mark.parametrize("growth", GROWTHS)
def test_a_callback_that_raises_is_named_in_the_error(growth: str) -> None:
    allocator, _ = make(growth, capacity=100 * MIB)

    def broken(missing: int) -> bool:
        raise KeyError("no such tensor")

    def silent(missing: int) -> None:
        pass

    allocator.add_pressure_callback(broken)
    allocator.add_pressure_callback(silent)  # type: ignore[arg-type]
    with pytest.raises(torch.OutOfMemoryError, match=STARTS) as caught:
        allocator.allocate(200 * MIB)
    assert "broken" in str(caught.value)
    assert "KeyError: 'no such tensor'" in str(caught.value)
    assert "silent" in str(caught.value)
    assert "got None" in str(caught.value)


@pytest.mark.parametrize("growth", GROWTHS)
def test_a_callback_that_runs_out_of_memory_is_not_asked_to_help_itself(growth: str) -> None:
    allocator, _ = make(growth, capacity=100 * MIB)
    asked: list[int] = []

    def greedy(missing: int) -> bool:
        asked.append(missing)
        allocator.allocate(150 * MIB)
        return True

    allocator.add_pressure_callback(greedy)
    with pytest.raises(torch.OutOfMemoryError, match=STARTS) as caught:
        allocator.allocate(200 * MIB)
    assert asked == [200 * MIB]
    assert "150.00 MiB" in str(caught.value)


def test_what_the_limit_forbids_is_not_begun() -> None:
    """Each pending block that is waited for would otherwise create handles up to the limit and destroy them again."""
    allocator, device = make("vmm", capacity="8GiB", memory_fraction=0.25)
    for stream in range(1, 9):
        address = allocator.allocate(4 * MIB)
        allocator.record_stream(address, stream)
        allocator.free(address)
    created = device.calls()["create"]
    with pytest.raises(torch.OutOfMemoryError, match=STARTS):
        allocator.allocate("3GiB")
    assert device.calls()["create"] == created


@pytest.mark.parametrize("growth", GROWTHS)
def test_callbacks_are_called_on_any_thread_and_dropped_when_removed(growth: str) -> None:
    allocator, _ = make(growth, capacity=100 * MIB)
    threads: list[int] = []

    class Callback:
        def __call__(self, missing: int) -> bool:
            threads.append(threading.get_ident())
            return False

    callback = Callback()
    handle = allocator.add_pressure_callback(callback)

    def fail() -> None:
        with pytest.raises(torch.OutOfMemoryError):
            allocator.allocate(200 * MIB)

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    assert threads == [thread.ident]
    gone = weakref.ref(callback)
    del callback
    assert gone() is not None
    allocator.remove_pressure_callback(handle)
    gc.collect()
    assert gone() is None
    fail()
    assert len(threads) == 1


@pytest.mark.parametrize("growth", GROWTHS)
def test_observers_are_told_of_an_error_once_it_is_certain(growth: str) -> None:
    allocator, device = make(growth, capacity=100 * MIB)
    allocator.allocate(60 * MIB)
    told: list[tuple[int, int, int]] = []
    allocator.add_oom_observer(lambda *figures: told.append(figures))
    allocator.allocate(20 * MIB)
    assert told == []
    with pytest.raises(torch.OutOfMemoryError):
        allocator.allocate(50 * MIB)
    assert told == [(50 * MIB, device.capacity, device.capacity - device.reserved)]


@pytest.mark.parametrize("growth", GROWTHS)
def test_a_size_over_the_device_changes_nothing_but_the_count(growth: str) -> None:
    allocator, device = make(growth, capacity=100 * MIB)
    kept = allocator.allocate(30 * MIB)
    before = allocator.counters()
    for size in (101 * MIB, 1 << 50, (1 << 60) - 1):
        with pytest.raises(torch.OutOfMemoryError, match=STARTS):
            allocator.allocate(size)
    for size in (1 << 60, 2**64 - 1):
        with pytest.raises(
            torch.OutOfMemoryError, match=r"^CUDA out of memory\. Tried to allocate more than 1EB memory\.$"
        ):
            allocator.allocate(size)
    allocator.check_invariants()
    # The retries are counted too, as PyTorch does.
    changed = {"num_ooms", "num_alloc_retries", "num_sync_all_streams"}
    after = allocator.counters()
    assert {name for name in after if after[name] != before[name]} <= changed
    assert after["num_ooms"] == 3
    assert device.reserved == 30 * MIB
    assert blocks(allocator, "active_allocated") == {kept: 30 * MIB}


@pytest.mark.parametrize("growth", GROWTHS)
def test_freeing_what_is_not_allocated_is_an_error_that_changes_nothing(growth: str) -> None:
    allocator, _ = make(growth)
    address, freed = allocator.allocate(4 * MIB), allocator.allocate(4 * MIB)
    allocator.free(freed)
    before = allocator.counters()
    for wrong in (freed, address + 512, 12345, 2**64 - 1):
        assert not allocator.owns(wrong)
        for call in (allocator.free, allocator.block, lambda value: allocator.record_stream(value, 1)):
            with pytest.raises(ValueError, match=r"address|freed|allocat"):
                call(wrong)
    allocator.check_invariants()
    assert allocator.counters() == before
    assert allocator.owns(address)


@pytest.mark.parametrize("call", ["acquire", "create", "map", "reserve"])
def test_a_driver_call_that_fails_leaves_the_allocator_as_it_was(call: str) -> None:
    growth = "malloc" if call == "acquire" else "vmm"
    allocator, device = make(growth)
    kept = allocator.allocate(700)
    before = (allocated(allocator), reserved(allocator), device.reserved)
    device.fail(call, count=100)
    message = rf"The driver refused more: .*{call}" if call in ("map", "reserve") else "Tried to allocate"
    with pytest.raises(torch.OutOfMemoryError, match=message) as error:
        allocator.allocate(50 * MIB)
    if call in ("map", "reserve"):
        assert "growth:malloc" in str(error.value)
        assert "No setting" not in str(error.value)
    allocator.check_invariants()
    assert (allocated(allocator), reserved(allocator), device.reserved) == before
    device.fail(call, count=0)
    allocator.allocate(50 * MIB)
    assert allocator.block(kept)["requested_size"] == 700
    allocator.check_invariants()


@pytest.mark.parametrize("call", ["map", "reserve"])
def test_what_a_driver_refuses_once_is_tried_again(call: str) -> None:
    allocator, device = make("vmm", capacity=400 * MIB)
    kept, cached = allocator.allocate(100 * MIB), allocator.allocate(200 * MIB, stream=7)
    allocator.free(cached)
    device.complete_all()
    device.fail(call)
    allocator.allocate(250 * MIB, stream=3)
    assert allocator.owns(kept)
    allocator.check_invariants()


def test_observers_get_the_limit_that_is_set() -> None:
    allocator, _ = make("vmm", capacity=400 * MIB, memory_fraction=0.5)
    seen: list[tuple[int, int, int]] = []
    allocator.add_oom_observer(lambda *told: seen.append(told))
    with pytest.raises(torch.OutOfMemoryError):
        allocator.allocate(300 * MIB)
    assert seen == [(300 * MIB, 200 * MIB, 400 * MIB)]


@pytest.mark.parametrize(
    ("method", "arguments", "error", "text"),
    [
        ("allocate", (True,), TypeError, r"size must be an integer or a text like '512MiB', got True \(bool\)"),
        ("allocate", (1.5,), TypeError, r"size must be an integer or a text like '512MiB', got 1\.5 \(float\)"),
        ("allocate", (None,), TypeError, r"size must be an integer or a text like '512MiB', got None"),
        ("allocate", (-1,), ValueError, r"size must be at least 0 .*got -1"),
        ("allocate", (2**64,), ValueError, r"size must be .*got 18446744073709551616"),
        ("allocate", ("12 parsecs",), ValueError, r"size: .*parsecs"),
        ("allocate", (512, True), TypeError, r"stream must be an integer, got True"),
        ("allocate", (512, -1), ValueError, r"stream must be at least 0 .*got -1"),
        ("free", ("4096",), TypeError, r"address must be an integer, got '4096'"),
        ("free", (-4096,), ValueError, r"address must be at least 0 .*got -4096"),
        ("record_stream", (False, 0), TypeError, r"address must be an integer, got False"),
        ("empty_cache", ((1, 2, 3),), TypeError, r"pool must be a pair of integers"),
        ("add_pressure_callback", (3,), TypeError, r"pressure callback must be callable, got 3"),
        ("add_oom_observer", (None,), TypeError, r"out-of-memory observer must be callable, got None"),
        ("record_history", ("some",), ValueError, r"enabled must be 'all', 'state' or None, got 'some'"),
        ("record_history", ("all", 10, "cpp"), ValueError, r"stacks must be 'python' or None, got 'cpp'"),
        ("record_history", ("all", -1), ValueError, r"max_entries must be at least 0"),
        ("record_history", ("all", 10, None, False, ["allok"]), ValueError, r"skip_actions takes alloc, .*'allok'"),
        ("pop_scope", (7,), RuntimeError, r"no scope 7 is open"),
    ],
)
def test_arguments_that_cannot_be_right_are_named(
    method: str, arguments: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    allocator, _ = make()
    before = allocator.counters()
    with pytest.raises(error, match=text):
        getattr(allocator, method)(*arguments)
    assert allocator.counters() == before


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"growth": "slab"}, ValueError, "growth must be 'vmm' or 'malloc', got 'slab'"),
        ({"max_split_size": True}, TypeError, r"max_split_size must be an integer or a text like '512MiB', got True"),
        ({"max_split_size": "lots"}, ValueError, r"max_split_size: .*lots"),
        ({"max_split_size": MIB}, ValueError, r"max_split_size"),
        ({"large_segment_size": 3.0}, TypeError, r"large_segment_size must be an integer or a text .*, got 3\.0"),
        ({"roundup_power2_divisions": 3}, ValueError, r"roundup_power2_divisions"),
        ({"roundup_power2_divisions": {3: 2}}, ValueError, r"roundup_power2_divisions"),
        ({"roundup_power2_divisions": {4: 2.0}}, TypeError, r"roundup_power2_divisions must be an integer, got 2\.0"),
        ({"garbage_collection_threshold": 2}, ValueError, r"garbage_collection_threshold"),
        ({"memory_fraction": "half"}, TypeError, r"memory_fraction must be a number, got 'half'"),
        ({"memory_fraction": True}, TypeError, r"memory_fraction must be a number, got True"),
        ({"memory_fraction": 1.5}, ValueError, r"memory_fraction"),
        ({"initial_pool_size": -1}, ValueError, r"initial_pool_size must be at least 0"),
    ],
)
def test_settings_that_cannot_be_right_are_named(settings: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        AllocatorConfig(**settings)


def test_without_virtual_memory_growth_is_malloc() -> None:
    device = SimulatedDevice("1GiB", virtual_memory=False)
    allocator = CachingAllocator(device, AllocatorConfig(growth="vmm"))
    assert allocator.config.growth == "malloc"
    allocator.allocate(512)
    assert device.calls()["acquire"] == 1


@pytest.mark.parametrize("growth", GROWTHS)
def test_an_observer_that_raises_does_not_hide_the_error(growth: str) -> None:
    allocator, _ = make(growth, capacity=100 * MIB)

    def broken(requested: int, total: int, free: int) -> None:
        raise KeyError("observer")

    told: list[int] = []
    allocator.add_oom_observer(broken)
    allocator.add_oom_observer(lambda requested, total, free: told.append(requested))
    with pytest.raises(torch.OutOfMemoryError, match=STARTS):
        allocator.allocate(200 * MIB)
    assert told == [200 * MIB]
