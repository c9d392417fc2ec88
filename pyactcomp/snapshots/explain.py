"""Explains where a recording's memory was at one moment, and which allocator would have had enough."""

from __future__ import annotations

import os
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from .._core import SimulatedDevice
from .candidates import FAMILIES
from .explanation import Crossing, Explanation, Fit, FreeMemory, Pin
from .failed_request import with_failed_request
from .groups import Stacks, by_stack, grouped, size_class, stack_label, stream_label
from .growth import find_growth
from .lifetimes import Lifetimes, find_lifetimes
from .model import ACTIONS, OOM, DeviceTrace, Events, Segment, Snapshot
from .pauses import paused_after
from .phases import PHASES, Phases
from .reader import read_snapshot
from .replay import replay
from .segments import blocks_inside, free_blocks, reserved_after, segments_after
from .steps import Steps, find_steps

# Share of the reserved memory: less free memory on other streams is not mentioned.
_MUCH = 0.05


def explain(
    recording: Snapshot | str | os.PathLike[str],
    at: str | int | None = None,
    *,
    device: int | None = None,
    capacity: int | str | None = None,
    progress: Callable[[str], object] | None = None,
) -> Explanation:
    """Explain where a recording's memory was at one moment.

    Parameters
    ----------
    recording : Snapshot or path
        A snapshot from ``read_snapshot``, or the path of its file.
    at : str or int, optional
        "peak": after the event with the most bytes alive, the first of several. "oom": after the last out-of-memory
        event. A number: after this event. None: "oom" if there is such an event, else "peak".
    device : int, optional
        Index of the device; may be left out if only one device was recorded.
    capacity : int or str, optional
        Memory for the allocator at an out-of-memory event: bytes or a text like "24GiB". None: the reserved memory plus
        the device's free memory, which is too much if a memory fraction was set.
    progress : callable, optional
        Called with the next stage, in words.

    Raises
    ------
    OSError, ValueError
        As ``read_snapshot``.
    ValueError
        For a moment or a device outside the recording, and for a capacity at any moment but an out-of-memory event.

    Examples
    --------
    >>> import json, tempfile
    >>> event = {"action": "alloc", "addr": 4096, "size": 600, "stream": 0, "time_us": 7, "frames": []}
    >>> with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
    ...     json.dump({"segments": [], "device_traces": [[event]]}, file)
    ...     file.flush()
    ...     explanation = explain(file.name, at="peak")
    >>> explanation.event, explanation.live_bytes, explanation.by_stack[0].label
    (0, 1024, 'no call stack')
    """

    def say(what: str) -> None:
        if progress is not None:
            progress(what)

    if not isinstance(recording, Snapshot):
        say("reading the snapshot")
        recording = read_snapshot(recording)
    trace = recording.trace(device)
    room = None if capacity is None else SimulatedDevice(capacity).capacity
    events = trace.events
    say("pairing allocations with frees")
    lifetimes = find_lifetimes(trace)
    peak = lifetimes.peak()
    failures = tuple(index for index, action in enumerate(events.action) if action == OOM)
    event = _moment(at, peak, failures, len(events), trace.index)
    failed = event in failures
    if capacity is not None and not failed:
        raise ValueError(
            "capacity needs the moment of an out-of-memory event, "
            f"got event {event} of device {trace.index}: leave capacity out"
        )
    say("finding the steps")
    steps = find_steps(trace, lifetimes, recording.annotations)

    live = list(lifetimes.alive_after(event))
    held = sum(lifetimes.size[number] for number in live)
    asked = sum(lifetimes.requested[number] for number in live)
    segments = segments_after(trace, event)
    free = free_blocks(segments or (), lifetimes, live)
    gaps = [gap for _, sizes in free for gap in sizes]
    reserved = None if segments is None else sum(segment.size for segment in segments)
    largest = max(gaps, default=0)
    stacks = Stacks(recording)
    phases = Phases(recording, trace, lifetimes)
    pins = _pins(segments or (), lifetimes, live, stacks)
    if failed and room is None and reserved is not None:
        room = reserved + events.address[event]
    own = f"device {trace.index}:"
    general = [note for note in recording.notes if not note.startswith("device ") or note.startswith(own)]
    notes = [*general, *_notes(recording, trace, failures, event, segments, live, lifetimes)]
    notes += _elsewhere(trace, lifetimes, event)
    return Explanation(
        device=trace.index,
        event=event,
        action="nothing" if event < 0 else (*ACTIONS, "unknown")[events.action[event]],
        seconds=_seconds(events.time_us, event),
        peak_event=peak,
        peak_bytes=sum(lifetimes.size[number] for number in lifetimes.alive_after(peak)),
        oom_events=failures,
        live_bytes=held,
        live_blocks=len(live),
        awaiting_bytes=sum(lifetimes.size[number] for number in live if lifetimes.asked_free[number] <= event),
        paused_bytes=paused_after(trace, event),
        internal=(held - asked) / held if held else 0.0,
        reserved_bytes=reserved,
        free_bytes=None if segments is None else sum(gaps),
        largest_free=None if segments is None else largest,
        external=None if segments is None else (1 - largest / sum(gaps) if gaps else 0.0),
        stream=events.stream[event] if failed else _busiest(segments or (), lifetimes, live),
        free_memory=_free_memory(free, recording.pools),
        request_bytes=events.size[event] if failed else None,
        capacity=room,
        by_stack=by_stack(lifetimes, live, stacks),
        by_size=grouped(lifetimes, live, lambda number: size_class(lifetimes.size[number])),
        by_age=grouped(lifetimes, live, lambda number: _age(lifetimes.begin[number], event, steps)),
        by_pool=grouped(lifetimes, live, lambda number: _pool(recording, lifetimes.pool[number])),
        by_stream=grouped(lifetimes, live, lambda number: _stream(lifetimes.stream[number])),
        by_metadata=grouped(lifetimes, live, lambda number: _metadata(recording, trace, lifetimes.begin[number])),
        by_phase=grouped(lifetimes, live, lambda number: (PHASES.index(phase := phases.of(number)), phase)),
        pins=pins,
        pinned_bytes=sum(pin.free_bytes for pin in pins),
        crossing=_crossing(lifetimes, live, event, steps, stacks),
        steps=steps,
        growth=find_growth(lifetimes, steps, stacks),
        fits=_fits(recording, trace, event, room, say) if failed and room is not None else (),
        notes=tuple(notes),
    )


def _moment(at: str | int | None, peak: int, failures: Sequence[int], count: int, device: int) -> int:
    if at is None:
        return failures[-1] if failures else peak
    if at == "peak":
        return peak
    if at == "oom":
        if not failures:
            raise ValueError(
                f"device {device} has no out-of-memory event in {count} events: explain its peak, or write the "
                "snapshot when the error is caught"
            )
        return failures[-1]
    if isinstance(at, str) or isinstance(at, bool):
        raise ValueError(f"at is peak, oom or an event's number, got {at!r}")
    if not count:
        raise ValueError(f"device {device} has no events, only the segments at the end: leave at out, got {at}")
    if not 0 <= at < count:
        raise ValueError(f"device {device} has events 0 to {count - 1}, got {at}")
    return at


def _seconds(times: array[int], event: int) -> float | None:
    return (times[event] - times[0]) / 1e6 if event >= 0 and times[0] != times[-1] else None


def _pins(segments: Iterable[Segment], lifetimes: Lifetimes, live: Sequence[int], stacks: Stacks) -> tuple[Pin, ...]:
    pins = []
    for segment, inside in blocks_inside(segments, lifetimes, live):
        held = sum(lifetimes.size[number] for number in inside)
        if segment.expandable or not inside or held >= segment.size:
            continue
        largest = max(inside, key=lifetimes.size.__getitem__)
        calls = lifetimes.stack[largest]
        pins.append(
            Pin(
                segment.address,
                segment.size,
                segment.size - held,
                held,
                len(inside),
                lifetimes.size[largest],
                stack_label(stacks.folded[calls][:1]),
                stacks.lines(calls),
                lifetimes.begin[largest],
            )
        )
    return tuple(sorted(pins, key=lambda pin: (-pin.free_bytes, pin.address)))


def _busiest(segments: Iterable[Segment], lifetimes: Lifetimes, live: Sequence[int]) -> int:
    """Return the stream with most live bytes; the default stream if there are none."""
    held: Counter[int] = Counter()
    for segment, inside in blocks_inside(segments, lifetimes, live):
        held[segment.stream] += sum(lifetimes.size[number] for number in inside)
    return max(held, key=lambda stream: (held[stream], -stream), default=0)


def _free_memory(free: Iterable[tuple[Segment, list[int]]], pools: Sequence[tuple[int, int]]) -> tuple[FreeMemory, ...]:
    found: dict[tuple[int, tuple[int, int]], list[int]] = defaultdict(list)
    for segment, sizes in free:
        found[segment.stream, pools[segment.pool]] += sizes
    parts = [FreeMemory(stream, pool, sum(sizes), max(sizes)) for (stream, pool), sizes in found.items() if sizes]
    return tuple(sorted(parts, key=lambda part: (-part.bytes, part.stream, part.pool)))


def _elsewhere(trace: DeviceTrace, lifetimes: Lifetimes, event: int) -> list[str]:
    """Return a note on memory that lies free on another stream when the most is reserved, if that is another moment."""
    reserved = reserved_after(trace)
    if not reserved:
        return []
    fullest = reserved.index(max(reserved))
    live = list(lifetimes.alive_after(fullest))
    free: Counter[int] = Counter()
    segments = segments_after(trace, fullest) or ()
    for segment, sizes in free_blocks(segments, lifetimes, live):
        free[segment.stream] += sum(sizes)
    own = trace.events.stream[fullest]
    del free[own]
    stream, most = max(free.items(), key=lambda item: item[1], default=(own, 0))
    if fullest == event or most < _MUCH * reserved[fullest]:
        return []
    return [
        f"most memory is reserved after event {fullest:,}: {reserved[fullest]:,} bytes, {sum(free.values()):,} of them "
        f"free on other streams than the one that asks there, most on stream {stream}: only requests of a block's own "
        "stream get it, until torch.cuda.empty_cache() gives it back"
    ]


def _age(begin: int, event: int, steps: Steps) -> tuple[int, str]:
    """Return a sort key and an age in words: in steps if these are known, else in events."""
    if begin < 0:
        return 102, "before the recording"
    if not steps.starts:
        power = len(str(event - begin))
        return power, f"{10 ** (power - 1) if power > 1 else 0:,} to {10**power - 1:,} events"
    if steps.of(begin) == 0:
        return 101, "before the first step"
    age = steps.of(event) - steps.of(begin)
    if age < 2:
        return age, "one step" if age else "this step"
    power = len(str(age))
    return 1 + power, f"{max(2, 10 ** (power - 1)):,} to {10**power - 1:,} steps"


def _pool(recording: Snapshot, pool: int) -> tuple[int, str]:
    return pool, f"private pool {recording.pools[pool]}" if pool else "default pool"


def _stream(stream: int) -> tuple[int, str]:
    return stream, stream_label(stream)


def _metadata(recording: Snapshot, trace: DeviceTrace, begin: int) -> tuple[int, str]:
    text = trace.events.metadata[begin] if begin >= 0 else 0
    return text, recording.metadata[text] or "no user_metadata"


def _crossing(
    lifetimes: Lifetimes, live: Iterable[int], event: int, steps: Steps, stacks: Stacks
) -> tuple[Crossing, ...]:
    now = steps.of(event)
    found: dict[tuple[str, ...], list[int]] = {}
    for number in live:
        if 1 <= steps.of(lifetimes.begin[number]) < now:
            found.setdefault(stacks.lines(lifetimes.stack[number]), []).append(number)
    groups = []
    for lines, numbers in found.items():
        births = {steps.of(lifetimes.begin[number]) for number in numbers}
        label = stacks.label(lifetimes.stack[numbers[0]])
        held = sum(lifetimes.size[number] for number in numbers)
        groups.append(Crossing(label, lines, len(numbers), held, min(births), len(births)))
    return tuple(sorted(groups, key=lambda group: -group.bytes))


def _notes(
    recording: Snapshot,
    trace: DeviceTrace,
    failures: Sequence[int],
    event: int,
    segments: Sequence[Segment] | None,
    live: Sequence[int],
    lifetimes: Lifetimes,
) -> list[str]:
    notes = []
    if not len(trace.events):
        notes.append("no events: record with torch.cuda.memory._record_memory_history() to see more than the end")
    if len(failures) > 1:
        notes.append(f"{len(failures)} out-of-memory events: {', '.join(f'{index:,}' for index in failures[:10])}")
    if not failures:
        notes.append("no out-of-memory event is in the recording")
    if segments is None:
        notes.append("the recording has no segments: the reserved memory is unknown, but a replay predicts it")
    elif any(segment.expandable for segment in segments):
        notes.append("expandable segments give back single pages: no memory block pins a whole segment")
    if live and not any(lifetimes.stack[number] for number in live):
        notes.append(
            "recorded without call stacks: torch.cuda.memory._record_memory_history(context='all') records them"
        )
    return notes


def _fits(
    recording: Snapshot, trace: DeviceTrace, event: int, capacity: int, say: Callable[[str], None]
) -> tuple[Fit, ...]:
    until = replace(trace, events=_until(trace.events, event + 1))
    asked, _ = with_failed_request(replace(recording, devices=(until,)))
    fits = []
    for config in FAMILIES:
        say(f"replaying under {config}")
        result = replay(asked, config, capacity)
        fits.append(Fit(config, result.oom_at, result.peak_reserved))
    return tuple(fits)


def _until(events: Events, end: int) -> Events:
    return Events(
        events.action[:end],
        events.address[:end],
        events.size[:end],
        events.stream[:end],
        events.time_us[:end],
        events.pool[:end],
        events.stack[:end],
        events.metadata[:end],
        events.has_pools,
    )
