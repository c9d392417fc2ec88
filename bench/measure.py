"""Timing: the only module that reads a clock around device work.

Small work is timed as replays of a CUDA graph, so that launch overhead on the host does not count as device
time. Every replay runs over several sets of buffers, together at least three times the L2 cache, so that no
input is found in the cache. Competitors take turns in shuffled rounds, so that a drift of the clocks or a
neighbour on the machine meets them all.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

L2_MULTIPLE = 3
"""A set of buffers is used again after this many times the L2 cache has passed through it."""

CONTENDED = 1.05
"""A run whose copies have a 90th percentile this much above their median shared the device with someone."""


def buffer_sets(nbytes: int, l2_bytes: int) -> int:
    """Return how many tensors of ``nbytes`` to rotate through; at least two, so that none follows itself."""
    return max(2, -(-L2_MULTIPLE * l2_bytes // nbytes))


def interleave(tasks: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run every task once a round, in an order shuffled anew each round, and return what each one returned."""
    shuffled = random.Random(0)
    samples: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(rounds):
        order = list(tasks)
        shuffled.shuffle(order)
        for name in order:
            samples[name].append(tasks[name]())
    return samples


def host_task(function: Callable[[Any], Any], items: Sequence[Any]) -> Callable[[], float]:
    """Return a task that applies the function to all items and returns microseconds an item."""

    def task() -> float:
        begin = time.perf_counter()
        kept = [function(item) for item in items]
        end = time.perf_counter()
        del kept
        return (end - begin) * 1e6 / len(items)

    return task


def device_task(
    function: Callable[[Any], Any], items: Sequence[Any], *, capture: bool = True
) -> tuple[Callable[[], float], str]:
    """Return a task like :func:`host_task`, in device time, and how it is timed: "graph" or "event"."""
    function(items[0])  # compiles and loads what is loaded lazily, which a capture forbids
    torch.cuda.synchronize()

    def run_each() -> None:
        for item in items:
            function(item)

    run: Callable[[], Any] = run_each
    timer = "event"
    if capture:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                # Held until the capture ends, so that the outputs too are distinct buffers.
                outputs = [function(item) for item in items]
            del outputs
            run, timer = graph.replay, "graph"
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            torch.cuda.synchronize()

    def task() -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        run()  # untimed: while it runs the host queues the timed one, so that no launch latency is inside
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / len(items)

    return task, timer


def host_loop_ms(length: int = 200_000, times: int = 5) -> float:
    """Return the milliseconds of a fixed loop of Python, the fastest of some.

    Where a step waits for the host, machines of one GPU differ as this does.
    """

    def loop() -> float:
        begin = time.perf_counter()
        sums: dict[int, int] = {}
        for i in range(length):
            sums[i & 255] = sums.get(i & 255, 0) + i
        return (time.perf_counter() - begin) * 1e3

    return min(loop() for _ in range(times))


CPUS_TRIED = 5
"""With half of them disturbed, one of five is not in 31 of 32 cases; to try them takes 7 ms, in which no GPU cools."""
_order = random.Random(0)


@contextmanager
def on_quick_cpu() -> Iterator[None]:
    """Run this process on the quickest of a few CPUs, where the system lets it choose.

    On a shared host the neighbours halve the speed of some CPUs, others each second. Steps that wait for the host took
    105 to 161 ms where the scheduler put them, 101 to 106 ms on the quickest (swin_base_amp, int8, medians of ten).
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    try:
        speeds = {}
        for cpu in _order.sample(sorted(allowed), min(CPUS_TRIED, len(allowed))):
            os.sched_setaffinity(0, {cpu})
            speeds[cpu] = host_loop_ms(10_000, times=2)
        _move_threads({min(speeds, key=speeds.__getitem__)})
        yield
    finally:
        _move_threads(allowed)


def _move_threads(cpus: set[int]) -> None:
    """Let all threads of this process run on these CPUs alone: autograd has its own for each GPU."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cpus)


def step_times(step: Callable[[], Any], count: int, device: str) -> list[float]:
    """Return the milliseconds of ``count`` calls; on a GPU each by CUDA events, on a quick CPU, right after another."""
    times = []
    if device != "cuda":
        for _ in range(count):
            begin = time.perf_counter()
            step()
            times.append((time.perf_counter() - begin) * 1e3)
        return times
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for _ in range(count):
        with on_quick_cpu():
            step()
            marks[0].record()
            step()
            marks[1].record()
            torch.cuda.synchronize()
        times.append(marks[0].elapsed_time(marks[1]))
    return times


def step_clock(step: Callable[[], Any], device: str) -> float:
    """Return the milliseconds of one call, all work on the device done."""
    if device != "cuda":
        return step_times(step, 1, device)[0]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize()
    marks[0].record()
    step()
    marks[1].record()
    torch.cuda.synchronize()
    return marks[0].elapsed_time(marks[1])


def turn_times(step: Callable[[], Any], count: int, device: str) -> list[float]:
    """Return the milliseconds of ``count`` calls, right after one another and after one that is not counted.

    Unlike :func:`step_times`, a turn is as short as it can be: two programs that take turns meet the same conditions.
    """
    if device != "cuda":
        step()
        return step_times(step, count, device)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    with on_quick_cpu():
        step()
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in itertools.pairwise(marks)]
