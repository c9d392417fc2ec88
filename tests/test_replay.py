"""Contract under test: a replay predicts what an allocator with other settings reserves, exactly where it can."""

from __future__ import annotations

import os
import random
from array import array
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
import torch
from allocator_cases import MIB
from replay_cases import SIDE_STREAM, Program, as_snapshot, events, load

from pyactcomp.allocator import AllocatorConfig, CachingAllocator, SimulatedDevice
from pyactcomp.snapshots.model import SEGMENT_MAP, Beginning, LiveBlock, Segment, Snapshot
from pyactcomp.snapshots.replay import ReplayResult, parse_configuration, replay

TRACES = ("sft_varlen", "bert_accum_eval", "lora_offload", "multiscale_resnet", "moe")
GIB = 1 << 30

# ---- real runs ----

# Peak of reserved bytes of the same programs, each in a run of its own under the setting, on an H200 with torch 2.11.
EXPANDABLE = {
    "sft_varlen": 15_734_931_456,
    "bert_accum_eval": 19_262_341_120,
    "multiscale_resnet": 6_660_554_752,
    "moe": 6_369_050_624,
}
OTHER_SETTINGS = {
    "max_split_size_mb:128": 22_210_936_832,
    "roundup_power2_divisions:8": 10_015_997_952,
    "garbage_collection_threshold:0.8,max_split_size_mb:512": 9_479_127_040,
}


@pytest.mark.parametrize("name", TRACES)
def test_native_replay_repeats_the_run(name: str) -> None:
    recorded, snapshot = load(name)
    result = replay(snapshot, "native")
    assert result.peak_reserved == recorded["peak_reserved"]
    assert result.peak_allocated == recorded["peak_alloc"]
    assert result.peak_requested == recorded["peak_requested"]
    assert result.peak_active == recorded["peak_active"]
    assert result.driver_calls == recorded["segs"]
    assert (result.retries, result.oom_at) == (recorded["retries"], None)
    assert result.utilization == recorded["peak_active"] / recorded["peak_reserved"]


@pytest.mark.parametrize("settings", OTHER_SETTINGS)
def test_native_replay_predicts_a_run_under_other_settings(settings: str) -> None:
    # Addresses of segments that the recording did not have are unknown, and of equal blocks the lowest is taken: one
    # small segment may differ.
    result = replay(load("multiscale_resnet")[1], f"native[{settings}]")
    assert abs(result.peak_reserved - OTHER_SETTINGS[settings]) <= 2 * MIB
    if "roundup" in settings:
        assert result.peak_allocated == 6_991_239_680


@pytest.mark.parametrize("name", EXPANDABLE)
def test_expandable_replay_predicts_a_run_with_expandable_segments(name: str) -> None:
    snapshot = load(name)[1]
    result = replay(snapshot, "expandable")
    # Two runs of one program differ by a few pages.
    assert abs(result.peak_reserved - EXPANDABLE[name]) <= 0.002 * EXPANDABLE[name]
    assert result == replay(snapshot, "expandable")


@pytest.mark.parametrize(("name", "share"), list(zip(TRACES, cycle([0.3, 0.6]))))
def test_recording_that_begins_mid_run_has_the_peak_of_its_window(name: str, share: float, tmp_path: Path) -> None:
    device = SimulatedDevice("140GiB")
    allocator = CachingAllocator(device, AllocatorConfig(growth="malloc"))
    allocator.record_history("all", max_entries=1 << 20, stacks=None)
    trace = load(name)[1].devices[0].events
    cut = int(share * len(trace))
    addresses: dict[int, int] = {}
    for row, (action, address, size) in enumerate(zip(trace.action, trace.address, trace.size, strict=True)):
        if row == cut:
            first = len(allocator.snapshot()["device_traces"][0])
            allocator.reset_peak_stats()
        if action == 0:
            addresses[address] = allocator.allocate(size)
        else:
            allocator.free(addresses.pop(address))
    peaks = allocator.counters()
    snapshot = as_snapshot(allocator, tmp_path, first)
    result = replay(snapshot, "native")
    assert result.peak_reserved == peaks["reserved_bytes.all.peak"]
    assert result.peak_requested == peaks["requested_bytes.all.peak"]
    # The rest of a block that was too small to be split off, 1 MiB at most, is known only where the block is in the
    # segments at the end, or has no free one behind it.
    begun = sum(block.requested > MIB for block in snapshot.devices[0].beginning.blocks)
    assert begun > 0
    assert 0 <= peaks["allocated_bytes.all.peak"] - result.peak_allocated <= begun * MIB
    assert (result.unknown_frees, result.lost_frees) == (0, 0)


@pytest.mark.parametrize("seed", range(6))
def test_recording_that_begins_mid_run_has_the_peak_of_its_window_with_streams_and_pools(
    seed: int, tmp_path: Path
) -> None:
    device = SimulatedDevice(64 * GIB)
    allocator = CachingAllocator(device, AllocatorConfig(growth="malloc"))
    allocator.record_history("all", max_entries=1 << 20, stacks=None)
    Program(seed, steps=300).drive(allocator, device)
    pending = allocator.allocate(3 * MIB)
    allocator.record_stream(pending, SIDE_STREAM)
    allocator.free(pending)
    first = len(allocator.snapshot()["device_traces"][0])
    allocator.reset_peak_stats()
    Program(seed + 100, steps=300).drive(allocator, device)
    snapshot = as_snapshot(allocator, tmp_path, first)
    begun = snapshot.devices[0].beginning.blocks
    assert any(block.pool for block in begun)
    assert any(block.pending for block in begun)
    assert replay(snapshot, "native").peak_reserved == allocator.counters()["reserved_bytes.all.peak"]


# ---- streams and private pools, against the core driven directly ----


def assert_same(result: ReplayResult, allocator: CachingAllocator) -> None:
    counters = allocator.counters()
    for name in ("allocated", "active", "requested", "reserved"):
        assert getattr(result, f"peak_{name}") == counters[f"{name}_bytes.all.peak"], name
    assert result.retries == counters["num_alloc_retries"]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("config", ["native", "pyactcomp"])
def test_replay_of_streams_and_pools_is_what_the_core_does(seed: int, config: str, tmp_path: Path) -> None:
    # Fewer events than the host runs ahead of a stream, so that only what the recording completes is complete.
    program = Program(seed, steps=380)
    native, device = program.run(AllocatorConfig(growth="malloc"), 64 * GIB)
    snapshot = as_snapshot(native, tmp_path)
    recorded = snapshot.devices[0].events
    pending = sum(
        action == 1 and (recorded.action[row + 1], recorded.address[row + 1]) != (2, recorded.address[row])
        for row, action in enumerate(recorded.action[:-1])
    )
    assert pending > 10
    assert len(set(recorded.pool)) == len(set(recorded.stream)) == 2
    assert len(recorded) < 1024
    if config == "pyactcomp":
        ours, device = program.run(AllocatorConfig(growth="vmm"), 64 * GIB)
        result = replay(snapshot, config, 64 * GIB)
        assert_same(result, ours)
    else:
        result = replay(snapshot, config, 64 * GIB)
        assert_same(result, native)
    calls = device.calls()
    memory = ("acquire", "release", "reserve", "unreserve", "create", "destroy", "map", "unmap")
    assert result.driver_calls == sum(calls[name] for name in memory)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("config", ["native", "pyactcomp"])
def test_replay_runs_out_of_memory_where_the_core_does(seed: int, config: str, tmp_path: Path) -> None:
    program = Program(seed, steps=380)
    roomy, _ = program.run(AllocatorConfig(growth="malloc"), 64 * GIB)
    snapshot = as_snapshot(roomy, tmp_path)
    growth = AllocatorConfig(growth="malloc" if config == "native" else "vmm")
    capacity = roomy.counters()["active_bytes.all.peak"] * 2 // 3
    device = SimulatedDevice(capacity)
    allocator = CachingAllocator(device, growth)
    with pytest.raises(torch.OutOfMemoryError):
        program.drive(allocator, device)
    result = replay(snapshot, config, capacity)
    assert result.oom_at is not None
    assert snapshot.devices[0].events.action[result.oom_at] == 0
    assert result.allocations == allocator.counters()["allocation.all.allocated"]


# ---- single rules ----


def test_memory_of_a_block_that_another_stream_uses_is_taken_only_after_its_free_completed() -> None:
    rows = [("alloc", 1 * GIB, 30 * MIB), ("free_requested", 1 * GIB, 30 * MIB), ("alloc", 2 * GIB, 30 * MIB)]
    waiting = replay(events([*rows, ("free_completed", 1 * GIB, 30 * MIB)]), "native")
    assert (waiting.peak_allocated, waiting.peak_active, waiting.peak_reserved) == (30 * MIB, 60 * MIB, 60 * MIB)
    at_once = replay(events([*rows[:2], ("free_completed", 1 * GIB, 30 * MIB), rows[2]]), "native")
    assert (at_once.peak_allocated, at_once.peak_active, at_once.peak_reserved) == (30 * MIB, 30 * MIB, 30 * MIB)
    without = replay(events(rows), "native")  # nothing in it ever completes: then the request is the free
    assert without.peak_reserved == 30 * MIB


def test_memory_that_another_stream_uses_is_waited_for_before_there_is_none() -> None:
    rows = [("alloc", 1 * GIB, 30 * MIB), ("free_requested", 1 * GIB, 30 * MIB), ("alloc", 2 * GIB, 30 * MIB)]
    result = replay(events([*rows, ("free_completed", 1 * GIB, 30 * MIB)]), "native", 59 * MIB)
    assert (result.oom_at, result.peak_reserved) == (None, 30 * MIB)


@pytest.mark.parametrize("config", ["native", "expandable", "pyactcomp"])
def test_replay_ends_at_the_allocation_that_does_not_fit(config: str) -> None:
    rows = [("alloc", at * GIB, 40 * MIB) for at in range(1, 6)]
    # Pages, segments and handles of 40 MiB all take 40 MiB.
    for fit in range(5):
        result = replay(events(rows), config, (fit * 40 + 39) * MIB)
        assert (result.oom_at, result.allocations, result.peak_reserved) == (fit, fit, fit * 40 * MIB)
    assert replay(events(rows), config, 200 * MIB).oom_at is None


def test_expandable_segments_give_back_whole_free_pages_when_memory_is_short() -> None:
    # Large requests fill 60 MiB; the freed 40 are given back for 2 MiB of the small pool, and no more than that fits.
    rows = [("alloc", at * GIB, 20 * MIB) for at in (1, 2, 3)]
    rows += [("free_completed", at * GIB, 20 * MIB) for at in (2, 3)]
    result = replay(events([*rows, ("alloc", 4 * GIB, 1 * MIB)]), "expandable", 61 * MIB)
    assert (result.oom_at, result.retries, result.peak_reserved) == (None, 1, 60 * MIB)
    assert replay(events([*rows[:3], ("alloc", 4 * GIB, 1 * MIB)]), "expandable", 61 * MIB).oom_at == 3


def test_expandable_segments_keep_the_block_that_can_grow_for_what_fits_nowhere_else() -> None:
    # 60 MiB are mapped and 8 of them free at the end, 20 at the beginning. 6 go into the 20, though 8 would fit better;
    # then 20 fit only where one more page is mapped.
    rows = [("alloc", 1 * GIB, 20 * MIB), ("alloc", 2 * GIB, 20 * MIB), ("alloc", 3 * GIB, 12 * MIB)]
    rows += [("free_completed", 1 * GIB, 20 * MIB), ("alloc", 4 * GIB, 6 * MIB), ("alloc", 5 * GIB, 20 * MIB)]
    assert replay(events(rows), "expandable").peak_reserved == 80 * MIB


def test_lost_events_are_counted() -> None:
    rows = [("alloc", 1 * GIB, 30 * MIB), ("alloc", 1 * GIB, 30 * MIB), ("free_completed", 2 * GIB, 512)]
    result = replay(events(rows), "native")
    assert (result.lost_frees, result.unknown_frees, result.peak_reserved) == (1, 1, 30 * MIB)


@pytest.mark.parametrize("config", ["native", "expandable", "pyactcomp"])
def test_timeline_has_the_peaks(config: str) -> None:
    snapshot = load("moe")[1]
    result = replay(snapshot, config, points=100)
    ends = [point.end for point in result.timeline]
    assert ends == sorted(set(ends))
    assert (ends[0], ends[-1]) == (0, len(snapshot.devices[0].events))
    assert 100 <= len(ends) <= 102  # the beginning, and what is left over at the end
    assert max(point.allocated for point in result.timeline) == result.peak_allocated
    assert max(point.active for point in result.timeline) == result.peak_active
    assert max(point.reserved for point in result.timeline) == result.peak_reserved
    assert replay(snapshot, config).timeline == ()


def test_replay_can_be_interrupted_and_tells_how_far_it_is() -> None:
    snapshot = load("moe", times=6)[1]
    positions: list[int] = []
    replay(snapshot, progress=positions.append)
    assert positions == sorted(positions)
    assert positions[-1] == len(snapshot.devices[0].events) > positions[0]

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay(snapshot, progress=interrupt)


def test_replay_takes_memory_for_live_blocks_and_not_for_events() -> None:
    snapshot = load("sft_varlen", times=40)[1]
    assert len(snapshot.devices[0].events) > 2_000_000
    page = os.sysconf("SC_PAGE_SIZE")
    used: list[int] = []

    def look(_: int) -> None:
        used.append(page * int(Path("/proc/self/statm").read_text().split()[1]))

    replay(snapshot, "native", progress=look)
    # From the first 100 000 events on, which are two rounds: a byte an event would be 2 MB.
    assert len(used) > 20
    assert max(used) - used[0] < 1 << 20


# ---- paused memory ----


def test_a_pause_that_began_before_the_recording_is_found(tmp_path: Path) -> None:
    allocator = CachingAllocator(SimulatedDevice("1GiB"))
    allocator.record_history("all", stacks=None)
    kept = allocator.allocate(500 * MIB, tag="training")
    allocator.pause({"training": True})
    begun = len(allocator.snapshot()["device_traces"][0])
    allocator.resume(["training"])
    device = as_snapshot(allocator, tmp_path, begun).devices[0]
    assert set(device.events.action) == {SEGMENT_MAP}
    assert (device.paused.most, device.paused.before, device.paused.at_end) == (500 * MIB, {kept: 500 * MIB}, {})


@pytest.mark.parametrize("config", ["native", "expandable", "pyactcomp"])
@pytest.mark.parametrize("first", [0, 1])
def test_paused_blocks_are_freed_and_come_back(config: str, first: int, tmp_path: Path) -> None:
    device = SimulatedDevice("1GiB")
    allocator = CachingAllocator(device)
    allocator.record_history("all", stacks=None)
    kept, freed = (allocator.allocate(size * MIB, tag="training") for size in (500, 200))
    allocator.pause({"training": True})
    begun = first * len(allocator.snapshot()["device_traces"][0])
    allocator.reset_peak_stats()
    large = allocator.allocate(800 * MIB)
    allocator.free(freed)
    allocator.free(large)
    allocator.empty_cache()
    allocator.resume(["training"])
    allocator.allocate(300 * MIB)
    allocator.free(kept)
    recording = as_snapshot(allocator, tmp_path, begun)
    result = replay(recording, config, "1GiB")
    assert (result.oom_at, result.unknown_frees, result.lost_frees) == (None, 0, 0)
    assert result.peak_allocated == 800 * MIB
    assert 800 * MIB <= result.peak_reserved <= device.capacity
    assert result.utilization <= 1
    # As the program, the replay has no room for more.
    tight = replay(recording, config, 799 * MIB)
    assert recording.devices[0].events.size[tight.oom_at or 0] == 800 * MIB


@pytest.mark.parametrize("seed", range(8))
def test_a_program_that_pauses_is_replayed_in_the_memory_it_had(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    device = SimulatedDevice("2GiB")
    allocator = CachingAllocator(device)
    allocator.record_history("all", max_entries=1 << 20, stacks=None)
    tags = ["", "kv", "weights"]
    live: dict[int, str] = {}
    paused: set[str] = set()
    begun = 0
    for number in range(300):
        tag = draw.choice(tags)
        action = draw.random()
        if action < 0.45 and tag not in paused and allocator.stats()["active_bytes.all.current"] < 1500 * MIB:
            live[allocator.allocate(draw.choice([600, 3 * MIB, 40 * MIB, 90 * MIB]), tag=tag)] = tag
        elif action < 0.75 and live:
            address = draw.choice(sorted(live))
            allocator.free(address)
            del live[address]
        elif action < 0.85 and tag not in paused:
            allocator.pause({tag: True})
            paused.add(tag)
        elif tag in paused:
            allocator.resume([tag])
            paused.discard(tag)
        if number == 100:
            begun = len(allocator.snapshot()["device_traces"][0])
    whole = as_snapshot(allocator, tmp_path)
    assert whole.devices[0].paused.most > 0
    assert set(whole.devices[0].paused.at_end) == {address for address, tag in live.items() if tag in paused}
    for recording in (whole, as_snapshot(allocator, tmp_path, begun)):
        for config in ("native", "expandable", "pyactcomp"):
            result = replay(recording, config)
            assert (result.oom_at, result.unknown_frees, result.lost_frees) == (None, 0, 0)
            assert result.utilization <= 1
    # Under the recorded allocator, without its tags, no more is reserved at a time than before.
    assert replay(whole, "pyactcomp").peak_reserved <= allocator.counters()["reserved_bytes.all.peak"]


# ---- what cannot be ----


def with_beginning(snapshot: Snapshot, segments: list[Segment], blocks: list[LiveBlock]) -> Snapshot:
    trace = replace(snapshot.devices[0], beginning=Beginning(tuple(blocks), tuple(segments), True))
    return replace(snapshot, devices=(trace,))


@pytest.mark.parametrize(
    ("segments", "blocks", "told"),
    [
        ([(GIB, 4 * MIB), (GIB + 2 * MIB, 4 * MIB)], [], "overlaps another"),
        ([(GIB, 4 * MIB)], [(GIB, 2 * MIB), (GIB + MIB, 2 * MIB)], "overlaps another"),
        ([(GIB, 4 * MIB)], [(GIB + 2 * MIB, 4 * MIB)], "does not lie in its segment"),
        ([(GIB, 4 * MIB)], [(GIB + 1, 512)], "multiples of 512"),
        ([(GIB, 4 * MIB + 1)], [], "multiple of 512"),
    ],
)
def test_beginning_that_cannot_have_been_is_refused(
    segments: list[tuple[int, int]], blocks: list[tuple[int, int]], told: str
) -> None:
    found = [Segment(address, size, 0, 0, False, False) for address, size in segments]
    live = [LiveBlock(address, size, size, 0, 0, False, 0) for address, size in blocks]
    with pytest.raises(ValueError, match=told):
        replay(with_beginning(events([]), found, live), "native")


def test_beginning_that_does_not_fit_is_out_of_memory_at_once() -> None:
    live = [LiveBlock(at * GIB, 30 * MIB, 30 * MIB, 0, 0, False, 0) for at in (1, 2)]
    found = [Segment(block.address, block.size, 0, 0, False, False) for block in live]
    snapshot = with_beginning(events([("alloc", 3 * GIB, 512)]), found, live)
    for config in ("native", "expandable", "pyactcomp"):
        result = replay(snapshot, config, 59 * MIB)
        assert (result.oom_at, result.allocations) == (0, 0)


def test_columns_of_another_type_or_length_are_refused() -> None:
    snapshot = events([("alloc", 1 * GIB, 512)])
    recorded = snapshot.devices[0].events
    for wrong, error in ((array("i", [512]), TypeError), (array("d", [512.0]), TypeError), (array("q"), ValueError)):
        trace = replace(snapshot.devices[0], events=replace(recorded, size=wrong))
        with pytest.raises(error):
            replay(replace(snapshot, devices=(trace,)))


# ---- configurations ----


def test_configurations_are_those_of_the_settings_parser() -> None:
    assert parse_configuration("native") == (AllocatorConfig(growth="malloc"), False)
    assert parse_configuration("expandable")[1] is True
    assert parse_configuration("pyactcomp") == (AllocatorConfig(), False)
    settings = "roundup_power2_divisions:[256:1,512:2,>:8],max_split_size_mb:512"
    base = AllocatorConfig(growth="malloc")
    assert parse_configuration(f"native[{settings}]") == (AllocatorConfig.parse(settings, base), False)
    assert parse_configuration("native[expandable_segments:True]") == parse_configuration("expandable")
    assert parse_configuration("pyactcomp[growth:malloc]") == (base, False)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "native, expandable or pyactcomp"),
        ("tcmalloc", "native, expandable or pyactcomp"),
        ("native[max_split_size_mb:128", "native, expandable or pyactcomp"),
        ("native[nothing:1]", "unknown setting 'nothing'"),
        ("native[growth:vmm]", "leave it out"),
        ("native[initial_pool_size_mb:100]", "no use for initial_pool_size"),
        ("expandable[initial_pool_size_mb:100]", "no use for initial_pool_size"),
        ("expandable[garbage_collection_threshold:0.8]", "no use for garbage_collection_threshold"),
        ("expandable[expandable_segments:False]", "contradicts itself"),
        ("native[memory_fraction:0.5]", "give its capacity"),
    ],
)
def test_configuration_that_cannot_be_is_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        replay(events([]), text)


def test_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one of the recorded devices \[0\], got 3"):
        replay(events([]), device=3)
