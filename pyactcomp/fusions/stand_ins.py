"""Run a module's own method with other callables in place of some children.

A fused form of two modules, such as a norm that applies the ReLU after it, gives what one of them alone does not. So no
module becomes such a form: wrappers, hooks and feature extractors call modules too. The parent's own method runs on a
stand-in for the parent, and only code that has the stand-in can call the fused form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch.nn import Module

M = TypeVar("M", bound=Module)


def with_children(module: M, children: Mapping[str, Callable[..., Any]]) -> M:
    """Return a shallow copy of a module, with the callables in place of the children of these names.

    The copy has the class, the parameters, the buffers and all other attributes of the module; what its methods assign
    to ``self`` is lost.
    """
    copy = object.__new__(type(module))
    vars(copy).update(vars(module))
    vars(copy)["_modules"] = {**module._modules, **children}
    return copy
