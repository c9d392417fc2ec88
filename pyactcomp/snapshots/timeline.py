"""A recording's memory over its events, in as many columns as a picture has, and the picture."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from ..sizes import size_text, unit_of
from .call_stacks import fold_stacks, shortened
from .groups import size_class
from .lifetimes import Lifetimes, find_lifetimes
from .model import OOM, Frame, Snapshot
from .segments import reserved_after

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: About the picture's width in pixels: more columns would not be seen.
COLUMNS = 1600
#: More colours cannot be told apart.
GROUPS = 7

#: Formats of a picture; the first is for a name without a suffix.
FORMATS = ("png", "svg", "pdf")

# Of the legend: characters of a label's longest line, which fit in half of the width.
_LONGEST, _MOST_COLUMNS = 72, 4
# Inches: the picture with a legend of one line, each further one, and at the sides.
_HEIGHT, _LINE, _MARGIN = 5.2, 0.18, 0.08

_INK, _MUTED, _GRID = "#222222", "#6b7280", "#e5e7eb"
_OOM = "#d1495b"
_COLOURS = ("#2e6f95", "#7fb2d1", "#5f8d4e", "#a9c29a", "#b08900", "#e3c567", "#8d3b72")
_OTHER = "#cbd0d6"


@dataclass(frozen=True)
class Timeline:
    """A device's live and reserved bytes; each column has the peak of a stretch of events.

    Attributes
    ----------
    ends
        For each column, the event after its stretch; the first stretch begins at event 0.
    labels
        The groups of live bytes: call stacks, the one with most bytes at the peak first, or sizes of memory blocks, the
        largest first; the last may be "other".
    live
        For each group, the bytes in each column, after the column's event in ``live_at``.
    live_at
        For each column, the first event after which the most bytes are alive.
    reserved
        The peak of the reserved bytes in each column; None if the recording has no segments.
    peak
        The first event after which the most bytes of the whole recording are alive, and how many.
    oom
        The out-of-memory events, each with the requested and the live bytes.
    seconds
        From the first event to each column's end; None if the recording has no times.
    by
        The kind of group: "call stack" or, if none was recorded, "block size".
    """

    device: int
    ends: tuple[int, ...]
    labels: tuple[str, ...]
    live: tuple[tuple[int, ...], ...]
    live_at: tuple[int, ...]
    reserved: tuple[int, ...] | None
    peak: tuple[int, int]
    oom: tuple[tuple[int, int, int], ...]
    seconds: tuple[float, ...] | None
    by: str


def timeline(recording: Snapshot, *, device: int | None = None, columns: int = COLUMNS) -> Timeline:
    """Return the curves of a picture of a device's memory; every peak shows, however few the columns.

    Parameters
    ----------
    recording : Snapshot
    device : int, optional
        Index of the device; may be left out if only one device was recorded.
    columns : int
        The most columns; a recording of fewer events has one column per event.

    Raises
    ------
    ValueError
        For a device outside the recording, for a recording without events, and for fewer than one column.
    """
    if columns < 1:
        raise ValueError(f"columns is at least 1, got {columns}")
    trace = recording.trace(device)
    events = trace.events
    count = len(events)
    if not count:
        raise ValueError(f"device {trace.index} has no events to draw: record with _record_memory_history()")
    columns = min(columns, count)
    ends = tuple(count * (column + 1) // columns for column in range(columns))
    lifetimes = find_lifetimes(trace)
    alive = list(accumulate(lifetimes.changes(), initial=lifetimes.before()))[1:]
    stretches = list(pairwise((0, *ends)))
    live_at = tuple(alive.index(max(alive[begin:end]), begin) for begin, end in stretches)
    peak = alive.index(max(alive))
    by, names = _names(recording, lifetimes, peak)
    labels, group_of = _largest(names, lifetimes, peak)
    reserved = reserved_after(trace)
    times = events.time_us
    return Timeline(
        trace.index,
        ends,
        labels,
        _divided(lifetimes, group_of, len(labels), live_at),
        live_at,
        None if reserved is None else tuple(max(reserved[begin:end]) for begin, end in stretches),
        (peak, alive[peak]),
        tuple((index, events.size[index], alive[index]) for index, action in enumerate(events.action) if action == OOM),
        tuple((times[end - 1] - times[0]) / 1e6 for end in ends) if times[0] < times[-1] else None,
        by,
    )


def _names(recording: Snapshot, lifetimes: Lifetimes, peak: int) -> tuple[str, list[tuple[int, str]]]:
    """Return the kind of group, and each allocation's group: a rank and a name."""
    folded = fold_stacks(recording)
    if not any(folded[lifetimes.stack[number]] for number in lifetimes.alive_after(peak)):
        return "block size", [size_class(size) for size in lifetimes.size]
    labels = _labels(folded)
    return "call stack", [(0, labels[folded[stack]]) for stack in lifetimes.stack]


def _labels(stacks: Sequence[tuple[Frame, ...]]) -> dict[tuple[Frame, ...], str]:
    """Return short names: the innermost line, with outer lines only where they tell two stacks apart."""
    names: dict[tuple[Frame, ...], str] = {}
    sharing: dict[str, set[tuple[Frame, ...]]] = {}
    for stack in stacks:
        sharing.setdefault(shortened(stack[0]) if stack else "no call stack", set()).add(stack)
    for short, members in sharing.items():
        for stack in members:
            names[stack] = short if len(members) == 1 else "\n  < ".join(map(shortened, stack[:2]))
    return names


def _largest(names: Sequence[tuple[int, str]], lifetimes: Lifetimes, peak: int) -> tuple[tuple[str, ...], list[int]]:
    """Return the labels of the groups with the most bytes at the peak, and the group of each allocation."""
    held = dict.fromkeys(names, 0)
    for number in lifetimes.alive_after(peak):
        held[names[number]] += lifetimes.size[number]
    most = sorted(held, key=lambda name: -held[name])[:GROUPS]
    # Groups with ranks lie in this order, the highest at the bottom.
    most.sort(key=lambda name: -name[0])
    labels = tuple(label for _, label in most) + (("other",) if len(held) > GROUPS else ())
    place = {name: number for number, name in enumerate(most)}
    return labels, [place.get(name, GROUPS) for name in names]


def _divided(
    lifetimes: Lifetimes, group_of: Sequence[int], groups: int, moments: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Return each group's live bytes after each of the ``moments``, events in order."""
    change = [[0] * (len(moments) + 1) for _ in range(groups)]
    rows = zip(lifetimes.begin, lifetimes.end, lifetimes.size, group_of, strict=True)
    for begin, end, size, group in rows:
        # Alive from the first moment not before ``begin`` to the last moment before ``end``.
        change[group][bisect_right(moments, begin - 1)] += size
        change[group][bisect_right(moments, end - 1)] -= size
    return tuple(tuple(accumulate(row[:-1])) for row in change)


def picture_format(path: Path) -> str:
    """Return the format that a file's name asks for; a name without a suffix is for PNG.

    Raises
    ------
    ValueError
        If the suffix is of another format.
    """
    chosen = path.suffix[1:].lower() or FORMATS[0]
    if chosen not in FORMATS:
        listed = ", ".join(f".{name}" for name in FORMATS)
        raise ValueError(f"a picture is written as {listed} (or without a suffix, as PNG), got {path.name}")
    return chosen


def draw(data: Timeline, path: Path, title: str) -> None:
    """Write a timeline to ``path``, in the format of the suffix; no display is needed.

    Parameters
    ----------
    data : Timeline
    path : Path
        Ends in .png, .svg or .pdf; the folder must exist.
    title : str
        The name of the recording.

    Raises
    ------
    ModuleNotFoundError
        If matplotlib is not installed.
    OSError
        If the file cannot be written.
    ValueError
        If the suffix is of another format.
    """
    chosen = picture_format(path)
    # The object interface alone: pyplot would keep global state and look for a display.
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(12, _HEIGHT), dpi=160)
    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=_MARGIN))
    axes = figure.subplots()
    most = max(data.peak[1], *(data.reserved or (0,)), *(alive + asked for _, asked, alive in data.oom))
    scale, unit = unit_of(most)
    # Each column is a step of its own: nothing is interpolated between two.
    edges = [0, *data.ends]
    colours = [*_COLOURS[: len(data.labels)], _OTHER][: len(data.labels)]
    bottom = [0.0] * (len(edges))
    for row, label, colour in zip(data.live, map(_cut, data.labels), colours, strict=True):
        top = [low + value / scale for low, value in zip(bottom, (*row, row[-1]), strict=True)]
        axes.fill_between(edges, bottom, top, step="post", color=colour, linewidth=0, label=_escaped(label))
        bottom = top
    if data.reserved is not None:
        held = [value / scale for value in (*data.reserved, data.reserved[-1])]
        axes.step(edges, held, where="post", color=_INK, linewidth=1.5, label="reserved")
    axes.set_xlim(0, data.ends[-1] * (1.02 if data.oom else 1))
    axes.set_ylim(0, 1.14 * most / scale)
    _mark(axes, data, scale, unit, most)
    axes.set_ylabel(unit)
    axes.set_xlabel("event")
    axes.xaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="y", color=_GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_MUTED)
    axes.tick_params(colors=_MUTED)
    axes.xaxis.label.set_color(_MUTED)
    axes.yaxis.label.set_color(_MUTED)
    span = f", {data.seconds[-1]:.3g} s" if data.seconds else ""
    heading = _escaped(f"{title}: live memory by {data.by}{span}")
    axes.set_title(heading, loc="left", color=_INK, fontsize=11, weight="bold")
    _add_legend(figure, axes)
    figure.savefig(path, format=chosen)


def _add_legend(figure: Figure, axes: Axes) -> None:
    """Add the legend in as many columns as fit, below the plot: names may be long, and the plot needs the width."""
    handles, labels = axes.get_legend_handles_labels()
    for columns in range(min(_MOST_COLUMNS, len(labels)), 0, -1):
        # From top to bottom, like the areas.
        legend = figure.legend(
            handles[::-1],
            labels[::-1],
            loc="outside lower left",
            ncols=columns,
            frameon=False,
            labelcolor=_INK,
            fontsize=9,
            labelspacing=0.4,
            borderpad=0.1,
        )
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()
    lines = max(label.count("\n") for label in labels) + 1
    figure.set_figheight(_HEIGHT + _LINE * (lines * -(-len(labels) // columns) - 1))


def _cut(label: str) -> str:
    """Return a label whose lines fit in half of the width: the ends of paths and the beginnings of names stay."""
    lines = []
    half = _LONGEST // 2
    for line in label.split("\n"):
        place, space, name = line.rpartition(" ")
        if len(line) > _LONGEST and space:
            place = place if len(place) <= half else f"\u2026{place[1 - half :]}"
            room = _LONGEST - len(place) - 1
            name = name if len(name) <= room else f"{name[: room - 1]}\u2026"
        elif len(line) > _LONGEST:
            name = f"\u2026{name[1 - _LONGEST :]}"
        lines.append(f"{place}{space}{name}")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """Return a recorded text for matplotlib: not hidden in the legend, and no mathematics."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def _mark(axes: Axes, data: Timeline, scale: int, unit: str, most: int) -> None:
    """Mark the peak of live memory, and the event where memory ran out."""
    event, held = data.peak
    left = event > 0.6 * data.ends[-1]
    axes.plot(event, held / scale, marker="o", color=_INK, markersize=5, clip_on=False, zorder=4)
    axes.annotate(
        f"peak {held / scale:.2f} {unit}",
        (event, held / scale),
        (-8 if left else 8, 6),
        textcoords="offset points",
        ha="right" if left else "left",
        color=_INK,
        fontsize=9,
        bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1.5},
    )
    for at, asked, alive in data.oom:
        axes.axvline(at, color=_OOM, linewidth=1.2, linestyle=(0, (4, 3)), zorder=3)
        # A bar as high as the request: if the top is below the reserved memory, there was enough, but in pieces.
        axes.bar(
            at, asked / scale, 0.012 * data.ends[-1], alive / scale, align="edge", color=_OOM, linewidth=0, zorder=3
        )
    if data.oom:
        at, asked, _ = data.oom[-1]
        left = at > 0.6 * data.ends[-1]
        axes.annotate(
            f"out of memory, asking for {size_text(asked)}",
            (at, 1.09 * most / scale),
            (-6 if left else 6, 0),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            color=_OOM,
            fontsize=9,
            weight="bold",
        )
