"""The process that measures one row of the suite `context`: ``python -m bench.context_worker JOB PATH``.

Each row has a process of its own, which ends without cleaning up: a step that ran out of memory spoils no other row,
and pinned memory takes seconds to free.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import context_models as models
from .context_methods import METHODS, Context, Method, apply, host_peak_bytes
from .measure import step_clock
from .rows import GIB, Row, failure, summary

WARM_UP, STEPS = 2, 8
"""Steps before the timed ones, of which the first creates the optimizer's state; and the most that are timed."""
LONG_S = 90.0
"""A first step that takes longer is the one that counts: what only it does takes a second of it at most."""
SEED, COMPARED_TOKENS = 1, 1024


@dataclass(frozen=True)
class Job:
    """One row: a model in the shapes of ``shape``, trained in full or by LoRA on one sequence a step."""

    shape: str
    train: str
    tokens: int
    method: str
    device: str
    tiny: bool
    memory_gib: float
    row_s: float | None = None
    """Seconds after which no further step is begun; there is always one timed step."""
    compare: bool = False
    """Whether the gradients of two layers are compared with plain ones first."""

    @property
    def workload(self) -> str:
        return f"{self.shape}-{self.train}-{self.tokens}"

    @property
    def sizes(self) -> models.Shape:
        return (models.TINY if self.tiny else models.SHAPES)[self.shape]


def _tokens(job: Job, count: int, vocabulary: int) -> Tensor:
    generator = torch.Generator(job.device).manual_seed(SEED)
    return torch.randint(vocabulary, (1, count), device=job.device, generator=generator)


def _allocated(job: Job) -> int:
    return torch.cuda.memory_allocated() if job.device == "cuda" else 0


def _model(job: Job, tokens: int, **sizes: Any) -> Any:
    model = models.build(job.sizes, tokens, job.device, **sizes)
    if job.train == "lora":
        models.freeze_beside_lora(model)
    return model


def gradient_error(job: Job, method: Method) -> Row:
    """Return the error of a method's gradients on two layers of the same width, beside that of a second plain step."""
    count = min(COMPARED_TOKENS, job.tokens)
    model = _model(job, count, layers=2, vocabulary=512)
    tokens = _tokens(job, count, 512)

    def gradients(module: nn.Module, context: Context) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        with context():
            module(tokens).backward()
        return [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]

    plain = METHODS["plain"].apply(model)
    exact, again = (gradients(models.NextToken(model, own_head=False), plain) for _ in range(2))
    context = apply(method, model)
    module = models.NextToken(model, method.own_head)
    # The second time, memory on the host and what the first step learnt are used again.
    found = [gradients(module, context) for _ in range(2)][-1]
    return {"grad_error": _relative(found, exact), "grad_error_plain": _relative(again, exact)}


def _relative(found: list[Tensor], exact: list[Tensor]) -> float:
    pairs = list(zip(found, exact, strict=True))
    difference = sum(float((a.float() - b.float()).square().sum()) for a, b in pairs)
    return float((difference / sum(float(b.float().square().sum()) for _, b in pairs)) ** 0.5)


def measure(job: Job, clock: Callable[[], float] = time.monotonic) -> Row:
    """Return the figures of one row."""
    began = clock()
    method, cuda = METHODS[job.method], job.device == "cuda"
    memory = torch.cuda.get_device_properties(0).total_memory if cuda else None
    if memory is not None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, job.memory_gib * GIB / memory))
        memory = min(memory, int(job.memory_gib * GIB))
    row: Row = {"memory_bytes": memory}
    if job.compare:
        row |= gradient_error(job, method)
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    model = _model(job, job.tokens)
    context = apply(method, model)
    module = models.NextToken(model, method.own_head)
    trained = [p for p in model.parameters() if p.requires_grad]
    row |= {"parameters": sum(p.numel() for p in model.parameters()), "trained": sum(p.numel() for p in trained)}
    if job.train == "full":
        optimizer, row["optimizer"] = models.adamw_8bit(trained, 1e-5, job.device, job.tiny)
    else:
        optimizer, row["optimizer"] = torch.optim.AdamW(trained, lr=1e-5, fused=cuda), "torch"
    tokens = _tokens(job, job.tokens, job.sizes.vocabulary)
    base, held, losses = _allocated(job), 0, []

    def step() -> None:
        nonlocal held
        with context():
            loss = module(tokens)
            held = _allocated(job) - base
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())

    times: list[float] = []
    peaks: list[int] = []
    row["ready_s"] = round(clock() - began, 1)
    warm_up = WARM_UP
    for number in range(WARM_UP + (2 if job.tiny else STEPS)):
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        begin = clock()
        took = step_clock(step, job.device)
        if number == 0 and took > LONG_S * 1e3:
            warm_up = 0
        if number < warm_up:
            base = _allocated(job)
            continue
        times.append(took)
        peaks.append(torch.cuda.max_memory_allocated() if cuda else 0)
        end = clock()
        if warm_up == 0 or (job.row_s is not None and end + (end - begin) - began > job.row_s):
            break
    row |= {
        "first_loss": float(losses[0]),
        "tokens_per_s": job.tokens / summary(times, "ms")["median_ms"] * 1e3,
        **summary(times, "ms"),
    }
    if cuda:
        row |= {
            "base_bytes": base,
            "act_bytes": held,
            "peak_bytes": max(peaks),
            "samples_peak_bytes": peaks,
            "reserved_bytes": torch.cuda.memory_reserved(),
            "host_bytes": host_peak_bytes(),
        }
    return row


def main() -> None:
    """Measure the job of the command line, and write its row."""
    job, path = Job(**json.loads(sys.argv[1])), Path(sys.argv[2])
    try:
        row: Row = {"status": "ok", **measure(job)}
    except Exception as problem:  # whatever a method does wrong is its row
        row = failure(problem)
        # Of pinned memory too, of which CUDA says no more than this.
        if row["status"] == "error" and "out of memory" in row["reason"]:
            row["status"] = "oom"
    path.write_text(json.dumps(row))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    main()
