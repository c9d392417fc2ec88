"""Finds the projections that compilation speeds up: torch.compile pads matrices whose rows are not aligned."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module

# The tensor cores take rows of 16 bytes, 8 elements of 16 bits. The three products (output, both gradients) of 16384
# tokens with a head of 50257 by 1024 take 41 ms on an H100. Padded by torch.compile they take 7 ms, and a copy of the
# logits takes 2 (docs/design/compiled.md).
_ALIGNED = 8
# Below these elements of a weight, 16384 rows save less than a millisecond in a step.
_FEWEST = 1 << 22


def unaligned_projections(model: Module, apart: Collection[Module]) -> dict[Module, str]:
    """Return the large Linears with rows that are not aligned, each with the name that equal ones share.

    Parameters
    ----------
    model : Module
    apart : collection of Module
        Left out.

    Returns
    -------
    dict of Module to str
    """
    return {
        module: f"Linear_{module.in_features}_{module.out_features}_{module.bias is not None}"
        for module in model.modules()
        if type(module) is Linear and "forward" not in module.__dict__ and module not in apart and _is_unaligned(module)
    }


def _is_unaligned(module: Linear) -> bool:
    sizes = module.in_features, module.out_features
    return sizes[0] * sizes[1] >= _FEWEST and any(size % _ALIGNED for size in sizes)


def pays(module: Module, args: tuple[Any, ...]) -> bool:
    """Return whether a call of a projection is faster compiled: in training, where rows are many, on a GPU."""
    x = args[0] if args else None
    return module.training and torch.is_grad_enabled() and isinstance(x, Tensor) and x.is_cuda
