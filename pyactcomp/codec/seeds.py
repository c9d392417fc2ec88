"""Seeds of stochastic rounding: each tensor of a step has its own, from run to run the same."""

from __future__ import annotations

import itertools
import threading
from typing import Any
from weakref import WeakValueDictionary

# Odd, so that multiples of it repeat only after 2**64; SplitMix64's, after the golden ratio.
_STEP = 0x9E3779B97F4A7C15
_SEEDS = 2**64
# Seeds of one sequence, and sequences apart: together half of all seeds, of which the other half is for second tensors.
_LONGEST, _SEQUENCES = 2**40, 2**23


class Seeds:
    """A sequence of seeds, for all that one configuration rounds: no seed comes twice.

    Sequences that begin with the same seed are apart while they are alive, so that the tensors of two models are not
    rounded by the same random numbers. One that is made when no other of its seed is alive is the first again. Copies
    and pickles are sequences of their own. Threads may draw from one sequence.

    Parameters
    ----------
    seed : int
    place : int, optional
        Which of the sequences of a seed; by default the first that is free.

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
        # An iterator's next is one step of the interpreter, which no other thread comes between.
        self._numbers = itertools.count(place % _SEQUENCES * _LONGEST + 1)

    def __reduce__(self) -> tuple[Any, ...]:
        return Seeds, (self.seed,)

    def next(self) -> int:
        """Return the next seed, of 64 bits."""
        return (self.seed + next(self._numbers) * _STEP) % _SEEDS


def second_of(seed: int) -> int:
    """Return the seed of the second tensor that a call rounds: half of all seeds further on."""
    return (seed + _SEEDS // 2) % _SEEDS


_lock = threading.Lock()
_alive: dict[int, WeakValueDictionary[int, Seeds]] = {}

calls = Seeds(0, _SEQUENCES - 1)
"""For calls that are given no seed."""
