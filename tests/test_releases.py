"""Contract under test: a replay empties the cache where the recorded program did, and nowhere else."""

from __future__ import annotations

import json
import random
from array import array
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import pytest
from allocator_cases import KIB, MIB
from replay_cases import as_snapshot, events
from snapshot_cases import BASE, FRAME, content, event, read

from pyactcomp.allocator import AllocatorConfig, CachingAllocator, SimulatedDevice
from pyactcomp.snapshots.model import FREE_REQUESTED, Beginning, Settings, Snapshot
from pyactcomp.snapshots.reader import read_snapshot
from pyactcomp.snapshots.releases import find_releases
from pyactcomp.snapshots.replay import replay

GIB = 1 << 30


def core(growth: str = "malloc", capacity: int = 64 * GIB) -> CachingAllocator:
    allocator = CachingAllocator(SimulatedDevice(capacity), AllocatorConfig(growth=growth))
    allocator.record_history("all", max_entries=1 << 20, stacks=None)
    return allocator


def peak(allocator: CachingAllocator) -> int:
    return int(allocator.counters()["reserved_bytes.all.peak"])


def emptying(seed: int) -> CachingAllocator:
    """Drive a roomy native allocator by a program that empties its cache now and then."""
    rng = random.Random(seed)
    allocator = core()
    live: list[int] = []
    for _ in range(300):
        choice = rng.random()
        if choice < 0.5 or not live:
            live.append(allocator.allocate(rng.choice((rng.randint(1, 600 * KIB), rng.randint(MIB, 40 * MIB)))))
        elif choice < 0.95:
            allocator.free(live.pop(rng.randrange(len(live))))
        else:
            allocator.empty_cache()
    return allocator


def with_stacks(allocator: CachingAllocator, folder: Path, name: str) -> Snapshot:
    """Return a recording, as PyTorch's, in which what gave memory back was called by a function of that name."""
    recorded = allocator.snapshot()
    recorded["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = ""
    for entry in recorded["device_traces"][0]:
        if entry["action"] == "segment_free":
            entry["frames"] = [{"filename": "memory.py", "line": 1, "name": name}, FRAME]
        elif entry["action"] == "free_requested":
            entry["frames"] = [FRAME]
    path = folder / "stacks.json"
    path.write_text(json.dumps(recorded))
    return read_snapshot(path)


def growing() -> CachingAllocator:
    """Ask for more after each emptying: without call stacks that looks as if the device had no more."""
    allocator = core()
    for size in (30, 40, 50):
        allocator.free(allocator.allocate(size * MIB))
        allocator.empty_cache()
    return allocator


@pytest.mark.parametrize("seed", range(20))
def test_call_stacks_tell_that_the_program_emptied_the_cache(seed: int, tmp_path: Path) -> None:
    allocator = emptying(seed)
    snapshot = with_stacks(allocator, tmp_path, "empty_cache")
    result = replay(snapshot, "native")
    assert (result.peak_reserved, result.pressure_releases) == (peak(allocator), 0)
    assert result.cache_emptied == len(snapshot.devices[0].releases.emptied) > 0


def test_call_stacks_tell_that_a_request_needed_memory(tmp_path: Path) -> None:
    result = replay(with_stacks(growing(), tmp_path, "malloc"), "native")
    assert (result.peak_reserved, result.pressure_releases, result.unclear_releases) == (120 * MIB, 2, 0)
    # The last is at the end, where nothing was asked for.
    assert result.cache_emptied == 1


def test_call_stacks_of_allocations_alone_tell_nothing(tmp_path: Path) -> None:
    """With ``context="alloc"`` memory that is given back has the stack of its allocation."""
    snapshot = with_stacks(growing(), tmp_path, "forward")
    events = snapshot.devices[0].events
    frees = [action == FREE_REQUESTED for action in events.action]
    silent = array("i", [0 if free else stack for free, stack in zip(frees, events.stack, strict=True)])
    beginning = Beginning((), (), True)
    found = find_releases(changed(events, stack=silent), beginning, snapshot.frames, snapshot.stacks, Settings())
    assert (len(found.emptied), found.for_requests, found.unclear) == (3, 0, 2)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_unclear_is_repeated_and_counted(seed: int, tmp_path: Path) -> None:
    allocator = emptying(seed)
    result = replay(as_snapshot(allocator, tmp_path), "native")
    assert (result.peak_reserved, result.pressure_releases) == (peak(allocator), 0)
    assert result.unclear_releases <= result.cache_emptied
    grown = replay(as_snapshot(growing(), tmp_path), "native")
    assert (grown.peak_reserved, grown.cache_emptied, grown.unclear_releases) == (50 * MIB, 3, 2)


def test_a_request_had_room_where_the_device_gave_as_much_at_another_time(tmp_path: Path) -> None:
    allocator = core()
    allocator.free(allocator.allocate(900 * MIB))
    allocator.empty_cache()
    for size in (300, 400, 500):
        allocator.free(allocator.allocate(size * MIB))
        allocator.empty_cache()
    result = replay(as_snapshot(allocator, tmp_path), "native")
    # The first is unclear: 900 and 300 MiB were never there together.
    assert (result.peak_reserved, result.cache_emptied, result.unclear_releases) == (peak(allocator), 4, 1)


def test_an_allocator_that_collects_garbage_gives_back_while_there_is_room(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [event("segment_alloc", BASE, 60 * MIB), event("alloc", BASE, 60 * MIB)]
    rows += [event("free_completed", BASE, 60 * MIB), event("segment_free", BASE, 60 * MIB)]
    rows += [event("segment_alloc", BASE + GIB, 50 * MIB), event("alloc", BASE + GIB, 50 * MIB)]
    # PyTorch collects only under a memory fraction: without one, the program emptied the cache.
    limited = "garbage_collection_threshold:0.8,per_process_memory_fraction:0.9"
    for conf, threshold, counts in (("", 0.0, (1, 0)), (limited, 0.8, (0, 1)), ("", 0.8, (1, 0))):
        settings = {"PYTORCH_CUDA_ALLOC_CONF": conf, "garbage_collection_threshold": threshold}
        result = replay(read(tmp_path, content(rows, allocator_settings=settings)), "native")
        assert (result.cache_emptied, result.pressure_releases) == counts


@pytest.mark.parametrize(("free", "size"), [(5 * MIB, GIB), (GIB, 30 * MIB)])
def test_where_memory_ran_out_the_recording_tells_what_there_was(free: int, size: int) -> None:
    """With 70 MiB at most, 30 and then 60 MiB had no room together: by what was free, or by what did not fit."""
    rows = [("segment_alloc", BASE, 30 * MIB), ("alloc", BASE, 30 * MIB), ("free_completed", BASE, 30 * MIB)]
    rows += [("segment_free", BASE, 30 * MIB), ("segment_alloc", BASE, 60 * MIB), ("alloc", BASE, 60 * MIB)]
    result = replay(events([*rows, ("oom", free, size)]), "native")
    assert (result.cache_emptied, result.pressure_releases, result.unclear_releases) == (0, 1, 0)
    assert replay(events(rows), "native").unclear_releases == 1
    # Had there been 90 MiB, it would not be known.
    assert replay(events([*rows, ("oom", 30 * MIB, GIB)]), "native").unclear_releases == 1


def test_memory_runs_out_after_all_was_given_back() -> None:
    rows = [("alloc", BASE, 40 * MIB), ("free_completed", BASE, 40 * MIB), ("segment_free", BASE, 40 * MIB)]
    result = replay(events([*rows, ("oom", 0, 100 * MIB)]), "native")
    assert (result.cache_emptied, result.pressure_releases, result.unclear_releases) == (0, 1, 0)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("config", ["native", "pyactcomp"])
def test_pages_that_moved_are_no_emptied_cache(config: str, seed: int, tmp_path: Path) -> None:
    """Our own allocator maps free pages elsewhere before it unmaps them: its recording predicts as any other does."""
    peaks, recordings = {}, {}
    for growth in ("malloc", "vmm"):
        rng = random.Random(seed)
        allocator = core(growth)
        live: list[int] = []
        for turn in range(250):
            if rng.random() < 0.55 or not live:
                live.append(allocator.allocate(rng.randint(MIB, (40 + turn) * MIB)))
            else:
                allocator.free(live.pop(rng.randrange(len(live))))
        peaks[growth] = peak(allocator)
        recordings[growth] = as_snapshot(allocator, tmp_path)
    moved = recordings["vmm"]
    assert any(action == 6 for action in moved.devices[0].events.action)
    for recording in recordings.values():
        result = replay(recording, config)
        assert (result.cache_emptied, result.pressure_releases) == (0, 0)
        assert result.peak_reserved == peaks["malloc" if config == "native" else "vmm"]


def test_private_pools_that_are_gone_give_back_their_memory(tmp_path: Path) -> None:
    allocator = core()
    for number in range(1, 6):
        pool = (0, number)
        allocator.begin_allocate_to_pool(pool)
        address = allocator.allocate(GIB)
        allocator.end_allocate_to_pool(pool)
        allocator.free(address)
        allocator.release_pool(pool)
        allocator.empty_cache()
        allocator.free(allocator.allocate(3 * MIB))
    result = replay(with_stacks(allocator, tmp_path, "empty_cache"), "native", "3GiB")
    assert (result.peak_reserved, result.oom_at) == (peak(allocator), None)


def lives(address: int, size: int, **others: Any) -> list[dict[str, Any]]:
    """Return the events of a block with a segment of its own, freed and kept."""
    actions = ("segment_alloc", "alloc", "free_requested", "free_completed")
    return [event(action, address, size, **others) for action in actions]


@pytest.mark.parametrize("frames", [[], [FRAME]])
def test_a_mempool_that_goes_leaves_the_rest_of_the_cache(frames: list[Any], tmp_path: Path) -> None:
    rows = [*lives(BASE, 100 * MIB), *lives(BASE + GIB, 50 * MIB, segment_pool_id=(0, 1))]
    rows += [event("segment_free", BASE + GIB, 50 * MIB, segment_pool_id=(0, 1)), event("alloc", BASE, 30 * MIB)]
    rows += [event(action, BASE + 2 * GIB, 96 * MIB) for action in ("segment_alloc", "alloc")]
    result = replay(read(tmp_path, content([{**row, "frames": frames} for row in rows])), "native")
    # The second request fits in what was kept; 100 and 96 MiB are there at the end.
    assert (result.peak_reserved, result.driver_calls, result.cache_emptied) == (196 * MIB, 4, 1)


@pytest.mark.parametrize("growth", ["malloc", "vmm"])
def test_stacks_of_our_own_recordings_are_those_of_allocations(growth: str, tmp_path: Path) -> None:
    allocator = core(growth)
    allocator.free(allocator.allocate(100 * MIB))
    allocator.empty_cache()
    allocator.allocate(120 * MIB)
    recorded = allocator.snapshot()
    for entry in recorded["device_traces"][0]:
        entry["frames"] = [FRAME]
    result = replay(read(tmp_path, recorded, "json"), "native")
    assert (result.peak_reserved, result.cache_emptied, result.pressure_releases) == (120 * MIB, 1, 0)


@pytest.mark.parametrize("name", ["train_without_empty_cache", "empty_cached_batches"])
def test_only_the_function_itself_empties_the_cache(name: str, tmp_path: Path) -> None:
    assert len(with_stacks(growing(), tmp_path, name).devices[0].releases.emptied) == 1
    for own in ("empty_cache", "torch.cuda.memory.empty_cache", "c10::cuda::CUDACachingAllocator::emptyCache(int)"):
        assert len(with_stacks(growing(), tmp_path, own).devices[0].releases.emptied) == 3


def test_a_small_segment_is_no_limit_to_what_a_large_request_takes(tmp_path: Path) -> None:
    """Where 5 MiB do not fit, up to 20 MiB may have been free: what was emptied before may have had room."""
    rows = [*lives(BASE, 100 * MIB)[:2], *lives(BASE + GIB, 78 * MIB), event("segment_free", BASE + GIB, 78 * MIB)]
    rows += [*lives(BASE + 2 * GIB, 20 * MIB)[:2], *lives(BASE + 3 * GIB, 70 * MIB)[:2]]
    rows += [{"action": "oom", "device_free": 10 * MIB, "size": 5 * MIB, "stream": 0, "time_us": 10, "frames": []}]
    result = replay(read(tmp_path, content(rows)), "native")
    assert (result.peak_reserved, result.cache_emptied, result.unclear_releases) == (190 * MIB, 1, 1)


def test_others_may_have_taken_memory_before_it_ran_out(tmp_path: Path) -> None:
    rows = [*lives(BASE, 100 * MIB), event("segment_free", BASE, 100 * MIB), *lives(BASE + GIB, 40 * MIB)[:2]]
    rows += [*lives(BASE + 2 * GIB, 150 * MIB), event("segment_free", BASE + 2 * GIB, 150 * MIB)]
    rows += [{"action": "oom", "device_free": 20 * MIB, "size": 30 * MIB, "stream": 0, "time_us": 10, "frames": []}]
    result = replay(read(tmp_path, content(rows)), "native")
    assert (result.peak_reserved, result.cache_emptied, result.pressure_releases) == (190 * MIB, 1, 1)


def test_blocks_that_come_back_while_a_request_waits_do_not_part_what_it_gave_back(tmp_path: Path) -> None:
    rows = [*lives(BASE, 100 * MIB), *lives(BASE + GIB, 50 * MIB)[:3], event("segment_free", BASE, 100 * MIB)]
    rows += [event("free_completed", BASE + GIB, 50 * MIB), event("segment_free", BASE + GIB, 50 * MIB)]
    rows += lives(BASE + 3 * GIB, 150 * MIB)[:2]
    snapshot = read(tmp_path, content([{**row, "frames": [FRAME]} for row in rows]))
    assert (len(snapshot.devices[0].releases.emptied), snapshot.devices[0].releases.for_requests) == (0, 2)


def test_pages_mapped_in_two_pieces_count_together(tmp_path: Path) -> None:
    rows = [event(action, BASE, 200 * MIB) for action in ("segment_map", "alloc", "free_requested", "free_completed")]
    rows += [event("alloc", BASE, 40 * MIB), event("segment_unmap", BASE + 40 * MIB, 160 * MIB)]
    rows += [event("segment_map", BASE + 40 * MIB, 20 * MIB), event("segment_map", BASE + 60 * MIB, 200 * MIB)]
    rows += [event("alloc", BASE + 40 * MIB, 220 * MIB)]
    # 200 and 220 MiB were never there together.
    assert read(tmp_path, content(rows)).devices[0].releases.unclear == 1
