"""Linears of one input: cast for all of them at once, and their gradients for it added as they are computed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import Module

from ..functional._linears import SharedInput
from ..torch_private import SavedTensorHooks, top_saved_tensor_hooks
from .formulas import children_fed, forward_of
from .fusion import Fused, Fusion, autocast_dtype, form_of, original_of
from .untouched import plain


class _Sharing(threading.local):
    """The input that modules which are running now share, and the hooks that what it is saved for goes to."""

    input: SharedInput | None = None
    hooks: SavedTensorHooks | None = None


_sharing = _Sharing()


@contextmanager
def shared(x: Any) -> Iterator[None]:
    """Let the fused Linears that get ``x`` inside, and compute as it is, add their gradients for it together."""
    before = _sharing.input, _sharing.hooks
    serves = type(x) is Tensor and x.requires_grad
    _sharing.input, _sharing.hooks = (SharedInput(x), top_saved_tensor_hooks()) if serves else (None, None)
    try:
        yield
    finally:
        _sharing.input, _sharing.hooks = before


class Linear(Fused):
    """One of several Linears of one input."""

    weight: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Multiply ``input`` by the weight."""
        together = None if torch.compiler.is_compiling() else _sharing.input
        if (
            together is None
            or input is not together.x
            or not torch.is_grad_enabled()
            or self._parameters.get("bias") is not None
            or type(self.weight) not in (Tensor, nn.Parameter)
            or self.weight.dtype is not input.dtype
            or autocast_dtype(input) is not None
            # What checkpoints this module alone runs it again without the others.
            or top_saved_tensor_hooks() != _sharing.hooks
        ):
            return cast(Tensor, super().forward(input))
        return together.linear(self.weight)


def is_matrix_product(linear: Module | None) -> bool:
    """Return whether a child is a Linear, and nothing else computes or sees its output."""
    return plain(linear, nn.Linear) and type(cast(Module, linear)._parameters.get("weight")) is nn.Parameter


def _fed_by(module: Module) -> list[Any]:
    """Return the children that a module's input goes to, and nowhere else."""
    return [getattr(module, name, None) for name in children_fed(forward_of(original_of(type(module))))]


def feeds_linears(module: Module) -> bool:
    """Return whether the input of a module goes to several Linears, and nowhere else."""
    children = _fed_by(module)
    return len(children) > 1 and all(isinstance(child, nn.Linear) for child in children)


def linears_of(module: Module) -> dict[Module, Fusion]:
    """Return the fused form of the Linears without bias that a module's input goes to, if it goes to several."""
    fusion = Fusion(form_of(Linear, nn.Linear))
    known = {child: fusion for child in _fed_by(module) if type(child) is nn.Linear and child.bias is None}
    return known if len(known) > 1 else {}


def cast_once(module: Module, x: Any) -> Any:
    """Return the input as the Linears that it goes to would cast it, if it goes to several, and nowhere else."""
    if type(x) is not Tensor or (dtype := autocast_dtype(x)) is None:
        return x
    return x.to(dtype) if feeds_linears(module) else x
