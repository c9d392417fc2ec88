"""Replays a recording under other allocator settings: an allocator without a GPU gets the recorded events."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from .._core import AllocatorConfig, Replay
from ..errors import PyactcompError
from .model import LARGE_SEGMENT, SMALL_SEGMENT, Segment, Snapshot

#: The default capacity in bytes: more than any GPU has.
BOUNDLESS = 512 << 30

# 10 ms: progress is smooth, Ctrl-C answers at once, and the calls cost nothing.
_EVENTS_AT_ONCE = 100_000

_FORM = re.compile(r"(native|expandable|pyactcomp)(?:\[(.*)\])?", re.DOTALL)


class TimelinePoint(NamedTuple):
    """The peak of each, in bytes, in the events from the last point to before ``end``."""

    end: int
    allocated: int
    active: int
    reserved: int


@dataclass(frozen=True)
class ReplayResult:
    """The outcome of a recording under an allocator; sizes in bytes.

    Attributes
    ----------
    config
        The configuration, as given.
    peak_allocated, peak_active, peak_requested, peak_reserved
        The peaks. Active is allocated plus memory blocks freed while other streams still used them.
    utilization
        ``peak_active / peak_reserved``; 1 if nothing was reserved.
    driver_calls
        Calls to acquire, map, unmap or give back memory or addresses, since the first event.
    driver_seconds
        Host time in these calls, estimated from calls timed on an H200.
    retries
        Times all unused memory was given back before an allocation was tried again.
    oom_at
        Index of the event whose allocation failed and ended the replay; None if no allocation failed. 0 also if the
        blocks from before the recording did not fit.
    allocations
        Allocations replayed.
    unknown_frees
        Frees of addresses without a recorded allocation: they changed nothing.
    lost_frees
        Addresses allocated again while in use: the lost free is taken to be just before.
    cache_emptied
        Times the recorded program emptied the cache; the replay did too.
    pressure_releases
        Times the recorded allocator gave memory back to serve an allocation; the replay decides for itself.
    unclear_releases
        The part of ``cache_emptied`` that may have served an allocation: without call stacks the recording does not
        tell.
    timeline
        About ``points`` points.
    """

    config: str
    peak_allocated: int
    peak_active: int
    peak_requested: int
    peak_reserved: int
    utilization: float
    driver_calls: int
    driver_seconds: float
    retries: int
    oom_at: int | None
    allocations: int
    unknown_frees: int
    lost_frees: int
    cache_emptied: int
    pressure_releases: int
    unclear_releases: int
    timeline: tuple[TimelinePoint, ...]


def parse_configuration(text: str) -> tuple[AllocatorConfig, bool]:
    """Parse ``native``, ``expandable`` or ``pyactcomp``, with optional settings in brackets.

    Parameters
    ----------
    text
        ``native[key:value,...]`` is PyTorch's own allocator, ``expandable`` the same with expandable segments,
        ``pyactcomp`` this package's; the keys are ``AllocatorConfig.parse``'s.

    Returns
    -------
    config
        The settings.
    expandable
        Whether PyTorch's expandable segments are meant.

    Raises
    ------
    ValueError
        For another name, and for settings that are malformed or unknown to the named allocator.

    Examples
    --------
    >>> config, expandable = parse_configuration("native[max_split_size_mb:128]")
    >>> config.growth, config.max_split_size, expandable
    ('malloc', 134217728, False)
    """
    form = _FORM.fullmatch(text.strip())
    if form is None:
        raise ValueError(
            f"a configuration is native, expandable or pyactcomp, or one of them with settings, "
            f"as in native[max_split_size_mb:128]; got '{text}'"
        )
    name, settings = form[1], form[2] or ""
    if name == "pyactcomp":
        return AllocatorConfig.parse(settings), False
    if re.search(r"(^|,)\s*growth\s*:", settings):
        raise ValueError(f"growth is a setting of pyactcomp's allocator, not of PyTorch's: leave it out of '{text}'")
    config = AllocatorConfig.parse(settings, AllocatorConfig(growth="malloc" if name == "native" else "vmm"))
    # The parser reads expandable_segments:True as growth by virtual memory.
    expandable = config.growth == "vmm"
    if name == "expandable" and not expandable:
        raise ValueError(f"'{text}' contradicts itself: without expandable segments it is native")
    family = "expandable" if expandable else "native"
    for setting, row in AllocatorConfig.settings().items():
        # Growth is the family itself.
        if setting != "growth" and family not in row["families"] and getattr(config, setting) != row["default"]:
            whose = "PyTorch's expandable segments have" if expandable else "PyTorch's allocator has"
            raise ValueError(f"{whose} no use for {setting}: leave it out of '{text}'")
    if config.memory_fraction == 1:
        # Without a memory fraction, PyTorch collects no garbage, whatever the threshold.
        config = config.replace(garbage_collection_threshold=0.0)
    return config, expandable


def replay(
    snapshot: Snapshot,
    config: str = "native",
    capacity: int | str | None = None,
    *,
    device: int | None = None,
    points: int = 0,
    progress: Callable[[int], object] | None = None,
) -> ReplayResult:
    """Replay a recording under an allocator with these settings.

    A memory block becomes free at its recorded ``free_completed`` event: memory used by other streams is held as long
    as in the recorded program. A block that the program paused is freed, and allocated again where the program resumed
    it. The replay ends when memory runs out.

    Parameters
    ----------
    snapshot
        The recording, from ``read_snapshot``.
    config
        A configuration for ``parse_configuration``.
    capacity
        The device's memory: bytes or a text like "24GiB". None: 512 GiB, more than any GPU has.
    device
        Index of the device whose events are replayed; may be left out if only one device was recorded.
    points
        Approximate number of points in the timeline.
    progress
        Called now and then with the number of events replayed so far. Ctrl-C is answered as often.

    Raises
    ------
    ValueError
        For a device outside the recording, a configuration refused by ``parse_configuration``, a memory fraction
        without a capacity, an impossible state before the recording (overlapping blocks or segments), and more pools or
        memory than there are addresses for.

    Examples
    --------
    >>> import json, tempfile
    >>> from pyactcomp.snapshots import read_snapshot
    >>> event = {"action": "alloc", "addr": 4096, "size": 600, "stream": 0, "time_us": 7, "frames": []}
    >>> with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
    ...     json.dump({"segments": [], "device_traces": [[event]]}, file)
    ...     file.flush()
    ...     result = replay(read_snapshot(file.name), "native")
    >>> result.peak_allocated, result.peak_reserved, result.oom_at
    (1024, 2097152, None)
    """
    settings, expandable = parse_configuration(config)
    if capacity is None and settings.memory_fraction < 1:
        raise ValueError(f"'{config}' takes a share of the device's memory: give its capacity")
    trace = snapshot.trace(device)
    events = trace.events
    try:
        native = Replay(
            action=events.action,
            address=events.address,
            size=events.size,
            stream=events.stream,
            pool=events.pool,
            pools=snapshot.pools,
            emptied=trace.releases.emptied,
            segments=[
                (
                    segment.address,
                    segment.size,
                    segment.stream,
                    segment.pool,
                    _is_small(segment),
                    segment.expandable,
                )
                for segment in trace.beginning.segments
            ],
            blocks=[
                (block.address, block.size, block.requested, block.stream, block.pool, block.pending)
                for block in trace.beginning.blocks
            ],
            config=settings,
            expandable=expandable,
            capacity=BOUNDLESS if capacity is None else capacity,
            points=points,
            paused=dict(trace.paused.before) if trace.paused.most else None,
        )
        while native.advance(_EVENTS_AT_ONCE):
            if progress is not None:
                progress(native.position)
    except PyactcompError as error:
        raise ValueError(f"'{config}' cannot replay this: {error}") from error
    if progress is not None:
        progress(native.position)
    result = native.result()
    reserved = result["peak_reserved"]
    return ReplayResult(
        config=config,
        utilization=result["peak_active"] / reserved if reserved else 1.0,
        timeline=tuple(TimelinePoint(*point) for point in native.timeline()) if points else (),
        pressure_releases=trace.releases.for_requests,
        unclear_releases=trace.releases.unclear,
        **result,
    )


def _is_small(segment: Segment) -> bool:
    """Return whether a segment serves requests up to 1 MiB, by the size if the segment is gone at the end."""
    if segment.small is not None:
        return segment.small
    return segment.size % LARGE_SEGMENT != 0 if segment.expandable else segment.size <= SMALL_SEGMENT
