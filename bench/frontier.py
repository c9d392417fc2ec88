"""Suite `frontier`: training steps of models under ours and the peers, vanilla first and again last."""

from __future__ import annotations

from dataclasses import replace

from .methods import METHODS, STAGES, VANILLA, VANILLA_AGAIN
from .rows import NOT_APPLICABLE, Options, Store
from .tuned import TUNED
from .untuned import UNTUNED
from .worker import Spec, identity, spec_for, supervise, tell
from .workload import Workload
from .workloads import WORKLOADS

SETS: dict[str, dict[str, Workload]] = {"all": WORKLOADS, "tuned": TUNED, "untuned": UNTUNED}


def run(options: Options, methods: tuple[str, ...] = (), chosen: str = "all") -> None:
    """Measure the core methods of every workload of a set, then the others; or just ``methods``."""
    store = options.store("frontier")
    started: list[float] = []
    for stage in (methods,) if methods else STAGES:
        for workload in filter(options.selects, SETS[chosen]):
            pending = [
                method
                for method in stage
                if options.selects(workload, method)
                and (methods or options.only[1:] or _by_default(workload, method))
                and (options.again or not store.has(workload=workload, method=method, scale=options.scale))
            ]
            spec = spec_for("frontier", workload, [], options, store)
            pending = [method for method in pending if not _ruled_out(spec, method, store)]
            if not pending:
                continue
            if not options.budget.allows(min(started, default=0.0)):
                print(f"frontier {workload}: not started, the budget is used up")
                return
            begin = options.budget.clock()
            supervise(replace(spec, methods=tuple(_framed(pending))), options.budget)
            started.append(options.budget.clock() - begin)


def _by_default(workload: str, method: str) -> bool:
    """Return whether a method is measured of this workload without being asked for."""
    measured = WORKLOADS[workload].methods
    return measured is None or method in measured


def _ruled_out(spec: Spec, method: str, store: Store) -> bool:
    """Write a row without a figure if the workload cannot have one, and return whether it was so."""
    reason = METHODS[method].unsuitable(WORKLOADS[spec.workload])
    if reason is None:
        return False
    row = {"status": NOT_APPLICABLE, "reason": reason}
    store.append({**identity(spec, method), **row})
    tell(spec, method, row)
    return True


def _framed(methods: list[str]) -> list[str]:
    """Put vanilla around what is timed: a time counts beside one of its own run, and the second shows the drift."""
    timed = [m for m in methods if METHODS[m].timed and m not in (VANILLA, VANILLA_AGAIN)]
    untimed = [m for m in methods if not METHODS[m].timed]
    return [*([VANILLA, *timed, VANILLA_AGAIN] if timed or not untimed else []), *untimed]
