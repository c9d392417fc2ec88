"""The first use of a tensor in another process: the sender describes new memory, the receiver opens and reads it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing as mp

from .rows import Row, summary

SIZES = (64 << 20, 512 << 20)
"""One handle of the largest size, and eight."""
REPEATS = 20
CALLS = ("send", "open")


def receive(method: str, device: str, connection: Connection) -> None:
    """Answer each tensor with its last value and the nanoseconds until the value was there; end with the connection."""
    if device == "cuda":
        from .alloc_methods import METHODS, use

        use(METHODS[method])
    torch.ones(2, device=device)[-1].item()
    connection.send("ready")
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        begin = time.perf_counter_ns()
        tensor = ForkingPickler.loads(message)
        value = tensor[-1].item()
        ns = time.perf_counter_ns() - begin
        del tensor
        connection.send((value, ns))


def exchange(connection: Connection, nbytes: int, value: float, device: str) -> tuple[float, float]:
    """Return the nanoseconds of describing a new tensor and of its first use in the receiver."""
    tensor = torch.full((nbytes // 4,), value, device=device)
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    message = bytes(ForkingPickler.dumps(tensor))
    send_ns = time.perf_counter_ns() - begin
    connection.send_bytes(message)
    seen, open_ns = connection.recv()
    if seen != value:
        raise RuntimeError(f"the receiver read {seen}, not {value}")
    del tensor
    if device == "cuda":  # the next tensor gets memory that was never shared
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
    return send_ns, open_ns


def measure(method: str, tiny: bool, device: str = "cuda") -> Iterator[Row]:
    """Yield a row for each size and side."""
    repeats, sizes = (2, (1 << 20,)) if tiny else (REPEATS, SIZES)
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=receive, args=(method, device, there))
    process.start()
    there.close()
    try:
        here.recv()
        for nbytes in sizes:
            samples = [exchange(here, nbytes, float(count), device) for count in range(repeats + 1)][1:]
            for call, own in zip(CALLS, zip(*samples, strict=True), strict=True):
                yield {"call": call, "nbytes": nbytes, "threads": 0, "best_ns": min(own), **summary(own, "ns")}
    finally:
        here.close()
        process.join()
