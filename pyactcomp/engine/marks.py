"""Every attribute that the package puts on objects of others: tensors, autograd nodes, modules and classes."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import Tensor

from .recipes import Recipe

T = TypeVar("T")


class Packs(NamedTuple):
    """The tensor that codes stand for, without holding it; no storage where the tensor's memory was given away."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    storage: ref[torch.UntypedStorage] | None


class TensorMark(Generic[T]):
    """An attribute of tensors, under one name."""

    def __init__(self, name: str) -> None:
        self.name = f"_pyactcomp_{name}"

    def get(self, tensor: Tensor) -> T | None:
        """Return a tensor's value, or None."""
        value: T | None = getattr(tensor, self.name, None)
        return value

    def set(self, tensor: Tensor, value: T) -> None:
        """Give a tensor a value."""
        setattr(tensor, self.name, value)


class DictMark(Generic[T]):
    """An entry in the ``__dict__`` of modules or classes, past ``Module.__getattr__`` and what a class inherits."""

    def __init__(self, name: str) -> None:
        self.name = f"_pyactcomp_{name}"

    def get(self, owner: Any) -> T | None:
        """Return an owner's value, or None."""
        value: T | None = owner.__dict__.get(self.name)
        return value

    def set(self, owner: Any, value: T) -> None:
        """Give an owner a value."""
        owner.__dict__[self.name] = value

    def pop(self, owner: Any) -> T | None:
        """Remove an owner's value, and return it."""
        value: T | None = owner.__dict__.pop(self.name, None)
        return value


RECIPE = TensorMark[Recipe]("recipe")
"""On an operator's output: how backward recomputes it."""

PACKS = TensorMark[Packs]("packs")
"""On codes that an autograd function saves: what a report counts them as."""

RECTIFIED = TensorMark[int]("rectified")
"""On the output of a batch norm that applied the ReLU behind it: the output's version."""

FUSING = DictMark[Any]("fusing")
"""On a compressed model and its fused modules: their :class:`~pyactcomp.fusions.base.Fusing`."""

FORM = DictMark[bool]("form")
"""On a class that fuses another class's modules."""


def attach(node: Any, out: Tensor, recipe: Recipe) -> None:
    """Make a recipe known by the tensor and by the node that made it."""
    RECIPE.set(out, recipe)
    # A cast leads back to the node that made its source, and from there to the source while that is alive.
    node.metadata["pyactcomp"] = ref(out)


def output_of(node: Any) -> Tensor | None:
    """Return the output that a node with a recipe made, while the output is alive."""
    output: ref[Tensor] | None = node.metadata.get("pyactcomp")
    return None if output is None else output()
