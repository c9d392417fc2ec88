"""Contract under test: a search finds settings that replays confirm, says what they need, and ends when told to."""

from __future__ import annotations

import random
import sys
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from allocator_cases import MIB
from replay_cases import GIB, Row, events, freed, held, load, passed
from snapshot_cases import block as block_of
from snapshot_cases import content, event, segment, write

from pyactcomp.snapshots import replay, tune
from pyactcomp.snapshots.candidates import Candidate
from pyactcomp.snapshots.model import Events, Snapshot
from pyactcomp.snapshots.reader import read_snapshot
from pyactcomp.snapshots.replay import BOUNDLESS
from pyactcomp.snapshots.trials import Trial, TuneProgress, TuneResult
from pyactcomp.snapshots.tune import _Search

SAME = 1.01  # what the documentation calls the same


def pair(large: int, small: int, at: int = 0) -> list[Row]:
    """Return a program whose second small block, which stays, lies where a large one was and is again."""
    first = [*held(at + 1, large), *held(at + 2, small), *freed(at + 1, large)]
    return [*first, *held(at + 3, small), *held(at + 4, large)]


def pinned(large: int, small: int) -> Snapshot:
    return events(pair(large, small))


def as_replayed(snapshot: Snapshot, trial: Trial, capacity: int | str) -> bool:
    return trial.results == tuple(
        replay(snapshot, trial.config, capacity, device=trace.index) for trace in snapshot.devices
    )


# ---- what is found ----


@pytest.mark.parametrize("name", ["sft_varlen", "bert_accum_eval", "lora_offload", "multiscale_resnet", "moe"])
def test_tuned_setting_is_never_worse_than_a_default(name: str) -> None:
    snapshot = load(name)[1]
    capacity = 20 * GIB
    result = tune(snapshot, capacity)
    assert (result.fits, result.stopped, result.capacity) == (True, "finished", capacity)
    assert result.recorded.config == "native"
    assert result.best in (result.pytorch, result.pyactcomp)
    for trial in (result.recorded, result.pytorch, result.pyactcomp):
        assert trial is not None
        assert as_replayed(snapshot, trial, capacity)
    for default in ("native", "expandable", "pyactcomp"):
        found = replay(snapshot, default, capacity)
        assert result.best.peak_reserved <= SAME * found.peak_reserved or found.oom_at is not None
        assert result.best.retries <= found.retries or found.oom_at is not None
    # Fewer settings than the default has there are not.
    if result.best.config != "native":
        worse = replay(snapshot, "native", capacity)
        assert result.best.peak_reserved * SAME < worse.peak_reserved or result.best.retries < worse.retries


@pytest.mark.parametrize(
    ("snapshot", "family", "peak", "default"),
    [
        # No earlier segment holds the next request; expandable ones grow.
        (events([*passed(1, 40), *passed(2, 60), *passed(3, 80)]), "expandable", 80, 180),
        # Neither segment that holds a small block can hold the large one again; unsplit, the large one's can.
        (pinned(100, 30), "native[max_split_size_mb", 160, 230),
        # The same between two powers of two: up to 32 a small request takes the large block whole, from 64 splits it.
        (pinned(56, 40), "native[max_split_size_mb", 136, 152),
        # Rounded to a power of two, all sizes share one segment.
        (events([*passed(1, 34), *passed(2, 36), *passed(3, 38), *passed(4, 40)]), "expandable", 40, 148),
        # Nothing to gain.
        (events([*passed(1, 40), *passed(2, 40)]), "native", 40, 40),
    ],
)
def test_known_best_setting_is_found(snapshot: Snapshot, family: str, peak: int, default: int) -> None:
    result = tune(snapshot, "1GiB")
    assert result.recorded.peak_reserved == default * MIB
    assert result.best.config.startswith(family)
    assert result.best.peak_reserved == peak * MIB
    assert as_replayed(snapshot, result.best, "1GiB")
    if family == "native":
        assert (result.best.config, result.best.conf) == ("native", "")


def test_split_size_found_is_as_good_as_every_other() -> None:
    # Pairs that each need a split size above one and up to the other: no value serves all.
    pairs = [(56, 40), (90, 70), (130, 100), (220, 180)]
    snapshot = events([row for at, sizes in enumerate(pairs) for row in pair(*sizes, at=10 * at)])
    each = [f"native[max_split_size_mb:{size}]" for size in range(21, 221)]
    least = min(replay(snapshot, config).peak_reserved for config in ("native", "expandable", *each))
    result = tune(snapshot, "4GiB")
    assert result.pytorch is not None
    assert result.pytorch.peak_reserved <= SAME * least


def test_split_size_between_two_of_the_grid_is_found() -> None:
    rows: list[Row] = []
    # So many other sizes that the grid leaves some out.
    for size in range(21, 41):
        rows += held(100 + size, size)
    # Blocks of 200 and of 300 MiB, split for smaller ones if the limit is above them.
    rows += [*passed(1, 200), *held(2, 80), *held(3, 80)]
    rows += [*passed(4, 300), *(row for at in range(5, 9) for row in held(at, 70))]
    # One of 400 MiB, which is not to be split: up to there.
    rows += pair(400, 100, at=10)
    tried: set[str] = set()
    result = tune(events(rows), "16GiB", progress=lambda now: tried.add(now.config))
    found = tried & {f"native[max_split_size_mb:{size}]" for size in range(301, 401)}
    others = sum(size + size % 2 for size in range(21, 41))  # in segments of whole 2 MiB
    least = (others + 200 + 300 + 400 + 2 * 100) * MIB
    assert {replay(events(rows), config).peak_reserved for config in found} == {least}
    assert result.pytorch is not None
    assert result.pytorch.peak_reserved <= least


def test_rounding_of_sizes_up_to_a_power_of_two_is_found() -> None:
    # Where 101 MiB were, 104 fit if both are rounded; the block of 22 after them keeps expandable segments from growing
    # there. Of 130 MiB, rounding would waste.
    held_on = [row for at in range(4, 9) for row in held(at, 130)]
    snapshot = events([*held(1, 101), *held(2, 22), *freed(1, 101), *held(3, 104), *held_on])
    result = tune(snapshot, "4GiB")
    assert result.pytorch is not None
    assert result.pytorch.peak_reserved == (104 + 22 + 5 * 130) * MIB
    assert ">:1]" in result.pytorch.config


def test_garbage_collection_that_spares_a_retry_is_found() -> None:
    # 182 MiB of 192 are free only once both blocks are given back.
    snapshot = events([*held(1, 22), *held(2, 116), *freed(1, 22), *freed(2, 116), *held(3, 182)])
    result = tune(snapshot, "192MiB")
    assert result.recorded.retries == 1
    assert result.pytorch is not None
    assert result.pytorch.config.startswith("native[garbage_collection_threshold:")
    assert result.pytorch.retries == 0


def small_recording(rng: random.Random) -> Snapshot:
    sizes = (22, 25, 30, 34, 40, 46, 50, 64, 92, 100)
    rows: list[Row] = []
    live: dict[int, int] = {}
    for at in range(1, rng.randint(3, 9) + 1):
        if not live or rng.random() < 0.6:
            live[at] = rng.choice(sizes)
            rows += held(at, live[at])
        else:
            address = rng.choice(list(live))
            rows += freed(address, live.pop(address))
    return events(rows)


def smallest_works(snapshot: Snapshot, trial: Trial) -> bool:
    least = trial.smallest_capacity
    assert least is not None
    assert least % (2 * MIB) == 0
    less_works = least > 2 * MIB and replay(snapshot, trial.config, least - 2 * MIB).oom_at is None
    return replay(snapshot, trial.config, least).oom_at is None and not less_works


@pytest.mark.parametrize("share", [0.5, 0.9, 4])
def test_random_recordings_are_tuned(share: float) -> None:
    for seed in range(150):
        snapshot = small_recording(random.Random(seed))
        capacity = int(share * replay(snapshot).peak_reserved) // (2 * MIB) * 2 * MIB
        result = tune(snapshot, capacity)
        trials = [trial for trial in (result.recorded, result.pytorch, result.pyactcomp) if trial is not None]
        assert len(trials) == 3
        for trial in trials:
            assert as_replayed(snapshot, trial, capacity if result.fits else BOUNDLESS), (seed, trial.config)
            assert smallest_works(snapshot, trial), (seed, trial.config)
            assert (result.fits and trial.fits) <= ((trial.smallest_capacity or 0) <= capacity), (seed, trial.config)
        assert result.best in trials
        if not result.fits:
            least = [trial.smallest_capacity or 0 for trial in trials]
            assert result.best.smallest_capacity == min(least), seed
            assert min(least) > capacity, seed


def test_only_split_sizes_that_were_tried_are_compared() -> None:
    # From the best, 26 MiB, up to twice as much no size lies between which anything would change.
    result = tune(events([*passed(1, 25), *held(2, 92), *held(3, 25), *held(4, 25)]), "1GiB")
    assert result.pyactcomp is not None
    assert result.pyactcomp.peak_reserved == (25 + 92 + 25) * MIB


def test_garbage_collection_is_tried_where_memory_ran_short() -> None:
    tried: set[str] = set()
    snapshot = load("lora_offload")[1]
    assert replay(snapshot, "native", "12GiB").retries > 0
    tune(snapshot, "12GiB", progress=lambda now: tried.add(now.config))
    assert any("native[garbage_collection_threshold" in config for config in tried)
    tried.clear()
    assert replay(snapshot, "native", "24GiB").retries == 0
    tune(snapshot, "24GiB", progress=lambda now: tried.add(now.config))
    assert not any("garbage_collection" in config for config in tried)


# ---- how it is judged ----


def search_of(
    trials: dict[Candidate, dict[str, Any]], snapshot: Snapshot | None = None, seconds: float = 0.0
) -> _Search:
    """Return a search in 1000 MiB that has tried these."""
    snapshot = snapshot or events(held(1, 40))
    search = _Search(snapshot, 1000 * MIB, Candidate("native"), 0.0, None, None)
    search.seconds = seconds
    plain = replay(snapshot)
    search.trials = {
        candidate: Trial(candidate.config, (replace(plain, **changes),)) for candidate, changes in trials.items()
    }
    return search


NATIVE, EXPANDABLE, OURS = Candidate("native"), Candidate("expandable"), Candidate("pyactcomp")
SPLIT = Candidate.make("native", {"max_split_size_mb": "64"})
SPLIT_AND_ROUNDED = Candidate.make("native", {"max_split_size_mb": "64", "roundup_power2_divisions": "8"})


@pytest.mark.parametrize(
    ("trials", "chosen"),
    [
        # Within a percent, fewer settings; beyond it, less memory.
        ([(EXPANDABLE, 200 * MIB, 0), (NATIVE, 201 * MIB, 0)], NATIVE),
        ([(EXPANDABLE, 200 * MIB, 0), (NATIVE, 204 * MIB, 0)], EXPANDABLE),
        ([(SPLIT_AND_ROUNDED, 200 * MIB, 0), (SPLIT, 201 * MIB, 0)], SPLIT),
        # PyTorch's own allocator before fewer settings, and fewer retries before both.
        ([(OURS, 200 * MIB, 0), (SPLIT_AND_ROUNDED, 201 * MIB, 0)], SPLIT_AND_ROUNDED),
        ([(NATIVE, 201 * MIB, 3), (SPLIT_AND_ROUNDED, 200 * MIB, 3), (SPLIT, 201 * MIB, 0)], SPLIT),
        ([(NATIVE, 201 * MIB, 3), (SPLIT, 200 * MIB, 3), (OURS, 201 * MIB, 2)], OURS),
        # Never more memory than the recorded setting, native: not for fewer retries, nor within the percent.
        ([(NATIVE, 200 * MIB, 3), (SPLIT, 201 * MIB, 0)], NATIVE),
        ([(NATIVE, 200 * MIB, 3), (SPLIT, 199 * MIB, 2), (OURS, 201 * MIB, 0)], SPLIT),
    ],
)
def test_simplest_of_what_is_the_same_is_chosen(trials: list[tuple[Candidate, int, int]], chosen: Candidate) -> None:
    search = search_of({each: {"peak_reserved": peak, "retries": retries} for each, peak, retries in trials})
    assert search.simplest(search.trials) == chosen


def test_memory_comes_first_and_time_in_the_driver_breaks_ties() -> None:
    # Of 2 s: 15 % and 1 %.
    trials = {
        NATIVE: {"peak_reserved": 210 * MIB, "driver_seconds": 0.3},
        EXPANDABLE: {"peak_reserved": 201 * MIB, "driver_seconds": 0.02},
        SPLIT: {"peak_reserved": 200 * MIB, "driver_seconds": 0.3},
    }
    timed = search_of(trials, seconds=2.0)
    assert timed.best_of("native") == SPLIT
    # Within a percent of the memory, the time counts; beyond it, only the memory does.
    assert timed.simplest(timed.trials) == EXPANDABLE
    assert timed.simplest([NATIVE, SPLIT]) == SPLIT
    # Less than a percent of the recorded time is no reason, and without times nothing is known of shares.
    assert search_of(trials, seconds=2000.0).simplest([EXPANDABLE, SPLIT]) == SPLIT
    assert search_of(trials).simplest([EXPANDABLE, SPLIT]) == SPLIT


def test_recorded_time_is_that_between_the_first_event_and_the_last() -> None:
    snapshot = pinned(100, 30)
    trace = snapshot.devices[0]
    times = array("q", [7_000_000 + 500_000 * index for index in range(len(trace.events))])
    timed = replace(snapshot, devices=(replace(trace, events=replace(trace.events, time_us=times)),))
    search = _Search(timed, GIB, NATIVE, 0.0, None, None)
    assert search.seconds == 0.5 * (len(trace.events) - 1)


def test_setting_that_gets_further_is_better_where_none_gets_through() -> None:
    snapshot = pinned(100, 30)
    trials = {
        NATIVE: {"peak_reserved": 100 * MIB, "oom_at": 1},
        SPLIT: {"peak_reserved": 130 * MIB, "oom_at": 3},
        SPLIT_AND_ROUNDED: {"peak_reserved": 120 * MIB, "oom_at": 2},
    }
    search = search_of(trials, snapshot)
    assert search.simplest(search.trials) == search.best_of("native") == SPLIT
    search = search_of({**trials, EXPANDABLE: {"peak_reserved": 900 * MIB, "oom_at": None}}, snapshot)
    assert search.simplest(search.trials) == EXPANDABLE


def evaluation(tmp_path: Path) -> Snapshot:
    """Return 40 ms of an evaluation: nothing is reserved, and most of the memory was there before."""
    segments = [segment(number * GIB, block_of(number * GIB, 20 * MIB)) for number in range(1, 81)]
    segments.append(segment(100 * GIB, block_of(100 * GIB, 20 * MIB, "inactive")))
    actions = ("alloc", "free_requested", "free_completed")
    rows = [
        event(action, 100 * GIB, 4 * MIB, time_us=500 * turn + number)
        for turn in range(80)
        for number, action in enumerate(actions)
    ]
    return read_snapshot(write(tmp_path, content(rows, segments)))


def test_memory_from_before_the_recording_costs_no_time_in_it(tmp_path: Path) -> None:
    recording = evaluation(tmp_path)
    found = replay(recording, "native")
    assert (found.peak_reserved, found.driver_calls, found.driver_seconds) == (81 * 20 * MIB, 0, 0.0)
    # Five new blocks of 25 MiB need a segment each, and the driver.
    trace = recording.devices[0]
    more = replay(replace(recording, devices=(replace(trace, events=growing(trace.events)),)), "native")
    assert more.driver_calls == 5
    assert more.driver_seconds > 0


def growing(events: Events) -> Events:
    """Return five allocations of 25 MiB in place of the events."""
    end = 5
    return replace(
        events,
        action=array("B", [0] * end),
        address=array("q", [(200 + number) * GIB for number in range(end)]),
        size=array("q", [25 * MIB] * end),
        **{name: getattr(events, name)[:end] for name in ("stream", "time_us", "pool", "stack")},
    )


def test_setting_with_more_memory_than_the_recorded_one_is_not_recommended(tmp_path: Path) -> None:
    result = tune(evaluation(tmp_path), "80GiB")
    assert result.recorded.config == "native"
    assert result.best.peak_reserved <= result.recorded.peak_reserved == 81 * 20 * MIB
    assert result.seconds == pytest.approx(79 * 500e-6 + 2e-6)


# ---- the smallest capacity ----


@pytest.mark.parametrize("name", ["lora_offload", "moe"])
def test_smallest_capacity_works_and_two_mebibytes_less_do_not(name: str) -> None:
    snapshot = load(name)[1]
    result = tune(snapshot, "16GiB")
    for trial in (result.recorded, result.pytorch, result.pyactcomp):
        assert trial is not None
        assert smallest_works(snapshot, trial)


def test_capacity_that_nothing_fits_in_is_said_with_the_one_that_works() -> None:
    snapshot = pinned(100, 30)
    result = tune(snapshot, "150MiB")
    assert not result.fits
    assert any("no tried setting fits" in note for note in result.notes)
    assert result.best.smallest_capacity == 160 * MIB
    assert replay(snapshot, result.best.config, 160 * MIB).oom_at is None


def test_setting_with_the_smallest_capacity_is_the_best_where_nothing_fits() -> None:
    # 5 MiB lie in a segment of 20, which this package's allocator makes as small as the memory is.
    snapshot = events(held(1, 5))
    result = tune(snapshot, "2MiB")
    assert not result.fits
    assert (result.recorded.smallest_capacity, result.recorded.peak_reserved) == (20 * MIB, 20 * MIB)
    assert (result.best, result.best.smallest_capacity) == (result.pyactcomp, 6 * MIB)


def test_capacity_below_the_first_request_is_searched_from_nothing() -> None:
    # Only this package's allocator fits; what ran out of memory at once was never seen to request anything.
    result = tune(events(held(1, 5)), "10MiB")
    assert (result.fits, result.best) == (True, result.pyactcomp)
    assert (result.recorded.fits, result.recorded.results[0].peak_requested) == (False, 0)
    assert (result.recorded.smallest_capacity, result.best.smallest_capacity) == (20 * MIB, 6 * MIB)
    assert tune(events(held(1, 1)), "2MiB").best.smallest_capacity == 2 * MIB


def test_setting_that_fits_needs_no_more_than_it_fits_in(monkeypatch: pytest.MonkeyPatch) -> None:
    # It fails in its peak, 200 MiB, and again from 350 MiB on.
    search = search_of({NATIVE: {"peak_reserved": 200 * MIB}})
    search.limit = 300 * MIB
    fitting, failing = search.trials[NATIVE], replace(search.trials[NATIVE].results[0], oom_at=0)

    def fits(config: str, capacity: int) -> Trial:
        return fitting if 250 * MIB <= capacity < 350 * MIB else Trial(config, (failing,))

    monkeypatch.setattr(search, "replay", fits)
    assert search.smallest_capacity(fitting) == 250 * MIB


def test_request_beyond_all_memory_is_known_to_fit_nowhere(tmp_path: Path) -> None:
    died = {"action": "oom", "device_free": 0, "size": 1 << 61, "stream": 0, "time_us": 10, "frames": []}
    result = tune(write(tmp_path, content([event("alloc", GIB, MIB), died])), "1GiB")
    assert (result.fits, result.best.fits, result.best.smallest_capacity) == (False, False, None)
    assert result.stopped == "finished"


def test_request_that_the_program_died_of_has_to_fit(tmp_path: Path) -> None:
    size = 40 * MIB
    recorded = content([event("alloc", 1 * GIB, size), {"action": "oom", "device_free": 0, "size": size, "stream": 0}])
    result = tune(write(tmp_path, recorded), "1GiB")
    assert result.best.smallest_capacity == 2 * size
    assert any("ends out of memory" in note for note in result.notes)
    went_on = content([*recorded["device_traces"][0], event("alloc", 2 * GIB, MIB)])
    result = tune(write(tmp_path, went_on), "1GiB")
    assert result.best.smallest_capacity == size + 2 * MIB
    assert any("the program went on" in note for note in result.notes)


# ---- when it ends ----


class Ticking:
    """A clock that each look moves by a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1
        return self.now


def test_time_limit_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ticking()
    monkeypatch.setattr(sys.modules["pyactcomp.snapshots.tune"], "time", clock)
    limit = 100
    result = tune(load("moe")[1], "16GiB", time_limit=limit)
    assert result.stopped == "time limit"
    # After the limit the replay in progress ends, and the result's own time is read.
    assert limit < clock.now < limit + 10
    assert result.best.fits


@pytest.mark.parametrize("limit", [100, 150, 200])
def test_time_is_left_for_what_would_do_where_nothing_fits(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["pyactcomp.snapshots.tune"], "time", Ticking())
    snapshot = load("moe")[1]
    result = tune(snapshot, "4GiB", time_limit=limit)
    assert (result.fits, result.stopped) == (False, "time limit")
    # Both allocators were replayed in memory without end, and the better one's smallest capacity is known.
    for trial in (result.recorded, result.pytorch, result.pyactcomp):
        assert trial is not None
        assert trial.fits
    assert smallest_works(snapshot, result.best)
    assert result.best.smallest_capacity == min(
        trial.smallest_capacity
        for trial in (result.recorded, result.pytorch, result.pyactcomp)
        if trial is not None and trial.smallest_capacity is not None
    )


def test_settings_are_tried_for_longer_once_one_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["pyactcomp.snapshots.tune"], "time", Ticking())
    seen: list[TuneProgress] = []
    limit = 120
    result = tune(load("moe")[1], "5.8GiB", time_limit=limit, progress=seen.append)
    assert (result.fits, result.recorded.fits, result.stopped) == (True, False, "time limit")
    # Of what is shown, what is not one of the three whose capacity is searched at the end.
    assert result.pytorch is not None
    assert result.pyactcomp is not None
    named = {result.recorded.config, result.pytorch.config, result.pyactcomp.config}
    last = max(now.seconds for now in seen if now.config not in named)
    assert limit / 3 < last < 2 * limit / 3


def test_nothing_is_known_to_work_where_the_time_was_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["pyactcomp.snapshots.tune"], "time", Ticking())
    result = tune(load("moe")[1], "4GiB", time_limit=1)
    assert (result.fits, result.stopped, result.best.smallest_capacity) == (False, "time limit", None)


def interrupted(snapshot: Snapshot, after: int) -> TuneResult:
    def interrupt(now: TuneProgress) -> None:
        if now.replays >= after:
            raise KeyboardInterrupt

    return tune(snapshot, "1GiB", progress=interrupt)


def test_interrupt_of_the_search_in_endless_memory_leaves_no_word_of_it(tmp_path: Path) -> None:
    rows = [event("alloc", (number + 1) * GIB, 100 * MIB, time_us=number * 10**6) for number in range(5)]
    path = write(tmp_path, content(rows))

    def interrupt(now: TuneProgress) -> None:
        # The recorded setting comes first in either search.
        if now.replays > 3 and now.config == "native":
            raise KeyboardInterrupt

    result = tune(path, "64MiB", progress=interrupt)
    assert (result.stopped, result.fits) == ("interrupted", False)
    assert not any("compared in unlimited memory" in note for note in result.notes)
    assert any("compared in unlimited memory" in note for note in tune(path, "64MiB").notes)


def test_interrupt_returns_the_best_so_far() -> None:
    snapshot = pinned(100, 30)
    whole = tune(snapshot, "1GiB")
    after_the_first = interrupted(snapshot, 2)
    assert (after_the_first.stopped, after_the_first.replays) == ("interrupted", 2)
    assert after_the_first.pytorch == after_the_first.best == after_the_first.recorded
    assert after_the_first.pyactcomp is None
    # Once settings were tried, the best of them; once its capacity was searched, that too.
    late = interrupted(snapshot, whole.replays - 1)
    assert late.stopped == "interrupted"
    assert late.best == whole.best
    assert late.best.smallest_capacity == 160 * MIB
    with pytest.raises(KeyboardInterrupt):
        interrupted(snapshot, 0)


def test_progress_names_what_is_tried_and_the_best() -> None:
    seen: list[TuneProgress] = []
    result = tune(pinned(100, 30), "1GiB", progress=seen.append)
    assert [now.seconds for now in seen] == sorted(now.seconds for now in seen)
    assert seen[-1].replays == result.replays
    assert (seen[0].config, seen[0].best) == ("native", None)
    assert seen[-1].best is not None
    assert seen[-1].best.peak_reserved == 160 * MIB


# ---- recordings ----


def test_several_devices_are_tuned_together() -> None:
    one, other = pinned(100, 30), events([*passed(1, 40), *passed(2, 60), *passed(3, 80)])
    snapshot = replace(one, devices=(one.devices[0], replace(other.devices[0], index=3)))
    result = tune(snapshot, "1GiB")
    assert [found.peak_reserved for found in result.recorded.results] == [230 * MIB, 180 * MIB]
    assert result.recorded.peak_reserved == 230 * MIB
    assert result.recorded.driver_calls == sum(found.driver_calls for found in result.recorded.results)
    assert as_replayed(snapshot, result.best, "1GiB")
    assert result.best.smallest_capacity == 160 * MIB


# ---- wrong arguments ----


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    snapshot = pinned(100, 30)
    with pytest.raises(ValueError, match="time_limit is a number of seconds above 0"):
        tune(snapshot, "1GiB", time_limit=0)
    with pytest.raises(ValueError, match="at least 2 MiB"):
        tune(snapshot, 512)
    with pytest.raises(ValueError, match="1 potato"):
        tune(snapshot, "1 potato")
    idle = content([], [segment(GIB, block_of(GIB, 2 * MIB))])
    with pytest.raises(ValueError, match="holds no events"):
        tune(write(tmp_path, idle), "1GiB")
