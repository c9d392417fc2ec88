"""A chain of blocks with choices under a budget, solved exactly.

The peak is modelled at every block, not as one sum: what early blocks store is gone by the time that backward reaches
later ones, and the last block needs its temporaries on top of what all blocks store. So the constraints are prefixes::

    forward of block i     base + stored[1..i-1] + forward[i]   <= budget
    backward of block i    base + stored[1..i]   + backward[i]  <= budget
    outside the blocks     fixed                                <= budget
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Choice(NamedTuple):
    """One way to run a block.

    Attributes
    ----------
    name : str
    seconds : float
        Of the block's forward and backward.
    stored : int
        Bytes that the block holds from its forward to its backward.
    forward, backward : int
        The most bytes that its forward takes beside what the blocks before store, and its backward beside what these
        and the block itself store. Gradients of later blocks belong to ``backward``.
    """

    name: str
    seconds: float
    stored: int
    forward: int
    backward: int


@dataclass(frozen=True)
class Chain:
    """Blocks in the order of the forward, each with its choices.

    Attributes
    ----------
    base : int
        Bytes before the first block: weights, the optimizer's state, the batch, what the model stores until then.
    blocks : tuple of tuple of Choice
    fixed : int
        The peak of all that runs outside of the blocks, such as the optimizer's step.
    seconds : float
        Time beside the blocks that other chains do not take.
    change : float
        Seconds that a change of the choice between neighbours counts, so that equal plans are told apart by their runs.
    """

    base: int
    blocks: tuple[tuple[Choice, ...], ...]
    fixed: int = 0
    seconds: float = 0.0
    change: float = 0.0

    def peak(self, picks: Sequence[int]) -> int:
        """Return the peak, in bytes, of the choices with these indices."""
        stored, peak = self.base, self.fixed
        for block, pick in zip(self.blocks, picks, strict=True):
            choice = block[pick]
            peak = max(peak, stored + choice.forward)
            stored += choice.stored
            peak = max(peak, stored + choice.backward)
        return peak

    def cost(self, picks: Sequence[int]) -> float:
        """Return the seconds of the choices with these indices, and of their changes."""
        chosen = [block[pick] for block, pick in zip(self.blocks, picks, strict=True)]
        changes = sum(a.name != b.name for a, b in itertools.pairwise(chosen))
        return self.seconds + sum(choice.seconds for choice in chosen) + self.change * changes

    def smallest(self) -> int:
        """Return the smallest budget for which there is a plan, in bytes."""
        low, high = 0, self.peak([0] * len(self.blocks))
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(middle) else (middle + 1, high)
        return low

    def _fits(self, budget: int) -> bool:
        """Return whether there is a plan: the one that stores least up to each block leaves most room for the rest."""
        stored = self.base
        for block in self.blocks:
            allowed = [choice.stored for choice in block if _allows(choice, stored, budget)]
            if not allowed:
                return False
            stored += min(allowed)
        return self.fixed <= budget


def _allows(choice: Choice, stored: int, budget: int) -> bool:
    return stored + choice.forward <= budget and stored + choice.stored + choice.backward <= budget


class _Label(NamedTuple):
    """The choices of the blocks so far, as what they store, what they cost, and the last of them."""

    stored: int
    cost: float
    pick: int
    name: str
    before: _Label | None


def solve(chain: Chain, budget: int) -> list[int] | None:
    """Return the indices of the choices that cost least and whose peak is within the budget; None if there are none.

    A dynamic program over the blocks. Of all beginnings only those stay that no other one beats in both bytes and
    seconds: what follows depends on the bytes alone, and on the last choice by the cost of a change. Equal blocks give
    equal sums, so few beginnings stay.
    """
    if chain.fixed > budget:
        return None
    labels: list[_Label] = [_Label(chain.base, chain.seconds, -1, "", None)]
    for block in chain.blocks:
        grown = [
            _Label(
                label.stored + choice.stored,
                label.cost + choice.seconds + (chain.change if label.name not in ("", choice.name) else 0.0),
                pick,
                choice.name,
                label,
            )
            for pick, choice in enumerate(block)
            for label in labels
            if _allows(choice, label.stored, budget)
        ]
        labels = _unbeaten(grown, chain.change)
    if not labels:
        return None
    last: _Label | None = min(labels, key=lambda label: label.cost)
    picks: list[int] = []
    while last is not None and last.before is not None:
        picks.append(last.pick)
        last = last.before
    return picks[::-1]


def _unbeaten(labels: list[_Label], change: float) -> list[_Label]:
    """Return the labels that no other one beats: with fewer bytes, and cheaper even if it has to change the choice."""
    kept: list[_Label] = []
    cheapest = float("inf")
    of_name: dict[str, float] = {}
    for label in sorted(labels, key=lambda label: (label.stored, label.cost)):
        if label.cost < of_name.get(label.name, float("inf")) and label.cost < cheapest + change:
            kept.append(label)
            of_name[label.name] = label.cost
            cheapest = min(cheapest, label.cost)
    return kept
