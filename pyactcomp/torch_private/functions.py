"""Autograd functions: the classes of those in Python, by the frame of ``apply`` or by name; what clamp's reads."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from types import CodeType
from typing import Any, cast

import torch
from torch import Tensor

CLAMP_DROPS_BOUNDS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)
"""Whether the derivative of ``clamp`` is zero at a bound that is a number; one there before torch 2.14."""


def code_of_apply() -> CodeType | None:
    """Return the code of ``Function.apply``; None from torch 2.14 on, where no frame of Python runs ``apply``."""
    function = getattr(torch.autograd.Function.apply, "__func__", None)
    return cast("CodeType | None", getattr(function, "__code__", None))


def class_of_node(node: type) -> type | None:
    """Return the autograd function whose results have nodes of a class; None if the class has none."""
    found: type | None = getattr(node, "_forward_cls", None)
    return found


# Name -> the autograd functions with that name, and torch's counter of autograd functions then.
_functions: dict[str, tuple[str, list[weakref.ref[type]]]] = {}


def functions_named(name: str) -> list[type]:
    """Return the classes derived from ``torch.autograd.Function`` with this ``__name__``."""
    # A class with an autograd function as its base takes a number. Without the counter each call looks anew.
    count = repr(getattr(torch.autograd.function, "AUTOGRAD_FUNCTION_COUNTER", object()))
    known = _functions.get(name)
    if known is None or known[0] != count:
        named = {weakref.ref(cls) for cls in _derived(torch.autograd.Function) if cls.__name__ == name}
        known = _functions[name] = count, list(named)
    return [cls for reference in known[1] if (cls := reference()) is not None]


def _derived(cls: type) -> Iterator[type]:
    derived: type
    for derived in type.__subclasses__(cls):
        yield derived
        yield from _derived(derived)


def _test_clamp() -> None:
    x = torch.tensor([-torch.inf, 0.0, 1.0, torch.inf], requires_grad=True)
    at_bound = 0.0 if CLAMP_DROPS_BOUNDS else 1.0
    for out, expected in (
        (x.clamp(0, 1), [0.0, at_bound, at_bound, 0.0]),
        (x.clamp(min=0), [0.0, at_bound, 1.0, 1.0]),
        (x.clamp(max=1), [1.0, 1.0, at_bound, 0.0]),
    ):
        assert torch.autograd.grad(out.sum(), x)[0].tolist() == expected


def _test_functions() -> None:
    def define() -> type:
        class Mine(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                ctx.save_for_backward(x)
                return x.clone()

        return Mine

    first: Any = define()
    assert first in functions_named("Mine")
    second = define()
    assert {first, second} <= set(functions_named("Mine"))
    frames: list[Any] = []

    def pack(tensor: Tensor) -> Tensor:
        frames.append(sys._getframe(1))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        first.apply(torch.zeros(1, requires_grad=True))
    # The frame of apply tells the class, or is not there.
    code, [frame] = code_of_apply(), frames
    assert frame.f_code is (code or _test_functions.__code__)
    assert code is None or frame.f_locals["cls"] is first
