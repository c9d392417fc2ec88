"""The demo's picture: the losses of all methods in one plot, and the bytes of each method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from training import Result

# Wide to narrow, so coinciding curves all stay visible.
_STYLES = {
    "plain": {"color": "#9aa5b1", "linewidth": 5.0, "linestyle": "-"},
    "checkpoint": {"color": "#c2410c", "linewidth": 2.0, "linestyle": "-"},
    "lossless": {"color": "#0f766e", "linewidth": 2.0, "linestyle": (0, (1, 3))},
    "int8": {"color": "#1d4ed8", "linewidth": 2.0, "linestyle": (0, (3, 2))},
    "int8 + checkpoint": {"color": "#7c3aed", "linewidth": 1.5, "linestyle": (0, (2, 4))},
}


def draw(result: Result, path: Path) -> None:
    """Write the picture of ``result`` to ``path`` as PNG; no display is needed."""
    # The object interface alone: pyplot would keep global state and look for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.6), layout="constrained")
    loss_axes, bytes_axes = figure.subplots(1, 2, width_ratios=[3, 2])
    _draw_losses(loss_axes, result)
    _draw_bytes(bytes_axes, result)
    figure.suptitle(
        f"{result.parameters / 1e6:.1f} M parameters, {result.batch} x {result.config.sequence} bytes a step, "
        f"{result.config.steps} steps on {result.config.device.type}"
    )
    figure.savefig(path, dpi=150)


def _draw_losses(axes: Axes, result: Result) -> None:
    for method, style in _STYLES.items():
        axes.plot(*_smoothed(result.training[method]), label=method, **style)  # type: ignore[arg-type]
    for method in ("plain", "int8"):
        steps, losses = zip(*result.validation[method], strict=True)
        marker = {"plain": "o", "int8": "x"}[method]
        axes.plot(steps, losses, marker, color=_STYLES[method]["color"], label=f"{method}, on text not trained on")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per byte")
    axes.set_title("loss: same weights, same batches")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _smoothed(losses: Sequence[float]) -> tuple[list[int], list[float]]:
    """Return steps and the mean over a trailing window, a twentieth of the run: batches differ more than methods."""
    window = max(len(losses) // 20, 1)
    steps = list(range(window, len(losses) + 1))
    return steps, [sum(losses[step - window : step]) / window for step in steps]


def _draw_bytes(axes: Axes, result: Result) -> None:
    largest = max(row.peak_bytes for row in result.rows)
    unit, name = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
    width = 0.38
    for index, row in enumerate(result.rows):
        color = _STYLES[row.method]["color"]
        for offset, nbytes, alpha in ((-width / 2, row.saved_bytes, 1.0), (width / 2, row.peak_bytes, 0.45)):
            bar = axes.bar(index + offset, nbytes / unit, width, color=color, alpha=alpha)
            axes.bar_label(bar, fmt="%.3g", padding=2)
    axes.margins(y=0.1)
    axes.set_xticks(range(len(result.rows)), [row.method.replace(" + ", " +\n") for row in result.rows])
    axes.set_ylabel(name)
    axes.set_title("left: saved for backward, right: peak of a step")
    axes.spines[["top", "right"]].set_visible(False)
