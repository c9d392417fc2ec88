"""Searches allocator settings for a recording: one replay for each, settings of PyTorch's own allocator first."""

from __future__ import annotations

import math
import os
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

from .._core import SimulatedDevice
from .candidates import AXES, FAMILIES, Candidate, coarse_moves, distinct_sizes, recorded_candidate, split_sizes
from .failed_request import with_failed_request
from .model import Events, Snapshot
from .reader import read_snapshot
from .replay import BOUNDLESS
from .replay import replay as replay_one
from .trials import Trial, TuneProgress, TuneResult

# The step of the search for capacities: cudaMalloc and virtual memory both give multiples of 2 MiB.
_GRANULARITY = 2 << 20
# Predicted peaks differ from real runs by up to 0.5 %: two settings within 1 % cannot be told apart.
_SAME = 1.01
# Time in the driver is an estimate: shares of the recorded time are compared in steps of this size.
_STEP_OF_TIME = 0.01
# Share of the time limit; in the rest three capacities are searched, with about 15 replays each.
_SHARE_OF_SEARCH = 2 / 3
# Share of the time limit as long as nothing fits; from then on the search is in unlimited memory.
_SHARE_WITHOUT_FIT = 1 / 3


class _TimeIsUp(Exception):
    pass


def tune(
    recording: Snapshot | str | os.PathLike[str],
    capacity: int | str,
    *,
    time_limit: float | None = None,
    progress: Callable[[TuneProgress], object] | None = None,
) -> TuneResult:
    """Search the settings of PyTorch's allocator and of this package's for the least memory for a recording.

    The search tries the setting of the recording, the defaults, and each setting by itself on a coarse grid; then every
    setting in turn around the best of each allocator, until nothing improves; then the smallest capacity of each best
    setting. The least reserved memory wins. Among settings within 1 % of the least, fewer retries win, then less time
    in the driver (in whole percent of the recorded time), then PyTorch's own allocator, then fewer settings. The best
    never reserves more than the recorded setting. The result is best for these events: a program with randomly drawn
    sizes asks for others in its next run. The request the recorded program died of has to be served too. Garbage
    collection needs ``per_process_memory_fraction``, a share of the device's whole memory: a result with
    this setting holds for devices of this capacity.

    Parameters
    ----------
    recording
        A snapshot, or its file's path.
    capacity
        The program's memory on each device: bytes or a text like "24GiB". On a GPU, about 0.5 GiB go to the CUDA
        context.
    time_limit
        Seconds after which the best so far is returned. The recorded setting is replayed in any case. If nothing fits
        in a third of the time, the rest goes into finding the memory that would do.
    progress
        Called before each replay, and now and then during one. KeyboardInterrupt from the callback, or from Ctrl-C,
        ends the search like the time limit.

    Raises
    ------
    OSError, ValueError
        If the file cannot be read or is no snapshot; ValueError also for an invalid capacity or time limit, and for a
        recording without events.
    KeyboardInterrupt
        If the recorded setting was not replayed yet.

    Examples
    --------
    >>> import json, tempfile
    >>> sizes = [40 << 20, 60 << 20, 80 << 20]
    >>> events = []
    >>> for number, size in enumerate(sizes):  # each fits into no earlier segment
    ...     for action in ("alloc", "free_requested", "free_completed"):
    ...         event = {"action": action, "addr": (number + 1) << 30, "size": size, "stream": 0, "time_us": 10**6}
    ...         events.append(event)
    >>> with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
    ...     json.dump({"segments": [], "device_traces": [events]}, file)
    ...     file.flush()
    ...     result = tune(file.name, "1GiB")
    >>> result.recorded.peak_reserved >> 20, result.best.peak_reserved >> 20, result.best.conf
    (180, 80, 'expandable_segments:True')
    >>> result.best.smallest_capacity >> 20
    80
    """
    limit = SimulatedDevice(capacity).capacity
    if limit < _GRANULARITY:
        raise ValueError(f"capacity is at least 2 MiB, got {capacity!r}")
    if time_limit is not None and not time_limit > 0:
        raise ValueError(f"time_limit is a number of seconds above 0, or None, got {time_limit!r}")
    started = time.monotonic()
    snapshot = recording if isinstance(recording, Snapshot) else read_snapshot(recording)
    if not any(len(trace.events) for trace in snapshot.devices):
        raise ValueError(
            "the snapshot holds no events, so nothing can be replayed: record them with "
            "torch.cuda.memory._record_memory_history() before the memory is allocated"
        )
    snapshot, failed = with_failed_request(snapshot)
    recorded, unknown = recorded_candidate(snapshot.settings)
    notes = (*snapshot.notes, *failed, *unknown)
    search = _Search(snapshot, limit, recorded, started, time_limit, progress)
    search.run()
    if not search.any_fits and not search.interrupted:
        search.limit = BOUNDLESS
        search.run()
        if not search.interrupted:
            notes = (*notes, "no tried setting fits in the capacity: the settings are compared in unlimited memory")
    return search.result(notes)


class _Search:
    """The trials so far, and the next ones."""

    def __init__(
        self,
        snapshot: Snapshot,
        capacity: int,
        recorded: Candidate,
        started: float,
        time_limit: float | None,
        progress: Callable[[TuneProgress], object] | None,
    ) -> None:
        self.snapshot = snapshot
        self.capacity = self.limit = capacity
        self.recorded = recorded
        self.started = started
        self.time_limit = time_limit
        self.until: float | None = None
        self.progress = progress
        self.trials: dict[Candidate, Trial] = {}
        self.replays = 0
        self.stopped: Literal["finished", "time limit", "interrupted"] = "finished"
        self.sizes = distinct_sizes(snapshot)
        self.seconds = max(_seconds(trace.events) for trace in snapshot.devices)

    @property
    def any_fits(self) -> bool:
        return any(trial.fits for trial in self.trials.values())

    @property
    def interrupted(self) -> bool:
        return self.stopped == "interrupted"

    def run(self) -> None:
        """Try settings until nothing improves, the time is over, or Ctrl-C."""
        try:
            self.until = None
            self.trials = {self.recorded: self.replay(self.recorded.config, self.limit)}
            searching = self.any_fits or self.limit != self.capacity
            self.until = self.deadline(_SHARE_OF_SEARCH if searching else _SHARE_WITHOUT_FIT)
            defaults = [Candidate(family) for family in FAMILIES]
            for candidate in defaults:
                self.consider(candidate)
            for candidate in defaults:
                for axis in AXES[candidate.family]:
                    self.consider_all(candidate, axis)
            for candidate in defaults:
                self.refine(candidate.family)
        except _TimeIsUp:
            self.stopped = "time limit"
        except KeyboardInterrupt:
            if not self.trials:
                raise
            self.stopped = "interrupted"

    def result(self, notes: tuple[str, ...]) -> TuneResult:
        """Find the smallest capacities, and return all."""
        pytorch = self.simplest(candidate for candidate in self.trials if candidate.family != "pyactcomp")
        ours = self.simplest(candidate for candidate in self.trials if candidate.family == "pyactcomp")
        best = self.simplest(filter(None, (pytorch, ours))) or self.recorded
        named = dict.fromkeys(filter(None, (best, self.recorded, pytorch, ours)))
        fits = self.limit == self.capacity and self.any_fits
        if not self.interrupted:
            self.find_capacities(named)
        if not fits:
            best = min(named, key=lambda each: self.trials[each].smallest_capacity or math.inf)
        return TuneResult(
            self.capacity,
            fits,
            self.trials[self.recorded],
            None if pytorch is None else self.trials[pytorch],
            None if ours is None else self.trials[ours],
            self.trials[best],
            self.seconds,
            self.replays,
            self.stopped,
            notes,
        )

    # ---- the trials ----

    def consider(self, candidate: Candidate | None) -> None:
        """Try a setting, once."""
        if candidate is not None and candidate not in self.trials:
            self.trials[candidate] = trial = self.replay(candidate.config, self.limit)
            if trial.fits:
                self.until = self.deadline(_SHARE_OF_SEARCH)

    def consider_all(self, candidate: Candidate, axis: str) -> None:
        """Try the grid of one axis around a tried candidate's other settings."""
        for move in coarse_moves(axis, candidate, self.trials[candidate].retries, self.sizes):
            self.consider(candidate.moved(move))

    def refine(self, family: str) -> None:
        """Change one setting of the allocator's best after the other, until nothing improves."""
        before = None
        while before != (before := self.best_of(family)):
            for axis in AXES[family]:
                self.consider_all(self.best_of(family), axis)
                if axis == "max_split_size_mb":
                    self.bisect_split_size(family)

    def bisect_split_size(self, family: str) -> None:
        """Move between the distinct sizes of the recording, from either side towards the best."""
        key = "max_split_size_mb"
        points = split_sizes(self.sizes)
        best = self.best_of(family)
        if not best.get(key):
            return
        at = int(best.get(key))
        low, high = at // 2, at * 2
        while True:
            below = points[bisect_right(points, low) : bisect_left(points, at)]
            above = points[bisect_right(points, at) : bisect_left(points, high)]
            if not below and not above:
                return
            left = below[len(below) // 2] if below else low
            right = above[len(above) // 2] if above else high
            for part, middle in ((below, left), (above, right)):
                if part:
                    self.consider(best.moved({key: str(middle)}))
            # If one side has no points, that end was perhaps never tried.
            moves = (best, best.moved({key: str(left)}), best.moved({key: str(right)}))
            found = min((move for move in moves if move in self.trials), key=self.rank)
            moved = int(found.get(key))
            low, high = (left, right) if moved == at else (low, at) if moved < at else (at, high)
            best, at = found, moved

    # ---- costs and ranks ----

    def rank(self, candidate: Candidate) -> tuple[float, int, int, float, int]:
        """Return a sort key: the share of events before memory runs out, the memory, retries, time, keys."""
        trial = self.trials[candidate]
        passed = min(
            1.0 if result.oom_at is None else result.oom_at / (len(trace.events) + 1)
            for trace, result in zip(self.snapshot.devices, trial.results, strict=True)
        )
        return -passed, trial.peak_reserved, trial.retries, trial.driver_seconds, candidate.keys

    def best_of(self, family: str) -> Candidate:
        return min((candidate for candidate in self.trials if candidate.family == family), key=self.rank)

    def simplest(self, candidates: Iterable[Candidate]) -> Candidate | None:
        """Return the simplest candidate within 1 % of the best, with no more memory than the recorded setting's.

        None if there are no candidates.
        """
        listed = list(candidates)
        if not listed:
            return None
        best = min(listed, key=self.rank)
        if not self.trials[best].fits:
            return best
        least = self.trials[best].peak_reserved
        enough = _SAME * least
        recorded = self.trials.get(self.recorded)
        if recorded is not None and recorded.fits:
            enough = min(enough, max(least, recorded.peak_reserved))
        same = [each for each in listed if self.trials[each].fits and self.trials[each].peak_reserved <= enough]
        return min(same, key=self.simplicity)

    def simplicity(self, candidate: Candidate) -> tuple[Any, ...]:
        """Return a sort key of settings with the same memory: the first is the one to take."""
        trial = self.trials[candidate]
        share = trial.driver_seconds / self.seconds if self.seconds else 0.0
        of_time = int(share / _STEP_OF_TIME)
        return trial.retries, of_time, candidate.family == "pyactcomp", candidate.keys, self.rank(candidate)

    # ---- replays ----

    def deadline(self, share: float) -> float | None:
        """Return when a share of the time limit is over."""
        return None if self.time_limit is None else self.started + share * self.time_limit

    def replay(self, config: str, capacity: int) -> Trial:
        """Replay all devices; raise when the time is over."""

        def check(_: int = 0) -> None:
            now = time.monotonic()
            if self.until is not None and now >= self.until:
                raise _TimeIsUp
            if self.progress is not None:
                best = self.simplest(self.trials) if self.any_fits else None
                so_far = None if best is None else self.trials[best]
                self.progress(TuneProgress(self.replays, now - self.started, config, so_far))

        check()
        self.replays += 1
        results = [
            replay_one(self.snapshot, config, capacity, device=trace.index, progress=check)
            for trace in self.snapshot.devices
        ]
        return Trial(config, tuple(results))

    def find_capacities(self, candidates: Iterable[Candidate]) -> None:
        """Find the smallest capacity of each, until the time is over or Ctrl-C."""
        self.until = self.deadline(1)
        try:
            for candidate in candidates:
                smallest = self.smallest_capacity(self.trials[candidate])
                self.trials[candidate] = replace(self.trials[candidate], smallest_capacity=smallest)
        except _TimeIsUp:
            self.stopped = "time limit"
        except KeyboardInterrupt:
            self.stopped = "interrupted"

    def smallest_capacity(self, trial: Trial) -> int | None:
        """Bisect between less than the program's own requests, which cannot do, and a capacity that works."""
        requested = max(result.peak_requested for result in trial.results)
        low = max(requested - 1, 0) // _GRANULARITY * _GRANULARITY
        high = max(-(-trial.peak_reserved // _GRANULARITY) * _GRANULARITY, low + _GRANULARITY)
        known = self.limit // _GRANULARITY * _GRANULARITY if trial.fits else BOUNDLESS
        while not self.replay(trial.config, high).fits:
            if high >= BOUNDLESS:
                return None
            # The setting may need more in a memory larger than the one known to fit.
            low, high = high, min(2 * high, known) if high < known else 2 * high
        while high - low > _GRANULARITY:
            middle = (low + high) // 2 // _GRANULARITY * _GRANULARITY
            low, high = (low, middle) if self.replay(trial.config, middle).fits else (middle, high)
        return high


def _seconds(events: Events) -> float:
    """Return the seconds of the recording; 0 if there are no times."""
    return max(0, events.time_us[-1] - events.time_us[0]) / 1e6 if len(events) else 0.0
