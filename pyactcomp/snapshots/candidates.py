"""The settings that a search tries: which keys each allocator has, and their values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .._core import AllocatorConfig
from .model import ALLOC, Settings, Snapshot
from .replay import parse_configuration

FAMILIES = ("native", "expandable", "pyactcomp")

#: The keys that are searched. PyTorch has large_segment_size_mb too, but refuses it before 2.11.
AXES = {
    "native": (
        "max_split_size_mb",
        "max_non_split_rounding_mb",
        "roundup_power2_divisions",
        "garbage_collection_threshold",
    ),
    "expandable": ("roundup_power2_divisions",),
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
# A snapshot has fields of these; the other settings stand in the text that the allocator was given, or nowhere.
_IN_SNAPSHOT = {"max_split_size", "roundup_power2_divisions", "garbage_collection_threshold"}
_NOT_OF_EXPANDABLE = {key for row in _SETTINGS.values() if "expandable" not in row["families"] for key in row["keys"]}

_MIB = 1 << 20
# PyTorch wants max_split_size_mb above its segments of 20 MiB.
_LEAST_SPLIT = 21
_POWERS = tuple(1 << power for power in range(5, 16))
# A grid of powers of two alone misses values that work only between two of them.
_OF_SIZES = 8
# Either allocator collects garbage only below a limit that is less than the whole memory.
_LIMITED = {"per_process_memory_fraction": "0.99"}

Move = Mapping[str, str | None]
"""Settings to change; None leaves one out."""


@dataclass(frozen=True)
class Candidate:
    """An allocator and its settings; ``make`` orders them."""

    family: str
    settings: tuple[tuple[str, str], ...] = ()

    @classmethod
    def make(cls, family: str, settings: Mapping[str, str]) -> Candidate:
        """Return it with the settings in their order, so that equal ones compare equal."""
        return cls(family, tuple((key, settings[key]) for key in _ORDER if key in settings))

    @property
    def config(self) -> str:
        """As ``replay`` takes it."""
        listed = ",".join(f"{key}:{value}" for key, value in self.settings)
        return f"{self.family}[{listed}]" if listed else self.family

    @property
    def keys(self) -> int:
        """How many settings a user has to give."""
        return len(self.settings) + (self.family == "expandable")

    def get(self, key: str) -> str:
        """Return a setting's value, or an empty text."""
        return dict(self.settings).get(key, "")

    def moved(self, move: Move) -> Candidate | None:
        """Return it with settings changed; None where they exclude each other."""
        kept = {key: value for key, value in self.settings if f"{key}_mb" not in move}
        changed = {**kept, **move}
        candidate = Candidate.make(self.family, {key: value for key, value in changed.items() if value is not None})
        try:
            parse_configuration(candidate.config)
        except ValueError:
            return None
        return candidate


def recorded_candidate(settings: Settings) -> tuple[Candidate, tuple[str, ...]]:
    """Return the setting that a snapshot was recorded under, and notes where it cannot be replayed."""
    given = {}
    for key in (key for name, row in _SETTINGS.items() if name not in _IN_SNAPSHOT for key in row["keys"]):
        # The family tells of expandable segments.
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
    return candidate, ()


def distinct_sizes(snapshot: Snapshot) -> list[int]:
    """Return the sizes requested, rounded up to MiB, in order."""
    sizes = {block.requested for trace in snapshot.devices for block in trace.beginning.blocks}
    for trace in snapshot.devices:
        events = trace.events
        sizes |= {size for action, size in zip(events.action, events.size, strict=True) if action == ALLOC}
    return sorted({-(-size // _MIB) for size in sizes})


def coarse_moves(axis: str, candidate: Candidate, retries: int, sizes: Sequence[int]) -> Iterator[Move]:
    """Give an axis's values on a coarse grid, without values that cannot matter to these sizes."""
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
        # From, or up to, a power of two only.
        divisions = candidate.get(axis)
        for power in range(sizes[-1].bit_length() if sizes and divisions.isdigit() else 0):
            yield {axis: f"[{1 << power}:1,>:{divisions}]"}
            yield {axis: f"[{1 << power}:{divisions},>:1]"}
    elif axis == "garbage_collection_threshold" and retries:
        yield from ({axis: share, **_LIMITED} for share in ("0.9", "0.8", "0.7", "0.6"))


def split_sizes(sizes: Sequence[int]) -> list[int]:
    """Return the values of max_split_size_mb between which something changes: up to a size, and beyond it."""
    return sorted({size + more for size in sizes for more in (0, 1) if size + more >= _LEAST_SPLIT})
