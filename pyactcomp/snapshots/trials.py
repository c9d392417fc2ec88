"""The plain data of a search for settings: its trials, its progress and its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from .replay import ReplayResult


@dataclass(frozen=True)
class Trial:
    """The outcome of a recording under one setting.

    Attributes
    ----------
    config
        As ``replay`` takes it.
    results
        Of each device recorded.
    smallest_capacity
        Bytes of a device's memory, a multiple of 2 MiB: with them no device ran out of memory, with 2 MiB less one did.
        An allocator may need more in some larger memory, and less may work again. None: not found, because the search
        ended before or the recording asks for more than 512 GiB.
    """

    config: str
    results: tuple[ReplayResult, ...]
    smallest_capacity: int | None = None

    @property
    def fits(self) -> bool:
        """Whether no device ran out of memory."""
        return all(result.oom_at is None for result in self.results)

    @property
    def peak_reserved(self) -> int:
        """Bytes, of the device that reserved most."""
        return max(result.peak_reserved for result in self.results)

    @property
    def retries(self) -> int:
        """Times that all unused memory was given back, on all devices."""
        return sum(result.retries for result in self.results)

    @property
    def driver_calls(self) -> int:
        """Calls into the driver, for all devices."""
        return sum(result.driver_calls for result in self.results)

    @property
    def driver_seconds(self) -> float:
        """Estimated host time in the driver, for all devices."""
        return sum(result.driver_seconds for result in self.results)

    @property
    def variable(self) -> str:
        """The environment variable that takes the setting; torch before 2.9 reads ``PYTORCH_CUDA_ALLOC_CONF``."""
        return "PYACTCOMP_ALLOC_CONF" if self.config.startswith("pyactcomp") else "PYTORCH_ALLOC_CONF"

    @property
    def conf(self) -> str:
        """The variable's value; empty for the default."""
        family, _, settings = self.config.partition("[")
        settings = settings[:-1]
        return ",".join(filter(None, ["expandable_segments:True" if family == "expandable" else "", settings]))


@dataclass(frozen=True)
class TuneResult:
    """The best settings found.

    Attributes
    ----------
    capacity
        Bytes of a device's memory.
    fits
        Whether any setting tried fits in it. Where none does, the trials are those in memory without end, if the search
        got that far.
    recorded
        The setting that the snapshot was recorded under.
    pytorch, pyactcomp
        The best setting of PyTorch's own allocator, and of this package's; None where the search ended before.
    best
        The one of both to take. Where nothing fits, the one of all three with the smallest capacity found; if none was
        found, nothing is known to work.
    replays
        How many replays the search took.
    stopped
        Why it ended: nothing improved any more, the time limit, or Ctrl-C.
    notes
        Anything unusual or unknown.
    """

    capacity: int
    fits: bool
    recorded: Trial
    pytorch: Trial | None
    pyactcomp: Trial | None
    best: Trial
    replays: int
    stopped: Literal["finished", "time limit", "interrupted"]
    notes: tuple[str, ...]


class TuneProgress(NamedTuple):
    """How far a search is."""

    replays: int
    seconds: float
    config: str  #: that is being tried
    best: Trial | None  #: so far
