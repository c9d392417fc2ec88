"""Arguments, texts and errors shared by several commands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from ..snapshots.model import Snapshot

# No markup: paths and reasons may contain square brackets.
console = Console(markup=False, highlight=False)
errors = Console(markup=False, highlight=False, stderr=True)

SnapshotFile = Annotated[Path, typer.Argument(help="File of torch.cuda.memory._dump_snapshot.", metavar="SNAPSHOT")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def fail(message: object) -> NoReturn:
    """Print an error and end the command with exit code 2, as for an argument that is refused."""
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(2)


def read(path: Path) -> Snapshot:
    """Return the snapshot in a file, or end the command if the file has none."""
    from ..snapshots import read_snapshot

    try:
        return read_snapshot(path)
    except FileNotFoundError:
        fail(f'{path}: No such file or directory; write one with torch.cuda.memory._dump_snapshot("{path.name}")')
    except OSError as error:
        fail(f"{path}: {error.strerror or error}")
    except ValueError as error:
        fail(error)


def capacity_bytes(text: str) -> int:
    """Return the value of ``--capacity`` in bytes, or refuse it as an argument."""
    from .._core import SimulatedDevice

    try:
        size = SimulatedDevice(text).capacity
    except ValueError as error:
        said = str(error).partition(" (csrc/")[0]  # the line that raised is of no use to who typed the number
        raise typer.BadParameter(said, param_hint="--capacity") from error
    if size < 2 << 20:
        raise typer.BadParameter(f"at least 2 MiB, got {text}", param_hint="--capacity")
    return size


def count_text(count: int, noun: str) -> str:
    """Return a number and a noun, with a plural s if needed."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def seconds_text(seconds: float) -> str:
    """Return a duration in seconds or milliseconds."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def print_notes(notes: Iterable[str]) -> None:
    """Print a line for each note."""
    for note in notes:
        console.print(f"note: {note}", soft_wrap=True)


def print_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], total: int) -> None:
    """Print rows under a title, which says how many of how many they are; nothing if there are none."""
    rows = list(rows)
    if not rows:
        return
    left = f" ({len(rows)} of {total:,})" if len(rows) < total else ""
    table = Table(title=title + left, title_justify="left", box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    table.add_column(headings[0], overflow="fold")
    for heading in headings[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def numbers_table(texts: Sequence[str], *numbers: str) -> Table:
    """Return a table without rows; long cells fold instead of losing characters."""
    table = Table(box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    for heading in texts:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, overflow="fold", justify="right")
    return table


def progress_bar() -> Progress:
    """Return a progress bar on stderr, erased at the end."""
    columns = TextColumn("{task.description}"), BarColumn(bar_width=20), TaskProgressColumn(), TimeElapsedColumn()
    return Progress(*columns, console=errors, transient=True)
