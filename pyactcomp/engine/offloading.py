"""Where the stored bytes of one configuration go: a tape and host memory for each device.

The library moves the bytes, ``csrc/engine/tape.hpp``; this module decides whether, how much, and over which link.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..config import share_of
from ..sizes import bytes_of
from ..torch_private import never_traced
from . import saved

UNBOUNDED = 2**62

links: dict[torch.device, Any] = {}
"""Links of this process by device. A test puts one of no device here, and so does the child process of an estimate."""

_alive: weakref.WeakSet[Offloading] = weakref.WeakSet()


@functools.cache
def reason_without_link(device: torch.device) -> str | None:
    """Return why nothing can leave a device, or None."""
    if device in links:
        return None
    if device.type != "cuda" or torch.version.cuda is None:
        return f"the device is {device}, and offload moves memory of NVIDIA GPUs alone"
    from .. import _core

    if not hasattr(_core, "CudaLink"):
        return "pyactcomp was built without cuda.h: set CUDA_HOME, or install nvidia-cuda-runtime, and install it again"
    if link_of(device).is_integrated:
        return f"{device} shares its memory with the host, so nothing is won by moving stored bytes"
    return None


def link_of(device: torch.device) -> Any:
    """Return the link of a device; the first call makes its two streams."""
    if device not in links:
        from .. import _core

        links[device] = _core.CudaLink(device.index)
    return links[device]


class Rates(NamedTuple):
    """Rates of a link, in bytes a second."""

    to_host: float
    to_device: float


@functools.cache
def rates_of(device: torch.device) -> Rates:
    """Return the measured rates of a device's link: four copies of 64 MiB each way, in about 20 ms."""
    return Rates(*link_of(device).measure(64 << 20, 4))


def room_on_host(device: torch.device) -> int:
    """Return how many bytes of host memory can be pinned for a device's stored bytes now."""
    most: int = saved.library().HostArena(link_of(device), UNBOUNDED).most
    return most


_PCI = Path("/sys/bus/pci/devices")


def is_remote(pci_address: str, devices: Path = _PCI) -> bool | None:
    """Return whether no CPU of this process is near the device at an address; None if the system does not tell.

    Copies then cross the link between the sockets, at a lower rate.
    """
    try:
        text = (devices / pci_address.lower() / "local_cpulist").read_text().strip()
    except OSError:
        return None
    near: set[int] = set()
    for span in filter(None, text.split(",")):
        first, _, last = span.partition("-")
        near.update(range(int(first), int(last or first) + 1))
    return near.isdisjoint(os.sched_getaffinity(0)) if near else None


class Sample(NamedTuple):
    """What lay where after a tensor was stored, or read by backward."""

    backward: bool
    device_bytes: int
    host_bytes: int
    allocated_bytes: int
    """All that the device's allocator gave out; 0 where nobody counts."""


_STALL_TOLERANCE = 0.01
"""Part of a pass that may be waited: a third of the 3 % that offload may cost, as forward and backward may both wait
and the share is not lowered again."""
_RATE_MARGIN = 0.97
"""Share of the rate that a pass has shown: what leaves is spread evenly over many tensors, not over each window. With
it, steps on half and on a quarter of the rate of an H200's link took at most 1.03 times those without offload."""
_STALLED_STEPS = 3
"""Steps in a row that must wait until the share is lowered again: two may be those around the writing of a checkpoint,
which takes the host's memory and the link for a while, and a share once lowered stays."""


@dataclasses.dataclass
class PassTimes:
    """Sums over the forwards, or the backwards, of one tape: seconds on the device, and of them in wait for copies."""

    seconds: float = 0.0
    waited: float = 0.0


class Waits:
    """How long the steps of one tape waited for copies, and the share that ``offload="auto"`` takes from that.

    The first step compiles and warms up. The second, which lets everything go, decides: if its forward or its backward
    waited, the link moved the bytes in the time that it took, and can move in the rest of that time only the same part
    of the bytes. From the third step on the share stays, and so does the memory of each step, unless three steps in a
    row wait.

    Attributes
    ----------
    forward, backward : PassTimes
        Of all that are over.
    """

    def __init__(self, tape: Any, adapts: bool) -> None:
        self._tape = tape
        self._adapts = adapts
        self._steps = 0
        self._worked = 1.0
        self._stalled: list[float] = []
        self.forward, self.backward = PassTimes(), PassTimes()

    def read_timings(self) -> None:
        """Read the times of the passes that are over.

        With ``"auto"`` the host waits once, as the third forward begins, for the end of the second backward: the device
        has the optimizer's step to do meanwhile.
        """
        read = 2 * self._steps
        finish = self._adapts and read < 4 <= read + self._tape.timings
        while (timing := self._tape.next_timing(finish)) is not None:
            backward, seconds, waited = timing
            sums = self.backward if backward else self.forward
            sums.seconds += seconds
            sums.waited += waited
            worked = (seconds - waited) / seconds if seconds > 0 else 1.0
            self._worked = min(worked, self._worked) if backward else worked
            if backward:
                self._steps += 1
                if self._adapts and self._steps > 1:
                    self._decide(self._worked)

    def _decide(self, worked: float) -> None:
        """Lower the share if the step stalled; ``worked`` is the part of the worse pass in which no stream waited."""
        self._stalled = [*self._stalled, worked] if worked < 1 - _STALL_TOLERANCE else []
        if self._stalled and (self._steps == 2 or len(self._stalled) == _STALLED_STEPS):
            self._tape.share *= _RATE_MARGIN * max(self._stalled)
            self._stalled = []


class Offloading:
    """What leaves the devices under one configuration.

    Attributes
    ----------
    number : int
        By which the compiled graphs of the model find it as they run; 0 without.
    """

    def __init__(self, offload: float | str, min_bytes: int, number: int = 0) -> None:
        self.number = number
        self.share = share_of(offload)
        self._adapts = offload == "auto"
        self.host_limit = bytes_of(offload)
        self._min_bytes = min_bytes
        self._tapes: dict[torch.device, Any] = {}
        self._arenas: dict[torch.device, Any] = {}
        self._waits: dict[torch.device, Waits] = {}
        _alive.add(self)

    def tape(self, device: torch.device) -> Any:
        """Return the tape of a device, None where nothing leaves."""
        if device not in self._tapes:
            if reason_without_link(device) is not None:
                return self._tapes.setdefault(device, None)
            native = saved.library()
            limit = UNBOUNDED if self.host_limit is None else self.host_limit
            arena = self._arenas[device] = native.HostArena(link_of(device), limit)
            tape = self._tapes[device] = native.Tape(arena, WINDOW, self.share, self._min_bytes)
            self._waits[device] = Waits(tape, self._adapts)
        return self._tapes[device]

    def read_timings(self) -> None:
        """Between steps: read how long those that are over have waited, and adapt the share."""
        for waits in self._waits.values():
            waits.read_timings()

    def statistics(self) -> dict[str, dict[str, float]]:
        """Return the counts of each device, by its name."""
        self.read_timings()
        found = {}
        for device, arena in self._arenas.items():
            host = {"pinned_bytes": arena.pinned, "host_bytes": arena.taken, "host_peak_bytes": arena.peak}
            waits = self._waits[device]
            times: dict[str, float] = {}
            for name, sums in (("forward", waits.forward), ("backward", waits.backward)):
                times |= {f"{name}_seconds": sums.seconds, f"{name}_waited_seconds": sums.waited}
            found[str(device)] = {**self._tapes[device].statistics(), **host, "pins": arena.pins, **times}
        return found

    def samples(self) -> dict[str, list[Sample]]:
        """Return what lay where during the last step, for each device."""
        return {str(device): [Sample(*each) for each in self._tapes[device].samples()] for device in self._arenas}

    def window_bytes(self) -> int:
        """Return how many stored bytes stay on the devices."""
        return int(sum(counts["window_bytes"] for counts in self.statistics().values()))

    def lines(self) -> list[str]:
        """Return a line for each device for the report."""
        found = []
        for device, counts in self.statistics().items():
            gone = counts["left_bytes"] / max(counts["packed_bytes"], 1)
            share = self._tapes[torch.device(device)].share
            names = ("window_bytes", "host_peak_bytes", "pinned_bytes", "held_bytes")
            window, host, pinned, held = (f"{counts[name] / 2**20:.0f} MiB" for name in names)
            forward, backward = (
                counts[f"{name}_waited_seconds"] / max(counts[f"{name}_seconds"], 1e-9)
                for name in ("forward", "backward")
            )
            found.append(
                f"Offload: {gone:.1%} of the bytes stored so far left {device}, {share:.0%} are to leave; window "
                f"{window}; on the host {host} at most, {pinned} pinned; sent but held elsewhere {held}; forwards "
                f"waited {forward:.1%} of their time, backwards {backward:.1%}; "
                f"{counts['late']:.0f} of {counts['brought']:.0f} came late."
            )
        return found

    def trim(self) -> int:
        """Give host memory without stored bytes back; return how many bytes."""
        return sum(arena.trim() for arena in self._arenas.values())


WINDOW = 0
"""Bytes to hold on a device; 0 takes one layer's, as the sizes of the last forward tell."""


def all_alive() -> list[Offloading]:
    """Return what this process has configured."""
    return list(_alive)


def pinned_bytes() -> int:
    """Return how many bytes of host memory are pinned for stored tensors, of all models and devices.

    Examples
    --------
    >>> import pyactcomp
    >>> pyactcomp.offload.pinned_bytes()
    0
    """
    return sum(arena.pinned for each in _alive for arena in each._arenas.values())


def serving(number: int) -> Offloading | None:
    """Return what serves the compiled graphs of a model, by their number; None once the model is decompressed."""
    return next((each for each in _alive if each.number == number), None)


@never_traced
def offloading_of(offload: bool | float | str, min_bytes: int, number: int = 0) -> Offloading | None:
    """Return what leaves under the value of the option, None if nothing does."""
    return Offloading(offload, min_bytes, number) if offload else None


def refuse_without_link(offload: bool | float | str, devices: Iterable[torch.device]) -> None:
    """Raise ValueError if stored bytes are to leave a device that they cannot leave."""
    for device in set(devices) if offload else ():
        reason = reason_without_link(device)
        if reason is not None and device.type != "meta":
            raise ValueError(f"offload={offload!r} cannot work: {reason}. Drop offload, or move the model first")
