"""One model under one method: whole training steps, their time, their memory and the gradients' error."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from .measure import host_loop_ms, on_quick_cpu, step_times
from .methods import Context, Method, implementation
from .rows import Row, quantile, summary
from .workload import Batch, Workload

WEIGHT_SEED, INPUT_SEED, STEP_SEED = 0, 1, 2
WARM_UP = 3
"""Steps before the timed ones: the first creates the optimizer's state, the last is the one whose memory counts."""
HOST_STEPS = 3
LOSS_TOLERANCE = 2.0**-7
"""Two forwards with the same weights, batch and seed differ, relative to the loss, by this at most.

One may round logits to bf16 where the other, its loss head fused, does not. That moves a logit by 2**-8 of it, and the
loss, a logarithm of a sum less one logit, by twice that at the largest logit, which random weights keep below the loss.
"""


@dataclass
class Trainer:
    """A model, its batch and its optimizer; ``context`` is what the method wraps a forward in."""

    workload: Workload
    device: str
    module: nn.Module
    batch: Batch
    context: Context = nullcontext
    tiny: bool = False
    optimizer: torch.optim.Optimizer | None = None

    def forward(self) -> Tensor:
        autocast = torch.autocast(self.device, torch.bfloat16) if self.workload.autocast else nullcontext()
        with autocast, self.context():
            loss: Tensor = self.module(*self.batch)
        return loss

    def finish(self, loss: Tensor) -> None:
        """Run what follows a forward, down to gradients that are gone."""
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4, fused=True)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        self.finish(self.forward())

    def gradients(self) -> list[Tensor]:
        """Return the gradients of one step from the first step's random state, leaving none behind."""
        torch.manual_seed(STEP_SEED)
        self.forward().backward()
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        self.module.zero_grad(set_to_none=True)
        return gradients


def build(workload: Workload, batch: int, device: str, tiny: bool) -> Trainer:
    """Build the model with the same weights and the same batch every time."""
    if workload.tf32:
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    torch.manual_seed(WEIGHT_SEED)
    with torch.device(device):
        module = workload.build(tiny)
    module.train()
    torch.manual_seed(INPUT_SEED)
    return Trainer(workload, device, module, workload.inputs(batch, device, tiny), tiny=tiny)


def clean(device: str) -> None:
    """Return what the last model left in the allocator, so that the next one starts from the same state."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def relative_error(gradients: list[Tensor], exact: list[Tensor]) -> float:
    """Return the relative L2 error over all gradients taken as one vector."""
    difference = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(gradients, exact, strict=True))
    return float((difference / sum(float(b.double().square().sum()) for b in exact)) ** 0.5)


def apply_and_compare(trainer: Trainer, method: Method) -> Row:
    """Apply a method, and return the error of its gradients beside that of an exact repetition.

    A method that compiles has the seconds of the first step too, and how many graphs it compiled.
    """
    blocks = trainer.workload.blocks(trainer.module)
    if method.reference is not None:
        method.reference(trainer.module, blocks)
    if not method.compared:
        trainer.context = method.apply(trainer.module, blocks)
        return _compilation(trainer)[1] if method.compile_s else {}
    exact = trainer.gradients()
    again = trainer.gradients()
    trainer.context = method.apply(trainer.module, blocks)
    found, compilation = _compilation(trainer) if method.compile_s else (trainer.gradients(), {})
    errors = {"grad_error": relative_error(found, exact), "grad_error_vanilla": relative_error(again, exact)}
    return {**errors, **compilation}


def _compilation(trainer: Trainer) -> tuple[list[Tensor], Row]:
    """Return the gradients of the first step, the seconds that it took, and how many graphs were compiled for it."""
    from torch._dynamo.utils import counters

    graphs, begin = counters["stats"]["unique_graphs"], time.perf_counter()
    gradients = trainer.gradients()
    if trainer.device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    return gradients, {"first_step_s": round(seconds, 2), "graphs": counters["stats"]["unique_graphs"] - graphs}


def differing(gradients: list[Tensor], exact: list[Tensor]) -> int:
    """Return how many of the tensors differ in any bit."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return sum(
        a.dtype != b.dtype or not torch.equal(a.view(bits[a.element_size()]), b.view(bits[b.element_size()]))
        for a, b in zip(gradients, exact, strict=True)
    )


def exactness(workload: Workload, method: Method, device: str, tiny: bool) -> Row:
    """Return how many gradient tensors of a method differ from vanilla's, and how many of a second vanilla step.

    All of it runs on deterministic algorithms, in a process that measures nothing else. Where an operator has none,
    the row names it, and the second vanilla step tells whether it matters.
    """
    trainer = build(workload, workload.batch_size(tiny), device, tiny)
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
    nondeterministic = None
    try:
        exact = trainer.gradients()
    except RuntimeError as problem:
        if "deterministic" not in str(problem):
            raise
        nondeterministic = str(problem)[:200]
        torch.use_deterministic_algorithms(True, warn_only=True)
        trainer.module.zero_grad(set_to_none=True)
        exact = trainer.gradients()
    again = trainer.gradients()
    trainer.context = method.apply(trainer.module, workload.blocks(trainer.module))
    return {
        "batch": workload.batch_size(tiny),
        "gradient_tensors": len(exact),
        "vanilla_differing": differing(again, exact),
        "differing": differing(trainer.gradients(), exact),
        "nondeterministic": nondeterministic,
        **implementation(trainer.module),
    }


def forward_bytes(trainer: Trainer) -> tuple[Tensor, int]:
    """Return the loss of a forward, and the bytes of the GPU that are allocated as long as the loss lives."""
    base = torch.cuda.memory_allocated()
    loss = trainer.forward()
    return loss, torch.cuda.memory_allocated() - base


def memory_of_step(trainer: Trainer) -> Row:
    """Return the bytes of one step, nothing on the CPU: torch counts allocations on a GPU only."""
    if trainer.device != "cuda":
        trainer.step()
        return {}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    loss, act = forward_bytes(trainer)
    trainer.finish(loss)
    torch.cuda.synchronize()
    return {
        "base_bytes": base,
        "act_bytes": act,
        "peak_minus_base_bytes": torch.cuda.max_memory_allocated() - base,
    }


def kernels_of(events: Iterable[Any]) -> Row:
    """Return how many kernels and copies ran on the GPU, and the milliseconds of all, from a profile's events."""
    # A range that a program names is an event of the GPU too, and spans the kernels in it. Each event makes its own
    # object for the type of its device: compare by value.
    ran = [e for e in events if e.device_type == DeviceType.CUDA and not getattr(e, "is_user_annotation", False)]
    return {"kernels": len(ran), "kernels_ms": sum(event.time_range.elapsed_us() for event in ran) / 1e3}


def kernels_of_step(trainer: Trainer) -> Row:
    """Return the kernels of one step, nothing on the CPU."""
    if trainer.device != "cuda":
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        trainer.step()
        torch.cuda.synchronize()
    return kernels_of(profiler.events())


def host_ms(trainer: Trainer, steps: int) -> float:
    """Return the median of the milliseconds in which the host is done with a step, whatever the GPU still computes.

    A queue that is full makes the host wait: the figure is the host's own only where the kernels take less.
    """
    times = []
    for _ in range(steps):
        with on_quick_cpu():
            if trainer.device == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            trainer.step()
            times.append((time.perf_counter() - begin) * 1e3)
    return quantile(times, 0.5)


def measure(workload: Workload, method: Method, device: str, tiny: bool, exact_loss: float | None) -> Row:
    """Measure one method on a freshly built model and return the row's figures.

    ``exact_loss`` is the first loss of the vanilla row: a method that changes the forward is an error, not a row.
    """
    clean(device)
    leftover = torch.cuda.memory_allocated() if device == "cuda" else None
    trainer = build(workload, workload.batch_size(tiny), device, tiny)
    errors = apply_and_compare(trainer, method)
    clean(device)

    torch.manual_seed(STEP_SEED)
    loss = trainer.forward()
    first_loss = float(loss.detach())
    reference_loss = first_loss if exact_loss is None else exact_loss
    if not abs(first_loss - reference_loss) <= LOSS_TOLERANCE * abs(reference_loss):
        raise RuntimeError(f"the first loss is {first_loss}, without the method it is {reference_loss}")
    trainer.finish(loss)
    del loss

    steps = 2 if tiny else min(method.steps, workload.steps or method.steps)
    for _ in range(WARM_UP - 2):
        trainer.step()
    # Before the times: launches under a profiler that was once on are slower, and so are those of every row then.
    kernels = kernels_of_step(trainer)
    memory = memory_of_step(trainer)
    times = step_times(trainer.step, steps, device)
    host = host_ms(trainer, HOST_STEPS)
    with on_quick_cpu():
        loop = host_loop_ms()
    return {
        "batch": workload.batch_size(tiny),
        "first_loss": first_loss,
        "leftover_bytes": leftover,
        "host_loop_ms": round(loop, 2),
        **(implementation(trainer.module) if method.ours else {}),
        **memory,
        **kernels,
        "host_ms": round(host, 3),
        **errors,
        **summary(times, "ms"),
    }


def throughput(trainer: Trainer, batch: int, steps: int) -> Row:
    """Return how many samples a second this trainer gets through with batches of this size."""
    torch.manual_seed(INPUT_SEED)
    trainer.batch = ()
    trainer.batch = trainer.workload.inputs(batch, trainer.device, trainer.tiny)
    for _ in range(2):
        trainer.step()
    times = summary(step_times(trainer.step, steps, trainer.device), "ms")
    return {"batch": batch, "samples_per_s": batch / times["median_ms"] * 1e3, **times}
