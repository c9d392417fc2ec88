"""The plain data of an explanation: where the memory of a recording was at one of its moments."""

from __future__ import annotations

from dataclasses import dataclass

from .steps import Steps


@dataclass(frozen=True)
class Group:
    """Live blocks that have something in common; ``stack`` is the call stack of all of them, innermost first."""

    label: str
    blocks: int
    bytes: int
    stack: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pin:
    """A segment, free in part, that cannot be given back for the blocks in it.

    Attributes
    ----------
    address, size
        Of the segment.
    free_bytes
        Bytes that the blocks keep from being given back.
    live_bytes, blocks
        The live bytes there.
    largest, label, stack, since
        The size of the largest of these blocks, its innermost line, its call stack, and the event that allocated it;
        -1: before the recording.
    """

    address: int
    size: int
    free_bytes: int
    live_bytes: int
    blocks: int
    largest: int
    label: str
    stack: tuple[str, ...]
    since: int


@dataclass(frozen=True)
class Crossing:
    """Live blocks of one call stack that were allocated in earlier steps.

    Attributes
    ----------
    label, stack, blocks, bytes
        As of a ``Group``.
    oldest
        The step, from 1, that the oldest of them is from.
    steps
        How many different steps they are from: where it is nearly all of them, each step leaves something behind.
    """

    label: str
    stack: tuple[str, ...]
    blocks: int
    bytes: int
    oldest: int
    steps: int


@dataclass(frozen=True)
class Fit:
    """The outcome under an allocator of the recording up to the out-of-memory event, and of the request that failed.

    ``oom_at`` is the event it would have failed at, None where it has room for everything; sizes in bytes.
    """

    config: str
    oom_at: int | None
    peak_reserved: int


@dataclass(frozen=True)
class Explanation:
    """Where a device's memory was after one event; sizes in bytes.

    Attributes
    ----------
    device, event, action
        The moment; event -1 is before the first.
    seconds
        From the first event to this one; None where the recording has no times.
    peak_event, peak_bytes
        The first event after which the most is alive, and how much is.
    oom_events
        The out-of-memory events of the recording.
    live_bytes, live_blocks
        Alive at the moment: allocated, or freed while other streams still use it.
    awaiting_bytes
        The part of ``live_bytes`` that is freed but still used.
    internal
        The share of ``live_bytes`` that was not asked for. What is known is the rounding to 512 bytes, and of blocks
        still there at the end their real size.
    reserved_bytes, free_bytes, largest_free
        Of the segments; None where the recording has none.
    external
        ``1 - largest_free / free_bytes``; 0 where nothing is free, None where the recording has no segments.
    request_bytes
        The size requested at an out-of-memory event; None elsewhere.
    capacity
        Memory for the allocator at an out-of-memory event: the memory it held plus the device's free memory.
    by_stack, by_size, by_age
        All live blocks: most bytes first, small to large, and young to old.
    pins
        The segments that blocks pin, most free bytes first. Expandable segments give back pages, and are left out.
    pinned_bytes
        The free bytes of all of them.
    crossing
        Blocks of earlier steps, most bytes first; blocks from before the first step are not among them.
    steps
        Where the steps begin.
    fits
        The outcome of native, expandable and pyactcomp at ``capacity``; empty unless memory ran out there.
    notes
        Anything unusual or unknown.
    """

    device: int
    event: int
    action: str
    seconds: float | None
    peak_event: int
    peak_bytes: int
    oom_events: tuple[int, ...]
    live_bytes: int
    live_blocks: int
    awaiting_bytes: int
    internal: float
    reserved_bytes: int | None
    free_bytes: int | None
    largest_free: int | None
    external: float | None
    request_bytes: int | None
    capacity: int | None
    by_stack: tuple[Group, ...]
    by_size: tuple[Group, ...]
    by_age: tuple[Group, ...]
    pins: tuple[Pin, ...]
    pinned_bytes: int
    crossing: tuple[Crossing, ...]
    steps: Steps
    fits: tuple[Fit, ...]
    notes: tuple[str, ...]
