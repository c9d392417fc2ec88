"""One dynamic-shape training under the allocator of this process: what it reserved, what it took, what it computed."""

from __future__ import annotations

import ctypes
import time

import torch

from .alloc_held_out import TRAININGS
from .alloc_methods import NATIVE
from .alloc_workloads import Step
from .rows import Row, summary

WARM_UP = 5
"""Steps that are run before the timed ones: libraries load, the optimizer makes its state."""
LOSS_TOLERANCE = 2.0**-7
"""Of the mean loss. The same seeds give the same kernels, but sums by atomics differ in their order from run to run by
an ulp of bf16, 2^-8, in a loss's terms; a block handed out twice makes a loss wrong by its own size."""


def train(step: Step, steps: int, device: str) -> Row:
    """Run the steps and return their times, their losses, and on a GPU the least memory that was free after one."""
    times, losses, free = [], [], []
    for _ in range(steps):
        begin = time.perf_counter()
        losses.append(float(step()))  # waits for all of the step: the loss is read after it on the same stream
        times.append((time.perf_counter() - begin) * 1e3)
        if device == "cuda":
            free.append(torch.cuda.mem_get_info()[0])
    timed = times[min(WARM_UP, steps - 1) :]
    return {
        "steps": steps,
        "mean_ms": sum(timed) / len(timed),
        **summary(timed, "ms"),
        "run_s": sum(times) / 1e3,
        "mean_loss": sum(losses) / len(losses),
        "final_loss": losses[-1],
        **({"least_free_bytes": min(free)} if free else {}),
    }


def memory() -> Row:
    """Return what the allocator says about the run."""
    stats = torch.cuda.memory_stats()
    active, reserved = stats.get("active_bytes.all.peak", 0), torch.cuda.max_memory_reserved()
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": reserved,
        "utilization": active / reserved if active and reserved else None,
        "retries": stats.get("num_alloc_retries"),
        "driver_calls": stats.get("num_device_alloc", 0) + stats.get("num_device_free", 0) or None,
    }


def driver_time(method: str) -> Row:
    """Return the seconds spent in the driver's memory calls, where they can be known.

    Ours counts them. Native's segments, of which none was given back during the run, are acquired once more, after
    it, under a clock.
    """
    if method.startswith("pyactcomp"):
        from pyactcomp import allocator

        return {"driver_s": allocator.stats()["driver_seconds"], "driver_s_from": "its own clock"}
    if method == NATIVE and torch.cuda.memory_stats()["num_device_free"] == 0:
        try:
            # The runtime library that torch has loaded, found again by its name.
            runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
        except OSError as problem:
            return {"driver_s": None, "driver_s_from": f"not measured: {problem}"}
        return {"driver_s": _acquire_again(runtime), "driver_s_from": "the same segments acquired again"}
    return {"driver_s": None, "driver_s_from": "not measured"}


def _acquire_again(runtime: ctypes.CDLL) -> float:
    """Return the seconds that cudaMalloc takes for this process's segments."""
    sizes = [segment["total_size"] for segment in torch.cuda.memory_snapshot()]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    pointers = [ctypes.c_void_p() for _ in sizes]
    begin = time.perf_counter()
    codes = [runtime.cudaMalloc(ctypes.byref(p), ctypes.c_size_t(n)) for p, n in zip(pointers, sizes, strict=True)]
    seconds = time.perf_counter() - begin
    codes += [runtime.cudaFree(pointer) for pointer in pointers]
    if any(codes):
        raise RuntimeError(f"cudaMalloc or cudaFree of {len(sizes)} segments failed with code {max(codes)}")
    return seconds


def measure(workload: str, method: str, device: str, tiny: bool, reference_loss: float | None) -> Row:
    """Return the row of one run; raise where its mean loss is not ``reference_loss``, native's with the same seeds."""
    chosen = TRAININGS[workload]
    start: Row = {}
    if device == "cuda":
        _load_libraries()
        start = {"start_free_bytes": torch.cuda.mem_get_info()[0], "start_reserved_bytes": torch.cuda.memory_reserved()}
    step = chosen.build(device, tiny)
    run = train(step, 3 if tiny else chosen.steps, device)
    loss = run["mean_loss"]
    expected = loss if reference_loss is None else reference_loss
    if not abs(loss - expected) <= LOSS_TOLERANCE * abs(expected):  # "not": a NaN is no loss to go on with either
        raise RuntimeError(f"the mean loss is {loss}, under the native allocator it was {reference_loss}")
    row = {**run, **start, "conditions": chosen.conditions}
    if device == "cuda":
        row |= memory()
        row["drop_bytes"] = row["start_free_bytes"] - row["least_free_bytes"]
        row["growth_bytes"] = row["peak_reserved_bytes"] - row["start_reserved_bytes"]
        row |= driver_time(method)
    return row


def _load_libraries() -> None:
    """Make the context and cuBLAS's handle and workspace, which are not what a run's own allocations take."""
    x = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16)
    (x @ x).sum().item()
