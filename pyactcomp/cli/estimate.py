"""The command ``estimate``: print the memory that training a model takes, and whether it fits."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.table import Table

from ..errors import PyactcompError
from ..sizes import budget_of, size_text
from .shared import AsJson, console, fail, numbers_table, print_notes, progress_bar

if TYPE_CHECKING:
    from ..estimate import Estimate, ModeEstimate
    from ..plan import Plan

_QUICK = 2.0  # seconds without a progress bar
_ROWS_AT_PEAK = 8

_ALLOCATORS = (
    "reserved: native is PyTorch's allocator, expandable the same with expandable_segments:True; pyactcomp is this "
    "package's"
)

# The limits of every estimate.
_UNKNOWN = (
    "not counted: workspaces of cuDNN's convolutions, recurrent layers and attention, other libraries' buffers (NCCL), "
    "several streams, CUDA graphs and torch.compile. How far estimates are from measured peaks: docs/will_it_fit.md"
)


def estimate(
    model: Annotated[
        str,
        typer.Argument(
            help="A model type of transformers (llama), the path of a config.json or its folder, timm:NAME, "
            "module:function or file.py:function; the function returns (model, batch[, loss]).",
            metavar="MODEL",
        ),
    ],
    batch: Annotated[int, typer.Option(help="Samples of a batch.")] = 8,
    seq: Annotated[int | None, typer.Option(help="Tokens of a sequence; by default 1024 or all positions.")] = None,
    optimizer: Annotated[str, typer.Option(help="adamw, adamw:fused, adamw8bit, sgd, ...")] = "adamw",
    dtype: Annotated[str | None, typer.Option(help="Of the weights: float32, bfloat16 or float16.")] = None,
    autocast: Annotated[str | None, typer.Option(help="bfloat16 or float16; by default no autocast.")] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            help="Some of plain, lossless, int8, int8+head, checkpoint, int8+checkpoint, int8+head+checkpoint; "
            "+offload after one with lossless or int8: int8+offload. By default plain,int8,int8+checkpoint, without "
            "what the model does not support."
        ),
    ] = None,
    gpu: Annotated[
        str, typer.Option(help="h100, h200, a100-40, a100-80, 4090, 3090, l4, t4, or a size: 24GiB.")
    ] = "h100",
    budget: Annotated[
        str | None,
        typer.Option(
            help="Also plan what each block does, so that the peak stays within a size (20GiB) or the GPU: auto."
        ),
    ] = None,
    largest: Annotated[bool, typer.Option(help="Look for the largest batch and the longest sequence that fit.")] = True,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the curve of a step into this file (needs matplotlib).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate without a GPU the memory of training a model: peaks by mode, and whether they fit."""
    from ..estimate import estimate as run
    from ..plan import plan as find

    if budget is not None:
        try:
            budget_of(budget)
        except ValueError as error:
            fail(str(error))
    drawing = _drawing(plot)
    progress = progress_bar()
    task = progress.add_task("", total=None)
    patience = threading.Timer(_QUICK, progress.start)
    if progress.console.is_terminal:
        patience.start()
    planned: Plan | None = None
    try:
        found = run(
            model,
            batch=batch,
            seq=seq,
            optimizer=optimizer,
            dtype=dtype,
            autocast=autocast,
            modes=None if mode is None else [each.strip() for each in mode.split(",")],
            gpu=gpu,
            largest=largest,
            progress=lambda what: progress.update(task, description=what),
        )
        if budget is not None:
            planned = find(
                model,
                batch,
                budget=budget,
                seq=seq,
                optimizer=optimizer,
                dtype=dtype,
                autocast=autocast,
                gpu=gpu,
                fuse_head="head" in (mode or ""),
                progress=lambda what: progress.update(task, description=f"plan: {what}"),
            )
    except PyactcompError as error:
        reason = str(error).partition("\n")[0]
        found = None
    finally:
        patience.cancel()
        if progress.live.is_started:
            progress.stop()
    if found is None:
        fail(reason)
    if drawing is not None:
        drawing(found)
    if as_json:
        plan = {} if planned is None else {"plan": planned.to_dict()}
        typer.echo(json.dumps({**found.as_dict(), **plan}, indent=2))
    else:
        precision = "" if dtype is None else f", {dtype} weights"
        precision += "" if autocast is None else f", autocast {autocast}"
        _print(found, f"{optimizer}{precision}")
        if planned is not None:
            console.print(str(planned), soft_wrap=True)
            console.print(
                f'in your training: pyactcomp.compress(model, plan=pyactcomp.plan(model, batch, budget="{budget}"))',
                soft_wrap=True,
            )


def _drawing(plot: Path | None) -> Callable[[Estimate], None] | None:
    """Return the function that draws, before the estimate takes its time; None if nothing is drawn."""
    if plot is None:
        return None
    if not plot.resolve().parent.is_dir():
        fail(f"--plot: there is no folder {plot.resolve().parent}")
    try:
        from ..estimate.plot import draw
    except ImportError as error:
        fail(f"--plot needs matplotlib ({error}): pip install matplotlib")
    return lambda found: draw(found, plot)


def _print(found: Estimate, training: str) -> None:
    first = found.modes[0]
    length = "" if first.seq is None else f" x {first.seq} tokens"
    named = f"{found.gpu} with " if " " in found.gpu else ""  # a size names itself
    console.print(
        f"{found.model}, batch {first.batch}{length}, {training}, on {named}{size_text(found.memory)}", soft_wrap=True
    )
    table = numbers_table([""], *(each.mode for each in found.modes))
    for title, name in (
        ("weights", "weights"),
        ("gradients", "gradients"),
        ("optimizer", "optimizer"),
        ("activations", "activations"),
        ("cuBLAS workspaces", "workspaces"),
        ("CUDA context", "context"),
        ("peak allocated", "peak_allocated"),
        ("  of the first step", "first_step"),
    ):
        table.add_row(title, *(size_text(getattr(each, name)) for each in found.modes))
    if any("offload" in each.mode for each in found.modes):
        table.add_row("pinned on the host", *(size_text(each.pinned) for each in found.modes))
    for allocator in first.peak_reserved:
        table.add_row(f"reserved, {allocator}", *(_reserved(each, allocator) for each in found.modes))
    if any(each.largest_batch is not None for each in found.modes):
        table.add_row("largest batch", *(_count(each.largest_batch) for each in found.modes))
    if any(each.longest_seq is not None for each in found.modes):
        table.add_row("longest sequence", *(_count(each.longest_seq) for each in found.modes))
    console.print(table)
    for each in found.modes:
        console.print(Group(f"alive at the peak, {each.mode}:", _alive(each)))
    print_notes(found.notes)
    print_notes(_notes(found.modes))
    print_notes([_ALLOCATORS, _UNKNOWN])


def _notes(modes: Sequence[ModeEstimate]) -> Iterator[str]:
    """Return each note once, with the modes that it is about where it is not about all."""
    for note in dict.fromkeys(note for each in modes for note in each.notes):
        about = [each.mode for each in modes if note in each.notes]
        yield note if len(about) == len(modes) else f"{', '.join(about)}: {note}"


def _reserved(each: ModeEstimate, allocator: str) -> str:
    return f"{size_text(each.peak_reserved[allocator])} {'fits' if each.fits[allocator] else 'does not fit'}"


def _count(number: int | None) -> str:
    return "none fits" if number is None else f"{number:,}"


def _alive(each: ModeEstimate) -> Table:
    table = numbers_table(["module or phase"], "bytes")
    rows = each.at_peak[:_ROWS_AT_PEAK]
    for name, size in rows:
        table.add_row(name, size_text(size))
    rest = each.at_peak[_ROWS_AT_PEAK:]
    if rest:
        table.add_row(f"{len(rest)} others", size_text(sum(size for _, size in rest)))
    return table
