"""Suite `plan`: plans under six budgets beside the same step with all blocks alike.

For each model a process measures the peak and the step of each choice in all blocks. Another process plans with these
times, on tensors without memory, while the next model is measured. At last the plans are measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pyactcomp.layout import OFFLOAD
from pyactcomp.plan import CHOICES, Plan

from .rows import FINAL, GIB, ROOT, Budget, Options, Row, Store
from .tables import conditions, figure, latest, on_gpu, reasons, section, table

# In the order of the time that planning takes, longest first.
MODELS = ("llama_1b_bf16", "bert_large_amp", "gpt2_medium_amp", "convnext_base_amp", "unet_amp")
UNIFORM = tuple(each for each in CHOICES if not each.startswith("lossless"))
SHARES = ("0.05", "0.2", "0.4", "0.6", "0.8", "0.95")
"""Budgets, of the way from the smallest that has a plan to the peak of a model whose blocks are all kept."""
TINY_SHARES = ("0.5",)
START_S = 40.0
"""What a process takes before its first row; the first of a machine compiles kernels."""


def run(options: Options) -> None:
    """Measure the choices, plan, and measure the plans, each once for each commit."""
    store = options.store("plan")
    shares = TINY_SHARES if options.tiny else SHARES
    choices = [each for each in UNIFORM if options.device == "cuda" or not each.endswith(OFFLOAD)]
    with ThreadPoolExecutor() as pool:
        planned: dict[str, Future[list[Row]]] = {}
        for name in filter(options.selects, MODELS):
            _measure(store, options, name, [{"method": choice} for choice in choices])
            times = _newest(store, "uniform", options, name)
            if times.keys() >= set(choices) and not _newest(store, "plan", options, name).keys() >= set(shares):
                steps = {choice: times[choice]["median_ms"] / 1e3 for choice in choices}
                job = _job(options, name, seconds=steps, shares=shares, device_of=store.origin["device"])
                planned[name] = pool.submit(lambda job=job: list(_rows_of(job, options.budget)))
        for name in filter(options.selects, MODELS):
            for row in planned[name].result() if name in planned else ():
                store.append({"suite": "plan", "kind": "plan", "workload": name, "scale": options.scale, **row})
            plans = [row for row in _newest(store, "plan", options, name).values() if row["method"] in shares]
            _measure(store, options, name, [{"method": row["method"], "plan": row["plan"]} for row in plans])
    for line in summary_of(store.rows()):
        print(line)


def _newest(store: Store, kind: str, options: Options, name: str) -> dict[str, Row]:
    """Return the newest good row of each method."""
    found = store.current(kind=kind, workload=name, scale=options.scale, status="ok")
    return {row["method"]: row for row in found}


def _job(options: Options, name: str, **fields: Any) -> Row:
    return {"workload": name, "device": options.device, "tiny": options.tiny, **fields}


def _measure(store: Store, options: Options, name: str, wanted: list[Row]) -> None:
    """Measure choices, or plans, that have no row yet."""
    kind = "measured" if wanted and "plan" in wanted[0] else "uniform"
    key = {"suite": "plan", "kind": kind, "workload": name, "scale": options.scale}
    pending = [
        each for each in wanted if options.again or not store.has(**{**key, "method": each["method"]}, **_budget(each))
    ]
    if not pending:
        return
    if not options.budget.allows(START_S):
        print(f"plan {name} {kind}: not started, the budget is used up")
        return
    given = {each["method"]: each for each in pending}
    for row in _rows_of(_job(options, name, methods=pending), options.budget):
        store.append({**key, **_budget(given.get(row["method"], {})), **row})
        numbers = "  ".join(f"{each} {row[each]:.4g}" for each in ("median_ms", "peak_bytes") if each in row)
        print(f"plan {name} {row['method']:16} {row['status']} {numbers}{row.get('reason', '')}", flush=True)


def _budget(wanted: Row) -> Row:
    """Return what a measured plan's row says about the plan."""
    if "plan" not in wanted:
        return {}
    plan = Plan.from_dict(wanted["plan"])
    what = ", ".join(f"{a}-{b} {choice}" if b > a else f"{a} {choice}" for a, b, choice in plan.runs())
    host = {"planned_pinned_bytes": plan.pinned} if plan.pinned else {}
    return {"budget_bytes": plan.budget, "planned_bytes": plan.peak, "planned_x": plan.slowdown, "what": what, **host}


def _rows_of(job: Row, budget: Budget) -> Iterator[Row]:
    """Yield the rows that a process prints, which is ended where the budget is used up."""
    command = [sys.executable, "-m", "bench.plan_worker", json.dumps(job)]
    remaining = budget.remaining()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        timer = threading.Timer(threading.TIMEOUT_MAX if remaining is None else max(remaining, 0.0), process.kill)
        timer.daemon = True
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
        finally:
            timer.cancel()
    if process.returncode > 0:
        yield {"method": "", "status": "error", "reason": f"the process ended with status {process.returncode}"}


def _lines(rows: Iterable[Row]) -> list[tuple[Row, Row | None, Row | None]]:
    """Return the measured plans, each with the model as it is and the fastest choice for all blocks that fits."""
    found = latest([row for row in rows if row.get("status") in FINAL], "kind", "workload", "method")
    lines = []
    for (kind, name, _), row in found.items():
        if kind != "measured" or row["status"] != "ok":
            continue
        uniform = {key[2]: each for key, each in found.items() if key[:2] == ("uniform", name) and "median_ms" in each}
        fitting = [each for each in uniform.values() if each.get("peak_bytes", 0) <= row["budget_bytes"]]
        best = min(fitting, key=lambda each: each["median_ms"], default=None)
        lines.append((row, uniform.get("keep"), best))
    return sorted(lines, key=lambda line: (MODELS.index(line[0]["workload"]), line[0]["budget_bytes"]))


def summary_of(rows: Iterable[Row]) -> list[str]:
    """Return sentences about the plans on a GPU: peaks within budgets, and steps beside those of equal blocks."""
    lines = [line for line in _lines(rows) if "peak_bytes" in line[0]]
    if not lines:
        return []
    within = sum(row["peak_bytes"] <= row["budget_bytes"] for row, _, _ in lines)
    errors = [row["planned_bytes"] / row["peak_bytes"] - 1 for row, _, _ in lines]
    compared = [row["median_ms"] / best["median_ms"] for row, _, best in lines if best]
    sentences = [
        f"{within} of {len(lines)} plans kept within their budgets; the peak was predicted within "
        f"{max(map(abs, errors)):.2%}."
    ]
    if compared:
        sentences.append(
            f"Against the fastest choice for all blocks that fits, steps took {min(compared):.2f} to "
            f"{max(compared):.2f} times as long."
        )
    return sentences


def plan_table(rows: Iterable[Row]) -> str:
    """Return the table of measured plans."""
    measured = on_gpu(rows)
    lines = []
    for row, keep, best in _lines(measured):
        time_x = f"{row['median_ms'] / keep['median_ms']:.2f}" if keep else ""
        other = f"{best['method']} {best['median_ms'] / keep['median_ms']:.2f}" if best and keep else ""
        sizes = [figure(row, f"{name}_bytes", ".2f", GIB) for name in ("budget", "planned", "peak")]
        lines.append([f"`{row['workload']}`", row["what"], *sizes, figure(row, "median_ms", ".1f"), time_x, other])
    if not lines:
        return ""
    header = ["model", "blocks", "budget GiB", "planned GiB", "peak GiB", "step ms", "x", "all blocks alike, x"]
    note = (
        "Peak: of all steps, optimizer included. x: times the step of the model as it is. All blocks alike: the "
        "fastest choice for all blocks whose measured peak is within the budget."
    )
    used = [row for row in measured if row.get("kind") in ("measured", "uniform")]
    newest = list(latest(used, "kind", "workload", "method").values())
    return section(" ".join(summary_of(measured)), table(header, lines), note, conditions(newest), reasons(newest))
