"""The settings a search tries: the keys of each allocator, and their values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .._core import AllocatorConfig
from .model import ALLOC, Settings, Snapshot
from .replay import parse_configuration

FAMILIES = ("native", "expandable", "pyactcomp")

#: The searched keys. PyTorch has large_segment_size_mb too, but refuses this key before 2.11.
AXES = {
    "native": (
        "max_split_size_mb",
        "max_non_split_rounding_mb",
        "roundup_power2_divisions",
        "garbage_collection_threshold",
    ),
    "expandable": ("max_split_size_mb", "max_non_split_rounding_mb", "roundup_power2_divisions"),
    "pyactcomp": (
        "growth",
        "large_segment_size_mb",
        "max_split_size_mb",
        "max_non_split_rounding_mb",
        "roundup_power2_divisions",
        "garbage_collection_threshold",
    ),
}

_SETTINGS = AllocatorConfig.settings()
_ORDER = tuple(key for row in _SETTINGS.values() for key in row["keys"])
# A snapshot has fields for these; the other settings are in the allocator's text of settings, or nowhere.
_IN_SNAPSHOT = {"max_split_size", "roundup_power2_divisions", "garbage_collection_threshold"}
_NOT_OF_EXPANDABLE = {key for row in _SETTINGS.values() if "expandable" not in row["families"] for key in row["keys"]}

_MIB = 1 << 20
# PyTorch wants max_split_size_mb above the segment size of 20 MiB.
_LEAST_SPLIT = 21
_POWERS = tuple(1 << power for power in range(5, 16))
# Points of the coarse grid from the recorded sizes: some values work only between two powers of two.
_OF_SIZES = 8
# PyTorch collects garbage only under a limit below the whole memory.
_LIMITED = {"per_process_memory_fraction": "0.99"}

Move = Mapping[str, str | None]
"""Settings to change; None removes a setting."""


@dataclass(frozen=True)
class Candidate:
    """An allocator and its settings, ordered by ``make``."""

    family: str
    settings: tuple[tuple[str, str], ...] = ()

    @classmethod
    def make(cls, family: str, settings: Mapping[str, str]) -> Candidate:
        """Return a candidate with ordered settings, so that equal candidates compare equal."""
        return cls(family, tuple((key, settings[key]) for key in _ORDER if key in settings))

    @property
    def config(self) -> str:
        """The configuration, for ``replay``."""
        listed = ",".join(f"{key}:{value}" for key, value in self.settings)
        return f"{self.family}[{listed}]" if listed else self.family

    @property
    def keys(self) -> int:
        """The number of settings a user has to give."""
        return len(self.settings) + (self.family == "expandable")

    def get(self, key: str) -> str:
        """Return a setting's value, or an empty text."""
        return dict(self.settings).get(key, "")

    def moved(self, move: Move) -> Candidate | None:
        """Return the candidate with changed settings; None if they exclude each other."""
        kept = {key: value for key, value in self.settings if f"{key}_mb" not in move}
        changed = {**kept, **move}
        candidate = Candidate.make(self.family, {key: value for key, value in changed.items() if value is not None})
        try:
            parse_configuration(candidate.config)
        except ValueError:
            return None
        return candidate


def recorded_candidate(settings: Settings) -> tuple[Candidate, tuple[str, ...]]:
    """Return the settings a snapshot was recorded under, and notes if they cannot be replayed or have no effect."""
    given = {}
    for key in (key for name, row in _SETTINGS.items() if name not in _IN_SNAPSHOT for key in row["keys"]):
        # The family stands for expandable_segments.
        if key != "expandable_segments" and (match := re.search(rf"(?:^|,)\s*{key}\s*:\s*([^,]+)", settings.conf)):
            given["per_process_memory_fraction" if key == "memory_fraction" else key] = match[1].strip()
    if settings.max_split_size is not None:
        whole, rest = divmod(settings.max_split_size, _MIB)
        given["max_split_size" if rest else "max_split_size_mb"] = str(settings.max_split_size if rest else whole)
    if settings.roundup_power2_divisions:
        divisions = [settings.roundup_power2_divisions.get(1 << interval, 1) for interval in range(16)]
        listed = ",".join(f"{1 << interval}:{count}" for interval, count in enumerate(divisions))
        given["roundup_power2_divisions"] = str(divisions[0]) if len({*divisions}) == 1 else f"[{listed}]"
    if settings.garbage_collection_threshold:
        given["garbage_collection_threshold"] = str(settings.garbage_collection_threshold)
    family = "expandable" if settings.expandable_segments else "native"
    if settings.of_pyactcomp:
        family = "pyactcomp"
    elif family == "expandable":
        given = {key: value for key, value in given.items() if key not in _NOT_OF_EXPANDABLE}
    candidate = Candidate.make(family, given)
    try:
        parse_configuration(candidate.config)
    except ValueError as error:
        return Candidate(family), (f"recorded under '{candidate.config}', taken as {family}: {error}",)
    if family == "native" and settings.garbage_collection_threshold and not settings.collects_garbage:
        note = (
            "the recorded garbage_collection_threshold is replayed without effect: PyTorch collects only under a "
            "memory fraction, and a fraction that the program set itself is not in the file"
        )
        return candidate, (note,)
    return candidate, ()


def distinct_sizes(snapshot: Snapshot) -> list[int]:
    """Return the sizes requested, rounded up to MiB, in order."""
    sizes = {block.requested for trace in snapshot.devices for block in trace.beginning.blocks}
    for trace in snapshot.devices:
        events = trace.events
        sizes |= {size for action, size in zip(events.action, events.size, strict=True) if action == ALLOC}
    return sorted({-(-size // _MIB) for size in sizes})


def coarse_moves(axis: str, candidate: Candidate, retries: int, sizes: Sequence[int]) -> Iterator[Move]:
    """Yield an axis's values on a coarse grid, without values too large to matter for these sizes."""
    largest = sizes[-1] if sizes else 0
    yield {axis: None, **(dict.fromkeys(_LIMITED) if axis == "garbage_collection_threshold" else {})}
    if axis == "growth":
        yield {axis: "malloc"}
    elif axis == "max_split_size_mb":
        points = split_sizes(sizes)
        spread = points[:: max(1, len(points) // _OF_SIZES)]
        yield from ({axis: str(size)} for size in sorted({*spread, *_POWERS}) if size <= largest)
    elif axis == "max_non_split_rounding_mb" and candidate.get("max_split_size_mb"):
        yield from ({axis: str(size)} for size in _POWERS if size <= largest)
    elif axis == "large_segment_size_mb":
        yield from ({axis: str(size)} for size in _POWERS[:5])
    elif axis == "roundup_power2_divisions":
        yield from ({axis: str(divisions)} for divisions in (2, 4, 8, 16, 32))
        # Divisions only above a power of two, or only below.
        divisions = candidate.get(axis)
        for power in range(sizes[-1].bit_length() if sizes and divisions.isdigit() else 0):
            yield {axis: f"[{1 << power}:1,>:{divisions}]"}
            yield {axis: f"[{1 << power}:{divisions},>:1]"}
    elif axis == "garbage_collection_threshold" and retries:
        yield from ({axis: share, **_LIMITED} for share in ("0.9", "0.8", "0.7", "0.6"))


def split_sizes(sizes: Sequence[int]) -> list[int]:
    """Return the values of max_split_size_mb at which the outcome changes: each size, and 1 MiB more."""
    return sorted({size + more for size in sizes for more in (0, 1) if size + more >= _LEAST_SPLIT})
