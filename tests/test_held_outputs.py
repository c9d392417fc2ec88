"""Outputs of a compressed model that a program holds, saves or swaps, as it may those of any model."""

from __future__ import annotations

import gc
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pyactcomp

OPTIONS: list[dict[str, Any]] = [{}, {"fuse": False}, {"mode": "lossless"}]
WIDTH = 128


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Function(nn.Module):
    """Calls a function of torch, as a model may instead of a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Return the function of ``x``, which one more operator saves."""
        y: Tensor = self.function(x)
        self.seen = y
        return y * y.cos()


LAST = {
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "GELU": nn.GELU,
    "silu": lambda: Function(F.silu),
    "product": lambda: Function(lambda x: x * x.sin()),
}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", LAST)
def test_an_output_is_pickled_with_nothing_of_this_package(name: str, options: dict[str, Any]) -> None:
    model = pyactcomp.compress(nn.Sequential(nn.Linear(WIDTH, WIDTH), LAST[name]()), min_bytes=1, **options)
    outputs = [model(torch.randn(64, WIDTH)), getattr(model[1], "seen", torch.zeros(()))]
    assert [tensor.__dict__ for tensor in outputs] == [{}, {}]
    assert b"pyactcomp" not in pickle.dumps(outputs)
    file = io.BytesIO()
    torch.save(outputs, file)
    assert b"pyactcomp" not in file.getvalue()
    file.seek(0)
    for loaded, tensor in zip(torch.load(file), outputs, strict=True):
        assert torch.equal(loaded, tensor)


def live_bytes(model: nn.Module) -> int:
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) is Tensor and t.device.type == "cpu"]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    for parameter in model.parameters():
        storages.pop(parameter.data_ptr(), None)
    return sum(storages.values())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", LAST)
def test_an_output_held_after_backward_holds_no_operand(name: str, options: dict[str, Any]) -> None:
    def held(model: nn.Module) -> int:
        inputs = [torch.randn(64, WIDTH) for _ in range(4)]
        before = live_bytes(model)
        outputs = [model(x) for x in inputs]
        for out in outputs:
            out.sum().backward()
        model.zero_grad(set_to_none=True)
        return live_bytes(model) - before

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), LAST[name]())
    held(model)  # the attribute "seen" holds one output from here on
    plain = held(model)
    compressed = pyactcomp.compress(model, min_bytes=1, **options)
    held(compressed)
    assert held(compressed) == plain


@pytest.mark.parametrize("name", LAST)
def test_an_output_saved_anew_after_its_backward(name: str) -> None:
    """The recipe's operands are gone: the output, and a cast of it, are stored."""
    w = torch.randn(WIDTH, WIDTH, requires_grad=True)

    def gradients() -> tuple[Tensor, ...]:
        out = model(x)
        out = getattr(model[1], "seen", out)
        (out @ w).sum().backward()
        late = (out * w[:64]).sum() + (out.bfloat16() * w[:64].bfloat16()).sum()
        return torch.autograd.grad(late, w)

    x = torch.randn(64, WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), LAST[name]())
    exact = gradients()
    with pyactcomp.compressed(model, mode="lossless", min_bytes=1):
        got = gradients()
    assert torch.equal(got[0], exact[0])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_output_is_swapped(options: dict[str, Any]) -> None:
    model = pyactcomp.compress(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)), min_bytes=1, **options)
    out = model(torch.randn(64, WIDTH)).detach_()
    torch.utils.swap_tensors(out, torch.ones(64, WIDTH))
    assert torch.equal(out, torch.ones(64, WIDTH))
