"""Build the fused class for a module; a module with a fused class can be pickled, copied and restored."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.nn import Module

from ..engine.classes import Given, InFront, class_in_front, given_of, unmarked
from ..engine.marks import FORM, FUSING, GIVEN
from ..functional.codes import Codes
from ..functional.saving import Saving
from ..readers.observer import observer
from .state import FusionState, codes_in


class Fused(InFront):
    """Base of the mixins before a module's own class: a ``forward`` with ``super().forward`` as the fallback.

    A mixin must keep no state on the module: fusing a module only changes ``__class__``.

    Attributes
    ----------
    stands_for : tuple of str
        Functions of :mod:`torch.nn.functional` in place of which the fused forward runs: if a program replaced one of
        them, the module's own forward runs. Empty: any function.
    """

    stands_for: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def row_length(module: Module) -> int | None:
        """Return the number of elements per deviation if the module divides by deviations, else None."""
        return None


@dataclass(frozen=True)
class Fusion:
    """The fused class for modules of one class, and the conditions for fusing.

    Attributes
    ----------
    fused : type
        A class from :func:`fused_class`.
    exact : bool
        Whether outputs and gradients in lossless mode equal, to the bit, the results of the module's own operators.
    bypassed : tuple of str
        Children whose ``forward`` is not called, so hooks on them would not run.
    suits : callable, optional
        Predicate on a module of the class: whether fusing this module gains anything.
    """

    fused: type[Module]
    exact: bool = False
    bypassed: tuple[str, ...] = ()
    suits: Callable[[Module], bool] | None = None


def fused_class(fused: type[Fused], original: type[Module]) -> type[Module]:
    """Return the class with ``fused`` before ``original``, under the name and module of ``original``."""
    # Another forward, which a program gives the class later, would not be the one that the fused class stands for.
    key = fused, original, original.forward
    if key not in _fused_classes:
        body = {FORM.name: (original, original.forward)}
        _fused_classes[key] = class_in_front(original, fused, _fused_class_of, (fused,), body)
    return _fused_classes[key]


def _fused_class_of(original: type[Module], fused: type[Fused]) -> type[Module]:
    return fused_class(fused, original)


_fused_classes: dict[tuple[type[Fused], type[Module], Any], type[Module]] = {}


def is_fused_class(cls: type) -> bool:
    """Return whether a class was made by :func:`fused_class`."""
    given: Given | None = GIVEN.get(cls)
    return given is not None and issubclass(given.mixin, Fused)


def original_of(cls: type[Module]) -> type[Module]:
    """Return the class of a module before fusing; a class that is not fused is returned unchanged."""
    known = _originals.get(cls)
    original = None if known is None else known()
    if original is None:
        # fully_shard derives a class from the fused one: search the bases.
        original = next((given_of(base).own for base in cls.__mro__ if is_fused_class(base)), unmarked(cls))
        _originals[cls] = ref(original)
    return original


# Cached: original_of is called many times in each forward, and a program has few classes.
_originals: WeakKeyDictionary[type[Module], ref[type[Module]]] = WeakKeyDictionary()


def codes_for(module: Module, *inputs: Tensor, constant: bool = False, kernels: bool = False) -> Saving | None:
    """Return the codes for a fused call on ``inputs``, or None where the forward of its own class must run.

    The own forward runs where :func:`.state.active_codes` returns None, and where an input is a tensor subclass, needs
    no gradient (unless ``constant`` inputs are taken too) or is smaller than ``min_bytes``: the engine keeps such
    tensors exact. A complex input also goes to the module's own class, to be refused there. So does an input where no
    fused kernel runs, if only ``kernels`` are faster than the module's own operators.
    """
    state: FusionState | None = FUSING.get(module)
    # Before the sizes: a size that is read while torch.compile traces ends the graph, or is fixed there.
    if state is None or torch.compiler.is_compiling():
        return None
    config = state.config
    for x in inputs:
        if (kernels and not (x.is_cuda or config.impl == "triton")) or not observer().takes(
            x, config.min_bytes, constant
        ):
            return None
    return codes_in(state, module)


def attention_codes(module: Module, codes: Saving) -> Codes:
    """Return ``codes`` for queries and keys: as in the engine, 16 bits where ``config.attention`` is "exact"."""
    state: FusionState | None = FUSING.get(module)
    assert state is not None  # only a fused forward asks
    return _sixteen_bits(codes) if codes.bits is not None and state.config.attention == "exact" else codes


@functools.lru_cache(maxsize=8)
def _sixteen_bits(codes: Saving) -> Codes:
    return Codes(16, codes.group_size, codes.rounding, codes.seed, codes.impl)


def fits(x: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None) -> bool:
    """Return whether torch's layer norm accepts ``x``; if not, the own forward raises torch's error."""
    # Outside autocast, CUDA's layer norm refuses mixed dtypes.
    mixed = not x.is_cuda or torch.is_autocast_enabled("cuda")
    return x.shape[-len(shape) :] == shape and of_one_dtype(x, weight, bias, mixed=mixed)


def of_one_dtype(x: Tensor, *parameters: Tensor | None, mixed: bool) -> bool:
    """Return whether the parameters have the dtype of ``x`` or, if ``mixed``, are float32 and ``x`` has 16 bits."""
    dtype = x.dtype
    wide = torch.float32 if mixed and x.itemsize == 2 else dtype
    for parameter in parameters:
        if parameter is not None and parameter.dtype is not dtype and parameter.dtype is not wide:
            return False
    return True


def linear_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype to which autocast casts the input ``x`` of a Linear, or None where autocast does not apply."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype is torch.float64 or not x.dtype.is_floating_point:
        return None
    return torch.get_autocast_dtype(device)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype to which autocast casts ``x`` before a Linear, or None where ``x`` needs no cast."""
    dtype = linear_dtype(x)
    return None if dtype is x.dtype else dtype
