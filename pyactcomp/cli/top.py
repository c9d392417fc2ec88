"""The command ``top``: all GPUs of this machine and their processes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from ..sizes import size_text
from .shared import AsJson, console, numbers_table

if TYPE_CHECKING:
    from ..live.nvml import Gpu

_BAR = 20


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one table and end.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds between two looks; end with Ctrl-C.")
    ] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Show all GPUs of this machine, their memory and their processes; needs nvidia-ml-py."""
    from ..errors import PyactcompError

    try:
        _show(once, interval, as_json)
    except PyactcompError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        return


def _show(once: bool, interval: float, as_json: bool) -> None:
    found = _gpus()
    if as_json:
        typer.echo(json.dumps({"gpus": [asdict(gpu) for gpu in found]}, indent=2))
    elif once:
        console.print(_shown(found))
    else:
        with Live(_shown(found), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                live.update(_shown(_gpus()), refresh=True)


def _gpus() -> tuple[Gpu, ...]:
    from ..live import nvml

    return nvml.gpus()


def _shown(gpus: Sequence[Gpu]) -> Group:
    cards = numbers_table(("GPU", "name", ""), "used", "of", "busy")
    users = numbers_table(("GPU", "process"), "pid", "memory")
    for gpu in gpus:
        filled = round(_BAR * gpu.used / gpu.total)
        busy = "?" if gpu.busy is None else f"{gpu.busy} %"
        bar = "█" * filled + "·" * (_BAR - filled)
        cards.add_row(str(gpu.index), gpu.name, bar, size_text(gpu.used), size_text(gpu.total), busy)
        for each in sorted(gpu.processes, key=lambda process: -(process.bytes or 0)):
            size = "?" if each.bytes is None else size_text(each.bytes)
            users.add_row(str(gpu.index), each.name, str(each.pid), size)
    return Group(cards, users if users.row_count else Text("no process that this user or container sees"))
