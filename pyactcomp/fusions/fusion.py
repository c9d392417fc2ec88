"""How the class of a module is swapped for a fused one that pickles, copies and goes back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import Module, Parameter

from ..engine.marks import FORM, FUSING
from ..functional.codes import Codes
from .base import Fusing, fusing


class Fused(Module):
    """Base of what goes before a module's own class: a ``forward`` that falls back on ``super().forward``.

    It must add nothing to the module and keep nothing on it, so that changing ``__class__`` is all there is to do.
    """

    @staticmethod
    def row_length(module: Module) -> int | None:
        """Return how many elements share a deviation that the module divides by; None where it divides by none."""
        return None

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Name the two classes instead of the one made of them, which is no attribute of any module."""
        parts = cast("tuple[Any, ...]", super().__reduce_ex__(max(protocol, 2)))
        return (_blank, type(self).__bases__, *parts[2:]) if is_form(type(self)) else parts


@dataclass(frozen=True)
class Fusion:
    """What the modules of one class become.

    Attributes
    ----------
    fused : type
        Made by :func:`form_of`.
    exact : bool
        Whether outputs and gradients in lossless mode are those of the module's own operators, to the bit.
    bypassed : tuple of str
        Children whose ``forward`` is not called: what others hook to them would not run.
    suits : callable, optional
        Whether a module of the class gains anything, where that depends on what is in it.
    """

    fused: type[Module]
    exact: bool = False
    bypassed: tuple[str, ...] = ()
    suits: Callable[[Module], bool] | None = None


def form_of(fused: type[Fused], original: type[Module]) -> type[Module]:
    """Return the class that runs ``fused`` before ``original``; its name stays the original's.

    Frameworks look names up: what to wrap in FSDP, how to initialise, what a checkpoint holds.
    """
    bases = fused, original
    if bases not in _forms:
        qualified = f"{fused.__qualname__}({original.__qualname__})"
        space = {"__module__": fused.__module__, "__qualname__": qualified, FORM.name: True}
        _forms[bases] = cast("type[Module]", type(original.__name__, bases, space))
    return _forms[bases]


_forms: dict[tuple[type[Fused], type[Module]], type[Module]] = {}


def is_form(cls: type) -> bool:
    """Return whether a class was made by :func:`form_of`."""
    return FORM.get(cls) is not None


def original_of(cls: type[Module]) -> type[Module]:
    """Return the class that a module had before it was fused; any other class is its own original."""
    original = _originals.get(cls)
    if original is None:
        # A class made of a form, as fully_shard makes one, has its original too.
        original = next((base.__bases__[1] for base in cls.__mro__ if is_form(base)), cls)
        _originals[cls] = original
    return original


# Asked many times in each forward; the classes of a program are few.
_originals: dict[type[Module], type[Module]] = {}


def _blank(fused: type[Fused], original: type[Module]) -> Module:
    form = form_of(fused, original)
    return form.__new__(form)


def codes_for(module: Module, *inputs: Tensor) -> Codes | None:
    """Return how the fused form of ``module`` is to store ``inputs``, or None where it must run as its own class does.

    Beside what :func:`.base.fusing` tells, that is where an input is no plain tensor, needs no gradient or is smaller
    than ``min_bytes``: the engine keeps such tensors exact. Complex ones are for the module's own class to refuse.
    """
    state: Fusing | None = FUSING.get(module)
    if state is None:
        return None
    for x in inputs:
        if type(x) not in (Tensor, Parameter) or not x.requires_grad or x.is_meta or x.is_nested:
            return None
        if not x.is_floating_point() or x.nbytes < state.config.min_bytes:
            return None
    return fusing(module)


def attention_codes(module: Module, codes: Codes) -> Codes:
    """Return ``codes`` for queries and keys: 16 bits where ``config.attention`` is "exact", as the engine has them."""
    state: Fusing | None = FUSING.get(module)
    assert state is not None  # only a fused forward asks
    return _sixteen_bits(codes) if codes.bits is not None and state.config.attention == "exact" else codes


@functools.lru_cache(maxsize=8)
def _sixteen_bits(codes: Codes) -> Codes:
    return replace(codes, bits=16)


def fits(norm: nn.LayerNorm, x: Tensor) -> bool:
    """Return whether torch normalises ``x``; if not, the module's own class raises what it does."""
    shape = norm.normalized_shape
    # Outside autocast CUDA's takes no others.
    mixed = x.device.type == "cpu" or torch.is_autocast_enabled(x.device.type)
    return x.shape[-len(shape) :] == shape and of_one_dtype(x, norm.weight, norm.bias, mixed=mixed)


def of_one_dtype(x: Tensor, *parameters: Tensor | None, mixed: bool) -> bool:
    """Return whether parameters have the dtype of ``x``, or if ``mixed`` float32 beside 16 bits."""
    wide = torch.float32 if mixed and x.itemsize == 2 else x.dtype
    return all(p is None or p.dtype is x.dtype or p.dtype is wide for p in parameters)


def linear_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype in which autocast has a Linear read ``x``, or None where autocast has no say."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype is torch.float64 or not x.dtype.is_floating_point:
        return None
    return torch.get_autocast_dtype(device)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return what autocast makes of ``x`` before a Linear, or None where it leaves it as it is."""
    dtype = linear_dtype(x)
    return None if dtype is x.dtype else dtype
