"""The data of a search for settings: trials, progress and result."""

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
        A configuration for ``replay``.
    results
        One result per recorded device.
    smallest_capacity
        Bytes of a device's memory, a multiple of 2 MiB: enough on every device, while 2 MiB less is not. An allocator
        may need more in some larger memory, and less may work again. None: not found, because the search ended before
        or the recording asks for more than 512 GiB.
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
        """Peak of the reserved bytes, on the device with the highest."""
        return max(result.peak_reserved for result in self.results)

    @property
    def retries(self) -> int:
        """Times all unused memory was given back, on all devices."""
        return sum(result.retries for result in self.results)

    @property
    def driver_calls(self) -> int:
        """Calls into the driver, for all devices."""
        return sum(result.driver_calls for result in self.results)

    @property
    def driver_seconds(self) -> float:
        """Estimated host time in the driver since the first event, for all devices."""
        return sum(result.driver_seconds for result in self.results)

    @property
    def variable(self) -> str:
        """The environment variable for the setting; torch before 2.9 reads ``PYTORCH_CUDA_ALLOC_CONF``."""
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
        Whether any tried setting fits in the capacity. If none does, the trials are in unlimited memory, provided the
        search got that far.
    recorded
        The setting under which the snapshot was recorded.
    pytorch, pyactcomp
        The best setting of PyTorch's own allocator, and of this package's; None if the search ended before.
    best
        The better of the two. If nothing fits, the one of all three with the smallest capacity found; if none was
        found, nothing is known to work.
    seconds
        Seconds from the recording's first event to its last, of the device with the most; 0 if it has no times.
    replays
        Number of replays in the search.
    stopped
        Why the search ended: no more improvement, the time limit, or Ctrl-C.
    notes
        Anything unusual or unknown.
    """

    capacity: int
    fits: bool
    recorded: Trial
    pytorch: Trial | None
    pyactcomp: Trial | None
    best: Trial
    seconds: float
    replays: int
    stopped: Literal["finished", "time limit", "interrupted"]
    notes: tuple[str, ...]


class TuneProgress(NamedTuple):
    """Progress of a search."""

    replays: int
    seconds: float
    config: str  #: the configuration being tried
    best: Trial | None  #: so far
