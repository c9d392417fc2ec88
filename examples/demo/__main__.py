"""Trains a small transformer plain, compressed, checkpointed and both, and shows a table and a picture."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import gpu_figures
import torch
import training
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from pyactcomp.sizes import size_text

console = Console(markup=False, highlight=False)


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
    import picture

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler, which measures memory, prints to stdout
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
            shown = ", ".join(f"{method} {losses[method]:.3f}" for method in ("plain", "int8") if method in losses)
            progress.update(task, completed=finished, description=shown)
            if not console.is_terminal and finished % max(config.steps // 10, 1) == 0:
                console.print(f"step {finished}/{config.steps}: {shown}")

        result = training.run(config, on_step)

    out.mkdir(parents=True, exist_ok=True)
    path = out / "demo.png"
    picture.draw(result, path)
    on_gpu = {} if config.device.type == "cuda" else gpu_figures.load()
    console.print(f"\n{training.summary(result, on_gpu)}\n", soft_wrap=True)
    console.print(f"this run, on {config.device}:")
    console.print(_table(result.rows))
    if on_gpu:
        console.print(f"not this run: GPT-2 medium on an {on_gpu['int8'].device}, from bench/results/frontier.json:")
        console.print(_gpu_table([on_gpu[method] for method in training.METHODS if method in on_gpu]))
    if json_path is not None:
        json_path.write_text(json.dumps(result.as_json(), indent=2) + "\n")
        console.print(f"rows: {json_path}", soft_wrap=True)
    console.print(f"picture: {path.resolve()}", soft_wrap=True)


def _empty(*headings: str) -> Table:
    table = Table(box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")
    return table


def _gpu_table(rows: Sequence[gpu_figures.Figures]) -> Table:
    table = _empty("saved for\nbackward", "peak", "step")
    for row in rows:
        table.add_row(row.method, f"{row.saved:.2f}x", f"{row.peak:.2f}x", f"{row.step:.2f}x")
    return table


def _table(rows: Sequence[training.Row]) -> Table:
    plain = rows[0]
    table = _empty("saved for\nbackward", "peak", "step", "validation\nloss")
    for row in rows:
        table.add_row(
            row.method,
            f"{size_text(row.saved_bytes)} {row.saved_bytes / plain.saved_bytes:.2f}x",
            f"{size_text(row.peak_bytes)} {row.peak_bytes / plain.peak_bytes:.2f}x",
            f"{row.step_ms:.{0 if row.step_ms >= 100 else 1}f} ms {row.step_ms / plain.step_ms:.2f}x",
            f"{row.val_loss:.3f} {row.val_loss - plain.val_loss:+.4f}",
        )
    return table


if __name__ == "__main__":
    typer.run(demo)
