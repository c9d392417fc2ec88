"""Finds call stacks whose memory grows from step to step: a program that keeps something of each.

Memory is lowest where a step begins, whatever the batch's shapes. So the least that a call stack
holds within a quarter of the steps is what it keeps: nothing for activations, the same in all quarters for weights,
more in each quarter for a list of losses.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from itertools import pairwise

from .explanation import Growth
from .groups import Stacks
from .lifetimes import Lifetimes
from .steps import Steps, turns

_QUARTERS = 4


def find_growth(lifetimes: Lifetimes, steps: Steps, stacks: Stacks) -> tuple[Growth, ...] | None:
    """Return the call stacks that keep more in each quarter of a recording than in the quarter before.

    Parameters
    ----------
    lifetimes : Lifetimes
    steps : Steps
    stacks : Stacks

    Returns
    -------
    tuple of Growth or None
        Most growth first; None if the recording has fewer than four steps, regular or not.
    """
    starts = turns(lifetimes, steps)
    if len(starts) < _QUARTERS:
        return None
    # From the state in which a step begins, that is after the event before.
    cuts = [starts[len(starts) * quarter // _QUARTERS] - 1 for quarter in range(_QUARTERS)]
    ended = lifetimes.events - 1
    kept: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for number in lifetimes.alive_after(ended):
        if lifetimes.begin[number] > cuts[0]:
            kept[stacks.lines(lifetimes.stack[number])].append(number)
    # Only of these can the memory have grown.
    changes: dict[tuple[str, ...], dict[int, int]] = {lines: defaultdict(int) for lines in kept}
    for number, (begin, end) in enumerate(zip(lifetimes.begin, lifetimes.end, strict=True)):
        of_stack = changes.get(stacks.lines(lifetimes.stack[number]))
        if of_stack is not None:
            of_stack[begin] += lifetimes.size[number]
            of_stack[end] -= lifetimes.size[number]
    found = []
    for lines, numbers in kept.items():
        least = _least(changes[lines], cuts, ended)
        if any(right <= left for left, right in pairwise(least)):
            continue
        first = [number for number in numbers if lifetimes.begin[number] <= cuts[1]]
        found.append(
            Growth(
                label=stacks.label(lifetimes.stack[numbers[0]]),
                stack=lines,
                blocks=len(numbers),
                bytes=sum(lifetimes.size[number] for number in numbers),
                first_blocks=len(first),
                first_bytes=sum(lifetimes.size[number] for number in first),
                quarters=least,
            )
        )
    return tuple(sorted(found, key=lambda growth: (growth.quarters[0] - growth.quarters[-1], growth.label)))


def _least(changes: dict[int, int], cuts: list[int], ended: int) -> tuple[int, ...]:
    """Return the least bytes alive in each quarter; ``changes`` has the difference at each event."""
    least: list[int | None] = [None] * len(cuts)
    alive, since = 0, -1
    for event in [*sorted(changes), ended + 1]:
        # The bytes alive from `since` to before this event.
        first = max(bisect_right(cuts, since) - 1, 0)
        last = bisect_right(cuts, event - 1) - 1
        if since < event:
            for quarter in range(first, last + 1):
                before = least[quarter]
                least[quarter] = alive if before is None else min(before, alive)
        if event <= ended:
            alive += changes[event]
            since = event
    return tuple(value or 0 for value in least)
