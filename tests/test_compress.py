"""compress and decompress leave programs as they are: cleared hooks, refused assignments, classes, nested tensors."""

from __future__ import annotations

import gc
import weakref
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pyactcomp


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())


def test_a_model_whose_hooks_were_cleared_is_decompressed() -> None:
    model = pyactcomp.compress(network())
    model._forward_hooks.clear()
    model._forward_pre_hooks.clear()
    with pytest.raises(pyactcomp.PyactcompError, match="compressed already"):
        pyactcomp.compress(model)
    pyactcomp.decompress(model)
    assert [type(child) for child in model] == [nn.Linear, nn.LayerNorm, nn.GELU]
    assert pyactcomp.compress(model) is model


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = network(), nn.LayerNorm(64)
        self.__dict__["ready"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "ready" in self.__dict__:
            raise AttributeError(f"{name} is frozen")
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.inner(x))
        return y


def test_a_module_that_refuses_assignments_is_compressed() -> None:
    model, x = Frozen(), torch.randn(64, 64)
    pyactcomp.compress(model, min_bytes=0)(x).sum().backward()
    assert pyactcomp.report(model).stored_bytes > 0
    pyactcomp.decompress(model)
    assert type(model) is Frozen


def test_classes_of_models_are_freed_with_their_models() -> None:
    def train() -> weakref.ref[type[nn.Module]]:
        class Local(Outer):
            pass

        model = pyactcomp.compress(Local(), min_bytes=0)
        model(torch.randn(8, 64)).sum().backward()
        pyactcomp.decompress(model)
        return weakref.ref(Local)

    known = train()
    gc.collect()
    assert known() is None


class Tagged(nn.Module):
    """Asks each subclass for a keyword, and keeps the subclasses, each name once."""

    subclasses: ClassVar[dict[str, type[nn.Module]]] = {}

    def __init_subclass__(cls, *, tag: str, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__name__ in cls.subclasses:
            raise ValueError(f"{cls.__name__} is registered already")
        cls.subclasses[cls.__name__] = cls


class TaggedNorm(Tagged, nn.LayerNorm, tag="norm"):
    pass


class TaggedModel(Tagged, tag="model"):
    def __init__(self) -> None:
        super().__init__()
        self.norm = TaggedNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        return y


@pytest.mark.parametrize("options", [{}, {"fuse": False}, {"mode": "lossless"}], ids=str)
def test_a_class_that_keeps_its_subclasses_sees_none_of_ours(options: dict[str, Any]) -> None:
    before = dict(Tagged.subclasses)
    model = pyactcomp.compress(TaggedModel(), min_bytes=0, **options)
    model(torch.randn(8, 64, requires_grad=True)).sum().backward()
    assert Tagged.subclasses == before
    with pytest.raises(TypeError, match="tag"):
        type("Derived", (type(model),), {})  # a class derived from ours is one of the user's


class Wrapping(nn.Module):
    """Wraps the forward of each subclass; the outermost wrapper alone counts calls."""

    calls = 0

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        forward = cls.forward

        def counted(self: Any, *args: Any) -> Any:
            self.calls += type(self).forward is counted
            return forward(self, *args)

        cls.forward = counted


class Wrapped(Wrapping, Outer):
    pass


def test_a_class_that_wraps_the_forwards_of_its_subclasses_wraps_ours() -> None:
    model = pyactcomp.compress(Wrapped(), min_bytes=0)
    model(torch.randn(8, 64)).sum().backward()
    assert model.calls == 1


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.GELU())
        self.norm, self.dropout = nn.LayerNorm(7), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(self.norm(self.layers(x)))
        return y


def modules_called(model: nn.Module) -> list[str]:
    return [str(node.target) for node in torch.fx.symbolic_trace(model).graph.nodes]


@pytest.mark.parametrize("options", [{}, {"fuse": False}, {"mode": "lossless"}], ids=str)
def test_fx_traces_a_compressed_model_as_any_other(options: dict[str, Any]) -> None:
    model = Convolutional()
    exact = modules_called(model), modules_called(nn.Sequential(model))
    named = [(type(module).__module__, type(module).__qualname__) for module in model.modules()]
    pyactcomp.compress(model, min_bytes=0, **options)
    assert (modules_called(model), modules_called(nn.Sequential(model))) == exact
    assert [(type(module).__module__, type(module).__qualname__) for module in model.modules()] == named


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("mode", ["int8", "lossless"])
def test_values_of_a_jagged_tensor(mode: Any) -> None:
    class Jagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            nested = torch.nested.nested_tensor_from_jagged(self.first(x), torch.tensor([0, 100, 300, len(x)]))
            return F.gelu(self.second(nested)).values().square().mean()

    torch.manual_seed(0)
    model, x = Jagged(), torch.randn(640, 64)
    model(x).backward()
    exact = [p.grad for p in model.parameters()]
    model.zero_grad()
    pyactcomp.compress(model, mode=mode, min_bytes=0)(x).backward()
    for p, gradient in zip(model.parameters(), exact, strict=True):
        assert p.grad is not None
        assert gradient is not None
        assert torch.linalg.vector_norm(p.grad - gradient) <= (0.02 if mode == "int8" else 0) * gradient.norm()
