"""Finds where the steps of a recorded training begin.

Annotations tell, if the recording has them. Otherwise the number of live memory blocks does: whatever the shapes, a
step leaves as many blocks alive as the one before, and between two of these valleys the number rises and falls once.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import sub
from statistics import median
from typing import Any

from .lifetimes import Lifetimes
from .model import DeviceTrace

_FEWEST = 3
# Annotations that are named if they mark no step.
_NAMED = 3
# This share of the intervals must be within this factor of their median. On five recorded trainings, of random shapes,
# with evaluation or offloading between, at least 92 % of the valleys' intervals are.
_REGULAR_SHARE, _REGULAR_FACTOR = 0.6, 1.5
# Setup and teardown have far fewer and far more live blocks than the valleys between steps. They are less than this
# share of a recording's events.
_UNUSUAL = 0.05
_SAMPLES = 100_000
# A loop with fewer allocations per turn is no training step.
_FEWEST_BLOCKS = 10


@dataclass(frozen=True)
class Steps:
    """The steps of a recording.

    Attributes
    ----------
    starts
        The first event of each step, in order; empty if no steps were found. Events before the first are setup.
    found_by
        How they were found, or why none were, in words.
    """

    starts: tuple[int, ...]
    found_by: str

    def of(self, event: int) -> int:
        """Return the number of the step an event is in, from 1; 0 before the first."""
        return bisect_left(self.starts, event + 1)


def find_steps(trace: DeviceTrace, lifetimes: Lifetimes, annotations: Sequence[Mapping[str, Any]]) -> Steps:
    """Return where the steps of a device's recording begin.

    Parameters
    ----------
    trace : DeviceTrace
    lifetimes : Lifetimes
        The device's allocations.
    annotations : sequence of mapping
        The snapshot's: ``ProfilerStep#n`` of torch.profiler, or else the ``Optimizer.step`` of an optimizer.
    """
    for prefix, stage, what in (("ProfilerStep", "START", "begin"), ("Optimizer.step", "END", "follow")):
        starts = _annotated(trace, annotations, prefix, stage)
        if len(starts) >= 2:
            return Steps(starts, f"annotations: steps {what} {prefix}")
    unused = _unused(annotations)
    # Events before the first are setup, or a step that began before the recording.
    if starts := _regular(_valleys(_counts(lifetimes))[1:]):
        besides = f" ({unused})" if annotations else ""
        return Steps(starts, f"the number of live blocks, which rises and falls once a step{besides}")
    return Steps((), f"no steps found: {unused}, and the number of live blocks does not rise and fall regularly")


def turns(lifetimes: Lifetimes, steps: Steps) -> tuple[int, ...]:
    """Return where the steps begin; if these are unknown, where the number of live blocks is low, regular or not."""
    return steps.starts or tuple(_valleys(_counts(lifetimes))[1:])


def _counts(lifetimes: Lifetimes) -> list[int]:
    """Return the number of live blocks after each event, less the number before the first."""
    changes = array("q", bytes(8 * lifetimes.events))
    for begin, end in zip(lifetimes.begin, lifetimes.end, strict=True):
        if begin >= 0:
            changes[begin] += 1
        if end < lifetimes.events:
            changes[end] -= 1
    return list(accumulate(changes))


def _unused(annotations: Sequence[Mapping[str, Any]]) -> str:
    """Say why no annotation marks a step, and which there are."""
    names = [re.sub(r"#\d+$", "", name) for entry in annotations if isinstance(name := entry.get("name"), str)]
    if not names:
        return "there are no annotations"
    most = Counter(names).most_common(_NAMED)
    listed = ", ".join(f"{name} ({count})" for name, count in most) + (", ..." if len({*names}) > len(most) else "")
    return f"none of the annotations marks two steps of this device within the recording: {listed}"


def _annotated(
    trace: DeviceTrace, annotations: Sequence[Mapping[str, Any]], prefix: str, stage: str
) -> tuple[int, ...]:
    times = trace.events.time_us
    if not times or any(right < left for left, right in pairwise(times)):
        return ()
    by_name: dict[str, set[int]] = defaultdict(set)
    for entry in annotations:
        name, time = entry.get("name"), entry.get("time_us")
        if not isinstance(name, str) or not isinstance(time, int) or entry.get("stage") != stage:
            continue
        if name.startswith(prefix) and times[0] <= time <= times[-1] and entry.get("device") in (None, -1, trace.index):
            by_name[re.sub(r"#\d+$", "", name)].add(bisect_left(times, time))
    # Of several optimizers take the one with the fewest steps (a GAN's generator, say): a training step has all of
    # them.
    return tuple(sorted(min(by_name.values(), key=lambda starts: len(starts), default=())))


def _valleys(counts: list[int]) -> list[int]:
    """Return the lowest points between rises and falls of at least half the usual range."""
    if not counts:
        return []
    swing = max(_usual_range(counts) / 2, _FEWEST_BLOCKS)
    valleys: list[int] = []
    rising = False
    extreme, at = counts[0], 0
    for index, count in enumerate(counts):
        if rising:
            if count > extreme:
                extreme = count
            elif extreme - count >= swing:
                rising, extreme, at = False, count, index
        elif count <= extreme:
            extreme, at = count, index
        elif count - extreme >= swing:
            valleys.append(at)
            rising, extreme = True, count
    return valleys


def _usual_range(counts: Sequence[int]) -> int:
    """Return the number of blocks by which the counts usually rise and fall."""
    ordered = sorted(counts[:: 1 + len(counts) // _SAMPLES])
    cut = int(_UNUSUAL * len(ordered))
    cut_at = int(_UNUSUAL * len(counts))
    usual = counts[cut_at : len(counts) - cut_at]
    # If a program keeps ever more blocks, or ever fewer, most of the range is drift: its largest fall, or its largest
    # rise, is smaller.
    fall: int = max(map(sub, accumulate(usual, max), usual))
    rise: int = max(map(sub, usual, accumulate(usual, min)))
    return min(ordered[-1 - cut] - ordered[cut], fall, rise)


def _regular(valleys: list[int]) -> tuple[int, ...]:
    """Return the valleys at which steps begin; none if the intervals differ too much."""
    gaps = [right - left for left, right in pairwise(valleys)]
    if len(gaps) < _FEWEST - 1:
        return ()
    usual = median(gaps)
    regular = sum(1 for gap in gaps if usual / _REGULAR_FACTOR <= gap <= usual * _REGULAR_FACTOR)
    if regular < _REGULAR_SHARE * len(gaps):
        return ()
    # The first optimizer step creates the optimizer's state, a rise and fall apart: short ones in front are setup.
    first = next(place for place, gap in enumerate(gaps) if gap >= usual / _REGULAR_FACTOR)
    return tuple(valleys[first:])
