"""The command ``explain``: print the owners of the memory in a snapshot."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from ..sizes import size_text
from .comparison import files_of_ranks, print_comparison, print_ranks
from .shared import capacity_bytes, console, errors, fail, print_notes, print_table, read

if TYPE_CHECKING:
    from ..snapshots.explanation import Explanation
    from ..snapshots.model import Snapshot

VIEWER = "https://pytorch.org/memory_viz"


def explain(
    snapshots: Annotated[
        list[Path],
        typer.Argument(
            help="File of torch.cuda.memory._dump_snapshot. Two files: why the second's peak is higher than the "
            "first's. More files, or a folder: the ranks of a job in a table.",
            metavar="SNAPSHOT...",
        ),
    ],
    at: Annotated[
        str | None,
        typer.Option(help="peak, oom or an event's number; oom where memory ran out, else peak.", show_default=False),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Lines of each table.")] = 10,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the memory over the events to this file: .png, .svg or .pdf.")
    ] = None,
    device: Annotated[int | None, typer.Option(help="Index of the device; all of them if left out.")] = None,
    capacity: Annotated[
        str | None,
        typer.Option(help='As in "24GiB", where a memory fraction was set: the memory that the process had.'),
    ] = None,
    ranks: Annotated[bool, typer.Option("--ranks", help="Show two files, or one, as ranks of a job too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Say where the memory was at the peak or where it ran out; compare two snapshots, or the ranks of a job."""
    as_ranks = ranks or len(snapshots) > 2 or any(path.is_dir() for path in snapshots)
    if as_ranks or len(snapshots) > 1:
        for name, value in (("--at", at), ("--plot", plot), ("--capacity", capacity)):
            if value is not None:
                raise typer.BadParameter(
                    "belongs to one snapshot: several are compared at the peak of each", param_hint=name
                )
        if as_ranks:
            print_ranks(files_of_ranks(snapshots), device, top, as_json)
        else:
            print_comparison(snapshots[0], snapshots[1], device, top, as_json)
        return
    [snapshot] = snapshots
    if plot is not None:
        _check_picture(plot)
    from ..snapshots.candidates import FAMILIES
    from ..snapshots.explain import explain as explain_one

    limit = None if capacity is None else capacity_bytes(capacity)
    # Limited to 18 digits: int() raises for thousands of digits.
    moment = int(at) if at is not None and re.fullmatch(r"-?[0-9]{1,18}", at) else at
    progress = Progress(TextColumn("{task.description}"), BarColumn(bar_width=20), console=errors, transient=True)
    with progress:
        task = progress.add_task("reading the snapshot", total=None)
        recording = read(snapshot)
        if not recording.devices:
            fail(f"{snapshot}: the snapshot holds neither events nor segments: there is nothing to explain")
        chosen, others = _chosen(recording, device, out_of_memory=at == "oom" or limit is not None)
        progress.update(task, total=len(chosen) * (2 + len(FAMILIES)) + (plot is not None))
        found = []
        for index in chosen:
            try:
                explanation = explain_one(
                    recording,
                    moment,
                    device=index,
                    capacity=limit,
                    progress=lambda what: progress.update(task, advance=1, description=what),
                )
            except ValueError as error:
                given = [name for name, value in (("--at", at), ("--capacity", capacity)) if value is not None]
                if not given:
                    fail(f"{snapshot}: {error}")
                which = "; choose one with --device" if len(chosen) > 1 and isinstance(moment, int) else ""
                raise typer.BadParameter(f"{error}{which}", param_hint=given) from error
            found.append(explanation)
        pictures = []
        if plot is not None:
            progress.update(task, advance=1, description="drawing")
            pictures = _draw(recording, chosen, plot, snapshot.name)
    undrawn = "no picture: there are no events to draw: record with torch.cuda.memory._record_memory_history()"
    if as_json:
        typer.echo(json.dumps({"explanations": [asdict(explanation) for explanation in found]}, indent=2))
        if plot is not None and not pictures:
            fail(f"{snapshot}: {undrawn}")
        return
    general = [note for note in found[0].notes if all(note in explanation.notes for explanation in found)]
    for explanation in found:
        _print(explanation, top, snapshot)
        print_notes(note for note in explanation.notes if note not in general)
    print_notes(general)
    if others:
        print_notes([f"memory did not run out on device {', '.join(map(str, others))}: left out"])
    for path in pictures:
        console.print(f"picture: {path}", soft_wrap=True)
    console.print(f"to look at it block by block: drop {snapshot.name} on {VIEWER}", soft_wrap=True)
    if plot is not None and not pictures:
        fail(f"{snapshot}: {undrawn}")


def _check_picture(plot: Path) -> None:
    """Refuse a picture that cannot be written, before the snapshot is read."""
    if importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter(
            "the picture is drawn with matplotlib; run: pip install matplotlib", param_hint="--plot"
        )
    if plot.is_dir():
        fail(f"{plot}: is a folder; --plot takes the file to write")
    from ..snapshots.timeline import picture_format

    try:
        picture_format(plot)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--plot") from error


def _chosen(recording: Snapshot, device: int | None, out_of_memory: bool) -> tuple[list[int], list[int]]:
    """Return the devices to explain, and the devices to leave out because memory did not run out there."""
    from ..snapshots.model import OOM

    indices = [trace.index for trace in recording.devices]
    if device is not None:
        if device not in indices:
            raise typer.BadParameter(f"recorded are {indices}, got {device}", param_hint="--device")
        return [device], []
    ran_out = [trace.index for trace in recording.devices if OOM in trace.events.action]
    # If memory ran out on no device, the explanation of each device says so.
    if not out_of_memory or not ran_out:
        return indices, []
    return ran_out, [index for index in indices if index not in ran_out]


def _draw(recording: Snapshot, devices: Sequence[int], plot: Path, name: str) -> list[Path]:
    """Draw each device with events to a separate file, and return the files."""
    from ..snapshots.timeline import draw, timeline

    drawn = [index for index in devices if len(recording.trace(index).events)]
    paths = []
    for index in drawn:
        path = plot if len(devices) == 1 else plot.with_stem(f"{plot.stem}-{index}")
        try:
            draw(timeline(recording, device=index), path, f"{name}, device {index}")
        except OSError as error:
            fail(f"{path}: {error.strerror or error}")
        paths.append(path)
    return paths


def _print(explanation: Explanation, top: int, snapshot: Path) -> None:
    from ..snapshots.groups import stream_label

    e = explanation
    when = f", {e.seconds:.3g} s after the first" if e.seconds is not None else ""
    moment = f"after event {e.event:,} ({e.action})" if e.event >= 0 else "before the first event"
    console.print(f"device {e.device}, {moment}{when}", style="bold")
    grid = Table.grid(padding=(0, 2))
    if e.request_bytes is not None:
        grid.add_row("asked for", size_text(e.request_bytes))
    parts = ((e.awaiting_bytes, "freed and still used"), (e.paused_bytes, "paused, without memory"))
    of_it = "".join(f", {size_text(part)} of it {what}" for part, what in parts if part)
    grid.add_row("live", f"{size_text(e.live_bytes)} in {e.live_blocks:,} block{'s' * (e.live_blocks != 1)}{of_it}")
    if e.reserved_bytes is not None:
        grid.add_row("reserved", size_text(e.reserved_bytes))
        grid.add_row(
            "free in it", f"{size_text(e.free_bytes or 0)}, the largest block {size_text(e.largest_free or 0)}"
        )
    others = sum(part.bytes for part in e.free_memory if part.stream != e.stream)
    if others:
        grid.add_row("", f"{size_text(others)} of it is free on other streams than {stream_label(e.stream)}")
    external = f"external {100 * e.external:.1f} %, " if e.external is not None else ""
    grid.add_row("fragmentation", f"{external}internal {100 * e.internal:.2f} %")
    if e.event != e.peak_event:
        peak = f"after event {e.peak_event:,}" if e.peak_event >= 0 else "before the first event"
        grid.add_row("peak", f"{size_text(e.peak_bytes)} live {peak}")
    found = f"{len(e.steps.starts):,}, found by {e.steps.found_by}" if e.steps.starts else e.steps.found_by
    grid.add_row("steps", found)
    console.print(grid)

    stacks = e.by_stack if any(group.stack for group in e.by_stack) else ()
    tables = [("by call stack", stacks), ("by size", e.by_size), ("by age", e.by_age)]
    # A table with one line says nothing that the line of live memory does not say.
    others_by = (("phase", e.by_phase), ("pool", e.by_pool), ("stream", e.by_stream), ("user_metadata", e.by_metadata))
    tables += [(f"by {what}", groups) for what, groups in others_by if len(groups) > 1]
    for what, groups in tables:
        shown = sorted(sorted(groups, key=lambda group: -group.bytes)[:top], key=groups.index)
        rows = [(group.label, f"{group.blocks:,}", size_text(group.bytes)) for group in shown]
        print_table(what, ("", "blocks", "live"), rows, len(groups))
    print_table(
        "kept from earlier steps",
        ("", "blocks", "live", "oldest", "steps"),
        [
            (group.label, f"{group.blocks:,}", size_text(group.bytes), f"step {group.oldest:,}", f"{group.steps:,}")
            for group in e.crossing[:top]
        ],
        len(e.crossing),
    )
    print_table(
        "growing from step to step: the least that is alive in each quarter of the steps",
        ("", "blocks kept", "first", "second", "third", "last quarter"),
        [
            (growth.label, f"{growth.blocks:,}", *(size_text(size) for size in growth.quarters))
            for growth in (e.growth or ())[:top]
        ],
        len(e.growth or ()),
    )
    print_table(
        f"segments that live blocks pin: {size_text(e.pinned_bytes)} free in them",
        ("largest block in it", "", "since event", "blocks", "live", "free"),
        [
            (
                pin.label,
                size_text(pin.largest),
                f"{pin.since:,}" if pin.since >= 0 else "before",
                f"{pin.blocks:,}",
                size_text(pin.live_bytes),
                size_text(pin.free_bytes),
            )
            for pin in e.pins[:top]
        ],
        len(e.pins),
    )
    if len(e.free_memory) > 1:
        print_table(
            "free memory: only requests of its stream and its pool get it",
            ("", "free", "largest block"),
            [
                (_owner(part.stream, part.pool), size_text(part.bytes), size_text(part.largest))
                for part in e.free_memory[:top]
            ],
            len(e.free_memory),
        )
    if e.fits and e.capacity is not None:
        rows = [
            (
                fit.config,
                "fits" if fit.oom_at is None else f"out of memory at event {fit.oom_at:,}",
                size_text(fit.peak_reserved),
            )
            for fit in e.fits
        ]
        print_table(f"the same requests with {size_text(e.capacity)}", ("allocator", "", "reserved"), rows, len(rows))
        shift, unit = next((shift, unit) for shift, unit in _UNITS if e.capacity % (1 << shift) == 0)
        search = f"pyactcomp tune {shlex.quote(str(snapshot))} --capacity {e.capacity >> shift}{unit}"
        console.print(f"to search all settings: {search}", soft_wrap=True)


def _owner(stream: int, pool: tuple[int, int]) -> str:
    from ..snapshots.groups import stream_label

    return stream_label(stream) + (f", private pool {pool}" if pool != (0, 0) else "")


_UNITS = ((30, "GiB"), (20, "MiB"), (0, ""))
