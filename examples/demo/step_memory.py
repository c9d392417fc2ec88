"""Measure the memory kept for backward and the peak of a training step, with one definition on every device.

Both count allocated bytes above the bytes at the step's start: ``saved_bytes`` when forward returns, ``peak_bytes`` at
the highest point of the step. On a GPU the caching allocator counts; on the CPU the profiler reports every allocation
and release. Temporary buffers inside an operator count in both.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

_FORWARD = "pyactcomp demo: forward"


@dataclass(frozen=True)
class StepMemory:
    """Bytes above the memory allocated when the step began."""

    saved_bytes: int
    peak_bytes: int


def measure(device: torch.device, forward: Callable[[], Tensor], finish: Callable[[Tensor], None]) -> StepMemory:
    """Run one step and return its memory: ``forward`` returns the loss, ``finish`` runs backward and the optimizer."""
    if device.type == "cuda":
        return _measure_cuda(device, forward, finish)
    return _measure_cpu(forward, finish)


def _measure_cuda(device: torch.device, forward: Callable[[], Tensor], finish: Callable[[Tensor], None]) -> StepMemory:
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    loss = forward()
    saved = torch.cuda.memory_allocated(device) - before
    finish(loss)
    return StepMemory(saved, torch.cuda.max_memory_allocated(device) - before)


def _measure_cpu(forward: Callable[[], Tensor], finish: Callable[[Tensor], None]) -> StepMemory:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        with record_function(_FORWARD):
            loss = forward()
        finish(loss)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]

    forward_end = next(event["ts"] + event["dur"] for event in events if event["name"] == _FORWARD)
    allocations = [event for event in events if event["name"] == "[memory]" and event["args"]["Device Type"] == 0]
    alive: dict[int, int] = {}
    saved = peak = live = 0
    for event in sorted(allocations, key=lambda event: event["ts"]):
        address, nbytes = event["args"]["Addr"], event["args"]["Bytes"]
        if nbytes > 0:
            alive[address] = nbytes
        else:
            # A release of memory from before the step, such as late garbage collection, does not count.
            nbytes = -alive.pop(address, 0)
        live += nbytes
        peak = max(peak, live)
        if event["ts"] <= forward_end:
            saved = live
    return StepMemory(saved, peak)
