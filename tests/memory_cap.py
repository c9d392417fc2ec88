"""A device with little memory, on the CPU: modules that run out of memory where the process holds more than a cap.

glibc counts the bytes that the process has allocated, whoever did: saved tensors, codes, gradients, states.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
_MMAP_THRESHOLD = -3


class _Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


_libc = ctypes.CDLL(None)
if not hasattr(_libc, "mallinfo2"):
    pytest.skip("glibc below 2.33 has no mallinfo2 to count the allocated bytes", allow_module_level=True)
_libc.mallinfo2.restype = _Counts
# Blocks of this many bytes have pages of their own, which are counted whatever thread allocated them.
_libc.mallopt(_MMAP_THRESHOLD, 1 << 16)


def allocated() -> int:
    """Return the bytes that this process has allocated."""
    counts = _libc.mallinfo2()
    return int(counts.uordblks + counts.hblkhd)


class Memory:
    """The memory of a simulated device: what the process allocates from now on, at most ``cap`` bytes."""

    def __init__(self, cap: int | None = None) -> None:
        gc.collect()
        self.base = allocated()
        self.cap = cap
        self.peak = 0
        self.failures = 0

    @property
    def used(self) -> int:
        return allocated() - self.base

    def check(self) -> None:
        used = self.used
        self.peak = max(self.peak, used)
        if self.cap is not None and used > self.cap:
            self.failures += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory. {used} bytes are in use, and the cap is {self.cap}.")

    def measure(self, run: Callable[[], None]) -> int:
        """Return the highest memory of a run, as ``find_batch_size`` asks for."""
        self.peak = 0
        run()
        return self.peak


class _Check(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: Memory) -> Tensor:
        ctx.memory = memory
        memory.check()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.memory.check()
        return grad, None


class Capped(nn.Module):
    """Lets its input through, and runs out of memory in forward or backward where the memory is full."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.memory = memory

    def forward(self, x: Tensor) -> Tensor:
        return _Check.apply(x, self.memory)  # type: ignore[no-any-return,no-untyped-call]
