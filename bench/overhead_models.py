"""The models of the suite `overhead`: many tensors, each so small that a step is the host's work alone."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pyactcomp
from pyactcomp.engine import reasons

from .measure import interleave
from .rows import Row, quantile

BLOCKS, WIDTH, HEADS, BATCH, LENGTH = 12, 32, 4, 4, 16
PAIRS = 2500
"""Of layers in :func:`tiny_tensors`, each of which saves one tensor."""


class Block(nn.Module):
    """A pre-norm block with dropout, whose projections of attention are one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(batch, tokens, width)))
        return x + self.drop(self.down(self.act(self.up(self.norm2(x)))))


def transformer(blocks: int) -> tuple[nn.Module, Tensor]:
    """Return a small transformer and its batch."""
    return nn.Sequential(*(Block() for _ in range(blocks))), torch.randn(BATCH, LENGTH, WIDTH)


def tiny_tensors(pairs: int) -> tuple[nn.Module, Tensor]:
    """Return a chain of layers and activations, each of which saves a tensor of 2 KiB, and its batch."""
    return nn.Sequential(*(m for _ in range(pairs) for m in (nn.Linear(32, 32), nn.Tanhshrink()))), torch.randn(16, 32)


def measure(
    model: nn.Module, batch: Tensor, device: str, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> Row:
    """Return the milliseconds of a forward and backward by a clock, plain and under int8 in turns, on one thread.

    The clock stops when the host is done; a GPU is waited for outside.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        plain = model.to(device).train()
        x = batch.to(device).requires_grad_()
        ours = pyactcomp.compress(copy.deepcopy(plain), min_bytes=1)
        tasks = {name: _step(each, x, device, clock) for name, each in (("plain", plain), ("int8", ours))}
        for task in (*tasks.values(), *tasks.values()):  # the first forward records what a report needs
            task()
        tensors = [t for t in pyactcomp.report(ours).tensors if t.kept not in reasons.ALIVE_ANYWAY]
        samples = interleave(tasks, rounds)
    finally:
        torch.set_num_threads(threads)
    medians = {name: quantile(times, 0.5) for name, times in samples.items()}
    return {
        "tensors": len(tensors),
        "plain_ms": medians["plain"],
        "int8_ms": medians["int8"],
        "time_x": quantile([b / a for a, b in zip(samples["plain"], samples["int8"], strict=True)], 0.5),
        "sum_us": (medians["int8"] - medians["plain"]) * 1e3 / len(tensors),
        **{f"samples_{name}_ms": [round(each, 4) for each in times] for name, times in samples.items()},
    }


def _step(model: nn.Module, x: Tensor, device: str, clock: Callable[[], float]) -> Callable[[], float]:
    def step() -> float:
        begin = clock()
        model(x).sum().backward()
        elapsed = clock() - begin
        if device == "cuda":
            torch.cuda.synchronize()
        model.zero_grad(set_to_none=True)
        return elapsed * 1e3

    return step
