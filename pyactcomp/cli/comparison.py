"""What the command ``explain`` prints of several snapshots: two compared, or the ranks of a job."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..sizes import size_text
from .shared import console, fail, numbers_table, print_notes, print_table, read

if TYPE_CHECKING:
    from ..snapshots.comparison import Peak
    from ..snapshots.model import Snapshot


def print_comparison(before: Path, after: Path, device: int | None, top: int, as_json: bool) -> None:
    """Print which call sites make the second snapshot's peak higher."""
    from ..snapshots.comparison import compare

    recordings = [_recording(path, device) for path in (before, after)]
    if device is None:
        for path, recording in zip((before, after), recordings, strict=True):
            if len(recording.devices) > 1:
                indices = [trace.index for trace in recording.devices]
                raise typer.BadParameter(f"{path} holds devices {indices}: choose one", param_hint="--device")
    found = compare(*recordings, device=device)
    if as_json:
        typer.echo(json.dumps({"comparison": asdict(found)}, indent=2))
        return
    for which, path, peak in (("a", before, found.before), ("b", after, found.after)):
        console.print(f"{which}: {path}, {_peak(peak)}", soft_wrap=True)
    by = f"{size_text(abs(found.bytes))} ({abs(found.bytes):,} bytes)"
    differs = f"{by} {'higher' if found.bytes > 0 else 'lower'} than" if found.bytes else "as high as"
    console.print(f"b's peak is {differs} a's", style="bold")
    for what, differences in (("by call site", found.by_stack), ("by size", found.by_size)):
        changed = [each for each in differences if each.bytes or each.before_blocks != each.after_blocks]
        largest = sorted(changed, key=lambda each: -abs(each.bytes))
        shown = [each for each in changed if any(each is one for one in largest[:top])]
        rows = [
            (
                each.label,
                f"{each.before_blocks:,}",
                f"{each.after_blocks:,}",
                size_text(each.before_bytes),
                size_text(each.after_bytes),
                f"{each.bytes:+,}",
            )
            for each in shown
        ]
        left = [each for each in differences if not any(each is one for one in shown)]
        if rows and left:
            rows.append(
                (
                    "all others",
                    f"{sum(each.before_blocks for each in left):,}",
                    f"{sum(each.after_blocks for each in left):,}",
                    size_text(sum(each.before_bytes for each in left)),
                    size_text(sum(each.after_bytes for each in left)),
                    f"{sum(each.bytes for each in left):+,}",
                )
            )
        headings = ("", "blocks in a", "in b", "live in a", "in b", "b - a, bytes")
        print_table(what, headings, rows, len(rows))
    print_notes(found.notes)


def print_ranks(paths: Sequence[Path], device: int | None, top: int, as_json: bool) -> None:
    """Print the ranks of a job in one table, and the call sites by which they differ."""
    from ..snapshots.comparison import compare_ranks

    names = _names(paths)

    def recordings() -> Iterator[tuple[str, Snapshot]]:
        for name, path in zip(names, paths, strict=True):
            yield name, _recording(path, device)

    found = compare_ranks(recordings(), device=device)
    if as_json:
        typer.echo(json.dumps({"ranks": asdict(found)}, indent=2))
        return
    table = numbers_table(("", "most held by"), "device", "peak live", "reserved", "at the end", "failed request")
    for rank in found.ranks:
        table.add_row(
            rank.name,
            f"{rank.label}, {size_text(rank.label_bytes)}",
            f"{rank.peak.device}",
            size_text(rank.peak.bytes),
            "" if rank.peak.most_reserved is None else size_text(rank.peak.most_reserved),
            size_text(rank.peak.end_bytes),
            "" if rank.peak.failed_bytes is None else size_text(rank.peak.failed_bytes),
        )
    console.print(table)
    print_table(
        "call sites that differ",
        ("", "least", "on", "most", "on", "difference, bytes"),
        [
            (
                spread.label,
                size_text(min(spread.bytes)),
                found.ranks[spread.bytes.index(min(spread.bytes))].name,
                size_text(max(spread.bytes)),
                found.ranks[spread.bytes.index(max(spread.bytes))].name,
                f"{spread.difference:,}",
            )
            for spread in found.by_stack[:top]
        ],
        len(found.by_stack),
    )
    if not found.by_stack:
        console.print("every call site holds the same on all ranks")
    print_notes(found.notes)


def files_of_ranks(paths: Sequence[Path]) -> list[Path]:
    """Return the files, and those in the folders, by the numbers in their names."""
    files = []
    for path in paths:
        if path.is_dir():
            inside = sorted((file for file in path.iterdir() if file.is_file()), key=_by_number)
            if not inside:
                fail(f"{path}: the folder has no files; write one snapshot for each rank into it")
            files += inside
        else:
            files.append(path)
    return files


def _by_number(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]{1,18})", path.name)]


def _names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each file: without folders, if that tells them apart."""
    names = [path.name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def _recording(path: Path, device: int | None) -> Snapshot:
    recording = read(path)
    if not recording.devices:
        fail(f"{path}: the snapshot holds neither events nor segments: there is nothing to explain")
    indices = [trace.index for trace in recording.devices]
    if device is not None and device not in indices:
        raise typer.BadParameter(f"{path}: recorded are {indices}, got {device}", param_hint="--device")
    return recording


def _peak(peak: Peak) -> str:
    when = f"after event {peak.event:,}" if peak.event >= 0 else "before the first event"
    reserved = "" if peak.most_reserved is None else f", at most {size_text(peak.most_reserved)} reserved"
    failed = "" if peak.failed_bytes is None else f"; a request of {size_text(peak.failed_bytes)} failed"
    return (
        f"device {peak.device}: {size_text(peak.bytes)} live in {peak.blocks:,} block{'s' * (peak.blocks != 1)} "
        f"{when}{reserved}{failed}"
    )
