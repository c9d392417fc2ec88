"""The table and the picture of the suite `context`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .context_methods import METHODS, PLAIN
from .context_worker import LONG_S
from .plots import INK, MUTED, pyplot, save
from .rows import GIB, Row
from .tables import conditions, latest, on_gpu, reasons, section, table

COLOURS = {
    PLAIN: INK,
    "ckpt": "#2e6f95",
    "ckpt+offload": "#7fb2d1",
    "unsloth": "#5f8d4e",
    "deepspeed": "#b08900",
    "liger": "#a9a29c",
    "liger+ckpt": "#6b7280",
    "int8": "#e59aa3",
    "int8+offload": "#d1495b",
    "int8+ckpt+offload": "#8d3b72",
}
"""Of the methods that are drawn: the others are in the table."""
TITLES = {
    "llama8b": "Llama-3.1-8B",
    "qwen8b": "Qwen3-8B",
    "full": "all weights, 8-bit AdamW",
    "lora": "LoRA",
}

_NARROWEST = 10.0
"""Inches that the title and three columns of the legend take."""

Panels = dict[tuple[str, str], dict[str, list[Row]]]


def panels(rows: Iterable[Row]) -> Panels:
    """Return for each shape and training the rows of each method, by length, of the GPU measured last."""
    newest = latest(on_gpu(rows), "shape", "train", "method", "tokens")
    found: Panels = {}
    for shape, train, method in sorted(
        {key[:3] for key in newest}, key=lambda key: (*key[:2], list(METHODS).index(key[2]))
    ):
        own = [row for key, row in newest.items() if key[:3] == (shape, train, method)]
        own = [row for row in own if row["status"] in ("ok", "oom")]
        if own:
            found.setdefault((shape, train), {})[method] = sorted(own, key=lambda row: row["tokens"])
    return found


def _size(tokens: int) -> str:
    return f"{tokens // 1024}k"


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row["status"] == "oom":
        return "no memory"
    host = f" + {row['host_bytes'] / GIB:.0f}" if row["host_bytes"] >= GIB / 2 else ""
    return f"{row['tokens_per_s']:,.0f}; {row['peak_bytes'] / GIB:.1f}{host}"


def context_table(rows: Iterable[Row]) -> str:
    """Return the table: for each length tokens a second, and the peak on the device and on the host."""
    everything = list(rows)
    found = panels(everything)
    if not found:
        return ""
    lengths = sorted({row["tokens"] for methods in found.values() for own in methods.values() for row in own})
    lines, shown = [], []
    for (shape, train), methods in found.items():
        for place, (method, own) in enumerate(methods.items()):
            by_length = {row["tokens"]: row for row in own}
            shown += own
            title = f"{TITLES[shape]}, {TITLES[train]}" if place == 0 else ""
            lines.append([title, METHODS[method].title, *(_cell(by_length.get(tokens)) for tokens in lengths)])
    header = ["model", "method", *map(_size, lengths)]
    measured = [row for row in shown if row["status"] == "ok"]
    caps = ", ".join(sorted({f"{row['memory_bytes'] / GIB:.0f}" for row in measured}))
    optimizers = ", ".join(sorted({row["optimizer"] for row in measured if row["train"] == "full"}))
    errors = {row["method"]: row["grad_error"] for row in on_gpu(everything) if row.get("grad_error") is not None}
    compared = ", ".join(f"{METHODS[name].title} {error:.2%}" for name, error in errors.items())
    note = (
        "Tokens a second; the peak on the device, of steps 3 and later (of the first, where it takes over "
        f"{LONG_S:.0f} s), + what was pinned on the host, in GiB. One sequence a step, on a device capped to {caps} "
        "GiB. A method that ran out of memory is not tried on longer sequences. All methods take the loss in chunks of "
        "tokens: Liger and pyactcomp by their own head, the others by one of the bench. Unsloth's way is a peer "
        "implementation in the bench, not the package."
    )
    if optimizers:
        note += f" 8-bit AdamW: {optimizers}."
    if compared:
        note += f" Gradient error against plain PyTorch, two layers of the same width: {compared}."
    failed = [row for row in latest(on_gpu(everything), "workload", "method").values() if row["status"] != "oom"]
    return section(table(header, lines), note, conditions(shown), reasons(failed))


def draw(found: Panels, docs: Path) -> None:
    """Draw tokens a second over the length for each method, with a cross where it runs out of memory."""
    plt = pyplot()
    # What was measured at one length stands in the table: points alone are no curve.
    found = {
        key: methods
        for key, methods in found.items()
        if len({row["tokens"] for own in methods.values() for row in own}) > 1
    } or found
    columns = min(2, len(found))
    figure, grid = plt.subplots(
        -(-len(found) // columns),
        columns,
        squeeze=False,
        figsize=(max(5.6 * columns, _NARROWEST), 3.9 * -(-len(found) // columns)),
    )
    for axes in list(grid.flat)[len(found) :]:
        axes.set_visible(False)
    drawn: dict[str, object] = {}
    for axes, ((shape, train), methods) in zip(grid.flat, found.items(), strict=False):
        ticks: set[int] = set()
        for method, own in methods.items():
            fitting = [row for row in own if row["status"] == "ok"]
            if method not in COLOURS or not fitting:
                continue
            style = {"color": COLOURS[method], "zorder": 4 if METHODS[method].ours else 3}
            lengths, rates = zip(*((row["tokens"], row["tokens_per_s"]) for row in fitting), strict=True)
            (line,) = axes.plot(
                lengths, rates, marker="o", markersize=4, linewidth=2.2 if METHODS[method].ours else 1.3, **style
            )
            drawn.setdefault(method, line)
            ticks.update(lengths)
            for end in [row["tokens"] for row in own if row["status"] == "oom"][:1]:
                axes.plot([lengths[-1], end], [rates[-1]] * 2, linewidth=1, linestyle=(0, (2, 2)), **style)
                axes.plot(end, rates[-1], marker="x", markersize=8, markeredgewidth=2, **style)
                ticks.add(end)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(ticks), [_size(tick) for tick in sorted(ticks)])
        axes.minorticks_off()
        axes.set_ylim(0, 1.05 * axes.dataLim.y1)
        axes.set_xlabel("tokens in the sequence", color=MUTED)
        axes.set_title(f"{TITLES[shape]}, {TITLES[train]}", loc="left", color=INK)
    for axes in grid[:, 0]:
        axes.set_ylabel("tokens per second")
    first = next(row for methods in found.values() for own in methods.values() for row in own)
    out = any(row["status"] == "oom" for methods in found.values() for own in methods.values() for row in own)
    figure.suptitle(
        f"Long sequences within {first['memory_gib']:g} GiB of an {first['origin']['device']}"
        + "; a cross is where a method runs out of memory" * out,
        color=INK, fontsize=11,
    )  # fmt: skip
    # Of plots without a line there is nothing to explain.
    names = [method for method in COLOURS if method in drawn]
    figure.legend(
        [drawn[name] for name in names], [METHODS[name].title for name in names],
        loc="lower center", ncols=3, frameon=False, labelcolor=INK, fontsize=8,
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0.045 * -(-len(names) // 3), 1, 1))
    save(figure, docs / "long_contexts.png")


def front_line(rows: Iterable[Row]) -> str:
    """Return a sentence of the longest sequence that both checkpointing and ours were measured on, of all weights."""
    for (shape, train), methods in panels(rows).items():
        both = [{row["tokens"]: row for row in methods.get(name, ())} for name in ("ckpt", "int8+offload")]
        lengths = [tokens for tokens in both[0] if all(own.get(tokens, {}).get("status") == "ok" for own in both)]
        if train != "full" or not lengths:
            continue
        found = [own[max(lengths)] for own in both]
        theirs, ours = (
            f"{row['tokens_per_s']:,.0f} tokens a second at {row['peak_bytes'] / GIB:.1f} GiB" for row in found
        )
        return (
            f"{TITLES[shape]}, {TITLES[train]}, sequences of {_size(max(lengths))} tokens on one "
            f"{found[1]['origin']['device']}: {theirs} with checkpointing, {ours} with codes on the host."
        )
    return ""


TABLES = {"context": ("context", context_table), "context-front": ("context", front_line)}
"""The suite and the table of each block."""
