"""The command ``demo``: options, progress, table and picture."""

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
    from .measured import Measured
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
    """Train a small transformer plain, compressed, checkpointed and both, and compare memory, speed and loss."""
    if importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("the demo draws a picture with matplotlib; run: pip install matplotlib")
    from . import measured, plot, training

    try:
        config = training.default_config(_device(device), steps=steps, seed=seed)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--steps") from error
    console.print(f"training on {config.device}, step by step in turn: {', '.join(training.METHODS)}", soft_wrap=True)
    with Progress(
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(bar_width=20),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
        console=console,
    ) as progress:
        task = progress.add_task("", total=config.steps)

        def on_step(finished: int, losses: Mapping[str, float]) -> None:
            shown = [f"{method} {losses[method]:.3f}" for method in ("vanilla", "int8") if method in losses]
            progress.update(task, completed=finished, description=", ".join(shown))

        result = training.run(config, on_step)

    out.mkdir(parents=True, exist_ok=True)
    picture = out / "demo.png"
    plot.draw(result, picture)
    on_gpu = {} if config.device.type == "cuda" else measured.load()
    console.print(f"\n{training.summary(result, on_gpu)}\n", soft_wrap=True)
    console.print(f"this run, on {config.device}:")
    console.print(_table(result.rows))
    if on_gpu:
        console.print(f"not this run: GPT-2 medium on an {on_gpu['int8'].device}, from bench/results/frontier.json:")
        console.print(_gpu_table([on_gpu[method] for method in training.METHODS if method in on_gpu]))
    if json_path is not None:
        json_path.write_text(json.dumps(result.as_json(), indent=2) + "\n")
        console.print(f"rows: {json_path}", soft_wrap=True)
    console.print(f"picture: {picture.resolve()}", soft_wrap=True)


def _empty(*headings: str) -> Table:
    table = Table(box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")
    return table


def _gpu_table(rows: Sequence[Measured]) -> Table:
    table = _empty("saved for\nbackward", "peak", "step")
    for row in rows:
        table.add_row(row.method, f"{row.saved:.2f}x", f"{row.peak:.2f}x", f"{row.step:.2f}x")
    return table


def _table(rows: Sequence[Row]) -> Table:
    vanilla = rows[0]
    table = _empty("saved for\nbackward", "peak", "step", "validation\nloss")
    for row in rows:
        table.add_row(
            row.method,
            f"{humanize.naturalsize(row.saved_bytes, binary=True)} {row.saved_bytes / vanilla.saved_bytes:.2f}x",
            f"{humanize.naturalsize(row.peak_bytes, binary=True)} {row.peak_bytes / vanilla.peak_bytes:.2f}x",
            f"{row.step_ms:.{0 if row.step_ms >= 100 else 1}f} ms {row.step_ms / vanilla.step_ms:.2f}x",
            f"{row.val_loss:.3f} {row.val_loss - vanilla.val_loss:+.4f}",
        )
    return table
