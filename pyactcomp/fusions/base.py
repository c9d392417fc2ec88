"""What a module whose class was swapped for a fused one knows of the compression that swapped it."""

from __future__ import annotations

import os
from typing import Any, NamedTuple, TypedDict

import torch
from torch.nn import Module

from ..codec import Impl, Rounding
from ..config import Config
from ..observer import transformed
from ..seeds import Seeds

ATTRIBUTE = "_pyactcomp_fusing"


class Options(TypedDict):
    """The keywords that every function of :mod:`pyactcomp.functional` takes."""

    bits: int | None
    group_size: int
    rounding: Rounding
    seed: int
    impl: Impl


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

    def options(self) -> Options:
        """Return the keywords for one call: a seed of its own for each, exact tensors in lossless mode."""
        config = self.config
        # Options that repeat are checked once; rounding to nearest reads no seed.
        return {
            "bits": None if config.mode == "lossless" else 8,
            "group_size": config.group_size,
            "rounding": config.rounding,
            "seed": self.seeds.next() if config.rounding == "stochastic" else 0,
            # The kernels of fused functions are Triton's; "cuda" is about the codec beside them.
            "impl": "auto" if config.impl == "cuda" else config.impl,
        }


def fusing(module: Module) -> Options | None:
    """Return how the fused form of ``module`` is to keep tensors, or None where it must run as its own class does.

    That is in evaluation mode, without gradients, inside functorch transforms and forward-mode differentiation, while
    torch.compile or make_fx traces, where compression is paused, and under ``PYACTCOMP_DISABLE=1``.
    It does not depend on hooks, so a checkpointed function
    takes the same way when it runs again in backward.
    """
    state: Fusing | None = module.__dict__.get(ATTRIBUTE)
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
    return state.options()


def options_again(module: Module) -> Options:
    """Return the options for one more call in a forward that runs fused: they have another seed."""
    state: Fusing = module.__dict__[ATTRIBUTE]
    return state.options()
