"""What the enabled allocator tells, and torch's own functions on the plain route, over a simulated device."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pyactcomp
from pyactcomp import PyactcompError, _core, allocator
from pyactcomp.allocator import AllocatorConfig, CachingAllocator, SimulatedDevice, attach, observe, plain

MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("allocator_not_enabled")


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch, allocator_not_enabled: None) -> CachingAllocator:
    """Let device 0 be a simulated one."""
    core = CachingAllocator(SimulatedDevice("64MiB"), AllocatorConfig(memory_fraction=0.75))
    monkeypatch.setattr(attach, "_active", AllocatorConfig())
    monkeypatch.setattr(_core, "runtime_device", {0: core}.__getitem__, raising=False)
    monkeypatch.setattr(_core, "runtime_existing", {0: core}.get, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return core


def test_observing_needs_an_enabled_allocator() -> None:
    for observed in (allocator.stats, lambda: allocator.on_pressure(bool), allocator.scope("step").__enter__):
        with pytest.raises(PyactcompError, match=r"not enabled: call pyactcomp\.allocator\.enable\(\)"):
            observed()


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("device", ["cpu", 7, "cuda:7", torch.device("cuda", 2), -1])
def test_a_device_that_is_not_there_is_named(device: object) -> None:
    with pytest.raises(ValueError, match=f"{re.escape(repr(device))}(: torch finds 2 CUDA devices)?$"):
        allocator.stats(device)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", [None, 0, "cuda", "cuda:0", torch.device("cuda")])
def test_stats_are_those_of_the_device(device: Any, simulated: CachingAllocator) -> None:
    simulated.allocate(1000)
    stats = allocator.stats(device)
    assert stats["requested_bytes.all.current"] == 1000
    assert stats == simulated.stats()


def test_scopes_count_what_happens_in_them_and_nest(simulated: CachingAllocator) -> None:
    simulated.allocate(4 * MIB)
    with allocator.scope("outer") as outer:
        kept = simulated.allocate(512)
        with allocator.scope("inner", device=0) as inner:
            simulated.free(simulated.allocate(2048))
            simulated.allocate(1024)
        simulated.free(kept)
    assert (inner.name, inner.allocated_bytes, inner.peak_bytes) == ("inner", 1024, 2048)
    assert (inner.total_bytes, inner.allocations) == (2048 + 1024, 2)
    assert (outer.allocated_bytes, outer.peak_bytes) == (1024, 512 + 2048)
    assert (outer.total_bytes, outer.allocations) == (512 + 2048 + 1024, 3)


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_scopes_that_end_in_any_order_count_the_same(simulated: CachingAllocator, order: tuple[int, ...]) -> None:
    level = 0
    numbers, begins, peaks, counts = [], [], [0] * 3, [0] * 3
    still_open: set[int] = set()

    def take_for_a_while(size: int) -> None:
        simulated.free(simulated.allocate(size * MIB))
        for scope in still_open:
            peaks[scope] = max(peaks[scope], level + size - begins[scope])
            counts[scope] += 1

    for scope, size in enumerate((5, 9, 7)):
        numbers.append(simulated.push_scope())
        begins.append(level)
        still_open.add(scope)
        take_for_a_while(size)
    for scope, size in zip(order, (6, 14, 8), strict=True):
        still_open.remove(scope)
        found = simulated.pop_scope(numbers[scope])
        assert (found["peak_bytes"], found["allocations"]) == (peaks[scope] * MIB, counts[scope])
        with pytest.raises(RuntimeError, match=f"no scope {numbers[scope]} is open"):
            simulated.pop_scope(numbers[scope])
        simulated.allocate(MIB)
        level += 1
        for each in still_open:
            peaks[each] = max(peaks[each], level - begins[each])
            counts[each] += 1
        take_for_a_while(size)


def test_overlapping_scopes_of_threads_count_their_own(simulated: CachingAllocator) -> None:
    steps = threading.Barrier(2, timeout=60)
    scopes = [allocator.scope(name) for name in ("first", "second")]

    def first() -> None:
        with scopes[0]:
            simulated.allocate(10 * MIB)
            steps.wait()
            steps.wait()
        steps.wait()

    other = threading.Thread(target=first)
    other.start()
    steps.wait()
    with scopes[1]:
        simulated.free(simulated.allocate(1 * MIB))
        steps.wait()
        steps.wait()
        simulated.allocate(20 * MIB)
    other.join()
    counts = [(each.allocated_bytes, each.peak_bytes, each.total_bytes, each.allocations) for each in scopes]
    assert counts == [(10 * MIB, 11 * MIB, 11 * MIB, 2), (20 * MIB, 20 * MIB, 21 * MIB, 2)]


def test_a_scope_of_several_threads_ends_for_each_where_it_began(simulated: CachingAllocator) -> None:
    shared = allocator.scope("shared")
    steps = threading.Barrier(2, timeout=60)
    counted: list[tuple[int, int]] = []

    def enter() -> None:
        with shared:
            steps.wait()
            steps.wait()
        counted.append((shared.total_bytes, shared.allocations))
        steps.wait()

    other = threading.Thread(target=enter)
    other.start()
    steps.wait()
    simulated.allocate(10 * MIB)
    with shared:
        steps.wait()
        steps.wait()
        other.join()
        simulated.allocate(20 * MIB)
    counted.append((shared.total_bytes, shared.allocations))
    assert counted == [(10 * MIB, 1), (20 * MIB, 1)]


def test_a_scope_is_entered_again_inside_itself_and_left_by_another_thread(simulated: CachingAllocator) -> None:
    step = allocator.scope("step")
    with step:
        simulated.allocate(1 * MIB)
        with step:
            simulated.allocate(2 * MIB)
        assert step.total_bytes == 2 * MIB
        simulated.allocate(4 * MIB)
    assert step.total_bytes == 7 * MIB
    step.__enter__()
    simulated.allocate(8 * MIB)
    other = threading.Thread(target=step.__exit__)
    other.start()
    other.join()
    assert step.total_bytes == 8 * MIB
    step.__exit__()
    assert step.total_bytes == 8 * MIB


def test_a_scope_is_closed_when_its_block_raises(simulated: CachingAllocator) -> None:
    step = allocator.scope("step")

    def fail_inside() -> None:
        with step:
            simulated.allocate(512)
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert step.allocations == 1
    with pytest.raises(RuntimeError, match="no scope 0 is open"):
        simulated.pop_scope(0)


def test_a_function_called_under_pressure_makes_room_until_it_is_removed(simulated: CachingAllocator) -> None:
    held = [simulated.allocate(40 * MIB)]
    missing: list[int] = []

    def let_go(missing_bytes: int) -> bool:
        missing.append(missing_bytes)
        if held:
            simulated.free(held.pop())
            return True
        return False

    with allocator.on_pressure(let_go) as handle:
        # Of 64 MiB, 0.75 may be taken: 48 MiB.
        held.append(simulated.allocate(42 * MIB))
        assert len(missing) == 1
        assert missing[0] > 0
        simulated.free(held.pop())
    held.append(simulated.allocate(40 * MIB))
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\. Tried to allocate"):
        simulated.allocate(42 * MIB)
    assert len(missing) == 1
    handle.remove()


def test_a_ladder_climbs_for_an_error_and_not_for_pressure_that_a_callback_took_away(
    simulated: CachingAllocator,
) -> None:
    """Cached memory given back calls no callback; where one is called, the request fails unless it makes room."""
    held: list[int] = []
    missing: list[int] = []

    def let_go(missing_bytes: int) -> bool:
        missing.append(missing_bytes)
        return bool(held) and simulated.free(held.pop()) is None

    model = torch.nn.Linear(4, 4)
    ladder = pyactcomp.Ladder(model, torch.optim.SGD(model.parameters(), lr=0.1), ["keep", "lossless"])

    def train(stream: int) -> list[str]:
        def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
            # Of 48 MiB.
            simulated.free(simulated.allocate((36 if ladder.rung.name == "keep" else 8) * MIB, stream=stream))
            return model(batch).sum()  # type: ignore[no-any-return]

        ladder.step(torch.ones(2, 4), loss)
        return [climb.rung for climb in ladder.climbs]

    with allocator.on_pressure(let_go):
        assert train(0) == train(3) == []  # the other stream's cache goes
        assert missing == []
        held.append(simulated.allocate(20 * MIB))
        assert train(0) == []
        assert (len(missing), held) == (1, [])
        assert train(0) == []
        assert len(missing) == 1
        kept = simulated.allocate(20 * MIB)
        assert train(0) == ["keep"]
        assert len(missing) == 2
    simulated.free(kept)


@pytest.mark.usefixtures("simulated")
def test_on_pressure_decorates_a_function_that_can_still_be_called() -> None:
    @allocator.on_pressure
    def let_go(missing_bytes: int) -> bool:
        return missing_bytes > 5

    assert isinstance(let_go, observe.PressureHandle)
    assert (let_go(5), let_go(6)) == (False, True)
    let_go.remove()
    with pytest.raises(TypeError, match="on_pressure expects a function of the missing bytes, got 3"):
        allocator.on_pressure(3)  # type: ignore[arg-type]


@pytest.fixture
def plainly(simulated: CachingAllocator, monkeypatch: pytest.MonkeyPatch) -> CachingAllocator:
    """Let torch's functions be those of the plain route, over the simulated device 0 and an unused device 1."""
    for name, function in plain._ENTRY_POINTS.items():
        monkeypatch.setattr(torch._C, name, function, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "is_initialized", lambda: True)
    return simulated


def test_statistics_have_the_structure_of_torchs(plainly: CachingAllocator) -> None:
    plainly.free(plainly.allocate(2 * MIB))
    plainly.allocate(1000)
    nested = torch.cuda.memory.memory_stats_as_nested_dict(0)
    for name in (
        "allocation segment active inactive_split allocated_bytes reserved_bytes active_bytes inactive_split_bytes "
        "requested_bytes"
    ).split():
        assert set(nested[name]) == {"all", "small_pool", "large_pool"}
        for counts in nested[name].values():
            assert set(counts) == {"current", "peak", "allocated", "freed"}
    assert set(nested["oversize_segments"]) == {"current", "peak", "allocated", "freed"}
    assert all(isinstance(nested[name], int) for name in ("num_ooms", "num_alloc_retries", "max_split_size"))
    # Flattened by torch again, they are what the core counts.
    assert dict(torch.cuda.memory_stats(0)) == plainly.counters()
    assert torch.cuda.memory_allocated(0) == 1024
    assert torch.cuda.memory_reserved(0) == plainly.counters()["reserved_bytes.all.current"] > 0
    assert "Allocated memory" in torch.cuda.memory_summary(0)
    # torch.accelerator asks for the same, once it is told that there is something to ask.
    assert torch._C._accelerator_getDeviceStats(0) == nested
    assert torch._C._accelerator_isAllocatorInitialized() == torch.cuda.is_initialized()


def test_a_device_that_was_never_used_counts_zero_and_is_not_created(plainly: CachingAllocator) -> None:
    plainly.allocate(1000)
    unused = torch.cuda.memory_stats(1)
    assert set(unused) == set(torch.cuda.memory_stats(0))
    assert {name: count for name, count in unused.items() if count} == {"max_split_size": -1}


def test_peaks_and_totals_are_reset(plainly: CachingAllocator) -> None:
    plainly.free(plainly.allocate(1024))
    assert torch.cuda.max_memory_allocated(0) == 1024
    torch.cuda.reset_peak_memory_stats(0)
    assert torch.cuda.max_memory_allocated(0) == 0
    assert torch.cuda.memory_stats(0)["allocation.all.allocated"] == 1
    torch.cuda.reset_accumulated_memory_stats(0)
    assert torch.cuda.memory_stats(0)["allocation.all.allocated"] == 0
    plainly.free(plainly.allocate(1024))
    torch._C._accelerator_resetPeakStats(0)
    torch._C._accelerator_resetAccumulatedStats(0)
    assert torch.cuda.max_memory_allocated(0) == torch.cuda.memory_stats(0)["allocation.all.allocated"] == 0


def test_snapshots_are_what_torchs_own_tool_reads(plainly: CachingAllocator) -> None:
    from torch.cuda import _memory_viz

    plainly.allocate(1000)
    plainly.free(plainly.allocate(5 * MIB))
    snapshot = torch.cuda.memory._snapshot()
    assert snapshot["device_traces"] == [[], []]
    assert torch.cuda.memory_snapshot() == snapshot["segments"] == plainly.snapshot()["segments"]
    assert torch.cuda.memory_snapshot((3, 4)) == []
    assert snapshot["allocator_settings"] == plainly.snapshot()["allocator_settings"]
    # It asserts that free and allocated bytes add up to those of the segments.
    assert "MiB" in _memory_viz.segsum(snapshot)


def test_memory_fraction_is_the_devices_or_the_one_to_come(
    plainly: CachingAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_core, "runtime_config", lambda: AllocatorConfig(memory_fraction=0.5), raising=False)
    assert torch._C._cuda_getMemoryFraction(0) == plainly.config.memory_fraction == 0.75
    assert torch._C._cuda_getMemoryFraction(1) == 0.5


@pytest.mark.usefixtures("plainly")
def test_what_the_plain_route_cannot_do_says_why_and_what_to_run() -> None:
    refused: list[Callable[[], object]] = [
        torch.cuda.memory._record_memory_history,
        lambda: torch._C._cuda_attach_out_of_memory_observer(lambda *_: None),
        lambda: torch._C._cuda_checkPoolLiveAllocations(0, (0, 1), set()),
        lambda: torch._C._cuda_getCheckpointState(0, (0, 1)),
    ]
    for call in refused:
        with pytest.raises(PyactcompError, match=r"CUDAPluggableAllocator.*run pyactcomp build-allocator"):
            call()
    # Nothing is recorded, and switching it off is no fault.
    torch.cuda.memory._record_memory_history(None)
    assert torch._C._cuda_isHistoryEnabled() is False


def test_every_function_of_the_library_is_given_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    roles = {
        "init": "set_init_fn",
        "reset": "set_reset_fn",
        "memory_fraction": "set_memory_fraction_fn",
        "base_alloc": "set_base_alloc_fn",
        "record_stream": "set_record_stream_fn",
        "begin_allocate_to_pool": "set_begin_allocate_to_pool",
        "end_allocate_to_pool": "set_end_allocate_to_pool_fn",
        "release_pool": "set_release_pool",
    }
    functions = {f"pyactcomp_{role}": ctypes.CFUNCTYPE(None)(lambda: None) for role in roles}
    addresses = {name: ctypes.cast(function, ctypes.c_void_p).value for name, function in functions.items()}
    given: dict[str, int] = {}
    setters = {name: lambda address, name=name: given.update({name: address}) for name in roles.values()}
    made = SimpleNamespace(allocator=lambda: SimpleNamespace(**setters))
    calls: list[object] = []
    monkeypatch.setattr(plain.ctypes, "CDLL", lambda path: SimpleNamespace(**functions))
    monkeypatch.setattr(torch.cuda.memory, "CUDAPluggableAllocator", lambda *names: calls.append(names) or made)
    monkeypatch.setattr(torch.cuda.memory, "change_current_allocator", calls.append)
    monkeypatch.setattr(plain, "_ENTRY_POINTS", {})
    plain.attach("library")
    assert calls == [("library", "pyactcomp_malloc", "pyactcomp_free"), made]
    assert given == {setter: addresses[f"pyactcomp_{role}"] for role, setter in roles.items()}

    def refuse(allocator: object) -> None:
        raise RuntimeError("Can't swap an already initialized allocator")

    monkeypatch.setattr(torch.cuda.memory, "change_current_allocator", refuse)
    with pytest.raises(PyactcompError, match=r"already initialized allocator.*enable first"):
        plain.attach("library")
