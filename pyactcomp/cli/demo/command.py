"""The command ``demo``: its options, progress, table and picture."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import humanize
import torch
import typer
from rich import box
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..shared import console

if TYPE_CHECKING:
    from .training import Row


class DeviceChoice(str, Enum):
    """Where the demo runs."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def _device(choice: DeviceChoice) -> torch.device:
    if choice is DeviceChoice.cuda and not torch.cuda.is_available():
        raise typer.BadParameter(
            "torch finds no CUDA device; use --device cpu, or see pyactcomp doctor", param_hint="--device"
        )
    if choice is DeviceChoice.auto:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(choice.value)


def demo(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the table's rows to this file.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("pyactcomp-demo"),
    steps: Annotated[int | None, typer.Option(help="Training steps of each method.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the order of the data.")] = 0,
    device: Annotated[DeviceChoice, typer.Option(help="auto takes the GPU if there is one.")] = DeviceChoice.auto,
) -> None:
    """Train a small transformer plain, compressed and checkpointed, and compare memory, speed and loss."""
    if importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("the demo draws a picture with matplotlib; run: pip install 'pyactcomp[bench]'")
    from . import plot, training

    try:
        config = training.default_config(_device(device), steps=steps, seed=seed)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--steps") from error
    console.print(f"training on {config.device}: plain, compressed and checkpointed, step by step in turn")
    with Progress(
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(bar_width=20),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
        console=console,
    ) as progress:
        task = progress.add_task("", total=config.steps)

        def on_step(finished: int, losses: Mapping[str, float]) -> None:
            shown = ", ".join(f"{method} {loss:.3f}" for method, loss in losses.items())
            progress.update(task, completed=finished, description=shown)

        result = training.run(config, on_step)

    out.mkdir(parents=True, exist_ok=True)
    picture = out / "demo.png"
    plot.draw(result, picture)
    if json_path is not None:
        json_path.write_text(json.dumps(result.as_json(), indent=2) + "\n")
        console.print(f"rows: {json_path}", soft_wrap=True)
    console.print(_table(result.rows))
    console.print(f"picture: {picture.resolve()}", soft_wrap=True)
    console.print(training.summary(result), soft_wrap=True)


def _table(rows: Sequence[Row]) -> Table:
    vanilla = rows[0]
    table = Table(
        title="memory and time of a training step, loss on held-out modules",
        box=box.SIMPLE,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("method", no_wrap=True)
    for heading in ("saved for\nbackward", "peak", "step", "validation\nloss"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.method,
            f"{humanize.naturalsize(row.saved_bytes, binary=True)} {row.saved_bytes / vanilla.saved_bytes:.2f}x",
            f"{humanize.naturalsize(row.peak_bytes, binary=True)} {row.peak_bytes / vanilla.peak_bytes:.2f}x",
            f"{row.step_ms:.4g} ms {row.step_ms / vanilla.step_ms:.2f}x",
            f"{row.val_loss:.4f} {row.val_loss - vanilla.val_loss:+.4f}",
        )
    return table
