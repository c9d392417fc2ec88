"""The commands ``replay`` and ``tune``: what other allocator settings would have done with a snapshot."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import humanize
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from .allocator.recording import DeviceTrace, Snapshot
    from .allocator.replay import ReplayResult
    from .allocator.trials import Trial, TuneProgress, TuneResult

# Of the call stack of an allocation that fails.
INNERMOST = 5

_console = Console(markup=False, highlight=False)
_errors = Console(markup=False, highlight=False, stderr=True)

_Snapshots = Annotated[
    list[Path], typer.Argument(help="Files of torch.cuda.memory._dump_snapshot.", metavar="SNAPSHOT")
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def replay(
    snapshots: _Snapshots,
    config: Annotated[
        list[str] | None,
        typer.Option(help="native, expandable or pyactcomp, with settings as in native[max_split_size_mb:128]."),
    ] = None,
    capacity: Annotated[str | None, typer.Option(help='The memory of each device, as in "24GiB".')] = None,
    as_json: _AsJson = False,
) -> None:
    """Say what allocators with other settings would have done with a memory snapshot; needs no GPU."""
    from .allocator.candidates import FAMILIES
    from .allocator.failed_request import with_failed_request
    from .allocator.replay import parse_configuration
    from .allocator.replay import replay as replay_one

    limit = None if capacity is None else capacity_bytes(capacity)
    configs = config or list(FAMILIES)
    for each in configs:
        try:
            if parse_configuration(each)[0].memory_fraction < 1 and limit is None:
                raise ValueError(f"'{each}' takes a share of the device's memory: give --capacity")
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--config") from error
    rows: list[dict[str, Any]] = []
    with _progress() as progress:
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
    # Index 0 also where what existed before does not fit: then no request of the events failed.
    before = result.oom_at == 0 and trace.beginning.blocks
    if result.oom_at is not None and result.oom_at < len(trace.events) and not before:
        row["oom_size"] = trace.events.size[result.oom_at]
        stack = snapshot.stacks[trace.events.stack[result.oom_at]][:INNERMOST]
        frames = [snapshot.frames[number] for number in stack]
        row["oom_stack"] = [f"{frame.filename}:{frame.line} {frame.name}" for frame in frames]
    return row


def _notes(trace: DeviceTrace, result: ReplayResult) -> list[str]:
    notes = []
    if not len(trace.events):
        notes.append("no events were recorded: only what existed at the end is known")
    elif not trace.beginning.complete:
        notes.append("there are no segments in the file: what no event touched is not known")
    if result.unknown_frees:
        notes.append(
            f"frees of addresses that nothing was seen to allocate, which changed nothing: {result.unknown_frees}"
        )
    if result.lost_frees:
        notes.append(f"frees that are missing, of addresses that were allocated again: {result.lost_frees}")
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
        _console.print(f"{title}: {count_text(own[0]['events'], 'event')}", soft_wrap=True)
        table = _table(
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
                _seconds(row["driver_seconds"]),
                "no" if row["oom_at"] is None else f"event {row['oom_at']}",
            )
        _console.print(table)
        for row in own:
            if row["oom_at"] is not None:
                _console.print(f"{row['config']} {_where(row)}", soft_wrap=True)
            for frame in row["oom_stack"]:
                _console.print(f"  {frame}", soft_wrap=True)
        for note in dict.fromkeys(note for row in own for note in row["notes"]):
            if (each[0], note) not in printed:
                _console.print(f"note: {note}", soft_wrap=True)
            printed.add((each[0], note))


def _where(row: dict[str, Any]) -> str:
    if row["oom_size"] is None:
        return "has no room for what existed before the first event, or for that"
    stack = ", requested by" if row["oom_stack"] else ""
    return f"runs out of memory at event {row['oom_at']}, a request of {size_text(row['oom_size'])}{stack}"


def tune(
    snapshot: Annotated[Path, typer.Argument(help="File of torch.cuda.memory._dump_snapshot.", metavar="SNAPSHOT")],
    capacity: Annotated[str, typer.Option(help='The memory of each device that is to do, as in "24GiB".')],
    time_limit: Annotated[float, typer.Option(help="Seconds after which the best so far is taken.")] = 120.0,
    as_json: _AsJson = False,
) -> None:
    """Search the allocator settings with which a recorded program takes the least memory; Ctrl-C ends the search."""
    from .allocator.tune import tune as search

    limit = capacity_bytes(capacity)
    if not time_limit > 0:
        raise typer.BadParameter("a number of seconds above 0", param_hint="--time-limit")
    with _progress() as progress:
        task = progress.add_task(f"reading {snapshot.name}", total=time_limit)

        def show(now: TuneProgress) -> None:
            best = "" if now.best is None else f"best so far: {now.best.config}, {size_text(now.best.peak_reserved)}"
            progress.update(task, completed=now.seconds, description=f"{count_text(now.replays, 'replay')}, {best}")

        recording = read(snapshot)
        try:
            result = search(recording, limit, time_limit=time_limit, progress=show)
        except ValueError as error:
            fail(f"{snapshot}: {error}")
    if as_json:
        typer.echo(json.dumps(_tuned(snapshot, result), indent=2))
    else:
        _print_tuned(result)
    if result.stopped == "interrupted":
        raise typer.Exit(130)


def _tuned(path: Path, result: TuneResult) -> dict[str, Any]:
    def entry(trial: Trial | None) -> dict[str, Any] | None:
        return (
            None
            if trial is None
            else {
                "config": trial.config,
                "variable": trial.variable,
                "conf": trial.conf,
                "peak_reserved": trial.peak_reserved,
                "retries": trial.retries,
                "driver_calls": trial.driver_calls,
                "driver_seconds": trial.driver_seconds,
                "fits": trial.fits,
                "smallest_capacity": trial.smallest_capacity,
            }
        )

    return {
        "trace": path.name,
        "capacity": result.capacity,
        "fits": result.fits,
        "best": entry(result.best),
        "recorded": entry(result.recorded),
        "pytorch": entry(result.pytorch),
        "pyactcomp": entry(result.pyactcomp),
        "replays": result.replays,
        "stopped": result.stopped,
        "notes": list(result.notes),
    }


def _print_tuned(result: TuneResult) -> None:
    table = _table(["best of", "setting"], "peak\nreserved", "saved", "retries", "in the\ndriver", "smallest\ncapacity")
    recorded = result.recorded
    for name, trial in (("recorded", recorded), ("PyTorch", result.pytorch), ("pyactcomp", result.pyactcomp)):
        if trial is None:
            continue
        saved = recorded.peak_reserved - trial.peak_reserved
        comparable = trial is not recorded and trial.fits and recorded.fits
        table.add_row(
            name,
            trial.config,
            size_text(trial.peak_reserved) if trial.fits else "out of memory",
            "" if not comparable else size_text(saved) if saved > 0 else "none",
            f"{trial.retries}",
            _seconds(trial.driver_seconds),
            "not known" if trial.smallest_capacity is None else size_text(trial.smallest_capacity),
        )
    _console.print(table)
    for note in result.notes:
        _console.print(f"note: {note}", soft_wrap=True)
    if result.stopped != "finished":
        so_far = ": the best so far" if result.fits or result.best.smallest_capacity is not None else ""
        _console.print(f"stopped by {_STOPPED[result.stopped]} after {count_text(result.replays, 'replay')}{so_far}")
    for line in _advice(result):
        _console.print(line, soft_wrap=True)


_STOPPED = {"time limit": "the time limit", "interrupted": "Ctrl-C"}
_FRACTION = "per_process_memory_fraction"


def _advice(result: TuneResult) -> list[str]:
    """Return what the best setting needs, and the lines that set it; none that set what is not known to work."""
    best, least = result.best, result.best.smallest_capacity
    recorded = best.config == result.recorded.config
    if result.fits:
        lines = [] if least is None else [f"{best.config} works with {size_text(least)}"]
        if least is not None and least > 2 << 20:
            lines[0] += ": with 2 MiB less memory runs out"
        if recorded:
            known = "best: there is nothing to change" if result.stopped == "finished" else "best so far"
            lines.append(f"the setting of the recording, {best.config}, is the {known}")
    else:
        nothing = f"nothing tried fits in {size_text(result.capacity)}"
        if least is None:
            why = "more than 512 GiB" if result.stopped == "finished" else "not known: the search ended before"
            return [f"{nothing}; what would do is {why}"]
        whose = ", the setting of the recording" if recorded else ""
        lines = [f"{nothing}; the least found to work is {size_text(least)}, with {best.config}{whose}"]
    return lines if recorded else lines + _export(result)


def _export(result: TuneResult) -> list[str]:
    """Return the lines that set the best setting."""
    best = result.best
    if best.config == "native":
        return ["for PyTorch's defaults:", "unset PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF"]
    lines = [f"export {best.variable}={shlex.quote(best.conf)}"] if best.conf else []
    if best.variable == "PYACTCOMP_ALLOC_CONF":
        lines.append("pyactcomp run SCRIPT")
        if result.pytorch is not None and result.pytorch.conf and result.fits and result.pytorch.fits:
            quoted = shlex.quote(result.pytorch.conf)
            lines += ["or, for PyTorch's own allocator:", f"export PYTORCH_ALLOC_CONF={quoted}"]
    of_pytorch = [line for line in lines if line.startswith("export PYTORCH_ALLOC_CONF")]
    if of_pytorch:
        lines.append("(torch before 2.9 reads PYTORCH_CUDA_ALLOC_CONF, which goes first in later ones: unset it there)")
    share = next((line.partition(f"{_FRACTION}:")[2].split(",")[0] for line in of_pytorch if _FRACTION in line), "")
    if share:
        lines.append(
            f"(torch before 2.10 does not know {_FRACTION}: leave it out of the variable there, and let the program "
            f"begin with torch.cuda.set_per_process_memory_fraction({share}))"
        )
    if any(_FRACTION in line for line in lines):
        lines.append(
            f"({_FRACTION} is a share of all the memory that the device has: with more than --capacity, it allows more)"
        )
    return lines


def _table(texts: Sequence[str], *numbers: str) -> Table:
    """Return a table without rows, whose cells fold rather than lose characters."""
    table = Table(box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    for heading in texts:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, overflow="fold", justify="right")
    return table


def _progress() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(bar_width=20), TaskProgressColumn(), TimeElapsedColumn()
    return Progress(*columns, console=_errors, transient=True)


def read(path: Path) -> Snapshot:
    """Return the snapshot of a file; a file that is none ends the command."""
    from .allocator.snapshot import read_snapshot

    try:
        return read_snapshot(path)
    except OSError as error:
        fail(f"{path}: {error.strerror or error}")
    except ValueError as error:
        fail(f"{error}")


def capacity_bytes(text: str) -> int:
    """Return what ``--capacity`` means in bytes; what is no capacity is refused."""
    from .allocator import SimulatedDevice

    try:
        size = SimulatedDevice(text).capacity
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--capacity") from error
    if size < 2 << 20:
        raise typer.BadParameter(f"at least 2 MiB, got {text}", param_hint="--capacity")
    return size


def size_text(size: int) -> str:
    """Return bytes in words."""
    return humanize.naturalsize(size, binary=True, format="%.2f")


def count_text(count: int, noun: str) -> str:
    """Return a number of things, a noun with its plural by s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def fail(message: str) -> NoReturn:
    """Print an error and end the command with exit code 1."""
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(1)
