"""Seeds of stochastic rounding: a different seed for each tensor of a step, the same in every run."""

from __future__ import annotations

import itertools
import threading
from typing import Any
from weakref import WeakValueDictionary

# SplitMix64's increment, from the golden ratio. Odd: multiples repeat only after 2**64.
_STEP = 0x9E3779B97F4A7C15
_SEEDS = 2**64
# Seeds of one sequence, and number of sequences: half of all seeds. The other half is for second tensors.
_LONGEST, _SEQUENCES = 2**40, 2**23


class Seeds:
    """A sequence of distinct seeds, for all tensors rounded under one configuration.

    Live sequences with the same ``seed`` do not overlap, so two models do not share random numbers. Without another
    live sequence of the same ``seed``, a new sequence starts from the first place again. Copies and pickles become new
    sequences. Threads may share a sequence.

    Parameters
    ----------
    seed : int
    place : int, optional
        Index among the sequences of ``seed``; by default the first free one.

    Examples
    --------
    >>> seeds = Seeds(7)
    >>> first, second = seeds.next(), seeds.next()
    >>> other = Seeds(7).next()  # while the first sequence is alive
    >>> len({first, second, other, second_of(first)})
    4
    >>> del seeds
    >>> Seeds(7).next() == first
    True
    """

    def __init__(self, seed: int, place: int | None = None) -> None:
        self.seed = seed
        with _lock:
            alive = _alive.setdefault(seed, WeakValueDictionary())
            if place is None:
                place = next(each for each in itertools.count() if each not in alive)
            alive[place] = self
        # next() on an iterator is one step of the interpreter, hence atomic.
        self._numbers = itertools.count(place % _SEQUENCES * _LONGEST + 1)

    def __reduce__(self) -> tuple[Any, ...]:
        return Seeds, (self.seed,)

    def next(self) -> int:
        """Return the next seed, of 64 bits."""
        return (self.seed + next(self._numbers) * _STEP) % _SEEDS


def second_of(seed: int) -> int:
    """Return the seed for the second tensor of one call: ``seed`` plus half of the range."""
    return (seed + _SEEDS // 2) % _SEEDS


_lock = threading.Lock()
_alive: dict[int, WeakValueDictionary[int, Seeds]] = {}

calls = Seeds(0, _SEQUENCES - 1)
"""Sequence for calls without a seed."""
