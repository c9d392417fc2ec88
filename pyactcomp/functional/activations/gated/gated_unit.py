"""The gated product of a tile of rows: by the operators of torch, and by the kernels of ``silu_mul``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast

import torch
from torch import Tensor

from ...saving import Saving

Activation = Literal["silu", "gelu", "gelu_tanh"]
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
Gradients = Callable[[Tensor], tuple[Tensor, Tensor]]


class Unit:
    """The gated product of a tile, by the operators of torch.

    ``gate`` is the tensor or, if ``coded``, its codes; ``up`` is the tensor.
    """

    def __init__(self, activation: Activation, how: Saving) -> None:
        self._silu = activation == "silu"
        self._approximate = "tanh" if activation == "gelu_tanh" else "none"
        self._how = how

    def _activated(self, gate: Tensor, out: Tensor) -> Tensor:
        if self._silu:
            return cast(Tensor, torch.ops.aten.silu.out(gate, out=out))
        return cast(Tensor, torch.ops.aten.gelu.out(gate, approximate=self._approximate, out=out))

    def over(self, gate: Tensor, up: Tensor, keeps: tuple[bool, bool], how: Saving) -> list[Tensor]:
        """Write the product over ``up``; return the codes of ``gate`` and ``up``, where they are kept."""
        operands = ((how, gate), (how.second(), up))
        codes = [each.pack(t)[0] for (each, t), keep in zip(operands, keeps, strict=True) if keep]
        up *= self._activated(gate, gate)
        return codes

    def again(self, gate: Tensor, up: Tensor, coded: bool) -> tuple[Tensor, Gradients]:
        """Return the product, and a function of its gradient that writes those of gate and up over the arguments."""
        gate = self._how.restorer(up.shape, up.dtype)(gate) if coded else gate
        activated = self._activated(gate, torch.empty_like(gate))

        def gradients(grad: Tensor) -> tuple[Tensor, Tensor]:
            of_up = activated.mul_(grad)
            grad *= up
            if self._silu:
                torch.ops.aten.silu_backward.grad_input(grad, gate, grad_input=grad)
            else:
                approximate = self._approximate
                torch.ops.aten.gelu_backward.grad_input(grad, gate, approximate=approximate, grad_input=grad)
            return grad, of_up

        return activated * up, gradients


class FusedUnit(Unit):
    """The gated product of a tile, by the kernels of ``silu_mul``."""

    def over(self, gate: Tensor, up: Tensor, keeps: tuple[bool, bool], how: Saving) -> list[Tensor]:
        """Write the product over ``up``; return the codes of ``gate`` and ``up``, where they are kept."""
        from . import launch

        return launch.silu_mul_over(gate, up, keeps, how)

    def again(self, gate: Tensor, up: Tensor, coded: bool) -> tuple[Tensor, Gradients]:
        """Return the product, and a function of its gradient that writes those of gate and up over the arguments."""
        from . import launch

        how = self._how if coded else None
        product = torch.empty_like(up)
        launch.silu_mul_into(gate, up, product, how)
        return product, lambda grad: launch.silu_mul_gradients(gate, up, grad, how)
