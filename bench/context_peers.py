"""A peer of the suite `context` that cannot be installed beside the others, in our own words.

Unsloth patches transformers as it is imported and needs a GPU for that, so what is measured is this peer
implementation of the mechanism that unsloth_zoo documents, not the package.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class _Streams:
    """A stream beside the one that computes; nothing on a CPU, where copies end before they return."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.side = torch.cuda.Stream(device) if self.cuda else None

    def beside(self) -> AbstractContextManager[object]:
        return nullcontext() if self.side is None else torch.cuda.stream(self.side)

    def side_waits(self) -> None:
        if self.side is not None:
            self.side.wait_stream(torch.cuda.current_stream())

    def main_waits(self) -> None:
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)

    def side_waits_for(self, event: torch.cuda.Event | None) -> None:
        if self.side is not None and event is not None:
            self.side.wait_event(event)

    def record(self) -> torch.cuda.Event | None:
        return torch.cuda.current_stream().record_event() if self.cuda else None


class HostInputs:
    """Unsloth's way to checkpoint: a block's input goes to the host while the block runs.

    The computing stream waits for the copy as the block ends. Pinned buffers are taken by position and used again by
    the next step; two device buffers take turns in backward, each written after the block that read it last. The last
    block's input stays on the device.

    Called in place of a checkpoint function, with the block's ``run`` and its input.
    """

    def __init__(self, layers: int, device: torch.device) -> None:
        self.layers = layers
        self.streams = _Streams(device)
        self.host: list[Tensor] = []
        self.device: list[Tensor | None] = [None, None]
        self.read: list[torch.cuda.Event | None] = [None, None]
        self.position = 0

    def __call__(self, run: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = _InputOnHost.apply(x, lambda x: run(x, *args, **kwargs), self)
        return out

    def send(self, x: Tensor) -> int | None:
        """Begin to copy the next block's input, and return its position; None if it stays."""
        position, last = self.position, self.position == self.layers - 1
        self.position = 0 if last else position + 1
        if last:
            return None
        if position == len(self.host):
            self.host.append(torch.empty(x.numel(), dtype=x.dtype, pin_memory=self.streams.cuda))
        elif self.host[position].numel() < x.numel():
            self.host[position] = torch.empty(x.numel(), dtype=x.dtype, pin_memory=self.streams.cuda)
        self.streams.side_waits()
        with self.streams.beside():
            self.host[position][: x.numel()].view(x.shape).copy_(x, non_blocking=True)
        return position

    def bring(self, position: int, shape: torch.Size, like: Tensor) -> Tensor:
        """Return an input on the device again."""
        turn, numel = position % 2, shape.numel()
        buffer = self.device[turn]
        if buffer is None or buffer.numel() < numel:
            buffer = self.device[turn] = torch.empty(numel, dtype=like.dtype, device=like.device)
            self.streams.side_waits()
        self.streams.side_waits_for(self.read[turn])
        x = buffer[:numel].view(shape)
        with self.streams.beside():
            x.copy_(self.host[position][:numel].view(shape), non_blocking=True)
        self.streams.main_waits()
        return x


class _InputOnHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor], inputs: HostInputs) -> Tensor:
        ctx.run, ctx.inputs, ctx.shape = run, inputs, x.shape
        ctx.position = inputs.send(x)
        if ctx.position is None:
            ctx.save_for_backward(x)
        with torch.no_grad():
            out = run(x)
        inputs.streams.main_waits()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        inputs: HostInputs = ctx.inputs
        x = ctx.saved_tensors[0] if ctx.position is None else inputs.bring(ctx.position, ctx.shape, grad)
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.run(x)
        torch.autograd.backward(out, grad)
        if ctx.position is not None:
            inputs.read[ctx.position % 2] = inputs.streams.record()
        return x.grad, None, None
