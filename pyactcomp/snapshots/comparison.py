"""Compares recordings: which call sites make one peak higher than another, and how the ranks of a job differ."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .call_stacks import described, shortened
from .groups import Stacks, size_class, stack_label
from .lifetimes import find_lifetimes
from .model import OOM, DeviceTrace, Frame, Snapshot
from .reader import read_snapshot
from .segments import reserved_after


@dataclass(frozen=True)
class Difference:
    """Live memory with something in common in two recordings, each at its own peak; sizes in bytes.

    ``label`` and ``stack``, innermost line first, are those of the second recording if the call site is there;
    ``stack`` is empty for a class of sizes.
    """

    label: str
    stack: tuple[str, ...]
    before_blocks: int
    before_bytes: int
    after_blocks: int
    after_bytes: int
    bytes: int  #: ``after_bytes - before_bytes``


@dataclass(frozen=True)
class Peak:
    """A device's highest live memory in a recording.

    Attributes
    ----------
    device, event
        The moment: the first event after which the most bytes are alive; -1: before the first.
    bytes, blocks
        Alive there.
    most_reserved
        The most bytes reserved at any event; None if the recording has no segments.
    end_bytes
        Alive after the last event.
    failed_bytes
        The last request that failed, on top of what was alive then; None if memory did not run out.
    """

    device: int
    event: int
    bytes: int
    blocks: int
    most_reserved: int | None
    end_bytes: int
    failed_bytes: int | None


@dataclass(frozen=True)
class Comparison:
    """Why one recording's peak is higher than another's.

    Attributes
    ----------
    before, after
        The peaks.
    bytes
        ``after.bytes - before.bytes``, the sum of ``bytes`` over ``by_stack``, and over ``by_size``.
    by_stack
        All call stacks alive at one of the peaks, most bytes more in ``after`` first.
    by_size
        The same by powers of two, small to large.
    notes
        Anything unusual or unknown.
    """

    before: Peak
    after: Peak
    bytes: int
    by_stack: tuple[Difference, ...]
    by_size: tuple[Difference, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Rank:
    """A recording of one process of a job: its name, its peak, and the call site that holds most there."""

    name: str
    peak: Peak
    label: str  #: of the call site
    label_bytes: int


@dataclass(frozen=True)
class Spread:
    """A call site at the peaks of all ranks, in the order of ``Ranks.ranks``; sizes in bytes."""

    label: str
    bytes: tuple[int, ...]  #: of each rank
    difference: int  #: the most less the least


@dataclass(frozen=True)
class Ranks:
    """The processes of a job side by side; call sites that differ most first, equal ones left out."""

    ranks: tuple[Rank, ...]
    by_stack: tuple[Spread, ...]
    notes: tuple[str, ...]


_Site = tuple[Frame, ...]
_Held = list[int]  # number and bytes of blocks


def compare(
    before: Snapshot | str | os.PathLike[str],
    after: Snapshot | str | os.PathLike[str],
    *,
    device: int | None = None,
) -> Comparison:
    """Say which call sites make one recording's peak higher than another's, exact to the byte.

    Parameters
    ----------
    before, after : Snapshot or path
        Snapshots from ``read_snapshot``, or the paths of their files. A call site of both is found by its lines; if the
        code was edited or lies elsewhere in between, by file names and lines, else by the functions' names.
    device : int, optional
        Index of the device in both; may be left out if each recording has one device, not necessarily the same.

    Raises
    ------
    OSError, ValueError
        As ``read_snapshot``, and for a device outside a recording.

    Examples
    --------
    >>> import json, pathlib, tempfile
    >>> from pyactcomp.snapshots import compare
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     paths = [pathlib.Path(folder, name) for name in ("a.json", "b.json")]
    ...     for path, size in zip(paths, (512, 2048)):
    ...         event = {"action": "alloc", "addr": 4096, "size": size, "stream": 0, "frames": []}
    ...         _ = path.write_text(json.dumps({"segments": [], "device_traces": [[event]]}))
    ...     found = compare(*paths)
    >>> found.bytes, [(each.label, each.bytes) for each in found.by_stack]
    (1536, [('no call stack', 1536)])
    """
    recordings = [each if isinstance(each, Snapshot) else read_snapshot(each) for each in (before, after)]
    traces = [recording.trace(device) for recording in recordings]
    sides = [_Side(recording, trace) for recording, trace in zip(recordings, traces, strict=True)]
    old, new = sides
    notes = [f"{which}: {note}" for which, recording in zip("ab", recordings, strict=True) for note in recording.notes]
    if not any(site for side in sides for site in side.by_stack):
        notes.append(
            "recorded without call stacks: torch.cuda.memory._record_memory_history(context='all') records them"
        )
    return Comparison(
        before=old.peak,
        after=new.peak,
        bytes=new.peak.bytes - old.peak.bytes,
        by_stack=tuple(
            sorted(
                (
                    _difference(stack_label(site), tuple(map(described, site)), *held)
                    for site, *held in _paired(old.by_stack, new.by_stack)
                ),
                key=lambda each: (-each.bytes, each.label),
            )
        ),
        by_size=tuple(
            _difference(key[1], (), old.by_size.get(key, (0, 0)), new.by_size.get(key, (0, 0)))
            for key in sorted({*old.by_size, *new.by_size})
        ),
        notes=tuple(notes),
    )


def compare_ranks(
    recordings: Iterable[tuple[str, Snapshot | str | os.PathLike[str]]], *, device: int | None = None
) -> Ranks:
    """Put the recordings of a job's processes side by side.

    Parameters
    ----------
    recordings : iterable of (str, Snapshot or path)
        A name for each process and its recording. Each is read when its turn comes, and dropped after it.
    device : int, optional
        Index of the device in each; if left out, each device of a recording is a rank.

    Raises
    ------
    OSError, ValueError
        As ``read_snapshot``, and for a device outside a recording.
    """
    ranks, held = [], []
    notes: list[str] = []
    for name, source in recordings:
        recording = source if isinstance(source, Snapshot) else read_snapshot(source)
        if not recording.devices:
            raise ValueError(f"{name}: the snapshot holds neither events nor segments")
        for trace in recording.devices if device is None else [recording.trace(device)]:
            side = _Side(recording, trace)
            of_sites: dict[str, int] = defaultdict(int)
            for site, (_, held_bytes) in side.by_stack.items():
                of_sites[stack_label(site)] += held_bytes
            largest = max(of_sites, key=lambda label: of_sites[label], default="")
            ranks.append(Rank(name, side.peak, largest, of_sites.get(largest, 0)))
            held.append(of_sites)
        notes += [f"{name}: {note}" for note in recording.notes]
    spreads = []
    for label in dict.fromkeys(label for of_sites in held for label in of_sites):
        sizes = tuple(of_sites.get(label, 0) for of_sites in held)
        if len(set(sizes)) > 1:
            spreads.append(Spread(label, sizes, max(sizes) - min(sizes)))
    return Ranks(tuple(ranks), tuple(sorted(spreads, key=lambda each: (-each.difference, each.label))), tuple(notes))


class _Side:
    """One recording at its peak."""

    def __init__(self, recording: Snapshot, trace: DeviceTrace) -> None:
        lifetimes = find_lifetimes(trace)
        event = lifetimes.peak()
        live = list(lifetimes.alive_after(event))
        folded = Stacks(recording).folded
        self.by_stack: dict[_Site, _Held] = defaultdict(lambda: [0, 0])
        self.by_size: dict[tuple[int, str], _Held] = defaultdict(lambda: [0, 0])
        for number in live:
            size = lifetimes.size[number]
            for held in (self.by_stack[folded[lifetimes.stack[number]]], self.by_size[size_class(size)]):
                held[0] += 1
                held[1] += size
        reserved = reserved_after(trace)
        failed = [size for action, size in zip(trace.events.action, trace.events.size, strict=True) if action == OOM]
        before = sum(segment.size for segment in trace.beginning.segments)
        self.peak = Peak(
            device=trace.index,
            event=event,
            bytes=sum(lifetimes.size[number] for number in live),
            blocks=len(live),
            most_reserved=None if reserved is None else max(reserved, default=before),
            end_bytes=sum(lifetimes.size[number] for number in lifetimes.alive_after(len(trace.events) - 1)),
            failed_bytes=failed[-1] if failed else None,
        )


# Ways to recognise a call site in another recording, the surest first: as it is, elsewhere on the disk, after an edit.
_NAMES: tuple[Callable[[_Site], object], ...] = (
    lambda site: site,
    lambda site: tuple(map(shortened, site)),
    lambda site: tuple(shortened(Frame(frame.filename, 1, frame.name)) for frame in site),
)


def _paired(
    before: Mapping[_Site, _Held], after: Mapping[_Site, _Held]
) -> list[tuple[_Site, Sequence[int], Sequence[int]]]:
    """Return all call sites with what each recording holds there."""
    pairs: list[tuple[_Site, Sequence[int], Sequence[int]]] = []
    left, right = dict(before), dict(after)
    for name in _NAMES:
        named: dict[object, tuple[list[_Site], list[_Site]]] = defaultdict(lambda: ([], []))
        for side, sites in enumerate((left, right)):
            for site in sites:
                named[name(site)][side].append(site)
        for olds, news in named.values():
            # Several sites of one name can be matched only if none was added or removed.
            if len(olds) == len(news):
                for old, new in zip(sorted(olds, key=_lines), sorted(news, key=_lines), strict=True):
                    pairs.append((new, left.pop(old), right.pop(new)))
    pairs += [(site, held, (0, 0)) for site, held in left.items()]
    pairs += [(site, (0, 0), held) for site, held in right.items()]
    return pairs


def _lines(site: _Site) -> list[int]:
    return [frame.line for frame in site]


def _difference(label: str, stack: tuple[str, ...], before: Sequence[int], after: Sequence[int]) -> Difference:
    return Difference(label, stack, before[0], before[1], after[0], after[1], after[1] - before[1])
