"""Counters, scopes, fragmentation, history and snapshots of the allocator, on the simulated device."""

from __future__ import annotations

import pickle
import re
import sys
import threading
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from allocator_cases import GROWTHS, MIB, POOL, blocks, make, stat
from torch.cuda import _memory_viz

from pyactcomp.allocator import CachingAllocator

# What torch.cuda.memory_stats returns, in torch 2.11 to 2.13.
ARRAYS = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)
FIGURES = ("current", "peak", "allocated", "freed")
COUNTS = (
    "num_alloc_retries",
    "num_ooms",
    "num_oom_rejections",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
    "max_split_size",
)
KEYS = {
    *(".".join(key) for key in product(ARRAYS, ("all", "small_pool", "large_pool"), FIGURES)),
    *(".".join(key) for key in product(("oversize_allocations", "oversize_segments"), FIGURES)),
    *COUNTS,
}


@pytest.mark.parametrize("growth", GROWTHS)
def test_counters_have_the_keys_of_torch_cuda_memory_stats(growth: str) -> None:
    allocator, _ = make(growth)
    assert allocator.counters().keys() == KEYS
    assert all(type(value) is int for value in allocator.counters().values())
    assert allocator.counters()["max_split_size"] == -1
    stats = allocator.stats()
    assert stats.keys() > KEYS
    assert {key: stats[key] for key in KEYS} == allocator.counters()


def test_torch_documents_no_counter_that_is_missing() -> None:
    document = torch.cuda.memory_stats.__doc__
    assert document is not None
    names = set(re.findall(r'``"([a-z]\w+)', document))
    # "allocated" is the documentation's word for what torch returns as "allocation".
    documented = (names - {"allocated", "reserved_bytes_by_private_pools"}) | {"allocation"}
    assert documented <= {key.split(".")[0] for key in KEYS}
    assert len(documented) >= 15


@pytest.mark.parametrize("growth", GROWTHS)
def test_memory_summary_formats_the_counters(growth: str, monkeypatch: pytest.MonkeyPatch) -> None:
    allocator, _ = make(growth)
    allocator.allocate(700 * MIB)
    monkeypatch.setattr(torch.cuda.memory, "memory_stats", lambda device=None: allocator.counters())
    monkeypatch.setattr(torch.cuda.memory, "_get_device_index", lambda device, optional: 0)
    assert "| Allocated memory      | 716800 KiB | 716800 KiB |" in torch.cuda.memory_summary()


def figures(allocator: CachingAllocator, array: str) -> tuple[int, int, int, int]:
    counters = allocator.counters()
    current, peak, allocated, freed = (counters[f"{array}.all.{name}"] for name in FIGURES)
    return current, peak, allocated, freed


@pytest.mark.parametrize("growth", GROWTHS)
def test_peaks_and_totals_follow_what_happened_and_are_reset(growth: str) -> None:
    allocator, _ = make(growth)
    first, second = allocator.allocate(1000), allocator.allocate(2000)
    allocator.free(first)
    assert figures(allocator, "allocated_bytes") == (2048, 3072, 3072, 1024)
    assert figures(allocator, "requested_bytes") == (2000, 3000, 3000, 1000)
    assert figures(allocator, "allocation") == (1, 2, 2, 1)
    assert figures(allocator, "reserved_bytes") == (2 * MIB, 2 * MIB, 2 * MIB, 0)
    allocator.reset_peak_stats()
    assert figures(allocator, "allocated_bytes") == (2048, 2048, 3072, 1024)
    allocator.reset_accumulated_stats()
    assert figures(allocator, "allocated_bytes") == (2048, 2048, 0, 0)
    assert stat(allocator, "num_device_alloc") == 0
    allocator.free(second)
    assert figures(allocator, "allocated_bytes") == (0, 2048, 0, 2048)


def test_inactive_split_counts_the_free_parts_of_segments_in_use() -> None:
    allocator, _ = make("malloc")
    address = allocator.allocate(4 * MIB)
    assert figures(allocator, "inactive_split_bytes")[0] == 16 * MIB
    assert figures(allocator, "inactive_split")[0] == 1
    allocator.free(address)
    assert figures(allocator, "inactive_split_bytes")[0] == 0


@pytest.mark.parametrize("growth", GROWTHS)
def test_scopes_count_what_happens_inside_them(growth: str) -> None:
    allocator, _ = make(growth)
    allocator.allocate(512)
    around = allocator.push_scope()
    kept = allocator.allocate(1000)
    inside = allocator.push_scope()
    gone = [allocator.allocate(512), allocator.allocate(5 * MIB)]
    for address in gone:
        allocator.free(address)
    inner = allocator.pop_scope(inside)
    allocator.allocate(512)
    outer = allocator.pop_scope(around)
    reserved = 20 * MIB
    assert inner == {
        "allocated_bytes": 0,
        "peak_bytes": 512 + 5 * MIB,
        "total_bytes": 512 + 5 * MIB,
        "allocations": 2,
        "reserved_bytes": reserved,
    }
    assert outer == {
        "allocated_bytes": 1024 + 512,
        "peak_bytes": 1024 + 512 + 5 * MIB,
        "total_bytes": 1024 + 512 + 5 * MIB + 512,
        "allocations": 4,
        "reserved_bytes": reserved,
    }
    allocator.free(kept)
    # A scope in which memory only becomes less.
    less = allocator.push_scope()
    allocator.free(next(iter(blocks(allocator, "active_allocated"))))
    assert allocator.pop_scope(less)["allocated_bytes"] == -512


@pytest.mark.parametrize("growth", GROWTHS)
def test_a_scope_leaves_the_peaks_of_the_statistics_alone(growth: str) -> None:
    allocator, _ = make(growth)
    allocator.free(allocator.allocate(5 * MIB))
    scope = allocator.push_scope()
    allocator.free(allocator.allocate(2 * MIB))
    assert allocator.pop_scope(scope)["peak_bytes"] == 2 * MIB
    assert figures(allocator, "allocated_bytes")[1] == 5 * MIB


def holes() -> tuple[CachingAllocator, list[int]]:
    """Blocks of 2, 3, 4, 5 and 6 MiB in one segment, of which those of 3 and 5 are free again."""
    allocator, _ = make("malloc")
    allocator.record_history("state")
    addresses = [allocator.allocate(size * MIB - 100) for size in (2, 3, 4, 5)] + [allocator.allocate(6 * MIB)]
    for index in (1, 3):
        allocator.free(addresses[index])
    return allocator, addresses


def test_fragmentation_is_as_computed_by_hand() -> None:
    allocator, _ = holes()
    stats = allocator.stats()
    assert stats["utilization"] == 1.0  # at the peak, all 20 MiB were in use
    assert stats["fragmentation.external"] == 1 - 5 / 8
    assert stats["fragmentation.internal"] == pytest.approx(200 / (12 * MIB), rel=1e-9)  # one rounding of 1 - x
    assert stats["free_bytes.largest"] == 5 * MIB
    assert stats["free_bytes.stream.0"] == 8 * MIB
    histogram = {key: value for key, value in stats.items() if key.startswith("free_blocks.") and value}
    assert histogram == {f"free_blocks.{2 * MIB}": 1, f"free_blocks.{4 * MIB}": 1}
    below = {int(key.rpartition(".")[2]): value for key, value in stats.items() if "free_below" in key}
    assert {2 * MIB, 4 * MIB, 8 * MIB} & below.keys()
    for size, share in below.items():
        assert share == sum(hole for hole in (3 * MIB, 5 * MIB) if hole < size) / (8 * MIB)


def test_pins_name_the_blocks_that_hold_most_free_memory_and_who_allocated_them() -> None:
    allocator, addresses = holes()
    pins = stat(allocator, "pins")
    # Between both holes: without it they would be one of 12 MiB.
    assert pins[0]["address"] == addresses[2]
    assert (pins[0]["size"], pins[0]["requested"]) == (4 * MIB, 4 * MIB - 100)
    assert pins[0]["pinned_bytes"] == 8 * MIB
    # Up to Python 3.11 a comprehension has a frame of its own.
    assert "holes" in [frame["name"] for frame in pins[0]["frames"][:2]]
    assert all(pin["pinned_bytes"] <= 8 * MIB for pin in pins)


def test_an_empty_allocator_has_no_fragmentation() -> None:
    stats = make()[0].stats()
    assert (stats["utilization"], stats["fragmentation.external"], stats["fragmentation.internal"]) == (1.0, 0.0, 0.0)
    assert stats["pins"] == []


def allocate_here(allocator: CachingAllocator) -> int:
    return allocator.allocate(1000)


def actions(snapshot: dict[str, Any]) -> list[str]:
    return [entry["action"] for entry in snapshot["device_traces"][0]]


def test_history_keeps_events_in_order_with_the_stacks_of_allocations() -> None:
    allocator, device = make("malloc")
    allocator.allocate(512)
    allocator.record_history("all")
    address = allocate_here(allocator)
    allocator.record_stream(address, 7)
    allocator.free(address)
    device.complete(7)
    allocator.free(allocator.allocate(3 * MIB))
    snapshot = allocator.snapshot()
    expected = [
        "alloc",
        "free_requested",
        "free_completed",
        "segment_alloc",
        "alloc",
        "free_requested",
        "free_completed",
    ]
    recorded = [entry for entry in snapshot["device_traces"][0] if entry["action"] != "snapshot"]
    assert [entry["action"] for entry in recorded] == expected
    assert [entry["size"] for entry in recorded] == [1000, 1000, 1000, 20 * MIB, 3 * MIB, 3 * MIB, 3 * MIB]
    assert recorded[0]["addr"] == address
    assert recorded[0]["stream"] == 0
    assert recorded[0]["frames"][0]["name"] == "allocate_here"
    assert Path(recorded[0]["frames"][0]["filename"]).name == Path(__file__).name
    assert recorded[0]["frames"][0]["line"] == allocate_here.__code__.co_firstlineno + 1
    times = [entry["time_us"] for entry in recorded]
    assert times == sorted(times)


def test_history_of_states_keeps_stacks_of_live_blocks_only() -> None:
    allocator, _ = make()
    allocator.record_history("state")
    address = allocate_here(allocator)
    snapshot = allocator.snapshot()
    assert actions(snapshot) == []
    [block] = [block for block in snapshot["segments"][0]["blocks"] if block["address"] == address]
    assert block["frames"][0]["name"] == "allocate_here"
    assert allocator.block(address)["frames"] == block["frames"]


def test_history_without_stacks_or_events_or_at_all() -> None:
    allocator, _ = make()
    allocator.record_history("all", stacks=None, skip_actions=["segment_alloc", "free_requested"])
    allocator.free(allocate_here(allocator))
    snapshot = allocator.snapshot()
    assert [action for action in actions(snapshot) if action != "snapshot"] == ["alloc", "free_completed"]
    assert snapshot["device_traces"][0][0]["frames"] == []
    allocator.record_history(None)
    allocate_here(allocator)
    assert actions(allocator.snapshot()) == []


@pytest.mark.parametrize("growth", GROWTHS)
def test_stacks_are_recorded_on_many_threads_and_dropped_with_the_history(growth: str) -> None:
    allocator, _ = make(growth)
    allocator.record_history(None)  # drops what other tests have left
    references = [sys.getrefcount(allocate_here.__code__)]
    allocator.record_history("all", max_entries=50)

    def work(stream: int) -> None:
        for _ in range(300):
            address = allocator.allocate(700, stream)
            allocator.free(allocate_here(allocator))
            allocator.free(address)

    threads = [threading.Thread(target=work, args=(stream,)) for stream in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    allocator.check_invariants()
    assert figures(allocator, "allocation") == (0, figures(allocator, "allocation")[1], 2400, 2400)
    entries = allocator.snapshot()["device_traces"][0]
    assert len(entries) == 50
    assert "allocate_here" in {entry["frames"][0]["name"] for entry in entries if entry["frames"]}
    references.append(sys.getrefcount(allocate_here.__code__))
    allocator.empty_cache()  # segments keep the stack that made them grow
    allocator.record_history(None)
    references.append(sys.getrefcount(allocate_here.__code__))
    assert references[1] > references[0] == references[2]


def test_history_drops_the_oldest_events_and_says_so() -> None:
    allocator, _ = make()
    allocator.record_history("all", max_entries=3, stacks=None, skip_actions=["snapshot"])
    for size in range(1, 6):
        allocator.allocate(size)
    snapshot = allocator.snapshot()
    assert [entry["size"] for entry in snapshot["device_traces"][0]] == [3, 4, 5]
    assert snapshot["allocator_settings"]["trace_alloc_overflowed"] is True


def test_an_out_of_memory_error_is_in_the_history() -> None:
    allocator, device = make(capacity=100 * MIB)
    allocator.record_history("all")
    allocator.allocate(60 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        allocator.allocate(50 * MIB)
    [entry] = [entry for entry in allocator.snapshot()["device_traces"][0] if entry["action"] == "oom"]
    assert (entry["size"], entry["device_free"]) == (50 * MIB, device.capacity - device.reserved)
    assert "addr" not in entry


def busy(growth: str) -> CachingAllocator:
    allocator, _ = make(growth)
    allocator.record_history("all")
    addresses = [allocator.allocate(size, stream=size % 2) for size in (700, MIB - 1, 3 * MIB, 30 * MIB + 1, 5 * MIB)]
    allocator.begin_allocate_to_pool(POOL)
    allocator.allocate(6 * MIB)
    allocator.end_allocate_to_pool(POOL)
    allocator.record_stream(addresses[1], 7)
    for address in addresses[1:4]:
        allocator.free(address)
    return allocator


@pytest.mark.parametrize("growth", GROWTHS)
def test_a_snapshot_has_the_fields_of_torchs_and_adds_up(growth: str) -> None:
    allocator = busy(growth)
    snapshot = allocator.snapshot()
    assert snapshot.keys() == {"segments", "device_traces", "allocator_settings", "external_annotations"}
    counters = allocator.counters()
    segments = snapshot["segments"]
    for segment in segments:
        assert segment.keys() == {
            *("device", "address", "total_size", "allocated_size", "active_size", "requested_size", "stream"),
            *("segment_type", "segment_pool_id", "is_expandable", "frames", "blocks"),
        }
        assert segment["device"] == 0
        assert segment["is_expandable"] == (growth == "vmm")
        at = segment["address"]
        for block in segment["blocks"]:
            assert block.keys() == {"address", "size", "requested_size", "state", "frames"}
            assert block["address"] == at
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]
    for field, array in (
        ("total", "reserved"),
        ("allocated", "allocated"),
        ("active", "active"),
        ("requested", "requested"),
    ):
        assert sum(segment[f"{field}_size"] for segment in segments) == counters[f"{array}_bytes.all.current"]
    assert {segment["segment_type"] for segment in segments} == {"small", "large"}
    assert {segment["segment_pool_id"] for segment in segments} == {(0, 0), POOL}
    states = {block["state"] for segment in segments for block in segment["blocks"]}
    assert states == {"active_allocated", "active_pending_free", "inactive"}
    assert {segment["segment_pool_id"] for segment in allocator.snapshot(POOL)["segments"]} == {POOL}


@pytest.mark.parametrize("growth", GROWTHS)
def test_a_snapshot_settles_with_its_settings(growth: str) -> None:
    allocator, _ = make(growth, max_split_size="512MiB", garbage_collection_threshold=0.5, roundup_power2_divisions=4)
    settings = allocator.snapshot()["allocator_settings"]
    assert settings["PYTORCH_CUDA_ALLOC_CONF"] == str(allocator.config)
    assert settings["max_split_size"] == 512 * MIB
    assert settings["garbage_collection_threshold"] == 0.5
    assert settings["expandable_segments"] == (growth == "vmm")
    assert settings["roundup_power2_divisions"] == {str(1 << bit): 4 for bit in range(16)}


@pytest.mark.parametrize("growth", GROWTHS)
def test_torchs_viewer_reads_a_snapshot(growth: str, tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(busy(growth).snapshot(), protocol=4))
    snapshot = pickle.loads(path.read_bytes())
    assert f"segments: {len(snapshot['segments'])}\n" in _memory_viz.segsum(snapshot)
    assert "# free completed for" in _memory_viz.trace(snapshot)
    assert "<html>" in _memory_viz.trace_plot(snapshot)


def test_a_snapshot_holds_only_what_the_web_viewer_can_unpickle() -> None:
    allowed = (dict, list, tuple, str, int, float, bool, type(None))

    def check(value: object) -> None:
        assert type(value) in allowed
        if isinstance(value, dict):
            value = [*value.keys(), *value.values()]
        if isinstance(value, (list, tuple)):
            for part in value:
                check(part)

    snapshot = busy("vmm").snapshot()
    check(snapshot)
    assert pickle.loads(pickle.dumps(snapshot, protocol=4)) == snapshot


@pytest.mark.parametrize("growth", GROWTHS)
def test_events_name_the_call_behind_them(growth: str) -> None:
    allocator, device = make(growth)
    allocator.record_history("all")

    def allocation() -> int:
        return allocator.allocate(30 * MIB)

    def giving_back() -> None:
        allocator.empty_cache()

    allocator.free(allocation())
    device.complete_all()
    giving_back()
    called: dict[str, set[str]] = {}
    for entry in allocator.snapshot()["device_traces"][0]:
        called.setdefault(entry["action"], set()).update(frame["name"] for frame in entry["frames"])
    given_back = called["segment_free" if growth == "malloc" else "segment_unmap"]
    assert "giving_back" in given_back
    assert "allocation" not in given_back
    # A free without a stack of its own has the allocation's.
    assert "allocation" in called["free_requested"]
    assert "allocation" in called["free_completed"]
