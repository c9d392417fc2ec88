"""What the tests of the "works with" matrix share: a small transformer and one exact beside one compressed step."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pyactcomp
from pyactcomp.report import Report

# The project's bar for the relative L2 error over all gradients of a step in int8.
GRADIENT_BOUND = 0.02
BFLOAT16_ULP = 2.0**-8
# Small enough for the activations of tiny models to be compressed; the default would keep every one of them.
MIN_BYTES = 1024
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

WIDTH = 64
HEADS = 4


class Block(nn.Module):
    """Pre-norm transformer block whose attention adds a causal mask of -inf, as Hugging Face's eager attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, width // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mask = torch.full((length, length), float("-inf"), device=x.device).triu(1)
        weights = (q @ k.transpose(-1, -2) * (width // HEADS) ** -0.5 + mask).softmax(-1).to(v.dtype)
        x = x + self.project((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Embeds features linearly, runs blocks, checkpointed or not, and regresses one number a position."""

    def __init__(self, blocks: int = 2, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH // 2, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 1)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def regression(device: str, batch: int = 4) -> tuple[Tensor, Tensor]:
    """Return inputs and targets for :class:`Transformer`, the same for every device."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(batch, 32, WIDTH // 2, generator=generator)
    return inputs.to(device), inputs.mean(-1, keepdim=True).to(device)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of every gradient by the parameter's name."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def relative_error(got: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Return the relative L2 error over all gradients together."""
    assert got.keys() == exact.keys()
    assert exact, "no parameter has a gradient"
    difference = sum(float((got[name].double() - exact[name].double()).square().sum()) for name in exact)
    return (difference / sum(float(g.double().square().sum()) for g in exact.values())) ** 0.5


def assert_compressed(report: Report) -> None:
    """Assert that floating-point tensors were packed and take less than autograd alone would have held."""
    assert any(tensor.kept is None and "float" in tensor.dtype for tensor in report.tensors)
    assert report.stored_bytes < report.unique_bytes


def assert_step_agrees(model: nn.Module, loss_of: Callable[[nn.Module], Tensor], *, loss_rtol: float = 0.0) -> Report:
    """Compare compressed steps of ``model``, fused and not, with an exact one of a copy; leaves ``model`` compressed.

    Hooks do not touch the forward, so the losses must be equal, except for ``loss_rtol`` where the forward itself is
    not reproducible. Fused functions sum in another order, which moves a loss by an ulp or so of the coarsest dtype.
    The gradients must differ (else nothing was compressed), and by no more than the bar.
    """
    exact = copy.deepcopy(model)
    torch.manual_seed(0)
    exact_loss = loss_of(exact)
    exact_loss.backward()

    for fuse in (True, False):
        pyactcomp.compress(model, fuse=fuse, min_bytes=MIN_BYTES)
        torch.manual_seed(0)
        loss = loss_of(model)
        loss.backward()
        rtol = max(loss_rtol, BFLOAT16_ULP) if fuse else loss_rtol
        torch.testing.assert_close(loss.detach(), exact_loss.detach(), rtol=rtol, atol=0.0)
        error = relative_error(gradients(model), gradients(exact))
        assert 0.0 < error <= GRADIENT_BOUND, error
        if fuse:
            pyactcomp.decompress(model).zero_grad()
    report = pyactcomp.report(model)
    assert_compressed(report)
    return report


def kept_for(report: Report, reason: str) -> list[pyactcomp.engine.record.SavedTensor]:
    """Return the saved tensors that were not compressed for ``reason``."""
    return [tensor for tensor in report.tensors if tensor.kept == reason]


def assert_losses_agree(losses: list[float], exact: list[float]) -> None:
    """Compare the losses of repeated steps of plain gradient descent on one batch.

    To first order a step lowers the loss by ``lr * g . g``, or by ``lr * g . g'`` with gradients ``g'`` off by at most
    the bar, so the curves differ by at most the bar times the decrease; twice that leaves room for the curvature.
    """
    assert losses[0] == exact[0]
    assert exact[-1] < 0.9 * exact[0], "the steps are too small to show anything"
    for loss, expected in zip(losses[1:], exact[1:], strict=True):
        assert abs(loss - expected) <= 2 * GRADIENT_BOUND * (exact[0] - expected)
