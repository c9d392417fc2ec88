"""The commands: ``demo``, ``doctor``, ``run``, ``build-*``, and what others define. Needs the ``cli`` extra."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import humanize
import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from . import explain_command, replay_commands
from ._version import __version__
from .errors import PyactcompError

if TYPE_CHECKING:
    from .demo import Row

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Compress the activations saved for backward.")
# Paths and reasons are printed as they are: their square brackets are no markup.
_console = Console(markup=False, highlight=False)


class Program(BaseException):
    """A program that is to run once the command line has been dealt with.

    typer would catch the program's KeyboardInterrupt and EOFError and replace its excepthook; it lets this pass.
    """

    def __init__(self, target: str, arguments: Sequence[str], module: bool) -> None:
        self.target, self.arguments, self.module = target, arguments, module

    def execute(self) -> None:
        """Run it as python does."""
        from .allocator.run import execute

        sys.excepthook = sys.__excepthook__
        execute(self.target, self.arguments, module=self.module)


class GrowthChoice(str, Enum):
    """How the allocator gets memory."""

    vmm = "vmm"
    malloc = "malloc"


class DeviceChoice(str, Enum):
    """Where the demo runs."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pyactcomp {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    # torch's profiler, which demo and doctor use, would otherwise log into their output.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def _device(choice: DeviceChoice) -> torch.device:
    if choice is DeviceChoice.cuda and not torch.cuda.is_available():
        raise typer.BadParameter(
            "torch finds no CUDA device; use --device cpu, or see pyactcomp doctor", param_hint="--device"
        )
    if choice is DeviceChoice.auto:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(choice.value)


@app.command()
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
    from . import demo as training
    from . import demo_plot

    try:
        config = training.default_config(_device(device), steps=steps, seed=seed)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--steps") from error
    _console.print(f"training on {config.device}: plain, compressed and checkpointed, step by step in turn")
    with Progress(
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(bar_width=20),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
        console=_console,
    ) as progress:
        task = progress.add_task("", total=config.steps)

        def on_step(finished: int, losses: Mapping[str, float]) -> None:
            shown = ", ".join(f"{method} {loss:.3f}" for method, loss in losses.items())
            progress.update(task, completed=finished, description=shown)

        result = training.run(config, on_step)

    out.mkdir(parents=True, exist_ok=True)
    picture = out / "demo.png"
    demo_plot.draw(result, picture)
    if json_path is not None:
        json_path.write_text(json.dumps(result.as_json(), indent=2) + "\n")
        _console.print(f"rows: {json_path}", soft_wrap=True)
    _console.print(_demo_table(result.rows))
    _console.print(f"picture: {picture.resolve()}", soft_wrap=True)
    _console.print(training.summary(result), soft_wrap=True)


def _demo_table(rows: Sequence[Row]) -> Table:
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


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False) -> None:
    """Say what works on this machine, what does not, and what to do; exit with 1 if something is wrong."""
    from .doctor import examine

    findings = examine()
    if as_json:
        typer.echo(json.dumps(findings, indent=2))
    else:
        _print_findings(findings)
    if findings["problems"]:
        raise typer.Exit(1)


def _print_findings(findings: dict[str, Any]) -> None:
    grid = Table.grid(padding=(0, 2))
    for name, version in findings["versions"].items():
        grid.add_row(name, version or "none")
    for device in findings["devices"]:
        memory = device["memory_bytes"]
        grid.add_row(
            device["device"], device["name"] + (f", {humanize.naturalsize(memory, binary=True)}" if memory else "")
        )
    _console.print(grid)

    table = Table(box=box.SIMPLE)
    for heading in ("implementation", "on", "state"):
        table.add_column(heading)
    for name, entry in findings["implementations"].items():
        if entry["unavailable_reason"]:
            state = f"not available: {entry['unavailable_reason']}"
        else:
            state = entry["self_test"] or "works: same bytes as the reference"
        table.add_row(name, entry["device"], state)
    _console.print(table)

    _console.print(_allocator_lines(findings["allocator"]), soft_wrap=True)
    _console.print(f"observer: {findings['observer'] or 'works'}", soft_wrap=True)
    private = findings["torch_private"]
    sound = sum(wrong is None for wrong in private.values())
    _console.print(f"private torch names that behave as expected: {sound} of {len(private)}")
    for problem in findings["problems"]:
        _console.print(f"problem: {problem}", style="red", soft_wrap=True)
    if not findings["problems"]:
        _console.print("everything that should work here works")


def _allocator_lines(entry: dict[str, str | None]) -> str:
    if entry["unavailable_reason"]:
        return f"allocator: not available: {entry['unavailable_reason']}"
    missing = entry["torch_subclass"]
    return f"allocator: attached through torch's plain interface: {missing}" if missing else "allocator: works"


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    target: Annotated[str, typer.Argument(help="The script, or with -m the module's name.", metavar="SCRIPT")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What it finds in sys.argv.", metavar="ARGS")] = None,
    module: Annotated[bool, typer.Option("-m", help="Run a module by its name, as python -m does.")] = False,
    conf: Annotated[str | None, typer.Option(help="Settings, key:value,key:value as in PYACTCOMP_ALLOC_CONF.")] = None,
    growth: Annotated[GrowthChoice | None, typer.Option(help="How the allocator gets memory.")] = None,
    max_split_size: Annotated[str | None, typer.Option(help='As in "512MiB": larger blocks are not split.')] = None,
) -> None:
    """Run a Python program with the allocator enabled; what follows SCRIPT belongs to it."""
    from .allocator.run import prepare

    if not module and not Path(target).exists():
        raise typer.BadParameter(f"there is no {target}", param_hint="SCRIPT")
    try:
        prepare(conf, growth and growth.value, max_split_size)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except PyactcompError as error:
        _fail(error)
    raise Program(target, arguments or [], module)


@app.command()
def build_allocator() -> None:
    """Compile the allocator's subclass of torch's for the installed torch."""
    from .allocator.build import build_torch_allocator

    try:
        path = build_torch_allocator()
    except PyactcompError as error:
        _fail(error)
    _console.print(f"built for torch {torch.__version__}: {path}", soft_wrap=True)


@app.command()
def build_observer() -> None:
    """Compile the observer, which tells what operator saves a tensor, for the installed torch."""
    from . import extensions

    try:
        path = extensions.build("_observer")
    except PyactcompError as error:
        _fail(error)
    _console.print(f"built for torch {torch.__version__}: {path}", soft_wrap=True)


app.command()(replay_commands.replay)
app.command()(replay_commands.tune)
app.command()(explain_command.explain)


def _fail(error: PyactcompError) -> NoReturn:
    typer.echo(f"Error: {error}", err=True)
    raise typer.Exit(1) from error
