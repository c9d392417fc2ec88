"""The own forward of a norm that a program writes out: the output has that forward's roundings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class OwnForward:
    """The forward of a module of the program's own, whose gradients and codes are those of a fused norm.

    Attributes
    ----------
    forward : callable, optional
        Maps the input to the output; left out where the fused function computes the same.
    """

    forward: Callable[[Tensor], Tensor] | None

    def result(self, x: Tensor) -> Tensor | None:
        """Return the output, in memory of its own and without a graph."""
        if self.forward is None:
            return None
        with torch.no_grad():
            out = self.forward(x.detach())
        return out if out._base is None else out.clone()
