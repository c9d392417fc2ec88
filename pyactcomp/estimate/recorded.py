"""From the events of a child process to an estimate: peaks, their tensors, and the replays of allocators."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from typing import Any

from .._core import Replay
from ..snapshots.replay import parse_configuration
from .gpus import Gpu
from .result import ALLOCATORS, ModeEstimate, Recorded

_LAST = 2  # the steady step's number
# More than a training takes: one of 671 billion parameters in float32 takes 10 TiB, and a replay that runs out stops.
_BOUNDLESS = 1 << 48
_POINTS = 1 << 20  # of the curve: each event has one, unless three steps have more than a million
_DRAWN = 400
_WORKSPACE = -2  # the label of csrc/phantom/operators.hpp
_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.|$)")
_EVENTS_AT_ONCE = 1 << 20


def estimated(recorded: Recorded, mode: str, gpu: Gpu) -> ModeEstimate:
    """Return the estimate of a mode."""
    parts, marks = recorded.parts, recorded.marks
    columns = _Columns(recorded)
    at = columns.peak_at(marks[f"step{_LAST - 1}"], marks[f"step{_LAST}"])
    reserved: dict[str, int] = {}
    fits: dict[str, bool] = {}
    first = peak = 0
    curve: tuple[tuple[int, int], ...] = ()
    for allocator in ALLOCATORS:
        wanted = min(len(columns.action), _POINTS) if allocator == "native" else 0
        result, points = columns.replay(allocator, _BOUNDLESS, wanted)
        reserved[allocator] = result["peak_reserved"]
        if points:
            first = max(each[0] for each in _within(points, marks["built"], marks["step0"]))
            last = _within(points, marks[f"step{_LAST - 1}"], marks[f"step{_LAST}"])
            peak = max(each[0] for each in last)
            group = -(-len(last) // _DRAWN)
            curve = tuple(
                (max(each[0] for each in last[i : i + group]), max(each[1] for each in last[i : i + group]))
                for i in range(0, len(last), group)
            )
        room = gpu.memory - gpu.context
        # An allocator that runs out gives cached memory back and tries again: the replay does too.
        fits[allocator] = room > peak and (
            reserved[allocator] <= room or columns.replay(allocator, room)[0]["oom_at"] is None
        )
    return ModeEstimate(
        mode=mode,
        batch=recorded.batch,
        seq=recorded.seq,
        weights=parts["weights"],
        gradients=parts["gradients"],
        optimizer=parts["optimizer"],
        inputs=parts["inputs"],
        activations=parts[f"forward{_LAST}"]
        - parts[f"zeroed{_LAST}"]
        - columns.workspaces(f"forward{_LAST}")
        + columns.workspaces(f"zeroed{_LAST}"),
        workspaces=columns.workspaces(f"step{_LAST}"),
        context=gpu.context,
        peak_allocated=peak,
        first_step=first,
        peak_reserved=reserved,
        fits=fits,
        at_peak=columns.alive(at, peak),
        curve=curve,
        notes=recorded.notes,
        pinned=parts["pinned"],
    )


def _within(points: list[tuple[int, int, int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """Return allocated and reserved bytes of the points of a timeline that have events between two."""
    found, before = [], 0
    for until, allocated, _, reserved in points:
        if until > begin and before < end:
            found.append((allocated, reserved))
        before = until
    return found


class _Columns:
    """The events as columns."""

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded
        self.action, self.address, self.size, self.label = array("B"), array("q"), array("q"), array("i")
        for column, content in zip((self.action, self.address, self.size, self.label), recorded.columns, strict=True):
            column.frombytes(content)

    def _rounded(self, index: int) -> int:
        return -(-self.size[index] // 512) * 512

    def peak_at(self, begin: int, end: int) -> int:
        """Return the index after the event, between two, that takes most bytes."""
        live = most = at = 0
        for index in range(end):
            if self.action[index] == 0:
                live += self._rounded(index)
            elif self.action[index] == 2:
                live -= self._rounded(index)
            if index >= begin - 1 and live > most:
                most, at = live, index + 1
        return at

    def workspaces(self, mark: str) -> int:
        """Return the bytes of workspaces taken before a mark."""
        end = self._recorded.marks[mark]
        return sum(self._rounded(index) for index in range(end) if self.label[index] == _WORKSPACE)

    def alive(self, end: int, peak: int) -> tuple[tuple[str, int], ...]:
        """Return the bytes alive before an event, by module or phase; repeated blocks are one.

        PyTorch's allocator counts a block as it cuts it: an end too short to be split off belongs to the block. These
        ends are the rest of ``peak``.
        """
        alive: dict[int, tuple[str, int]] = {}
        gradients = set(self._recorded.gradients)
        for index in range(end):
            if self.action[index] == 0:
                alive[self.address[index]] = (self._name(index, gradients), self._rounded(index))
            elif self.action[index] == 2:
                del alive[self.address[index]]
        total: Counter[str] = Counter()
        for name, size in alive.values():
            total[name] += size
        ends = peak - sum(total.values())
        if ends > 0:
            total["ends of blocks"] = ends
        return tuple(total.most_common())

    def _name(self, index: int, gradients: set[int]) -> str:
        label = self.label[index]
        if label == _WORKSPACE:
            return "cuBLAS workspaces"
        if self.address[index] in gradients:
            return "gradients"
        return _NUMBERS.sub("*", self._recorded.labels[max(label, 0)])

    def replay(self, allocator: str, capacity: int, points: int = 0) -> tuple[dict[str, Any], list[Any]]:
        """Run the events through an allocator; return its result and points of the curve."""
        settings, expandable = parse_configuration(allocator)
        count = len(self.action)
        native = Replay(
            action=self.action,
            address=self.address,
            size=self.size,
            stream=array("q", bytes(8 * count)),
            pool=array("i", bytes(4 * count)),
            pools=((0, 0),),
            emptied=array("Q"),
            segments=[],
            blocks=[],
            config=settings,
            expandable=expandable,
            capacity=capacity,
            points=points,
            paused=None,
        )
        while native.advance(_EVENTS_AT_ONCE):
            pass
        return native.result(), list(native.timeline()) if points else []
