"""Rows of measurements: where they are kept, what they say about their origin, how samples are summarised."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

Row = dict[str, Any]

SCHEMA = 1
GIB = 2**30
ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "torch", "triton", "transformers", "timm", "bitsandbytes", "liger-kernel", "rmm-cu13", "diffusers",
    "torch_geometric", "peft", "torchao", "trl", "deepspeed", "pyactcomp",
)  # fmt: skip
NOT_APPLICABLE = "not applicable"
FINAL = ("ok", "oom", NOT_APPLICABLE)
"""A row with one of these is a result; `unavailable` and `error` are tried again by the next run."""


def quantile(samples: Sequence[float], q: float) -> float:
    """Return the ``q`` quantile of the samples, interpolating linearly between neighbours."""
    ordered = sorted(samples)
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summary(samples: Sequence[float], unit: str) -> Row:
    """Return median, 20th and 80th percentile and the raw samples, named by their unit."""
    return {
        f"median_{unit}": quantile(samples, 0.5),
        f"p20_{unit}": quantile(samples, 0.2),
        f"p80_{unit}": quantile(samples, 0.8),
        f"samples_{unit}": [round(sample, 4) for sample in samples],
    }


def _output_of(*command: str, folder: Path = ROOT) -> str | None:
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _sources_digest(tree: Path) -> str:
    """Return a digest of the sources that a figure depends on: a commit says nothing about a dirty tree."""
    digest = hashlib.sha256()
    for folder in ("pyactcomp", "csrc", "bench"):
        for path in sorted((tree / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".hpp", ".cu", ".cuh", ".h"):
                digest.update(path.relative_to(tree).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _command() -> str:
    """Return the command line without the paths in it, which are those of one machine."""
    arguments = list(sys.argv[1:])
    for option in ("--out", "--before"):
        arguments = [a for a in arguments if not a.startswith(f"{option}=")]
        if option in arguments:
            at = arguments.index(option)
            del arguments[at : at + 2]
    return " ".join(["python -m bench", *arguments])


def origin_of(tree: Path, variable: str) -> Row:
    """Return the commit of a checkout, whether it was changed since, and the digest of its sources.

    The commit of a copy without its own .git is taken from the environment's ``variable``.
    """
    commit = os.environ.get(variable)
    changes = None  # of a copy without history nobody can say: the digest tells
    if commit is None and (tree / ".git").exists():
        watched = ("pyactcomp", "csrc", "bench", ":!bench/results")
        commit = _output_of("git", "rev-parse", "HEAD", folder=tree)
        changes = _output_of("git", "status", "--porcelain", "--", *watched, folder=tree)
    return {"commit": commit, "dirty": None if changes is None else bool(changes), "sources": _sources_digest(tree)}


# Of one device: each prints a line.
_DRIVER = ("nvidia-smi", "-i", "0", "--query-gpu=driver_version", "--format=csv,noheader")


def provenance(device: str) -> Row:
    """Return what a reader needs to judge or repeat a row that was measured on ``device`` ("cuda" or "cpu")."""
    import torch

    gpu = device == "cuda"
    return {
        **origin_of(ROOT, "PYACTCOMP_BENCH_COMMIT"),
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "driver": _output_of(*_DRIVER) if gpu else None,
        "cuda": torch.version.cuda if gpu else None,
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "command": _command(),
    }


@dataclass
class Budget:
    """The wall-clock time a run may still use; rows that would not fit are not started."""

    seconds: float | None = None
    clock: Callable[[], float] = time.monotonic
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()

    def remaining(self) -> float | None:
        return None if self.seconds is None else self.seconds - (self.clock() - self.started)

    def allows(self, expected_s: float) -> bool:
        """Return whether something that takes about ``expected_s`` seconds still fits."""
        remaining = self.remaining()
        return remaining is None or remaining > max(expected_s, 0.0)


def read(path: Path) -> list[Row]:
    """Return the rows of a suite's file, oldest first; none where it is missing."""
    if not path.exists():
        return []
    loaded = json.loads(path.read_text())
    origins: list[Row] | None = loaded.get("origins")
    rows: list[Row] = loaded["rows"]
    return rows if origins is None else [{**row, "origin": origins[row["origin"]]} for row in rows]


@dataclass
class Store:
    """The rows of one suite in one JSON file, rewritten atomically with each new row.

    ``key`` names the fields that tell rows apart in a suite of many small rows: a newer row replaces the one with the
    same fields, and origins are written once.
    """

    path: Path
    origin: Row
    key: tuple[str, ...] = ()

    def rows(self) -> list[Row]:
        return read(self.path)

    def append(self, row: Row) -> None:
        """Stamp the row with time and origin and write it out at once."""
        if row.get("reason"):
            row = {**row, "reason": _without_paths(row["reason"])}
        stamped = {**row, "time": datetime.now(timezone.utc).isoformat(timespec="seconds"), "origin": self.origin}
        before = [old for old in self.rows() if not self.key or any(old.get(n) != row.get(n) for n in self.key)]
        self._write([*before, stamped])

    def _write(self, rows: list[Row]) -> None:
        head = ""
        if self.key:
            origins: list[Row] = []
            for origin in (row["origin"] for row in rows):
                if origin not in origins:
                    origins.append(origin)
            rows = [{**row, "origin": origins.index(row["origin"])} for row in rows]
            head = '"origins": [\n' + ",\n".join(json.dumps(origin, allow_nan=False) for origin in origins) + "\n], "
        lines = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".tmp")
        draft.write_text(f'{{"schema": {SCHEMA}, {head}"rows": [\n{lines}\n]}}\n')
        draft.replace(self.path)

    def current(self, **key: Any) -> list[Row]:
        """Return the rows with these fields that were measured at this commit, from these sources, on this device."""
        same = ("commit", "sources", "device")
        return [
            row for row in select(self.rows(), **key) if all(row["origin"][name] == self.origin[name] for name in same)
        ]

    def has(self, **key: Any) -> bool:
        """Return whether there is a current result with these fields."""
        return any(row["status"] in FINAL for row in self.current(**key))


@dataclass(frozen=True)
class Options:
    """What the command line says to every suite."""

    out: Path
    device: str
    budget: Budget
    only: tuple[str, ...] = ()
    again: bool = False
    tiny: bool = False

    @property
    def scale(self) -> str:
        """The scale that rows name."""
        return "tiny" if self.tiny else "full"

    def store(self, suite: str) -> Store:
        return Store(self.out / f"{suite}.json", provenance(self.device))

    def selects(self, workload: str, method: str | None = None) -> bool:
        """Return whether ``--only WORKLOAD[,METHOD]`` lets this workload (and method) through."""
        if self.only and self.only[0] != workload:
            return False
        return method is None or len(self.only) < 2 or self.only[1] == method


def _without_paths(text: str) -> str:
    """Return a text without the folders of this machine: those of installed packages, and the project's."""
    return re.sub(r"\S*/site-packages/", "", text).replace(f"{ROOT}/", "")


def failure(error: BaseException) -> Row:
    """Return the fields of a row that has no figure: status and reason."""
    import torch

    from pyactcomp.errors import ImplementationUnavailableError

    status = "error"
    if isinstance(error, torch.OutOfMemoryError):
        status = "oom"
    elif isinstance(error, (ImportError, ImplementationUnavailableError)):
        status = "unavailable"
    # The first line: the others may be a traceback with the paths of this machine.
    return {"status": status, "reason": f"{type(error).__name__}: {error}".strip().partition("\n")[0][:400]}


def select(rows: Iterable[Row], **key: Any) -> list[Row]:
    """Return the rows with these fields, oldest first."""
    return [row for row in rows if all(row.get(name) == value for name, value in key.items())]
