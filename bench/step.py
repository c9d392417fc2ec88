"""Suite `step`: whole training steps of five models under every method, vanilla first and again last."""

from __future__ import annotations

from .methods import STAGES, VANILLA, VANILLA_AGAIN
from .rows import Options
from .worker import spec_for, supervise
from .workloads import WORKLOADS


def run(options: Options, methods: tuple[str, ...] = ()) -> None:
    """Measure the core methods of every workload, then the others; or just ``methods``."""
    store = options.store("step")
    started: list[float] = []
    for stage in (methods,) if methods else STAGES:
        for workload in filter(options.selects, WORKLOADS):
            pending = [
                method
                for method in stage
                if options.selects(workload, method)
                and (options.again or not store.has(workload=workload, method=method, scale=_scale(options)))
            ]
            if not pending:
                continue
            # A figure counts beside a vanilla step of its own run, and the second one shows the drift.
            others = [method for method in pending if method not in (VANILLA, VANILLA_AGAIN)]
            if not options.budget.allows(min(started, default=0.0)):
                print(f"step {workload}: not started, the budget is used up")
                return
            begin = options.budget.clock()
            supervise(spec_for("step", workload, [VANILLA, *others, VANILLA_AGAIN], options, store), options.budget)
            started.append(options.budget.clock() - begin)


def _scale(options: Options) -> str:
    return "tiny" if options.tiny else "full"
