"""The command ``tune``: search the allocator settings for the least memory of a recorded program."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..sizes import size_text
from .shared import (
    AsJson,
    SnapshotFile,
    capacity_bytes,
    console,
    count_text,
    fail,
    numbers_table,
    print_notes,
    progress_bar,
    read,
    seconds_text,
)

if TYPE_CHECKING:
    from ..snapshots.trials import Trial, TuneProgress, TuneResult


def tune(
    snapshot: SnapshotFile,
    capacity: Annotated[str, typer.Option(help='Memory of each device to fit into, as in "24GiB".')],
    time_limit: Annotated[float, typer.Option(help="Seconds after which the best so far is taken.")] = 120.0,
    as_json: AsJson = False,
) -> None:
    """Search for the allocator settings with the least memory for a recorded program; Ctrl-C ends the search."""
    from ..snapshots.tune import tune as search

    limit = capacity_bytes(capacity)
    if not time_limit > 0:
        raise typer.BadParameter("a number of seconds above 0", param_hint="--time-limit")
    with progress_bar() as progress:
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
        "recorded_seconds": result.seconds,
        "replays": result.replays,
        "stopped": result.stopped,
        "notes": list(result.notes),
    }


def _print_tuned(result: TuneResult) -> None:
    table = numbers_table(
        ["best of", "setting"], "peak\nreserved", "saved", "retries", "in the\ndriver", "smallest\ncapacity"
    )
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
            seconds_text(trial.driver_seconds),
            "not known" if trial.smallest_capacity is None else size_text(trial.smallest_capacity),
        )
    console.print(table)
    print_notes(result.notes)
    if result.stopped != "finished":
        so_far = ": the best so far" if result.fits or result.best.smallest_capacity is not None else ""
        console.print(f"stopped by {_STOPPED[result.stopped]} after {count_text(result.replays, 'replay')}{so_far}")
    for line in _advice(result):
        console.print(line, soft_wrap=True)


_STOPPED = {"time limit": "the time limit", "interrupted": "Ctrl-C"}
_FRACTION = "per_process_memory_fraction"


def _advice(result: TuneResult) -> list[str]:
    """Return the capacity needed by the best setting, and the lines to export the setting if known to work."""
    best, least = result.best, result.best.smallest_capacity
    recorded = best.config == result.recorded.config
    if result.fits:
        lines = [] if least is None else [f"{best.config} works with {size_text(least)}"]
        if least is not None and least > 2 << 20:
            lines[0] += ": with 2 MiB less memory runs out"
        lines += _time_in_the_driver(result)
        if recorded:
            known = "best: there is nothing to change" if result.stopped == "finished" else "best so far"
            lines.append(f"the setting of the recording, {best.config}, is the {known}")
    else:
        nothing = f"nothing tried fits in {size_text(result.capacity)}"
        if least is None:
            why = "more than 512 GiB" if result.stopped == "finished" else "not known: the search ended before"
            return [f"{nothing}; the capacity that would be enough is {why}"]
        whose = ", the setting of the recording" if recorded else ""
        lines = [f"{nothing}; the least found to work is {size_text(least)}, with {best.config}{whose}"]
    return lines if recorded else lines + _export(result)


def _time_in_the_driver(result: TuneResult) -> list[str]:
    """Return a line for each setting that pays for its memory with time, at least a percent of the recorded one's."""
    recorded = result.recorded
    return [
        f"memory comes first: {trial.config} spends {trial.driver_seconds / result.seconds:.0%} of the recorded "
        f"{seconds_text(result.seconds)} in the driver, the recorded setting "
        f"{recorded.driver_seconds / result.seconds:.0%}"
        for trial in dict.fromkeys(filter(None, (result.best, result.pytorch)))
        if result.seconds and trial.driver_seconds - recorded.driver_seconds >= 0.01 * result.seconds
    ]


def _export(result: TuneResult) -> list[str]:
    """Return the shell lines for the best setting."""
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
