"""Suite `pairs`: this tree against an earlier one, whose processes take turns on one device.

Both sides live side by side, each with its own package and this tree's bench, and one is idle while the other runs. The
sides alternate, in an order that is swapped from pair to pair, so that a drift meets both; how far the earlier side's
turns differ among themselves says how much of a ratio is noise.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from .overhead import CHAIN
from .rows import ROOT, Options, Row, origin_of, quantile
from .workloads import WORKLOADS

BEFORE, AFTER = SIDES = ("before", "after")
BASELINE = {"int8-attention": "int8"}
"""What the earlier side runs against a method that it may lack."""
PAIRS, STEPS = 5, 5
CHAIN_PAIRS, CHAIN_STEPS = 10, 3
"""A turn counts by its median: a difference of two times is no figure if one of them was disturbed."""
ODD = "odd-sizes"
"""A small network whose sizes are no multiple of a tile, a group or a vector load."""


class SideError(Exception):
    """One side answered with a failure, or not at all; ``row`` is what to record."""

    def __init__(self, row: Row) -> None:
        super().__init__(row["reason"])
        self.row = row


class Side:
    """One tree's process."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name, self.process = name, process

    def ask(self, **command: Any) -> Row:
        """Send a command and return the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended, and so has its output
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            reason = f"{self.name}: the process ended with exit code {self.process.wait()}"
            raise SideError({"status": "error", "reason": reason})
        answer: Row = json.loads(line)
        if "status" in answer:
            raise SideError({**answer, "reason": f"{self.name}: {answer['reason']}"})
        return answer


@contextmanager
def side(name: str, tree: Path) -> Iterator[Side]:
    """Start the process of a tree, and end it with the block."""
    command = [sys.executable, "-m", "bench.pairs_worker", str(tree)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Side(name, process)
        finally:
            process.kill()
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()


def compared(turns: dict[str, list[Row]]) -> Row:
    """Return the figures of both sides' turns: the medians of each turn, and their ratios in the first figure.

    ``spread`` is the largest of the earlier side's turns over its smallest, ``itself`` its odd turns over its even.
    """
    series = {
        name: {figure: [quantile(turn[figure], 0.5) for turn in taken] for figure in taken[0]}
        for name, taken in turns.items()
    }
    unit = next(iter(series[BEFORE]))
    before, after = (series[name][unit] for name in SIDES)
    ratios = [b / a for a, b in zip(before, after, strict=True)]
    return {
        "unit": unit,
        "ratios": ratios,
        "ratio": quantile(ratios, 0.5),
        "spread": max(before) / min(before),
        "itself": quantile(before[::2], 0.5) / quantile(before[1::2], 0.5),
        **{f"{name}_turns": figures for name, figures in series.items()},
    }


def measure(workload: str, method: str, trees: dict[str, Path], device: str, tiny: bool, pairs: int) -> Row:
    """Return the figures of one row; each side builds while the other is idle, as it runs."""
    pairs, steps = (max(pairs, CHAIN_PAIRS), CHAIN_STEPS) if workload == CHAIN else (pairs, STEPS)
    methods = {BEFORE: BASELINE.get(method, method), AFTER: method}
    with ExitStack() as stack:
        sides = {name: stack.enter_context(side(name, tree)) for name, tree in trees.items()}
        facts = {
            name: sides[name].ask(workload_name=workload, method_name=methods[name], device=device, tiny=tiny)
            for name in SIDES
        }
        turns: dict[str, list[Row]] = {name: [] for name in SIDES}
        for pair in range(2 if tiny else pairs):
            for name in SIDES if pair % 2 == 0 else reversed(SIDES):
                turns[name].append(sides[name].ask(steps=2 if tiny else steps))
    return {**facts, "before_method": methods[BEFORE], **compared(turns)}


def run(options: Options, before: Path, methods: tuple[str, ...], pairs: int) -> None:
    """Measure the first method on every workload, then chains and odd sizes, then the other methods."""
    store = options.store("pairs")
    trees = {BEFORE: before.resolve(), AFTER: ROOT}
    earlier = origin_of(trees[BEFORE], "PYACTCOMP_BENCH_BEFORE")
    jobs = [(workload, method) for method in methods for workload in WORKLOADS]
    jobs[len(WORKLOADS) : len(WORKLOADS)] = [(CHAIN, "int8"), (ODD, "int8")]
    longest = 0.0
    for workload, method in jobs:
        key = {"workload": workload, "method": method, "scale": options.scale, "earlier": earlier}
        if not options.selects(workload, method) or (store.has(**key) and not options.again):
            continue
        if not options.budget.allows(longest):
            print(f"pairs {workload} {method}: not started, the budget is used up")
            return
        begin = options.budget.clock()
        try:
            row: Row = {"status": "ok", **measure(workload, method, trees, options.device, options.tiny, pairs)}
        except SideError as problem:
            row = problem.row
        seconds = options.budget.clock() - begin
        longest = max(longest, seconds)
        store.append({"suite": "pairs", **key, **row, "row_s": round(seconds, 2)})
        figures = "  ".join(f"{name} {row[name]:.3f}" for name in ("ratio", "spread", "itself") if name in row)
        print(f"pairs {workload:16} {method:14} {row['status']:11} {figures}{row.get('reason', '')}", flush=True)
