"""The command line: ``run``, ``build-*``, and the commands from the other modules here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer

from .._version import __version__
from ..errors import PyactcompError
from .doctor import doctor
from .estimate import estimate
from .explain import explain
from .replay import replay
from .shared import console, fail
from .top import top
from .tune import tune

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Estimate and explain the memory of PyTorch programs."
)


class Program(BaseException):
    """A program to run after the command line is parsed.

    Raised to leave typer before the program runs: typer would catch the program's KeyboardInterrupt and EOFError, and
    replaces ``sys.excepthook``.
    """

    def __init__(self, target: str, arguments: Sequence[str], module: bool) -> None:
        self.target, self.arguments, self.module = target, arguments, module

    def execute(self) -> None:
        """Run the program as ``python`` would."""
        from ..allocator.run import execute

        sys.excepthook = sys.__excepthook__
        execute(self.target, self.arguments, module=self.module)


class GrowthChoice(str, Enum):
    """The allocator's ways to get memory."""

    vmm = "vmm"
    malloc = "malloc"


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
    # Silence torch's profiler: doctor uses the profiler, and prints to the same output.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    target: Annotated[str, typer.Argument(help="The script, or with -m the module's name.", metavar="SCRIPT")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its arguments.", metavar="ARGS")] = None,
    module: Annotated[bool, typer.Option("-m", help="Run a module by its name, as python -m does.")] = False,
    conf: Annotated[str | None, typer.Option(help="Settings, key:value,key:value as in PYACTCOMP_ALLOC_CONF.")] = None,
    growth: Annotated[GrowthChoice | None, typer.Option(help="How the allocator gets memory.")] = None,
    max_split_size: Annotated[str | None, typer.Option(help='As in "512MiB": larger blocks are not split.')] = None,
) -> None:
    """Run a Python program with the allocator enabled; arguments after SCRIPT belong to the program."""
    from ..allocator.run import prepare

    if not module and not Path(target).exists():
        raise typer.BadParameter(f"there is no {target}", param_hint="SCRIPT")
    try:
        prepare(conf, growth and growth.value, max_split_size)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except PyactcompError as error:
        fail(error)
    raise Program(target, arguments or [], module)


@app.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
def demo(arguments: Annotated[list[str] | None, typer.Argument(help="Its options.", metavar="OPTIONS")] = None) -> None:
    """Train a small transformer plain, compressed and checkpointed: runs examples/demo of a checkout."""
    checkouts = (Path(__file__).parents[2], Path())
    found = [checkout / "examples" / "demo" for checkout in checkouts if (checkout / "examples" / "demo").exists()]
    if not found:
        fail("the installed package has no demo: run this command in a checkout of pyactcomp, which has examples/demo")
    raise Program(str(found[0]), arguments or [], module=False)


def _build(name: str, compile_library: Callable[[], Path]) -> None:
    from ..torch_private.extensions import LIBRARIES

    console.print(f"compiling for torch {torch.__version__}: about {LIBRARIES[name].duration}", soft_wrap=True)
    try:
        path = compile_library()
    except PyactcompError as error:
        fail(error)
    console.print(f"built for torch {torch.__version__}: {path}", soft_wrap=True)


@app.command()
def build_allocator() -> None:
    """Compile the subclass of torch's allocator for the installed torch."""
    from ..allocator.build import build_torch_allocator

    _build("_torch_allocator", build_torch_allocator)


@app.command()
def build_observer() -> None:
    """Compile the library that packs saved tensors, for the installed torch."""
    from ..torch_private import extensions

    _build("_observer", lambda: extensions.build("_observer"))


@app.command()
def build_phantom() -> None:
    """Compile the library that estimates memory without a GPU, for the installed torch."""
    from ..torch_private import extensions

    _build("_phantom", lambda: extensions.build("_phantom"))


for command in (doctor, estimate, replay, tune, explain, top):
    app.command()(command)
