"""What a watch notes: of each step, and of moments in between."""

from __future__ import annotations

from dataclasses import dataclass

from .breakdown import Memory


@dataclass(frozen=True)
class Step:
    """One step of a training; bytes.

    Attributes
    ----------
    step : int
        From 1.
    seconds : float
        From the beginning of the watch to the end of the step.
    allocated, reserved : int or None
        At the end of the step; None on the CPU, as the next two.
    peak_allocated, peak_reserved : int or None
        The exact peaks of the step, by the allocator's counters.
    retries : int or None
        How often the allocator ran out during the step, gave back unused memory and tried again.
    resident : int or None
        Host memory of the process, at the end of the step.
    memory : Memory or None
        The breakdown: right after ``optimizer.step()`` if the watch knows the optimizer, else at the end of the step.
        None in steps without.
    """

    step: int
    seconds: float
    allocated: int | None
    reserved: int | None
    peak_allocated: int | None
    peak_reserved: int | None
    retries: int | None
    resident: int | None
    memory: Memory | None


@dataclass(frozen=True)
class Sample:
    """What counters do not keep, sampled by the thread: bytes at a moment, ``others`` those of other processes."""

    seconds: float
    allocated: int | None
    reserved: int | None
    others: int | None
    resident: int | None
