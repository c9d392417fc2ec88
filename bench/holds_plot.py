"""The picture of the suite `holds`: all trainings over one another, and how far apart they end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .holds_report import LIMIT, Outcome, percent
from .methods import VANILLA
from .plots import INK, MUTED, pyplot, save
from .rows import Row

COLOURS = {VANILLA: INK, "lossless": "#2e6f95", "int8": "#d1495b", "nearest2": "#b08900"}
NAMES = {"nearest2": "2 bits, nearest"}
TITLES = {
    "byte_lm": "Byte language model, 25 M parameters",
    "resnet50_digits": "ResNet-50 on handwritten digits",
    "memorise": "Random bytes by heart, 0.4 M parameters",
}
SHADE = "#f1f3f5"
LEFT, RIGHT = -2 * LIMIT, 3.4 * LIMIT
"""Ends of the axis of degradations; what is beyond is drawn at the edge with its figure."""


def _means(curves: Iterable[Sequence[Sequence[float | None]]], column: int) -> tuple[list[float], list[float]]:
    """Return the steps and the mean over the curves, up to where one of them diverged."""
    steps, values = [], []
    for points in zip(*curves, strict=True):
        at = [point[column] for point in points]
        if None in at:
            break
        steps.append(points[0][0])
        values.append(sum(at) / len(at))
    return steps, values


def _curves(axes: Any, outcomes: Sequence[Outcome]) -> None:
    # Vanilla last and narrow, so that what lies under it can be seen at its sides.
    for outcome in sorted(outcomes, key=lambda outcome: outcome.arm == VANILLA):
        vanilla = outcome.arm == VANILLA
        style = {"color": COLOURS[outcome.arm], "zorder": 4 if vanilla else 3}
        for row in outcome.rows:
            points = [(step, loss) for step, loss in row["training_curve"] if loss is not None]
            axes.plot(*zip(*points, strict=True), linewidth=0.4, alpha=0.45, **style)
        axes.plot(*_means((row["training_curve"] for row in outcome.rows), 1), linewidth=0.9 if vanilla else 2.2,
                  linestyle=(0, (3, 2)) if vanilla else "-", **style)  # fmt: skip
        axes.plot(*_means((row["validation_curve"] for row in outcome.rows), 1), linestyle="", marker="o",
                  markersize=3 if vanilla else 6.5, markerfacecolor=INK if vanilla else "white", **style)  # fmt: skip
    axes.set_yscale("log")
    ticks = _ticks(*axes.get_ylim())
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(0, None)
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy, nats")


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers on a logarithmic axis: 1, 2 and 5 of each decade, more or fewer where few or many are."""
    digits: tuple[float, ...] = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    if high / low > 8:
        digits = (1, 2, 5) if high / low < 1000 else (1,)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [digit * 10.0**decade for decade in decades for digit in digits if low <= digit * 10.0**decade <= high]


def _degradations(axes: Any, outcomes: Sequence[Outcome]) -> None:
    compared = [outcome for outcome in outcomes if outcome.degradations]
    axes.axvspan(LEFT, LIMIT, color=SHADE, linewidth=0)
    axes.axvline(LIMIT, color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.axvline(0, color=MUTED, linewidth=0.8)
    for place, outcome in enumerate(compared):
        colour = COLOURS[outcome.arm]
        inside = [value for value in outcome.degradations if LEFT <= value <= RIGHT]
        axes.plot(inside, [place] * len(inside), "o", color=colour, markersize=4.5, alpha=0.55, markeredgewidth=0)
        text = percent(outcome.mean)
        if outcome.complete:
            text += f", bound {percent(outcome.bound)}: {outcome.verdict}"
        else:
            text += f": {outcome.verdict}"
        if outcome.mean <= RIGHT:
            end = min(outcome.bound, RIGHT) if outcome.complete else outcome.mean
            axes.plot([outcome.mean, end], [place] * 2, color=colour, linewidth=1.4)
            axes.plot([outcome.mean], [place], "|", color=colour, markersize=15, markeredgewidth=2)
            axes.plot([end], [place], "|", color=colour, markersize=8, markeredgewidth=1.4)
        else:
            axes.plot([RIGHT], [place], ">", color=colour, markersize=7, clip_on=False)
        box = {"facecolor": SHADE, "edgecolor": "none", "pad": 1}
        axes.annotate(text, (LEFT, place), (4, 13), textcoords="offset points", color=colour, fontsize=8, bbox=box)
    axes.set_xlim(LEFT, RIGHT)
    axes.set_ylim(len(compared) - 0.5, -0.7)
    axes.set_yticks(range(len(compared)), [NAMES.get(outcome.arm, outcome.arm) for outcome in compared])
    ticks = [LEFT, -LIMIT, 0.0, LIMIT, 2 * LIMIT, 3 * LIMIT]
    axes.set_xticks(ticks, [f"{100 * tick:+g} %" if tick else "0" for tick in ticks])
    axes.set_xlabel("worse than vanilla: seeds, their mean and its upper 95 % bound")
    axes.grid(visible=False)


def draw(outcomes: Sequence[Outcome], docs: Path) -> None:
    """Draw for each task the curves of all trainings, and beside them the paired degradations with their bound."""
    plt = pyplot()
    tasks = list(dict.fromkeys(outcome.task for outcome in outcomes))
    figure, grid = plt.subplots(
        len(tasks), 2, figsize=(10.5, 3.5 * len(tasks)), squeeze=False, width_ratios=(1.15, 1)
    )  # fmt: skip
    for (left, right), task in zip(grid, tasks, strict=True):
        own = [outcome for outcome in outcomes if outcome.task == task]
        row: Row = own[0].rows[0]
        _curves(left, own)
        left.set_title(TITLES[task], loc="left", color=INK)
        _degradations(right, own)
        right.set_title(f"Degradation of the {row['metric'].partition(' with ')[0]}", loc="left", color=INK)
    arms = list(dict.fromkeys(outcome.arm for outcome in outcomes))
    handles = [
        plt.Line2D([], [], color=COLOURS[arm], linewidth=2, linestyle=(0, (3, 2)) if arm == VANILLA else "-")
        for arm in arms
    ]
    handles.append(plt.Line2D([], [], color=MUTED, linestyle="", marker="o", markerfacecolor="white", markersize=6))
    names = [*(NAMES.get(arm, arm) for arm in arms), "validation"]
    figure.legend(handles, names, loc="lower center", ncols=len(names), frameon=False, labelcolor=INK)
    device = outcomes[0].rows[0]["origin"]["device"]
    figure.suptitle(
        f"Seed by seed, every arm from the same weights on the same data ({device}); shaded: within the limit",
        color=INK, fontsize=11,
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    save(figure, docs / "training_holds.png")
