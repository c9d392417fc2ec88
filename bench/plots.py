"""The pictures of the bench; matplotlib is imported when one is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .rows import GIB, Row

INK, MUTED, GRID = "#222222", "#6b7280", "#e5e7eb"
COLOURS = {
    "vanilla": "#222222",
    "int8": "#d1495b",
    "int8+ckpt": "#8d3b72",
    "ckpt": "#2e6f95",
    "ckpt2": "#7fb2d1",
    "save_on_cpu": "#5f8d4e",
}
ALLOCATORS = {"native": "#222222", "expandable": "#2e6f95", "pyactcomp": "#d1495b"}


def pyplot() -> Any:
    """Return matplotlib's interface, drawing to files, in the style of all pictures here."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({
        "font.size": 9, "axes.edgecolor": MUTED, "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED,
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": GRID,
        "axes.axisbelow": True, "figure.dpi": 160, "axes.titlesize": 10, "axes.titleweight": "bold",
    })  # fmt: skip
    return plt


def save(figure: Any, path: Path) -> None:
    """Write a picture, in a folder that may not be there yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot().close(figure)


def throughput_vs_batch(points: dict[str, dict[str, list[Row]]], path: Path) -> None:
    """Draw samples a second over the batch size for each method, with a cross where it runs out of memory."""
    plt = pyplot()
    figure, grid = plt.subplots(1, len(points), figsize=(4.8 * len(points), 3.6), squeeze=False)
    device, cap = "", 0.0
    for axes, (workload, methods) in zip(grid.flat, points.items(), strict=True):
        ticks: set[int] = set()
        for method, run in methods.items():
            fitting = [row for row in run if row["status"] == "ok"]
            failed = [row for row in run if row["status"] == "oom"]
            if not fitting:
                continue
            device, cap = fitting[-1]["origin"]["device"], fitting[-1].get("memory_gib") or 0.0
            colour = COLOURS.get(method, MUTED)
            batches = [row["batch"] for row in fitting]
            rates = [row["samples_per_s"] for row in fitting]
            axes.plot(batches, rates, color=colour, marker="o", markersize=4, linewidth=1.6, label=method)
            ticks.update(batches)
            if failed:
                end = failed[0]["batch"]
                axes.plot([batches[-1], end], [rates[-1]] * 2, color=colour, linewidth=1, linestyle=(0, (2, 2)))
                axes.plot(end, rates[-1], color=colour, marker="x", markersize=8, markeredgewidth=2)
                ticks.add(end)
        axes.set_xscale("log", base=2)
        powers = sorted(tick for tick in ticks if tick & (tick - 1) == 0)
        axes.set_xticks(powers or sorted(ticks), [str(tick) for tick in powers or sorted(ticks)])
        axes.minorticks_off()
        axes.set_ylim(0, 1.1 * axes.dataLim.y1)
        axes.set_title(workload, loc="left", color=INK)
        axes.set_xlabel("batch size")
        axes.legend(frameon=False, loc="lower right", labelcolor=INK)
    grid.flat[0].set_ylabel("samples per second")
    figure.suptitle(
        f"Throughput under {cap:g} GiB ({device}); a cross is where the method runs out of memory",
        color=INK, fontsize=11,
    )  # fmt: skip
    figure.tight_layout()
    save(figure, path)


def allocator_training(bars: dict[str, dict[str, Row]], path: Path) -> None:
    """Draw for each workload what the allocators reserve, and beside it their step times with their intervals."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.8))
    width = 0.8 / len(ALLOCATORS)
    for place, (method, colour) in enumerate(ALLOCATORS.items()):
        at = [
            i + (place - (len(ALLOCATORS) - 1) / 2) * width for i, found in enumerate(bars.values()) if method in found
        ]
        rows = [found[method] for found in bars.values() if method in found]
        drawn = left.bar(at, [row["reserved_x"] for row in rows], 0.92 * width, color=colour, label=method)
        left.bar_label(drawn, fmt="%.2f", fontsize=7, color=INK, padding=1)
        if method == "native":
            continue
        right.errorbar(
            at, [row["step_x"] for row in rows], [row["step_x_half"] for row in rows],
            fmt="o", color=colour, markersize=5, capsize=3, linewidth=1.2, label=method,
        )  # fmt: skip
    for axes in (left, right):
        axes.set_xticks(range(len(bars)), [name.replace("_", "\n") for name in bars])
        axes.axhline(1.0, color=MUTED, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.grid(axis="x", visible=False)
    left.set_ylim(0, 1.18 * max(row["reserved_x"] for found in bars.values() for row in found.values()))
    left.set_title("Peak reserved, times native's peak allocated", loc="left", color=INK)
    right.set_title("Step time, times native's (95 % interval)", loc="left", color=INK)
    device = next(row["device"] for found in bars.values() for row in found.values())
    figure.suptitle(f"Trainings with changing shapes ({device}); lower is better", color=INK, fontsize=11)
    figure.legend(
        *left.get_legend_handles_labels(), loc="lower center", ncols=len(ALLOCATORS), frameon=False, labelcolor=INK
    )
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    save(figure, path)


def allocator_timeline(lines: dict[str, list[int]], trace: str, path: Path) -> None:
    """Draw what a recorded training requested over its course, and what was reserved for it."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7.2, 3.6))
    share = [100 * i / (len(lines["requested"]) - 1) for i in range(len(lines["requested"]))]
    gib = {name: [value / GIB for value in values] for name, values in lines.items()}
    axes.fill_between(share, gib["requested"], color=MUTED, alpha=0.35, linewidth=0, label="requested")
    for name, owner in (("native", "PyTorch's allocator"), ("pyactcomp", "pyactcomp's")):
        axes.plot(share, gib[name], color=ALLOCATORS[name], linewidth=1.6, label=f"reserved by {owner}")
    axes.set_ylim(0, 1.08 * max(gib["native"]))
    axes.set_xlim(0, 100)
    axes.set_xlabel("allocations and frees so far, %")
    axes.set_ylabel("GiB")
    axes.legend(frameon=False, labelcolor=INK, loc="upper left", fontsize=9)
    axes.set_title(f"Random sequence lengths ({trace}), a recorded training replayed", loc="left", color=INK)
    figure.tight_layout()
    save(figure, path)


def pausing_loop(rows: dict[str, Row], path: Path) -> None:
    """Draw the device memory in use over the first cycles of training and generation, for each way to run them."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7.2, 3.4))
    cycles = 6
    for (name, row), colour in zip(rows.items(), (ALLOCATORS["native"], ALLOCATORS["pyactcomp"]), strict=True):
        used = [bytes_used / GIB for _, bytes_used, _ in row["samples"][: 2 * cycles]]
        axes.stairs(
            used, [half / 2 for half in range(len(used) + 1)], color=colour, baseline=None, linewidth=1.8, label=name
        )
    high = axes.get_ylim()[1]
    for half in range(1, 2 * cycles, 2):
        axes.axvspan(half / 2, (half + 1) / 2, color=GRID, alpha=0.5, linewidth=0, zorder=0)
    axes.set_ylim(0, 1.25 * high)
    axes.set_xlim(0, cycles)
    axes.set_xlabel("cycle: training, then generation (grey)")
    axes.set_ylabel("GiB in use")
    axes.grid(axis="x", visible=False)
    axes.legend(frameon=False, labelcolor=INK, loc="upper left", ncols=2)
    device = next(iter(rows.values()))["origin"]["device"]
    axes.set_title(f"Device memory after each half of a cycle ({device})", loc="left", color=INK)
    figure.tight_layout()
    save(figure, path)
