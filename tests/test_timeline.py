"""The memory of recordings over their events against a recount, and what is drawn of it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from allocator_cases import KIB, MIB
from explain_cases import LAYER, LOSS, alloc, failure, free, large
from replay_cases import Program, as_snapshot
from snapshot_cases import BASE, block, content, event, read, segment

from pyactcomp.allocator import AllocatorConfig
from pyactcomp.snapshots.model import SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, Snapshot
from pyactcomp.snapshots.segments import reserved_after, segments_after
from pyactcomp.snapshots.timeline import GROUPS, Timeline, draw, timeline

PNG = b"\x89PNG\r\n\x1a\n"
BEGINS = {"": PNG, ".png": PNG, ".svg": b"<?xml", ".pdf": b"%PDF"}


def random_recording(tmp_path: Path, frames: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], Snapshot]:
    """Return events that reserve, allocate and free at random, with blocks from before, and their recording."""
    rng = random.Random(11)
    rows: list[dict[str, Any]] = []
    live: dict[int, int] = {900 * MIB: MIB}
    reserved = 0
    for number in range(3000):
        choice = rng.random()
        if choice < 0.02:
            rows.append(large(100 + reserved))
            reserved += 1
        elif choice < 0.03 and reserved:
            reserved -= 1
            rows.append(event("segment_free", BASE + (100 + reserved) * 64 * MIB, 20 * MIB))
        elif choice < 0.5 or not live:
            live[number * MIB] = rng.randint(1, MIB)
            chosen = [rng.choice(frames)] if frames else []
            rows.append(alloc(number * MIB, live[number * MIB], *chosen))
        else:
            offset = rng.choice(list(live))
            rows += free(offset, live.pop(offset))
    for number, row in enumerate(rows):
        row["time_us"] = 5 * number
    return rows, read(tmp_path, content(rows))


def recount(rows: list[dict[str, Any]]) -> list[tuple[dict[str, int], int]]:
    """Return after each event the live bytes by innermost frame, and the reserved bytes, in the plainest way."""
    live = {BASE + 900 * MIB: ("no call stack", MIB)}
    reserved = 0
    states = []
    for row in rows:
        if row["action"] == "alloc":
            frame = row["frames"][0] if row["frames"] else None
            name = f"model.py:{frame['line']} {frame['name']}" if frame else "no call stack"
            live[row["addr"]] = (name, -(-row["size"] // 512) * 512)
        elif row["action"] == "free_completed":
            del live[row["addr"]]
        elif row["action"] == "segment_alloc":
            reserved += row["size"]
        elif row["action"] == "segment_free":
            reserved -= row["size"]
        held: dict[str, int] = {}
        for name, size in live.values():
            held[name] = held.get(name, 0) + size
        states.append((held, reserved))
    return states


@pytest.mark.parametrize("columns", [1, 7, 640, 10**6])
def test_timeline_equals_a_recount_in_every_column(tmp_path: Path, columns: int) -> None:
    frames = [{"filename": "/home/me/model.py", "line": 10 + number, "name": f"f{number}"} for number in range(12)]
    rows, recording = random_recording(tmp_path, frames)
    data = timeline(recording, columns=columns)
    states = recount(rows)
    # What the reserved segments were before is what the events free without having made them: none.
    assert len(data.ends) == min(columns, len(rows))
    assert len(data.labels) == GROUPS + 1
    begin = 0
    for column, end in enumerate(data.ends):
        stretch = states[begin:end]
        totals = [sum(held.values()) for held, _ in stretch]
        at = begin + totals.index(max(totals))
        assert data.live_at[column] == at
        drawn = {label: row[column] for label, row in zip(data.labels, data.live, strict=True)}
        others = sum(size for name, size in states[at][0].items() if name not in data.labels)
        assert drawn == {label: states[at][0].get(label, 0) for label in data.labels[:-1]} | {"other": others}
        assert data.reserved is not None
        assert data.reserved[column] == max(reserved for _, reserved in stretch)
        begin = end
    assert begin == len(rows)
    totals = [sum(held.values()) for held, _ in states]
    assert data.peak == (totals.index(max(totals)), max(totals))
    assert data.seconds is not None
    assert data.seconds[-1] == 5 * (len(rows) - 1) / 1e6


def test_timeline_without_stacks_is_by_size_the_largest_at_the_bottom(tmp_path: Path) -> None:
    rows = [alloc(0, 5 * MIB), alloc(8 * MIB, 700), *free(0, 5 * MIB), failure(30 * MIB, 0)]
    data = timeline(read(tmp_path, content(rows)))
    assert (data.by, data.labels) == ("block size", ("4 MiB to 8 MiB", "1 KiB to 2 KiB"))
    assert data.live == ((5 * MIB, 5 * MIB, 5 * MIB, 0, 0), (0, 1024, 1024, 1024, 1024))
    assert (data.reserved, data.oom, data.seconds) == (None, ((4, 30 * MIB, KIB),), None)


def test_timeline_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no events to draw"):
        timeline(read(tmp_path, content([], [segment(BASE, block(BASE, MIB))])))
    with pytest.raises(ValueError, match="columns is at least 1"):
        timeline(read(tmp_path, content([alloc(0, MIB)])), columns=0)


@pytest.mark.parametrize(
    ("growth", "kinds"), [("vmm", {SEGMENT_MAP, SEGMENT_UNMAP}), ("malloc", {SEGMENT_ALLOC, SEGMENT_FREE})]
)
def test_reserved_is_the_sum_of_the_segments_after_each_event(tmp_path: Path, growth: str, kinds: set[int]) -> None:
    # Little enough that segments are given back.
    allocator, _ = Program(9, 400).run(AllocatorConfig(growth=growth), 600 * MIB)
    trace = as_snapshot(allocator, tmp_path, first=200).devices[0]
    assert trace.beginning.segments
    assert kinds <= {*trace.events.action}
    reserved = reserved_after(trace)
    assert reserved is not None
    for index, total in enumerate(reserved):
        segments = segments_after(trace, index)
        assert segments is not None
        assert total == sum(segment.size for segment in segments)


def drawn(data: Timeline, path: Path, monkeypatch: pytest.MonkeyPatch, title: str = "a recording") -> tuple[Any, Any]:
    """Draw it and return the figure, and the edges, bottoms and tops of each area."""
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    figures: list[Any] = []
    areas: list[Any] = []
    fill, save = Axes.fill_between, Figure.savefig

    def keep_area(self: Axes, *edges: Any, **style: Any) -> Any:
        areas.append(edges)
        return fill(self, *edges, **style)

    def keep_figure(self: Figure, *where: Any, **how: Any) -> None:
        figures.append(self)
        save(self, *where, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Axes, "fill_between", keep_area)
        patch.setattr(Figure, "savefig", keep_figure)
        draw(data, path, title)
    assert path.read_bytes().startswith(BEGINS[path.suffix])
    return figures[0], areas


def test_picture_has_the_areas_of_the_timeline_one_on_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, recording = random_recording(tmp_path, [LAYER, LOSS])
    data = timeline(recording, columns=40)
    figure, areas = drawn(data, tmp_path / "timeline.png", monkeypatch)
    scale = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[figure.axes[0].get_ylabel()]
    below = [0.0] * 41
    for (edges, bottom, top), row in zip(areas, data.live, strict=True):
        assert edges == [0, *data.ends]
        assert bottom == below
        # Exact: whole numbers of bytes, divided by a power of two.
        assert [scale * (high - low) for low, high in zip(bottom, top, strict=True)] == [*row, row[-1]]
        below = top
    (line,) = (line for line in figure.axes[0].get_lines() if line.get_label() == "reserved")
    assert data.reserved is not None
    assert [scale * value for value in line.get_ydata()] == [*data.reserved, data.reserved[-1]]


def test_picture_shows_every_label_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = [
        {"filename": filename, "line": 3, "name": name}
        for filename, name in (
            ("/u/model/__init__.py", "forward"),
            ("/u/_a.py", "f$x$ and $y$"),
            ("/u/b.py", "f$\\bad{$"),
        )
    ]
    rows = [alloc(number * MIB, MIB, frame) for number, frame in enumerate(frames)]
    data = timeline(read(tmp_path, content(rows)))
    figure, _ = drawn(data, tmp_path / "picture", monkeypatch, title="$\\bad{$")
    (legend,) = figure.legends
    shown = [text.get_text() for text in legend.get_texts()]
    assert sorted(label.replace("\\$", "$").strip() for label in shown) == sorted(data.labels)
    assert not any(label.startswith("_") for label in shown)
    assert figure.axes[0].get_title("left").count("$") == figure.axes[0].get_title("left").count("\\$") == 2


@pytest.mark.parametrize("suffix", BEGINS)
def test_picture_has_the_format_of_its_name(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn(timeline(read(tmp_path, content([alloc(0, MIB)]))), tmp_path / f"picture{suffix}", monkeypatch)


def test_picture_of_another_format_is_refused(tmp_path: Path) -> None:
    data = timeline(read(tmp_path, content([alloc(0, MIB)])))
    with pytest.raises(ValueError, match=r"written as \.png, \.svg, \.pdf .* got picture\.jpg"):
        draw(data, tmp_path / "picture.jpg", "a recording")
    assert not (tmp_path / "picture.jpg").exists()


NAMES = ("f", "a_function_of_a_usual_length", "a_name_" * 30)


@pytest.mark.parametrize("name", NAMES, ids=["short", "usual", "endless"])
@pytest.mark.parametrize("filename", ["/u/m.py", f"/u/{'modeling_' * 20}llama.py"], ids=["short", "endless"])
def test_plot_has_the_width_and_the_legend_lies_inside_whatever_the_names(
    name: str, filename: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = [{"filename": filename, "line": 10 + number, "name": name} for number in range(9)]
    rows = [large(0), *(alloc(number * MIB, MIB, frame) for number, frame in enumerate(frames))]
    figure, _ = drawn(timeline(read(tmp_path, content(rows))), tmp_path / "picture.png", monkeypatch)
    width, height = figure.get_size_inches() * figure.dpi
    plot, legend = figure.axes[0].get_window_extent(), figure.legends[0].get_window_extent()
    # Beside the plot are the numbers of the axis alone, and the legend takes at most two fifths of the height.
    assert plot.width >= 0.9 * width
    assert plot.height >= 0.5 * height
    assert legend.x0 >= 0
    assert legend.y0 >= 0
    assert legend.x1 <= width
    assert legend.y1 <= plot.y0
    # Each line can be told from the others by its number.
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len({*shown}) == len(shown)
    assert sum(".py:1" in label for label in shown) == GROUPS


def test_picture_of_few_events_has_each_tick_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = [alloc(0, 1), failure(300, 7)]
    for number, rows in enumerate((one, [*one, alloc(MIB, MIB)])):
        figure, _ = drawn(timeline(read(tmp_path, content(rows))), tmp_path / f"{number}.pdf", monkeypatch)
        ticks = [label.get_text() for label in figure.axes[0].get_xticklabels()]
        assert len({*ticks}) == len(ticks) > 1
