"""The autograd nodes that made a tensor, by the names of the nodes."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import Node

from .rule import KINDS, Kind


def _backward(names: str) -> frozenset[str]:
    """Return the names of the nodes of operators."""
    return frozenset(f"{name}Backward0" for name in names.split())


VIEWS = _backward(" ".join(name.title().replace("_", "") for name, kind in KINDS.items() if kind is Kind.VIEW))
_LONGEST_WALK = 8
CAST = "ToCopyBackward0"


def producer(tensor: Tensor) -> tuple[str, Node | None]:
    """Return the name and the node of the operator behind ``tensor``, views aside. Do not keep the node."""
    base = tensor._base
    # Start at the base: a Python object for each view's node would live as long as the graph. A view in another dtype,
    # such as the real part, has a node of its own.
    node = (tensor if base is None or base.dtype is not tensor.dtype else base).grad_fn
    for _ in range(_LONGEST_WALK):
        if node is None:
            break
        name = node.name()
        if name not in VIEWS:
            return name, node
        node = node.next_functions[0][0]
    return "", None
