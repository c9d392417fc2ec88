"""Suite `batch`: samples a second at growing batch sizes under a memory cap, until each method runs out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .methods import VANILLA
from .rows import Options
from .worker import spec_for, supervise
from .workloads import WORKLOADS

DEFAULT_WORKLOADS = ("bert_large_amp", "resnet50_tf32")
DEFAULT_METHODS = (VANILLA, "int8", "ckpt")
MEMORY_GIB = 24.0
"""The memory of a common workstation card, which the lent device's allocator is capped to."""
STEPS = 4


def sizes(first: int, limit: int | None = None) -> Iterator[int]:
    """Yield batch sizes that double, with the one halfway between; at most ``limit`` of them."""
    count = 0
    while True:
        for size in (first, first * 3 // 2) if first > 1 else (first,):
            if limit is not None and count == limit:
                return
            yield size
            count += 1
        first *= 2


def run(options: Options, methods: tuple[str, ...] = (), memory_gib: float = MEMORY_GIB) -> None:
    """Measure every method on the chosen workloads."""
    if options.device != "cuda" and not options.tiny:
        raise ValueError("the batch suite needs a GPU: the CPU has no memory cap to run into")
    store = options.store("batch")
    for workload in filter(options.selects, options.only[:1] or DEFAULT_WORKLOADS):
        pending = [
            method
            for method in methods or DEFAULT_METHODS
            if options.selects(workload, method)
            and (options.again or not store.has(workload=workload, method=method, status="oom"))
        ]
        if pending and options.budget.allows(0.0) and workload in WORKLOADS:
            spec = spec_for("batch", workload, pending, options, store)
            supervise(replace(spec, memory_gib=memory_gib), options.budget)
