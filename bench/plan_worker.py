"""Does one job of ``bench.plan`` and prints a row for each method: ``python -m bench.plan_worker JOB``.

A job with ``methods`` measures each on the device; one with ``seconds`` plans, and touches no GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch

import pyactcomp
from pyactcomp.estimate import question_of
from pyactcomp.estimate.gpus import gpu_named
from pyactcomp.estimate.process import Child
from pyactcomp.layout import Layout, repeating
from pyactcomp.plan.planner import Planner
from pyactcomp.plan.result import Plan

from . import training
from .estimate import GPUS
from .estimate_programs import MODELS
from .measure import step_times
from .rows import Row, failure, summary
from .workload import Workload

STEPS, TINY_STEPS = 4, 1


def uniform(module: torch.nn.Module, choice: str, fuse_head: bool) -> Layout:
    """Return the layout in which all blocks have one choice."""
    names = {each: name for name, each in module.named_modules()}
    mode: Any = "int8" if choice.startswith("int8") else None
    return Layout(mode, tuple((names[block], choice) for block in repeating(module)), fuse_head and mode == "int8")


def measure(workload: Workload, wanted: Row, device: str, tiny: bool) -> Row:
    """Return the times of steps and, on a GPU, the peak of all of them."""
    training.clean(device)
    cuda = device == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    trainer = training.build(workload, workload.batch_size(tiny), device, tiny)
    module = trainer.module
    given = wanted.get("plan")
    layout = Plan.from_dict(given) if given else uniform(module, wanted["method"], workload.language_model)
    pyactcomp.compress(module, plan=layout)
    for _ in range(training.WARM_UP):
        trainer.step()
    row = summary(step_times(trainer.step, TINY_STEPS if tiny else STEPS, device), "ms")
    if cuda:
        row |= {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
    pinned = pyactcomp.offload.pinned_bytes()
    row |= {"pinned_bytes": pinned} if pinned else {}
    return {"batch": workload.batch_size(tiny), "blocks": len(layout.blocks), **row}


def measured(job: Row) -> Iterator[Row]:
    """Yield a row for each method of a job."""
    for wanted in job["methods"]:
        try:
            row: Row = {"status": "ok", **measure(MODELS[job["workload"]], wanted, job["device"], job["tiny"])}
        except Exception as problem:  # whatever goes wrong with one plan is its row
            row = failure(problem)
        yield {"method": wanted["method"], **row}


def planned(job: Row) -> Iterator[Row]:
    """Yield the plan of each budget of a job."""
    workload = MODELS[job["workload"]]
    name = f"bench.estimate_programs:{workload.name}{'_tiny' if job['tiny'] else ''}"
    autocast = "bfloat16" if workload.autocast else None
    card = gpu_named(GPUS.get(job["device_of"], "h100"))
    question = question_of(name, workload.batch_size(job["tiny"]), None, "adamw:fused", None, autocast, card)
    seconds = job["seconds"]
    with Child(question) as child:
        planner = Planner(child, question, tuple(seconds), workload.language_model, lambda _: None, seconds)
        low, high = planner.smallest(), planner.peak(Layout(None, ()))
        for share in job["shares"]:
            plan = planner.within(int(low + float(share) * (high - low)))
            yield {"method": share, "status": "ok", "smallest_bytes": low, "plan": plan.to_dict()}


def main() -> None:
    """Print the rows of a job, one a line."""
    job = json.loads(sys.argv[1])
    for row in measured(job) if "methods" in job else planned(job):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
