"""Turns the request a recorded program died of into an allocation to replay."""

from __future__ import annotations

from array import array
from dataclasses import replace

from .model import ALLOC, OOM, DeviceTrace, Snapshot

# Above every recorded address, and every segment a replay places near one.
_BEYOND = 1 << 40


def with_failed_request(snapshot: Snapshot) -> tuple[Snapshot, tuple[str, ...]]:
    """Return the snapshot with the last failed request as an allocation, if no other allocation follows; and notes.

    Otherwise a recording that ends out of memory would fit in the memory the program ran out of. Earlier failed
    requests are left out and named in the notes: the program went on without this memory.

    Examples
    --------
    >>> import json, tempfile
    >>> from pyactcomp.snapshots import replay
    >>> from pyactcomp.snapshots import read_snapshot
    >>> event = {"action": "oom", "device_free": 0, "size": 30 << 20, "stream": 0, "time_us": 7}
    >>> with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
    ...     json.dump({"segments": [], "device_traces": [[event]]}, file)
    ...     file.flush()
    ...     recorded = read_snapshot(file.name)
    >>> snapshot, notes = with_failed_request(recorded)
    >>> replay(recorded).peak_reserved >> 20, replay(snapshot).peak_reserved >> 20
    (0, 30)
    >>> notes
    ('device 0: the recording ends out of memory; the 31,457,280 bytes of event 0 are replayed as an allocation',)
    """
    devices = []
    notes: list[str] = []
    for trace in snapshot.devices:
        changed, of_device = _of_device(trace)
        devices.append(changed)
        notes += of_device
    return replace(snapshot, devices=tuple(devices)), tuple(notes)


def _of_device(trace: DeviceTrace) -> tuple[DeviceTrace, list[str]]:
    events = trace.events
    failed = [row for row, action in enumerate(events.action) if action == OOM]
    if not failed:
        return trace, []
    notes = []
    last = failed[-1]
    if ALLOC not in events.action[last:]:
        failed.pop()
        action, address = array("B", events.action), array("q", events.address)
        action[last] = ALLOC
        address[last] = max(events.address) + _BEYOND
        notes.append(
            f"device {trace.index}: the recording ends out of memory; the {events.size[last]:,} bytes of "
            f"event {last:,} are replayed as an allocation"
        )
        events = replace(events, action=action, address=address)
    if failed:
        notes.append(
            f"device {trace.index}: memory ran out, first at event {failed[0]:,} ({len(failed):,} in all), and the "
            "program went on: the failed requests are not replayed"
        )
    return replace(trace, events=events), notes
