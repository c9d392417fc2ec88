"""What every table of the report is made of: rows picked from the JSON files, cells, and where they come from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from .rows import PACKAGES, Row, read, select


def load(folder: Path, suite: str) -> list[Row]:
    """Return the rows of a suite, oldest first; none where the file is missing."""
    return read(folder / f"{suite}.json")


def on_gpu(rows: Iterable[Row]) -> list[Row]:
    """Return the full-size rows of the GPU measured last: absolute times count on a GPU only."""
    found = on_gpus(rows)
    return [row for row in found if row["gpu"] == found[-1]["gpu"]]


def on_gpus(rows: Iterable[Row]) -> list[Row]:
    """Return the full-size rows of all GPUs, with the GPU's name under ``gpu``, for tables that show it."""
    full = ({**row, "gpu": row["origin"]["device"]} for row in select(rows, scale="full"))
    return [row for row in full if row["gpu"] != "cpu"]


def on_cpu(rows: Iterable[Row]) -> list[Row]:
    """Return the full-size rows of CPUs, of which only ratios are shown."""
    return [row for row in select(rows, scale="full") if row["origin"]["device"] == "cpu"]


def latest(rows: Iterable[Row], *key: str) -> dict[tuple[str, ...], Row]:
    """Return the last row of each key."""
    return {tuple(row.get(name, "") for name in key): row for row in rows}


def figure(row: Row, name: str, form: str, scale: float = 1.0) -> str:
    value = row.get(name)
    return "" if value is None else format(value / scale, form)


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---" if i < 2 else "---:" for i in range(len(header))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *lines])


def folded(summary: str, content: str) -> str:
    """Return long content behind its summary, on GitHub and on the site."""
    return f'<details markdown="1"><summary>{summary}</summary>\n\n{content}\n\n</details>'


def _values(rows: Iterable[Row], name: str) -> str:
    return ", ".join(sorted({str(row["origin"].get(name)) for row in rows if row["origin"].get(name)}))


def conditions(rows: Sequence[Row]) -> str:
    """Return one line that says on what, from what and by which command the rows were measured."""
    parts = [_values(rows, "device")]
    for name in ("driver", *(package for package in PACKAGES if package != "pyactcomp")):
        if values := _values(rows, name):
            parts.append(f"{name} {values}")
    commits = sorted({
        (row["origin"]["commit"] or "unknown")[:10] + (" with changes" if row["origin"]["dirty"] else "")
        for row in rows
    })  # fmt: skip
    parts.append(f"commit {', '.join(commits)}")
    parts.append(" to ".join(sorted({min(row["time"][:10] for row in rows), max(row["time"][:10] for row in rows)})))
    commands = ", ".join(f"`{command}`" for command in sorted({row["origin"]["command"] for row in rows}))
    return f"Measured on {'; '.join(parts)}; {commands}."


def reasons(rows: Iterable[Row]) -> str:
    """Return a list of what has no figure, and why."""
    workloads: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] != "ok":
            text = f"{row['method']}{' ' + row['phase'] if 'phase' in row else ''}: {row['status']}"
            text += f" ({row['reason']})" if row.get("reason") else ""
            workloads.setdefault(text, []).append(row["workload"])
    return "\n".join(sorted(f"- {', '.join(dict.fromkeys(names))} {text}" for text, names in workloads.items()))


def section(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)
