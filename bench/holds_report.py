"""The table of the suite `holds`: how much worse each arm ends than vanilla, seed by seed, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .holds import SEEDS
from .holds_training import ARMS, MUST_FAIL, TASKS
from .methods import VANILLA
from .rows import Row, select
from .tables import conditions, latest, on_gpu, reasons, section, table

T95 = 2.132
"""One-sided 95 % quantile of Student's t for five pairs, 4 degrees of freedom (NIST/SEMATECH e-Handbook, 1.3.6.7.2)."""
LIMIT = 0.005
"""The largest degradation, as a share of vanilla's mean, that an arm that holds may have."""


@dataclass(frozen=True)
class Outcome:
    """An arm of a task: its rows by seed, and how much worse each is than vanilla's of that seed.

    ``degradations`` are shares of vanilla's mean, positive where the arm is worse, infinite where it diverged.
    """

    task: str
    arm: str
    rows: tuple[Row, ...]
    degradations: tuple[float, ...]
    act_x: float | None

    @property
    def mean(self) -> float:
        return sum(self.degradations) / len(self.degradations)

    @property
    def bound(self) -> float:
        return upper_bound(self.degradations)

    @property
    def complete(self) -> bool:
        return len(self.degradations) == SEEDS

    @property
    def verdict(self) -> str:
        if self.arm == VANILLA:
            return ""
        seeds = f"{len(self.degradations)} of {SEEDS} seeds"
        if self.arm == MUST_FAIL and self.degradations and math.isinf(self.mean):
            # No further seed could make up for one that diverged.
            return "fails, as it must" if self.complete else f"fails, as it must ({seeds})"
        if not self.complete:
            return seeds
        if self.arm == MUST_FAIL:
            # Its bound alone could exceed the limit by noise, which would show nothing: its mean has to.
            return "fails, as it must" if self.mean > LIMIT else "not told apart: the test shows nothing"
        return "holds" if self.bound <= LIMIT else "not shown to hold"


def upper_bound(differences: Sequence[float]) -> float:
    """Return the upper end of the one-sided 95 % interval of the mean of five differences."""
    if len(differences) != SEEDS:
        raise ValueError(f"the quantile is that of {SEEDS} pairs, got {len(differences)}")
    mean = sum(differences) / SEEDS
    if not math.isfinite(mean):
        return math.inf
    deviation = math.sqrt(sum((value - mean) ** 2 for value in differences) / (SEEDS - 1))
    return mean + T95 * deviation / math.sqrt(SEEDS)


def _mean(rows: Iterable[Row], name: str) -> float | None:
    values = [math.inf if row[name] is None else row[name] for row in rows if name in row]
    return sum(values) / len(values) if values else None


def _outcome(task: str, arm: str, found: Sequence[Row]) -> Outcome:
    own = sorted(select(found, method=arm, status="ok"), key=lambda row: row["seed"])
    vanillas = {(row["seed"], row["pair"]): row for row in select(found, method=VANILLA, status="ok")}
    pairs = [(row, vanillas[key]) for row in own if (key := (row["seed"], row["pair"])) in vanillas]
    unit = _mean((vanilla for _, vanilla in pairs), "value")
    degradations = []
    for row, vanilla in pairs if arm != VANILLA else ():
        if row["value"] is None:
            degradations.append(math.inf)
        elif unit:
            worse = row["value"] - vanilla["value"] if row["lower_is_better"] else vanilla["value"] - row["value"]
            degradations.append(worse / unit)
    act, vanilla_act = (_mean(rows, "act_bytes") for rows in (own, vanillas.values()))
    return Outcome(task, arm, tuple(own), tuple(degradations), act / vanilla_act if act and vanilla_act else None)


def outcomes(rows: Iterable[Row]) -> list[Outcome]:
    """Return every arm of every task, from the rows of the sources that the task was trained with last."""
    measured = on_gpu(rows)
    result = []
    for task in TASKS:
        own = select(measured, workload=task)
        same = [row for row in own if row["origin"]["sources"] == own[-1]["origin"]["sources"]]
        found = list(latest(same, "method", "seed").values())
        result += [outcome for arm in ARMS if (outcome := _outcome(task, arm, found)).rows]
    return result


def percent(share: float) -> str:
    return f"{100 * share:+.2f} %" if math.isfinite(share) else "diverged"


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form) if math.isfinite(value) else "diverged"


def holds_table(rows: Iterable[Row]) -> str:
    """Return the table of the arms' final metrics and what they say."""
    everything = list(rows)
    found = outcomes(everything)
    if not found:
        return ""
    lines = []
    previous = None
    for outcome in found:
        own = outcome.rows
        lines.append([
            f"`{outcome.task}`, {own[0]['metric']}" if outcome.task != previous else "",
            outcome.arm,
            _cell(_mean(own, "value"), ".4f"),
            _cell(_mean(own, "loss"), ".4f"),
            _cell(outcome.act_x, ".2f"),
            percent(outcome.mean) if outcome.degradations else "",
            percent(outcome.bound) if outcome.complete else "",
            percent(LIMIT) if outcome.arm != VANILLA else "",
            outcome.verdict,
        ])  # fmt: skip
        previous = outcome.task
    header = (
        "task", "arm", "metric", "validation loss", "act x", "mean degradation", "95 % bound", "limit", "verdict"
    )  # fmt: skip
    note = (
        f"Means over {SEEDS} seeds. With one seed, each arm starts from vanilla's weights and sees vanilla's data in "
        "vanilla's order. degradation: how much worse the arm's metric ends, as a share of vanilla's mean. bound: the "
        f"upper end of the one-sided 95 % interval of the mean of the {SEEDS} paired differences (Student's t). An arm "
        "holds where the bound is within the limit. `nearest2` packs the same tensors as int8 in 2 bits, rounded to "
        "nearest, and shows that the test can fail: the mean of `nearest2` must exceed the limit. act x: bytes that a "
        "forward allocates, against vanilla."
    )
    notes = [TASKS[task].note for task in dict.fromkeys(outcome.task for outcome in found)]
    shown = [row for outcome in found for row in outcome.rows]
    missing = latest(on_gpu(everything), "workload", "method", "seed").values()
    return section(table(header, lines), " ".join(filter(None, [note, *notes])), conditions(shown), reasons(missing))


TABLES = {"holds": ("holds", holds_table)}
"""The suite and the table of the block."""
