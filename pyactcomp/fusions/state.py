"""State of the fused modules of one compressed model, and the codes for each of their calls."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from ..codec.seeds import Seeds
from ..config import Config
from ..engine.marks import FUSING
from ..engine.reruns import as_in_first_run
from ..functional.codes import Codes
from ..functional.saving import Saving, saving
from ..readers.observer import observer, transformed
from .replaced import calls_are_replaced


class LeftAlone(NamedTuple):
    """A module with a known fused class that is not fused: qualified name, name of the class, reason."""

    name: str
    type: str
    reason: str


class FusionState:
    """State shared by the fused modules of one compressed model.

    Attributes
    ----------
    config : Config
    left_alone : tuple of LeftAlone
    seeds : Seeds
        Sequence of seeds, shared with the hooks of the model.
    paused : bool
        While set, fused modules run the forward of their own class.
    """

    def __init__(self, config: Config, left_alone: tuple[LeftAlone, ...] = (), seeds: Seeds | None = None) -> None:
        self.config = config
        self.seeds = Seeds(config.seed) if seeds is None else seeds
        self.left_alone = left_alone
        self.paused = False

    def __reduce__(self) -> tuple[Any, ...]:
        return FusionState, (self.config, self.left_alone, self.seeds)

    @functools.cached_property
    def _codes(self) -> Saving:
        config = self.config
        codes = Codes(
            bits=None if config.mode == "lossless" else config.bits,
            group_size=config.group_size,
            rounding=config.rounding,
            # Rounding to the nearest reads no seed.
            seed=0,
            # Fused functions have Triton kernels only; "cuda" selects the codec of the engine.
            impl="auto" if config.impl == "cuda" else config.impl,
        )
        return saving(codes)

    @functools.cached_property
    def fixed_codes(self) -> Saving | None:
        """The codes of every call, if all calls have the same; None in lossless mode and with stochastic rounding."""
        return None if self._codes.bits is None or self._codes.stochastic else self._codes

    def codes(self) -> Saving:
        """Return the codes of one call, with a new seed; in lossless mode tensors are kept exact."""
        return replace(self._codes, seed=self.seeds.next()) if self._codes.stochastic else self._codes


def active_codes(module: Module) -> Saving | None:
    """Return the codes for one call of a fused module, or None where the forward of its own class must run.

    The own forward runs in evaluation mode, without gradients, inside functorch transforms and forward-mode
    differentiation, while torch.compile or make_fx traces, while compression is paused, where a function is replaced
    (:func:`.replaced.calls_are_replaced`), and under ``PYACTCOMP_DISABLE=1``. Hooks on the module do not matter: they
    see what the module takes and returns, fused or not. The rerun of a checkpointed function takes the path
    of its first run.
    """
    state: FusionState | None = FUSING.get(module)
    return None if state is None or torch.compiler.is_compiling() else codes_in(state, module)


def codes_in(state: FusionState, module: Module) -> Saving | None:
    """Return the same as :func:`active_codes`, given the state of the module, where torch.compile does not trace."""
    if observer().is_ordinary():
        return state.codes() if _is_in_use(state, module) else None
    if not torch.is_grad_enabled() or transformed():
        return None
    return state.codes() if as_in_first_run(_is_active, module) else None


def _is_active(module: Module) -> bool:
    state: FusionState | None = FUSING.get(module)
    return state is not None and os.environ.get("PYACTCOMP_DISABLE") != "1" and _is_in_use(state, module)


def _is_in_use(state: FusionState, module: Module) -> bool:
    return not state.paused and module.training and not calls_are_replaced(module)


def next_codes(module: Module) -> Saving:
    """Return codes with another seed, for the next fused call in the same forward."""
    state: FusionState | None = FUSING.get(module)
    assert state is not None  # only a fused forward asks
    return state.codes()
