"""The data of an explanation: where a recording's memory was at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from .steps import Steps


@dataclass(frozen=True)
class Group:
    """Live memory blocks with something in common; ``stack`` is the call stack of all of them, innermost first."""

    label: str
    blocks: int
    bytes: int
    stack: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pin:
    """A partly free segment that cannot be given back because of the memory blocks in it.

    Attributes
    ----------
    address, size
        The segment's.
    free_bytes
        Free bytes that the blocks keep from being given back.
    live_bytes, blocks
        Bytes and number of the blocks.
    largest, label, stack, since
        Of the largest block: size, innermost line, call stack, and the event of the allocation; -1: before the
        recording.
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
class FreeMemory:
    """Free memory that only requests of one stream and one pool get; sizes in bytes.

    ``pool`` is (0, 0) but for a private pool of a CUDA graph or a ``MemPool``.
    """

    stream: int
    pool: tuple[int, int]
    bytes: int
    largest: int


@dataclass(frozen=True)
class Crossing:
    """Live memory blocks of one call stack, allocated in earlier steps.

    Attributes
    ----------
    label, stack, blocks, bytes
        As in ``Group``.
    oldest
        The step of the oldest block, from 1.
    steps
        The number of different steps that made the blocks: nearly all steps if each of them leaks.
    """

    label: str
    stack: tuple[str, ...]
    blocks: int
    bytes: int
    oldest: int
    steps: int


@dataclass(frozen=True)
class Growth:
    """Memory blocks of one call stack of which each quarter of the steps keeps more than the quarter before.

    Attributes
    ----------
    label, stack
        As in ``Group``.
    blocks, bytes
        Allocated since the first step, and alive at the end.
    first_blocks, first_bytes
        The part of them from the first quarter of the steps.
    quarters
        The least bytes of this call stack that are alive in each quarter.
    """

    label: str
    stack: tuple[str, ...]
    blocks: int
    bytes: int
    first_blocks: int
    first_bytes: int
    quarters: tuple[int, ...]


@dataclass(frozen=True)
class Fit:
    """One allocator's outcome for the recording up to the out-of-memory event, with the failed request.

    ``oom_at`` is the event at which this allocator runs out of memory, None if everything fits; sizes in bytes.
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
        From the first event to this one; None if the recording has no times.
    peak_event, peak_bytes
        The first event after which the most bytes are alive, and how many.
    oom_events
        The out-of-memory events of the recording.
    live_bytes, live_blocks
        Alive at the moment: allocated, or freed but still used by other streams.
    awaiting_bytes
        The freed part of ``live_bytes``, still used by other streams.
    paused_bytes
        The part of ``live_bytes`` without memory: the program had paused it.
    internal
        The share of ``live_bytes`` beyond the requested bytes. Known are the rounding to 512 bytes and, of blocks still
        there at the end, the real size.
    reserved_bytes, free_bytes, largest_free
        Of the segments; None if the recording has no segments.
    external
        ``1 - largest_free / free_bytes``; 0 if nothing is free, None if the recording has no segments.
    stream
        The stream that asks at an out-of-memory event; elsewhere the stream with most live bytes.
    free_memory
        The free bytes by the stream and the pool that may use them, most first; empty if the recording has no segments.
    request_bytes
        The size requested at an out-of-memory event; None elsewhere.
    capacity
        Memory for the allocator at an out-of-memory event: the reserved memory plus the device's free memory.
    by_stack, by_size, by_age
        All live blocks: most bytes first, small to large, and young to old.
    by_pool, by_stream, by_metadata
        All live blocks by the pool and the stream that they were allocated for, and by the ``user_metadata`` that the
        program had set.
    by_phase
        All live blocks by the phase they were allocated in: forward, backward, optimizer, other (none of the three),
        before the recording, or unknown.
    pins
        Segments pinned by blocks, most free bytes first. Expandable segments give back single pages, and are left out.
    pinned_bytes
        The free bytes of all pinned segments.
    crossing
        Blocks of earlier steps, most bytes first; blocks from before the first step are not among them.
    steps
        Where the steps begin.
    growth
        Call stacks that keep more in each quarter of the steps, most growth first, over the whole recording; None if
        the recording has fewer than four steps.
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
    paused_bytes: int
    internal: float
    reserved_bytes: int | None
    free_bytes: int | None
    largest_free: int | None
    external: float | None
    stream: int
    free_memory: tuple[FreeMemory, ...]
    request_bytes: int | None
    capacity: int | None
    by_stack: tuple[Group, ...]
    by_size: tuple[Group, ...]
    by_age: tuple[Group, ...]
    by_pool: tuple[Group, ...]
    by_stream: tuple[Group, ...]
    by_metadata: tuple[Group, ...]
    by_phase: tuple[Group, ...]
    pins: tuple[Pin, ...]
    pinned_bytes: int
    crossing: tuple[Crossing, ...]
    steps: Steps
    growth: tuple[Growth, ...] | None
    fits: tuple[Fit, ...]
    notes: tuple[str, ...]
