"""The largest batch and the longest sequence that fit: by interpolation between runs, and a run of the answer."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from ..errors import PyactcompError
from .gpus import Gpu
from .result import ModeEstimate

Run = Callable[[int, "int | None"], ModeEstimate]
_At = Callable[[int], "tuple[int, ModeEstimate | None]"]

_ALLOCATOR = "pyactcomp"
_MOST_RUNS = 8


def largest_batch(one: ModeEstimate, run: Run, gpu: Gpu) -> ModeEstimate:
    """Return an estimate with the largest batch that fits at the same length; None if not even one sample does."""
    found = _largest(one.batch, one, lambda size: (size, run(size, one.seq)), gpu)
    return dataclasses.replace(one, largest_batch=found)


def longest_seq(one: ModeEstimate, run: Run, gpu: Gpu) -> ModeEstimate:
    """Return an estimate with the longest sequence that fits at the same batch, as far as the model has positions."""
    assert one.seq is not None
    positions: int | None = None

    def at(length: int) -> tuple[int, ModeEstimate | None]:
        nonlocal positions
        try:
            return length, run(one.batch, length)
        except PyactcompError as error:
            told = re.search(r"the model has (\d+) positions", str(error))
            if told is None:
                raise
            positions = int(told[1])
            return positions + 1, None

    found = _largest(one.seq, one, at, gpu)
    notes = one.notes
    if found is not None and found == positions:
        notes += ("the model's positions limit the longest sequence, not the memory",)
    return dataclasses.replace(one, longest_seq=found, notes=notes)


def _largest(start: int, one: ModeEstimate, at: _At, gpu: Gpu) -> int | None:
    """Return the largest size that was run and fits; the next one does not fit, by a run or by the line.

    ``at`` runs a size and returns it; or the first size that the model does not take, and None. A line through two runs
    tells the next size to run.
    """
    room = gpu.memory - gpu.context
    fits: int | None = None
    over: int | None = None
    known: dict[int, int] = {}

    def note(size: int, found: ModeEstimate | None) -> None:
        nonlocal fits, over
        if found is not None and found.fits[_ALLOCATOR]:
            fits = size if fits is None else max(fits, size)
        else:
            over = size if over is None else min(over, size)
        if found is not None:
            known[size] = found.peak_reserved[_ALLOCATOR]

    note(start, one)
    for _ in range(_MOST_RUNS):
        if over == 1 or (fits is not None and over == fits + 1):
            break
        low, high = fits or 0, over
        if len(known) < 2:
            guess = 2 * start if fits else max(start // 2, 1)
        else:
            (a, x), (b, y) = sorted(known.items())[-2:] if high is None else _around(known, room)
            guess = a + (room - x) * (b - a) // (y - x) if y > x else 2 * max(known)
            if fits is not None and fits == max(known) and guess <= fits:
                break  # the line through two runs, of which this is one, leaves no room for more
        guess = max(guess, low + 1)
        if high is not None:
            guess = min(guess, high - 1)
        note(*at(guess))
    return fits


def _around(known: dict[int, int], room: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the two runs whose memory is closest to the room, by size."""
    first, second = sorted(sorted(known.items(), key=lambda each: abs(each[1] - room))[:2])
    return first, second
