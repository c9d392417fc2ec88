"""The picture of the frontier: a panel for each workload, peak memory across, step time up, both against vanilla."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .frontier_report import TITLES
from .plots import GRID, INK, MUTED, pyplot
from .rows import GIB, Row

OURS, PEERS = "#c8324a", "#7a8594"
TINT = "#faeef0"
DRAWN = {
    "vanilla": INK, "lossless": OURS, "int8": OURS, "int8+ckpt": OURS, "ckpt": PEERS, "ckpt2": PEERS, "liger": PEERS,
    "liger+ckpt": PEERS, "compile": PEERS, "compile0.5": PEERS, "compile-blocks": PEERS, "save_on_cpu": PEERS,
    "compile-fp8-e4m3": PEERS, "compile-fp8-e5m2": PEERS, "compile+int8": OURS,
    "compile+int8+head": OURS, "compile-blocks+int8": OURS, "compile+lossless": OURS,
}  # fmt: skip
"""The methods that are drawn, and their colours; variants of a method are in the tables only."""
RIGHT, TOP = 1.14, 1.5
"""Ends of the axes in vanilla's memory and steps; what is beyond is drawn at the edge with its figure."""
PLACES = (
    (7, -3, "left"), (-7, -3, "right"), (0, 8, "center"), (0, -14, "center"), (6, 6, "left"), (-6, -12, "right"),
    (6, -12, "left"), (-6, 6, "right"), (7, 15, "left"), (-7, -21, "right"), (7, -21, "left"), (-7, 15, "right"),
    (7, 26, "left"), (-7, -32, "right"), (7, -32, "left"), (-7, 26, "right"), (7, 37, "left"), (-7, 37, "right"),
    (30, 15, "left"), (30, -21, "left"), (30, 26, "left"), (30, -32, "left"), (7, 48, "left"), (30, 37, "left"),
    (30, 48, "left"), (7, 59, "left"), (30, 59, "left"), (30, 70, "left"), (7, -43, "left"), (-7, -43, "right"),
)  # fmt: skip
"""Where a name may stand beside its point, the best first: across and up in points, and the side that is fixed."""
ADJACENT = 14
"""Points up or down to which a name needs no line to its point."""

Place = tuple[int, int, str]


@dataclass(frozen=True)
class Point:
    """A method's place in a panel: ``x`` and ``y`` lie inside the axes, ``name`` says so where it was moved there."""

    method: str
    x: float
    y: float
    name: str
    marker: str


def place(row: Row) -> Point:
    """Return a row's point: its place, cut at the edges of the plot, its name and its marker."""
    x, y, name, marker = row["peak_x"], row["time_x"], row["method"], "o"
    if y > TOP:
        name, marker = f"{name} {y:.1f}x", "^"
    elif x > RIGHT:
        name, marker = f"{name} {x:.0%}", ">"
    return Point(row["method"], min(x, RIGHT - 0.02), min(y, TOP - 0.015), name, marker)


def frontier(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other one beats in both coordinates, from the leftmost on."""
    best: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not best or y < best[-1][1]:
            best.append((x, y))
    return best


def draw(rows: list[Row], folder: Path) -> None:
    """Draw ``frontier.png`` and ``frontier.svg``."""
    from matplotlib.text import Text

    plt = pyplot()
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    columns = min(3, len(workloads) + 1)
    lines = -(-(len(workloads) + 1) // columns)  # one more place, for the key
    figure, grid = plt.subplots(lines, columns, figsize=(3.5 * columns, 3.2 * lines), squeeze=False)
    shown = [row for row in rows if row["method"] in DRAWN]
    bottom = min(0.92, *(row["time_x"] - 0.12 for row in shown))
    panels = []
    for axes, workload in zip(grid.flat, workloads, strict=False):
        found = [row for row in shown if row["workload"] == workload]
        panels.append((axes, _panel(axes, found, workload, bottom)))
    key, *unused = grid.flat[len(workloads) :]
    for axes in (key, *unused):
        axes.set_axis_off()
    _key(key, rows[-1]["origin"]["device"])
    for axes in grid[:, 0]:
        axes.set_ylabel("step time")
    for axes in [axes for axes, _ in panels][-columns:]:
        axes.set_xlabel("peak memory")
    figure.tight_layout(w_pad=1.6, h_pad=1.6)
    figure.canvas.draw()
    for axes, points in panels:
        _label(axes, points)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "frontier.png")
    # Text as outlines, which a halo or an embedded font takes, makes the file seven times as large.
    for text in figure.findobj(Text):
        text.set_path_effects([])
    # Without a date and with a fixed salt the same rows give the same file.
    with plt.rc_context({"svg.hashsalt": "frontier", "svg.fonttype": "none"}):
        figure.savefig(folder / "frontier.svg", metadata={"Date": None})
    plt.close(figure)


def _panel(axes: Any, rows: list[Row], workload: str, bottom: float) -> list[Point]:
    best = frontier([(row["peak_x"], row["time_x"]) for row in rows])
    # Along the frontier time falls only where a method is, so it is a staircase.
    across = [best[0][0], *(x for x, _ in best[1:] for _ in range(2)), RIGHT]
    up = [y for _, y in best for _ in range(2)]
    axes.fill_between(across, up, TOP, color=TINT, linewidth=0, zorder=0)
    axes.plot([best[0][0], *across], [TOP, *up], color=OURS, linewidth=1.1, alpha=0.55, zorder=2)
    points = [place(row) for row in rows]
    for point in points:
        ours = DRAWN[point.method] == OURS
        axes.plot(
            point.x, point.y, marker=point.marker, color=DRAWN[point.method], markersize=7.5 if ours else 6,
            markeredgecolor="white", markeredgewidth=0.8, clip_on=False, zorder=4 if ours else 3,
        )  # fmt: skip
    vanilla = next((row for row in rows if row["method"] == "vanilla"), None)
    axes.set_title(TITLES.get(workload, workload), loc="left", color=INK, fontsize=11, pad=16)
    if vanilla:
        figures = f"plain: {vanilla['median_ms']:.0f} ms, {vanilla['peak_minus_base_bytes'] / GIB:.1f} GiB"
        axes.annotate(
            figures, (0, 1), (0, 5), xycoords="axes fraction", textcoords="offset points", color=MUTED, fontsize=8.5
        )
    for line in (axes.axhline, axes.axvline):
        line(1.0, color=MUTED, linewidth=0.8, linestyle=(0, (2, 3)), zorder=1)
    axes.set_xlim(0, RIGHT)
    axes.set_ylim(bottom, TOP)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0], ["0", "25 %", "50 %", "75 %", "100 %"])
    ticks = [tick / 10 for tick in range(5, 15) if bottom <= tick / 10 <= TOP]
    axes.set_yticks(ticks, [f"{tick:.1f}x" for tick in ticks])
    axes.grid(color=GRID, linewidth=0.6)
    return points


def _key(axes: Any, device: str) -> None:
    """Say what the colours, the line and the tint mean."""
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.text(0.02, 0.97, "Step time against peak memory", color=INK, fontsize=11, weight="bold", va="top")
    axes.text(
        0.02, 0.88, f"Both relative to plain PyTorch, on one\n{device}. Memory is what a step\n"
        "needs above weights and optimizer\nstate. Lower left is better.",
        color=MUTED, fontsize=8.5, va="top", linespacing=1.45,
    )  # fmt: skip
    for y, colour, text in ((0.5, OURS, "pyactcomp"), (0.4, PEERS, "the alternatives"), (0.3, INK, "plain PyTorch")):
        axes.plot(0.06, y, marker="o", color=colour, markersize=7, clip_on=False)
        axes.text(0.15, y, text, color=INK, fontsize=9, va="center")
    axes.plot([0.02, 0.06, 0.06, 0.1], [0.225, 0.225, 0.175, 0.175], color=OURS, linewidth=1.1, alpha=0.55)
    axes.text(0.15, 0.2, "the frontier: no method beats it in both", color=INK, fontsize=9, va="center")
    axes.fill_between([0.02, 0.1], 0.07, 0.13, color=TINT, linewidth=0)
    axes.text(0.15, 0.1, "dominated by a method on the frontier", color=INK, fontsize=9, va="center")


def _label(axes: Any, points: list[Point]) -> None:
    """Write each point's name at the place, of several, that covers least: what has the fewest to choose from first."""
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    renderer = axes.figure.canvas.get_renderer()
    unit = axes.figure.dpi / 72
    room = axes.get_window_extent(renderer).padded(-2 * unit, 3 * unit)
    # Every line here is made of vertical and horizontal parts, so its parts are boxes.
    corners = [line.get_transform().transform(line.get_xydata()) for line in axes.lines]
    lines = [Bbox(pair).padded(unit) for line in corners for pair in itertools.pairwise(line)]
    taken = [Bbox([centre] * 2).padded(4.5 * unit) for centre in axes.transData.transform([(p.x, p.y) for p in points])]

    def cost(place: Place, box: Bbox) -> int:
        inside = room.x0 <= box.x0 and box.x1 <= room.x1 and room.y0 <= box.y0 and box.y1 <= room.y1
        # A line that is crossed is worth five places down the list.
        return 100 * (not inside) + 30 * box.count_overlaps(taken) + 5 * box.count_overlaps(lines) + PLACES.index(place)

    named = [point for point in points if point.method != "vanilla"]  # the key names it
    for point in sorted(named, key=lambda point: (point.marker == "o", DRAWN[point.method] == PEERS)):
        colour = DRAWN[point.method]
        text = axes.annotate(
            point.name, (point.x, point.y), (0, 0), textcoords="offset points", color=colour, fontsize=8.5,
            weight="bold" if colour == OURS else "normal", zorder=5,
            path_effects=[withStroke(linewidth=2, foreground="#ffffffb0")],
        )  # fmt: skip

        def box_at(place: Place, text: Any = text) -> Bbox:
            text.set_position(place[:2])
            text.set_horizontalalignment(place[2])
            return text.get_window_extent(renderer)

        chosen = min(PLACES, key=lambda place: cost(place, box_at(place)))
        taken.append(box_at(chosen))
        if abs(chosen[1]) > ADJACENT:
            # Further away than the next line of text: say whose name it is.
            line = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 3}
            end = (chosen[0], chosen[1] + (0 if chosen[1] > 0 else 7))
            axes.annotate("", (point.x, point.y), end, textcoords="offset points", arrowprops=line, zorder=3)
