"""The picture of a watch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import PyactcompError
from .records import Sample, Step

FORMATS = (".png", ".svg", ".pdf")
_PARTS = (("weights", "#2e6f95"), ("gradients", "#7fb2d1"), ("optimizer", "#5f8d4e"), ("activations", "#e3c567"))
_NAMES = {"optimizer": "optimizer state", "activations": "activations and temporary, at the peak"}


def draw(steps: Sequence[Step], samples: Sequence[Sample], path: Path) -> None:
    """Draw the peak of each step, divided, and the curves of the samples."""
    if path.suffix not in FORMATS:
        raise ValueError(f"the picture's name must end in one of {FORMATS}, got {str(path)!r}")
    if not steps:
        raise PyactcompError("there is nothing to draw: no step has ended")
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise PyactcompError("the picture is drawn with matplotlib; run: pip install matplotlib") from None

    figure = Figure(figsize=(9, 4.6), layout="constrained")
    axes = figure.subplots()
    ends = [step.seconds for step in steps]
    edges = [0.0, *ends]
    layers: dict[str, list[float]] = {name: [] for name, _ in _PARTS}
    memory = next((step.memory for step in steps if step.memory is not None), None)
    for step in steps:
        memory = step.memory or memory
        sizes = [0, 0, 0] if memory is None else [memory.weights, memory.gradients, memory.optimizer]
        peak = sum(sizes) if step.peak_allocated is None else step.peak_allocated
        for name, size in zip(layers, (*sizes, max(0, peak - sum(sizes))), strict=True):
            layers[name].append(size / 2**30)
    below = [0.0] * len(ends)
    for name, colour in _PARTS:
        above = [low + size for low, size in zip(below, layers[name], strict=True)]
        if any(layers[name]):
            label = _NAMES.get(name, name)
            axes.stairs(above, edges, baseline=below, fill=True, color=colour, label=label, linewidth=0)
        below = above
    reserved = [step.peak_reserved for step in steps]
    if None not in reserved:
        axes.stairs([size / 2**30 for size in reserved if size is not None], edges, color="#222222", label="reserved")
    for name, colour, label in (
        ("others", "#d1495b", "other processes"),
        ("resident", "#8d3b72", "host memory of the process"),
    ):
        points = [(each.seconds, size / 2**30) for each in samples if (size := getattr(each, name)) is not None]
        if len(points) > 1:
            axes.plot(*zip(*points, strict=True), color=colour, label=label, linewidth=1.2, linestyle="--")
    axes.set(xlabel="seconds", ylabel="GiB", xlim=(0, ends[-1]), ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e7eb")
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=144)
