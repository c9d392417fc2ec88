"""Memory blocks with something in common: call stack, size, pool, stream, the program's text, phase of the training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from .call_stacks import described, fold_stacks, shortened
from .explanation import Group
from .lifetimes import Lifetimes
from .model import Frame, Snapshot


class Stacks:
    """A recording's call stacks as the user's own lines, in text."""

    def __init__(self, recording: Snapshot) -> None:
        self.folded = fold_stacks(recording)
        self._lines = [tuple(map(described, frames)) for frames in self.folded]

    def label(self, stack: int) -> str:
        """Return a stack in a line, innermost first."""
        return stack_label(self.folded[stack])

    def lines(self, stack: int) -> tuple[str, ...]:
        """Return a stack's lines with whole paths, innermost first."""
        return self._lines[stack]


def stack_label(frames: Sequence[Frame]) -> str:
    """Return a folded call stack in a line, innermost first."""
    return " < ".join(map(shortened, frames)) or "no call stack"


def stream_label(stream: int) -> str:
    """Return a stream's name: recordings have the address of its handle, 0 for the default stream."""
    return f"stream {stream:#x}" if stream > 0xFFFF else f"stream {stream}"


def size_class(size: int) -> tuple[int, str]:
    """Return the largest power of two up to a size, as a sort key, and the range in words."""
    power = max(size, 1).bit_length() - 1
    return power, f"{_binary(power)} to {_binary(power + 1)}"


def _binary(power: int) -> str:
    unit = min(power // 10, 4)
    return f"{1 << (power - 10 * unit)} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def by_stack(lifetimes: Lifetimes, live: Iterable[int], stacks: Stacks) -> tuple[Group, ...]:
    """Return blocks by call stack, most bytes first."""
    found: dict[tuple[str, ...], Group] = {}
    for number in live:
        calls = lifetimes.stack[number]
        lines = stacks.lines(calls)
        group = found.get(lines) or Group(stacks.label(calls), 0, 0, lines)
        found[lines] = replace(group, blocks=group.blocks + 1, bytes=group.bytes + lifetimes.size[number])
    return tuple(sorted(found.values(), key=lambda group: -group.bytes))


def grouped(lifetimes: Lifetimes, live: Iterable[int], key: Callable[[int], tuple[int, str]]) -> tuple[Group, ...]:
    """Return blocks by a sort key and a label, in the order of the keys."""
    found: dict[tuple[int, str], list[int]] = {}
    for number in live:
        found.setdefault(key(number), []).append(lifetimes.size[number])
    return tuple(Group(label, len(sizes), sum(sizes)) for (_, label), sizes in sorted(found.items()))
