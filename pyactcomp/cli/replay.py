"""The command ``replay``: print the memory needed under other allocator settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..sizes import size_text
from .shared import (
    AsJson,
    capacity_bytes,
    console,
    count_text,
    fail,
    numbers_table,
    progress_bar,
    read,
    seconds_text,
)

if TYPE_CHECKING:
    from ..snapshots.model import DeviceTrace, Snapshot
    from ..snapshots.replay import ReplayResult


def replay(
    snapshots: Annotated[
        list[Path], typer.Argument(help="Files of torch.cuda.memory._dump_snapshot.", metavar="SNAPSHOT")
    ],
    config: Annotated[
        list[str] | None,
        typer.Option(help="native, expandable or pyactcomp, with settings as in native[max_split_size_mb:128]."),
    ] = None,
    capacity: Annotated[str | None, typer.Option(help='The memory of each device, as in "24GiB".')] = None,
    as_json: AsJson = False,
) -> None:
    """Replay a memory snapshot under allocators with other settings; needs no GPU."""
    from ..snapshots.candidates import FAMILIES
    from ..snapshots.failed_request import with_failed_request
    from ..snapshots.replay import parse_configuration
    from ..snapshots.replay import replay as replay_one

    limit = None if capacity is None else capacity_bytes(capacity)
    configs = config or list(FAMILIES)
    for each in configs:
        try:
            if parse_configuration(each)[0].memory_fraction < 1 and limit is None:
                raise ValueError(f"'{each}' takes a share of the device's memory: give --capacity")
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--config") from error
    rows: list[dict[str, Any]] = []
    with progress_bar() as progress:
        task = progress.add_task("", total=None)
        for path in snapshots:
            progress.reset(task, total=None, description=f"reading {path.name}")
            snapshot, notes = with_failed_request(read(path))
            if not snapshot.devices:
                fail(f"{path}: the snapshot holds neither events nor segments: there is nothing to replay")
            for trace in snapshot.devices:
                of_others = tuple(f"device {other.index}:" for other in snapshot.devices if other is not trace)
                known = [note for note in (*snapshot.notes, *notes) if not note.startswith(of_others)]
                for each in configs:
                    progress.reset(task, total=len(trace.events), description=f"{path.name}: {each}")
                    try:
                        result = replay_one(
                            snapshot,
                            each,
                            limit,
                            device=trace.index,
                            progress=lambda events: progress.update(task, completed=events),
                        )
                    except ValueError as error:
                        fail(f"{path}: {error}")
                    row = _row(path, snapshot, trace, result)
                    rows.append({**row, "notes": [*known, *_notes(trace, result)]})
    if as_json:
        typer.echo(json.dumps({"rows": rows}, indent=2))
    else:
        _print_rows(rows)


def _row(path: Path, snapshot: Snapshot, trace: DeviceTrace, result: ReplayResult) -> dict[str, Any]:
    from ..snapshots.call_stacks import described, fold_stacks

    row: dict[str, Any] = {
        "trace": path.name,
        "config": result.config,
        "peak_allocated": result.peak_allocated,
        "peak_reserved": result.peak_reserved,
        "driver_calls": result.driver_calls,
        "oom_at": result.oom_at,
        "device": trace.index,
        "peak_active": result.peak_active,
        "peak_requested": result.peak_requested,
        "utilization": result.utilization,
        "retries": result.retries,
        "driver_seconds": result.driver_seconds,
        "events": len(trace.events),
        "oom_size": None,
        "oom_stack": [],
    }
    # oom_at is also 0 if the blocks from before the first event do not fit: then no recorded request failed.
    before = result.oom_at == 0 and trace.beginning.blocks
    if result.oom_at is not None and result.oom_at < len(trace.events) and not before:
        row["oom_size"] = trace.events.size[result.oom_at]
        stack = snapshot.stacks[trace.events.stack[result.oom_at]]
        (folded,) = fold_stacks(replace(snapshot, stacks=(stack,)))
        row["oom_stack"] = [described(frame) for frame in folded]
    return row


def _notes(trace: DeviceTrace, result: ReplayResult) -> list[str]:
    notes = []
    if not len(trace.events):
        notes.append("no events were recorded: only the blocks that existed at the end are known")
    elif not trace.beginning.complete:
        notes.append("there are no segments in the file: blocks without events are not known")
    if result.unknown_frees:
        notes.append(f"frees of addresses without a recorded allocation, ignored: {result.unknown_frees}")
    if result.lost_frees:
        notes.append(f"missing frees, of addresses that were allocated a second time: {result.lost_frees}")
    if result.cache_emptied:
        notes.append(f"times that the program emptied the cache, and the replay too: {result.cache_emptied}")
    if result.unclear_releases:
        notes.append(
            "of these, times that memory was perhaps given back to serve a request, which the recording does not tell: "
            f"{result.unclear_releases} (record with call stacks to know)"
        )
    if result.pressure_releases:
        notes.append(
            f"times that the recorded allocator gave memory back to serve a request: {result.pressure_releases}"
        )
    return [f"device {trace.index}: {note}" for note in notes]


def _print_rows(rows: Sequence[dict[str, Any]]) -> None:
    several = {(row["trace"], row["device"]): f"{row['trace']}, device {row['device']}" for row in rows}
    if len(several) == len({row["trace"] for row in rows}):
        several = {(trace, device): trace for trace, device in several}
    printed = set()
    for each, title in several.items():
        own = [row for row in rows if (row["trace"], row["device"]) == each]
        console.print(f"{title}: {count_text(own[0]['events'], 'event')}", soft_wrap=True)
        table = numbers_table(
            ["config"],
            "peak\nallocated",
            "peak\nreserved",
            "utili-\nsation",
            "driver\ncalls",
            "retries",
            "in the\ndriver",
            "out of\nmemory",
        )
        for row in own:
            table.add_row(
                row["config"],
                size_text(row["peak_allocated"]),
                size_text(row["peak_reserved"]),
                f"{row['utilization']:.1%}",
                f"{row['driver_calls']}",
                f"{row['retries']}",
                seconds_text(row["driver_seconds"]),
                "no" if row["oom_at"] is None else f"event {row['oom_at']}",
            )
        console.print(table)
        for row in own:
            if row["oom_at"] is not None:
                console.print(f"{row['config']} {_where(row)}", soft_wrap=True)
            for frame in row["oom_stack"]:
                console.print(f"  {frame}", soft_wrap=True)
        for note in dict.fromkeys(note for row in own for note in row["notes"]):
            if (each[0], note) not in printed:
                console.print(f"note: {note}", soft_wrap=True)
            printed.add((each[0], note))


def _where(row: dict[str, Any]) -> str:
    if row["oom_size"] is None:
        return "has no room for the blocks from before the first event, or for the first request"
    stack = ", requested by" if row["oom_stack"] else ""
    return f"runs out of memory at event {row['oom_at']}, a request of {size_text(row['oom_size'])}{stack}"
