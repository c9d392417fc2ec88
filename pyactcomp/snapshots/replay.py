"""Replays a recording under other allocator settings: gives its events to an allocator without a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from .._core import AllocatorConfig, Replay
from ..errors import PyactcompError
from .model import LARGE_SEGMENT, SMALL_SEGMENT, Segment, Snapshot

#: Bytes, more than any GPU has: where no capacity is given.
BOUNDLESS = 512 << 30

# 10 ms: progress is smooth, Ctrl-C answers at once, and the calls cost nothing.
_EVENTS_AT_ONCE = 100_000

_FORM = re.compile(r"(native|expandable|pyactcomp)(?:\[(.*)\])?", re.DOTALL)


class TimelinePoint(NamedTuple):
    """The most of each, in bytes, in the events from the last point to before ``end``."""

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
        The configuration, as it was given.
    peak_allocated, peak_active, peak_requested, peak_reserved
        The most of each. Active is allocated plus blocks freed while other streams still used them.
    utilization
        ``peak_active / peak_reserved``; 1 where nothing was reserved.
    driver_calls
        Calls that acquire, map, unmap or give back memory or addresses.
    driver_seconds
        Host time in them, estimated from calls timed on an H200.
    retries
        Times that all unused memory was given back before an allocation was tried again.
    oom_at
        Index of the event whose allocation failed, where the replay ended; None where none did. 0 also where what
        existed before the recording did not fit.
    allocations
        Allocations replayed.
    unknown_frees
        Frees of addresses that nothing was seen to allocate: they changed nothing.
    lost_frees
        Addresses that were allocated again while in use: their free was lost, and is taken to be just before.
    cache_emptied
        Times that the recorded program emptied the cache; the replay did too.
    pressure_releases
        Times that the recorded allocator gave memory back to serve an allocation; the replay decides for itself.
    unclear_releases
        Times of ``cache_emptied`` that may have been to serve an allocation: without call stacks the recording does not
        tell.
    timeline
        About as many points as were asked for.
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
    """Parse ``native``, ``expandable`` or ``pyactcomp``, with settings in brackets where wanted.

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
        For another name, and for settings that cannot be parsed or that the named allocator does not have.

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
    # The parser takes expandable_segments:True for growth by virtual memory.
    expandable = config.growth == "vmm"
    if name == "expandable" and not expandable:
        raise ValueError(f"'{text}' contradicts itself: without expandable segments it is native")
    family = "expandable" if expandable else "native"
    for setting, row in AllocatorConfig.settings().items():
        # Growth is the family itself.
        if setting != "growth" and family not in row["families"] and getattr(config, setting) != row["default"]:
            whose = "PyTorch's expandable segments have" if expandable else "PyTorch's allocator has"
            raise ValueError(f"{whose} no use for {setting}: leave it out of '{text}'")
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

    Blocks are free for others when the recording says ``free_completed``, so it holds on to memory that other streams
    use for as long as the recorded program did. The replay ends where memory runs out.

    Parameters
    ----------
    snapshot
        The recording, as ``read_snapshot`` gives it.
    config
        As ``parse_configuration`` takes it.
    capacity
        The device's memory: bytes or a text like "24GiB". None: 512 GiB, more than any GPU has.
    device
        Index of the device whose events are replayed; may be left out where the recording is of one alone.
    points
        About how many points the timeline has.
    progress
        Called now and then with the number of events replayed so far. Ctrl-C is answered as often.

    Raises
    ------
    ValueError
        For a device that was not recorded, a configuration that ``parse_configuration`` refuses, one that takes a share
        of a capacity that is not given, what cannot have existed before the recording (blocks or segments that
        overlap), and more pools or memory than there are addresses for.

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
    """Say whether a segment serves requests up to 1 MiB; of one that is gone at the end its size has to tell."""
    if segment.small is not None:
        return segment.small
    return segment.size % LARGE_SEGMENT != 0 if segment.expandable else segment.size <= SMALL_SEGMENT
