"""Every attribute set by this package on other people's objects: tensors, autograd nodes, modules and classes."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import Tensor

from . import saved

T = TypeVar("T")


class Packs(NamedTuple):
    """Describes a packed tensor without holding the memory; no storage if the memory was overwritten."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    storage: ref[torch.UntypedStorage] | None


class TensorMark(Generic[T]):
    """One named attribute on tensors."""

    def __init__(self, name: str) -> None:
        self.name = f"_pyactcomp_{name}"

    def get(self, tensor: Tensor) -> T | None:
        """Return the value set on a tensor, or None."""
        value: T | None = getattr(tensor, self.name, None)
        return value

    def set(self, tensor: Tensor, value: T) -> None:
        """Set the value on a tensor."""
        setattr(tensor, self.name, value)


class DictMark(Generic[T]):
    """One named entry in the ``__dict__`` of modules or classes; bypasses ``Module.__getattr__`` and inheritance."""

    def __init__(self, name: str) -> None:
        self.name = f"_pyactcomp_{name}"

    def get(self, owner: Any) -> T | None:
        """Return the value set on an owner, or None."""
        value: T | None = owner.__dict__.get(self.name)
        return value

    def set(self, owner: Any, value: T) -> None:
        """Set the value on an owner."""
        owner.__dict__[self.name] = value

    def pop(self, owner: Any) -> T | None:
        """Remove the value from an owner and return the value, or None."""
        value: T | None = owner.__dict__.pop(self.name, None)
        return value


class OutputMark(Generic[T]):
    """One value on the autograd node of an output; nothing on the output itself, which users save and copy."""

    def __init__(self, name: str) -> None:
        self.name = f"pyactcomp_{name}"

    def get(self, out: Tensor) -> T | None:
        """Return the value set on the node of an output, or None."""
        node: Any = out.grad_fn
        return None if node is None else self.on(node)

    def on(self, node: Any) -> T | None:
        """Return the value set on a node, or None."""
        value: T | None = node.metadata.get(self.name)
        return value

    def set(self, node: Any, value: T) -> None:
        """Set the value on a node."""
        node.metadata[self.name] = value

    def drop(self, node: Any) -> None:
        """Remove the value from a node."""
        node.metadata.pop(self.name, None)


RECIPE: OutputMark[saved.Recipe] = OutputMark("recipe")
"""On the node of an operator, also by the library: how backward recomputes the output."""

SHARDS = OutputMark[Any]("shards")
"""On the node of a DTensor: the :class:`~pyactcomp.engine.gathered.Shards` that its gathered results share."""

PACKS = TensorMark[Packs]("packs")
"""On codes saved by an autograd function: the packed tensor, for the report."""

FUSING = DictMark[Any]("fusing")
"""On a compressed model and its fused modules: the :class:`~pyactcomp.fusions.state.FusionState`."""

FORM = DictMark[tuple[type, Any]]("form")
"""On a fused subclass, to tell the subclass from the user's own class: that class, and its forward then."""

GIVEN = DictMark[Any]("given")
"""On a class that ``compress`` gives to modules: the :class:`~pyactcomp.engine.classes.Given`, what it is made of."""

SEALED = DictMark[bool]("sealed")
"""On a given class once it is made: True, from then on new attributes are those of the module's own class."""

COMPILED = DictMark[Any]("compiled")
"""On the class that a compressed module has for torch.compile: the :class:`~pyactcomp.compiled.marks.Mark`."""


def compiled_mark(cls: type) -> Any:
    """Return the mark of a class or of its nearest base with one, as ``fully_shard`` derives classes; else None."""
    return next((mark for base in cls.__mro__ if (mark := COMPILED.get(base)) is not None), None)


def compiles_itself(module: Any) -> bool:
    """Return whether a module has the class of a compiled block; its hooks then run outside of its graph."""
    mark = compiled_mark(type(module))
    return mark is not None and bool(mark.compiled)
