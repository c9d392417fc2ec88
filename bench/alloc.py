"""Suite `alloc`: what an allocation costs, what dynamic-shape trainings reserve, what recorded traces would reserve.

Parts: ``pair`` (from Python), ``threads`` (native threads), ``share`` (the first use of a tensor in another process),
``pause`` (memory given back for a while), ``prediction`` (recorded runs replayed, beside real ones), ``training``
(whole runs) and ``traces`` (replayed on the simulated device, which needs no GPU).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import datetime, timezone

from . import alloc_pausing, alloc_prediction, alloc_traces
from .alloc_held_out import TRAININGS
from .alloc_methods import CALLS, NATIVE, PAUSING, SHARING, TRAINING
from .alloc_worker import Job, start
from .rows import Options, Store

ROUNDS = 5
CALL_ROUNDS = 10
"""Of the calls, whose best time counts: a process takes a fifth more in the median than in the best round."""


def selectable() -> list[str]:
    """Return what ``--only`` may name."""
    traces = map(alloc_traces.workload_of, sorted(alloc_traces.FOLDER.glob("*.npz")))
    predictions = map(alloc_prediction.workload_of, alloc_prediction.WORKLOADS)
    return ["pair", "threads", "share", *alloc_pausing.WORKLOADS, *TRAININGS, *traces, *predictions]


def run(options: Options, parts: Sequence[str], methods: Sequence[str] = ()) -> None:
    """Measure the parts, the cheapest first."""
    if "traces" in parts:
        alloc_traces.run(options, methods)
    store = options.store("alloc")
    calls = tuple(part for part in ("pair", "threads") if part in parts and options.selects(part))
    if calls:
        measure(options, store, calls, methods or CALLS, CALL_ROUNDS)
    if "share" in parts and options.selects("share"):
        measure(options, store, ("share",), methods or SHARING)
    if "pause" in parts:
        for workload in filter(options.selects, alloc_pausing.WORKLOADS):
            measure(options, store, (workload,), methods or PAUSING, rounds=1)  # each row repeats its cycle itself
    if "prediction" in parts:
        alloc_prediction.run(options, store, methods)
    if "training" in parts:
        for workload in filter(options.selects, TRAININGS):
            measure(options, store, (workload,), methods or TRAINING)


def measure(
    options: Options, store: Store, workloads: tuple[str, ...], methods: Sequence[str], rounds: int = ROUNDS
) -> None:
    """Measure in rounds, each method once a round in an order shuffled anew, native in every round."""
    run = f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S}-{workloads[0]}"
    left = [method for method in methods if any(options.selects(workload, method) for workload in workloads)]
    longest = 0.0
    begun = False
    for number in range(1 if options.tiny else rounds):
        pending = [
            method
            for method in left
            if options.again
            or not all(store.has(workload=w, method=method, round=number, scale=options.scale) for w in workloads)
        ]
        if not pending:
            continue
        if not options.budget.allows(longest):
            print(f"alloc {' '.join(workloads)} round {number}: not started, the budget is used up")
            return
        begin = options.budget.clock()
        order = [NATIVE, *(method for method in pending if method != NATIVE)]
        if begun:  # the first round begins with native, whose loss is what the others' are held against
            random.Random(number).shuffle(order)
        begun = True
        for method in order:
            if start(Job(workloads, method, number, run, str(store.path), store.origin, options.tiny)):
                continue
            if method == NATIVE:
                print(f"alloc {' '.join(workloads)}: without native there is nothing to compare with", flush=True)
                return
            left.remove(method)
        longest = max(longest, options.budget.clock() - begin)
