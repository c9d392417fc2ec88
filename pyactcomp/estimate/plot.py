"""Draws the memory of a step, as estimated."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from .gpus import GIB
from .result import Estimate

_COLOURS = tuple(matplotlib.color_sequences["tab10"])


def draw(found: Estimate, path: Path) -> None:
    """Draw allocated memory over a steady step, a line a mode, and the room on the GPU, to a file.

    The step is drawn by the allocator's events, from forward to the optimizer: a GPU takes another time for each.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for each, colour in zip(found.modes, _COLOURS, strict=False):
        share = [index / max(len(each.curve) - 1, 1) for index in range(len(each.curve))]
        allocated = [point[0] / GIB for point in each.curve]
        reserved = [point[1] / GIB for point in each.curve]
        axes.plot(share, allocated, color=colour, linewidth=1.5, label=f"{each.mode}: {max(allocated):.2f} GiB")
        axes.plot(share, reserved, color=colour, linewidth=1, linestyle=":")
    first = found.modes[0]
    room = (found.memory - first.context) / GIB
    highest = max(axes.get_ylim()[1], 0)
    if room < 1.3 * highest:
        axes.axhline(room, color="black", linewidth=1, linestyle="--", label=f"{found.gpu}: {room:.2f} GiB")
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    axes.set_xticks([])
    axes.set_xlabel("a steady step, from forward to the optimizer, by the allocator's events")
    axes.set_ylabel("GiB (dotted: reserved, PyTorch's allocator)")
    length = "" if first.seq is None else f" x {first.seq} tokens"
    axes.set_title(f"{Path(found.model).name}, batch {first.batch}{length}")
    axes.legend(loc="best", frameon=False)
    figure.savefig(path, dpi=120)
