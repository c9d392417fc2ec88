"""Suite `mlp`: forward and backward of one norm and gated MLP of Llama-3.1-8B, at 8k to 128k tokens.

The first row to run after a change of the tiles: what backward needs beside what forward stored, and what the tiles
cost in time, against all tokens at once, against torch's checkpoint and against Liger's tiled MLP.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pyactcomp
from pyactcomp.config import Config

from .rows import Options, Row, failure, summary

TOKENS, TINY_TOKENS = (2**13, 2**14, 2**15, 2**16, 2**17), (64,)
CHECKED_TOKENS, TINY_CHECKED_TOKENS = 2**12, 48
ROUNDS = 5


class Part(nn.Module):
    """The second half of a Llama block."""

    def __init__(self, tiny: bool, checkpointed: bool = False) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama import modeling_llama

        super().__init__()
        width, middle = (64, 192) if tiny else (4096, 14336)
        self.config = LlamaConfig(hidden_size=width, intermediate_size=middle, num_attention_heads=32)
        self.post_attention_layernorm = modeling_llama.LlamaRMSNorm(width)
        self.mlp: nn.Module = modeling_llama.LlamaMLP(self.config)
        self.checkpointed = checkpointed

    def _part(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the input and the MLP's output."""
        return checkpoint(self._part, x, use_reentrant=False) if self.checkpointed else self._part(x)  # type: ignore[no-any-return]


def _plain(tiny: bool) -> Part:
    return Part(tiny)


def _ours(tiny: bool, *, checkpointed: bool = False, tile: Any = "auto") -> Part:
    if tiny and tile is not None:
        tile = 16
    pyactcomp.compress(part := Part(tiny, checkpointed), tile=tile, min_bytes=0 if tiny else Config.min_bytes)
    return part


def _liger(tiny: bool) -> Part:
    from liger_kernel.transformers import LigerTiledSwiGLUMLP

    part = Part(tiny)
    tiled = LigerTiledSwiGLUMLP(part.config)
    tiled.load_state_dict(part.mlp.state_dict())
    part.mlp = tiled
    return part


METHODS: dict[str, Callable[[bool], Part]] = {
    "plain": _plain,
    "checkpoint": partial(Part, checkpointed=True),
    "liger tiled": _liger,
    "int8, tile=None": partial(_ours, tile=None),
    "int8": _ours,
    "int8, tile=4096": partial(_ours, tile=4096),
    "int8+ckpt, tile=None": partial(_ours, checkpointed=True, tile=None),
    "int8+ckpt": partial(_ours, checkpointed=True),
}


def _part(method: str, frozen: bool, options: Options) -> Part:
    torch.manual_seed(0)
    part = METHODS[method](options.tiny).to(options.device, torch.bfloat16)
    return part.requires_grad_(not frozen)


def _input(part: Part, tokens: int, device: str) -> Tensor:
    generator = torch.Generator(device).manual_seed(1)
    width = part.config.hidden_size
    x = torch.randn(1, tokens, width, generator=generator, device=device, dtype=torch.bfloat16)
    return x.requires_grad_()


def _gradients(method: str, frozen: bool, options: Options) -> list[Tensor]:
    part = _part(method, frozen, options)
    x = _input(part, TINY_CHECKED_TOKENS if options.tiny else CHECKED_TOKENS, options.device)
    part(x).backward(torch.ones_like(x))
    return [x.grad, *(p.grad for p in part.parameters() if p.grad is not None)]  # type: ignore[list-item]


def error(method: str, frozen: bool, options: Options) -> float:
    """Return how far the gradients of a few tokens are off plain's, as a share of their norm."""
    ours, plain = _gradients(method, frozen, options), _gradients("plain", frozen, options)
    off = sum(float((a.float() - b.float()).square().sum()) for a, b in zip(ours, plain, strict=True))
    return (off / sum(float(b.float().square().sum()) for b in plain)) ** 0.5


def _bytes(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def measure(tokens: int, method: str, frozen: bool, options: Options) -> Row:
    """Return times of forward and backward, what forward stores, and the peaks of both beside what was there."""
    cuda = options.device == "cuda"
    row: Row = {"grad_error": error(method, frozen, options)}
    part = _part(method, frozen, options)
    x = _input(part, tokens, options.device)
    upstream = torch.ones_like(x)
    forward, backward = [], []
    for each in range(2 + (1 if options.tiny else ROUNDS)):
        part.zero_grad()
        x.grad = None
        marks = [_mark(cuda)]
        base = _bytes(options.device)
        out = part(x)
        marks.append(_mark(cuda))
        if cuda:
            stored = _bytes(options.device) - base
            forward_peak = torch.cuda.max_memory_allocated() - base
            torch.cuda.reset_peak_memory_stats()
            row |= {"stored_bytes": stored, "forward_peak_bytes": forward_peak}
        out.backward(upstream)
        marks.append(_mark(cuda))
        if cuda:
            row["peak_bytes"] = torch.cuda.max_memory_allocated() - base
            torch.cuda.reset_peak_memory_stats()
        del out
        if each >= 2:
            forward.append((marks[1] - marks[0]) * 1e3)
            backward.append((marks[2] - marks[1]) * 1e3)
    steps = [a + b for a, b in zip(forward, backward, strict=True)]
    return {**row, **summary(steps, "ms"), "forward_ms": summary(forward, "ms")["median_ms"]}


def _mark(cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def run(options: Options) -> None:
    """Measure each row once per commit, the long sequences last."""
    store = options.store("mlp")
    lengths = TINY_TOKENS if options.tiny else TOKENS
    for tokens, frozen, method in ((n, frozen, m) for n in lengths for frozen in (False, True) for m in METHODS):
        workload = f"{tokens} tokens" + (", frozen" if frozen else "")
        key: Row = {"workload": workload, "method": method, "scale": options.scale}
        if (store.has(**key) and not options.again) or not options.selects(workload, method):
            continue
        if not options.budget.allows(0.0):
            print("mlp: not started, the budget is used up")
            return
        try:
            row: Row = {"status": "ok", **measure(tokens, method, frozen, options)}
        except (ImportError, RuntimeError) as problem:
            row = failure(problem)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        store.append({"suite": "mlp", **key, "tokens": tokens, "frozen": frozen, **row})
        figures = "  ".join(
            f"{name} {row[name]:.4g}" for name in ("median_ms", "peak_bytes", "grad_error") if name in row
        )
        print(f"mlp {workload} {method} {row['status']} {figures}{row.get('reason', '')}", flush=True)
