"""Gradients are those of the functions that ran, where a program replaces functions of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness_checks import distance
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from works_with import GRADIENT_BOUND

import pyactcomp
from pyactcomp import functional
from pyactcomp.fusions import fused_modules

OPTIONS: list[dict[str, Any]] = [{}, {"fuse": False}, {"mode": "lossless"}]
Gradients = tuple[Tensor, ...]


class Quantised(TorchFunctionMode):
    """Rounds and scales results, with the derivative of the scaling: simulated quantisation."""

    functions = (F.gelu, F.dropout, F.layer_norm, F.silu, F.max_pool2d, F.batch_norm, F.linear)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return 0.5 * (out + (out.round(decimals=1) - out).detach()) if func in self.functions else out


class Seen(TorchFunctionMode):
    """Keeps the functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def between_linears(module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), module, nn.Linear(64, 64))


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "gelu": (lambda: between_linears(nn.GELU()), (64, 64)),
    "dropout": (lambda: between_linears(nn.Dropout(0.3)), (64, 64)),
    "layer_norm": (lambda: between_linears(nn.LayerNorm(64)), (64, 64)),
    "batch_norm": (convolutional, (4, 3, 32, 32)),
    "max_pool2d": (convolutional, (4, 3, 32, 32)),
}

REPLACEMENTS: dict[str, Callable[..., Tensor]] = {
    "gelu": lambda x, **_: x.tanh(),
    "dropout": lambda x, *_, **__: x * x.sigmoid(),
    "layer_norm": lambda x, shape, weight, bias, eps: 3 * torch.layer_norm(x, shape, weight, bias, eps + 1),
    "batch_norm": lambda x, mean, var, weight, bias, *_: 2 * x * weight.view(-1, 1, 1) + bias.view(-1, 1, 1),
    "max_pool2d": lambda x, *_, **__: x[..., ::2, ::2] * x[..., 1::2, 1::2],
}


def compressed_and_not(name: str, options: dict[str, Any], step: Callable[[nn.Module, Tensor], Gradients]) -> float:
    """Return how far the gradients of a compressed model are off."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    torch.manual_seed(1)
    exact = step(model, x)
    pyactcomp.compress(model, min_bytes=1, **options)
    torch.manual_seed(1)
    return distance(step(model, x), exact)


def gradients(model: nn.Module, x: Tensor) -> Gradients:
    return torch.autograd.grad(model(x).sin().sum(), list(model.parameters()))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_function_mode_replaces_functions(name: str, options: dict[str, Any]) -> None:
    def step(model: nn.Module, x: Tensor) -> Gradients:
        with Quantised():
            return gradients(model, x)

    assert compressed_and_not(name, options, step) <= (0 if "mode" in options else GRADIENT_BOUND)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward too"])
def test_a_function_is_replaced(
    name: str, options: dict[str, Any], in_backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(model: nn.Module, x: Tensor) -> Gradients:
        with monkeypatch.context() as patch:
            patch.setattr(F, name, REPLACEMENTS[name])
            loss = model(x).sin().sum()
            if in_backward:
                return torch.autograd.grad(loss, list(model.parameters()))
        return torch.autograd.grad(loss, list(model.parameters()))

    assert compressed_and_not(name, options, step) <= (0 if "mode" in options else GRADIENT_BOUND)


def test_a_replaced_function_stops_the_modules_that_stand_for_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO-3 replaces ``linear``."""
    own = F.linear
    monkeypatch.setattr(F, "linear", lambda x, weight, bias=None: own(x, weight, bias))
    model = nn.Sequential(between_linears(nn.RMSNorm(64, eps=1e-6)), between_linears(nn.LayerNorm(64)))
    pyactcomp.compress(model, min_bytes=1, group_size=64)
    x = torch.randn(64, 64)
    names = [type(part[1](part[0](x)).grad_fn).__name__ for part in model]
    assert names == ["_RmsNormBackward", "_LayerNormBackward"]
    monkeypatch.setattr(F, "rms_norm", lambda x, *_: x.tanh())
    names = [type(part[1](part[0](x)).grad_fn).__name__ for part in model]
    assert names == ["TanhBackward0", "_LayerNormBackward"]


def test_a_function_replaced_after_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward recomputes by the function that ran."""

    def step(model: nn.Module, x: Tensor) -> Gradients:
        loss = model(x).sin().sum()
        with monkeypatch.context() as patch:
            patch.setattr(F, "gelu", REPLACEMENTS["gelu"])
            return torch.autograd.grad(loss, list(model.parameters()))

    for options in OPTIONS:
        assert compressed_and_not("gelu", options, step) <= (0 if "mode" in options else GRADIENT_BOUND)


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return y


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_mode_that_sees_a_checkpointed_forward_alone(name: str, options: dict[str, Any]) -> None:
    """The rerun takes the path of the first run, though the mode has ended."""

    def step(block: nn.Module, x: Tensor) -> Gradients:
        with Seen() as mode:
            loss = model(x).sin().sum()
        assert getattr(F, name) in mode.functions
        return torch.autograd.grad(loss, list(model.parameters()))

    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = Checkpointed(make()), torch.randn(shape)
    torch.manual_seed(1)
    exact = step(model, x)
    pyactcomp.compress(model, min_bytes=1, **options)
    torch.manual_seed(1)
    assert distance(step(model, x), exact) <= (0 if "mode" in options else GRADIENT_BOUND)


def test_a_device_as_a_context_replaces_nothing() -> None:
    model, x = pyactcomp.compress(between_linears(nn.LayerNorm(64)), min_bytes=1), torch.randn(64, 64)
    assert fused_modules(model)
    with torch.device("cpu"):
        y = model[1](model[0](x))
    assert type(y.grad_fn).__name__ == "_LayerNormBackward"


def test_the_functions_of_this_package_leave_replacing_to_modes() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with Quantised():
        (exact,) = torch.autograd.grad(F.gelu(x).sin().sum(), x)
        (got,) = torch.autograd.grad(functional.gelu(x).sin().sum(), x)
    assert torch.equal(got, exact)
