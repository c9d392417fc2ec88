"""Says in which phase of a training each memory block was allocated: forward, backward or optimizer.

The call stack tells. Without one, torch's annotations of optimizer steps do. Autograd's threads run no Python: in a
recording of Python's stacks alone, what they allocate has an empty stack, unlike all else.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from .call_stacks import is_engine
from .lifetimes import Lifetimes
from .model import ALLOC, DeviceTrace, Frame, Snapshot

FORWARD, BACKWARD, OPTIMIZER, OTHER, BEFORE, UNKNOWN = PHASES = (
    "forward",
    "backward",
    "optimizer",
    "other",
    "before the recording",
    "unknown",
)

# Each optimizer's step runs in a function of the base class, whoever wrote the optimizer.
_OPTIMIZER = re.compile(r"[/\\]torch[/\\]optim[/\\]")
_AUTOGRAD = re.compile(r"[/\\]torch[/\\]autograd[/\\](__init__|graph)\.py$")
_BACKWARD = ("backward", "grad", "_engine_run_backward")
_MODULE = re.compile(r"[/\\]torch[/\\]nn[/\\]modules[/\\]module\.py$")
_CALL = ("_call_impl", "_wrapped_call_impl")
_FUNCTIONAL = re.compile(r"[/\\]torch[/\\]nn[/\\]functional\.py$")


class Phases:
    """The phases in which a device's memory blocks were allocated."""

    def __init__(self, recording: Snapshot, trace: DeviceTrace, lifetimes: Lifetimes) -> None:
        self._frames = [_of_frame(frame) for frame in recording.frames]
        self._stacks = [self._of_stack(stack) for stack in recording.stacks]
        self._lifetimes = lifetimes
        self._times = trace.events.time_us
        self._optimizer = _optimizer_steps(trace, recording.annotations)
        recorded = any(
            stack
            for action, stack in zip(trace.events.action, trace.events.stack, strict=True)
            if action == ALLOC and stack
        )
        self._without_stack = BACKWARD if recorded else UNKNOWN

    def of(self, number: int) -> str:
        """Return the phase in which an allocation was made, one of ``PHASES``."""
        begin, stack = self._lifetimes.begin[number], self._lifetimes.stack[number]
        if stack:
            return self._stacks[stack]
        if begin < 0:
            return BEFORE
        time = self._times[begin]
        after = bisect_left(self._optimizer, (time + 1,)) - 1
        if after >= 0 and time <= self._optimizer[after][1]:
            return OPTIMIZER
        return self._without_stack

    def _of_stack(self, stack: Sequence[int]) -> str:
        found = [phase for number in stack if (phase := self._frames[number]) is not None]
        if not found:
            return OTHER
        # The innermost counts: an optimizer may run inside backward, and a closure's forward inside the optimizer. But
        # a forward inside backward is a checkpointed block that runs again.
        return BACKWARD if found[0] == FORWARD and BACKWARD in found else found[0]


def _of_frame(frame: Frame) -> str | None:
    if _OPTIMIZER.search(frame.filename):
        return OPTIMIZER
    if is_engine(frame) or (_AUTOGRAD.search(frame.filename) and frame.name in _BACKWARD):
        return BACKWARD
    called = _MODULE.search(frame.filename) and frame.name in _CALL
    return FORWARD if called or _FUNCTIONAL.search(frame.filename) else None


def _optimizer_steps(trace: DeviceTrace, annotations: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Return begin and end, in microseconds, of each annotated step of an optimizer, by begin."""
    if any(right < left for left, right in pairwise(trace.events.time_us)):
        return []
    begun: dict[str, int] = {}
    steps = []
    for entry in annotations:
        name, time, stage = entry.get("name"), entry.get("time_us"), entry.get("stage")
        if not isinstance(name, str) or not isinstance(time, int) or not name.startswith("Optimizer.step"):
            continue
        if entry.get("device") not in (None, -1, trace.index):
            continue
        if stage == "START":
            begun[name] = time
        elif stage == "END" and name in begun:
            steps.append((begun.pop(name), time))
    return sorted(steps)
