"""What a module whose class was swapped for a fused one knows of the compression that swapped it."""

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
from ..functional.codes import Codes
from ..readers.observer import transformed


class LeftAlone(NamedTuple):
    """A module that could be fused but is not, by its qualified name, its class's name and why."""

    name: str
    type: str
    reason: str


class Fusing:
    """State that the fused modules of one compressed model share.

    Attributes
    ----------
    config : Config
    left_alone : tuple of LeftAlone
    seeds : Seeds
        What the hooks of the model draw from, too.
    paused : bool
        While it is set, fused modules run as their own classes do.
    """

    def __init__(self, config: Config, left_alone: tuple[LeftAlone, ...] = (), seeds: Seeds | None = None) -> None:
        self.config = config
        self.seeds = Seeds(config.seed) if seeds is None else seeds
        self.left_alone = left_alone
        self.paused = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Fusing, (self.config, self.left_alone, self.seeds)

    @functools.cached_property
    def _codes(self) -> Codes:
        config = self.config
        return Codes(
            bits=None if config.mode == "lossless" else config.bits,
            group_size=config.group_size,
            rounding=config.rounding,
            # Rounding to the nearest reads no seed.
            seed=0,
            # The kernels of fused functions are Triton's; "cuda" is about the codec beside them.
            impl="auto" if config.impl == "cuda" else config.impl,
        )

    def codes(self) -> Codes:
        """Return how one call stores tensors: with a seed of its own, and exactly in lossless mode."""
        return replace(self._codes, seed=self.seeds.next()) if self._codes.stochastic else self._codes


def fusing(module: Module) -> Codes | None:
    """Return how the fused form of ``module`` is to store tensors, or None where it must run as its own class does.

    That is in evaluation mode, without gradients, inside functorch transforms and forward-mode differentiation, while
    torch.compile or make_fx traces, where compression is paused, and under ``PYACTCOMP_DISABLE=1``.
    It does not depend on hooks, so a checkpointed function
    takes the same way when it runs again in backward.
    """
    state: Fusing | None = FUSING.get(module)
    if (
        state is None
        or state.paused
        or not module.training
        or not torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or os.environ.get("PYACTCOMP_DISABLE") == "1"
        or transformed()
    ):
        return None
    return state.codes()


def codes_again(module: Module) -> Codes:
    """Return the codes for one more call in a forward that runs fused: they have another seed."""
    state: Fusing | None = FUSING.get(module)
    assert state is not None  # only a fused forward asks
    return state.codes()
