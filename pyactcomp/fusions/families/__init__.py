"""Families of modules that have fused forms: a file or a folder each, found by being here.

Each says by ``by_class`` what modules of a class become, and by ``by_place`` what the children of a module do.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Collection
from importlib import import_module

from torch.nn import Module

from ..fusion import Fusion

_FAMILIES = [import_module(f"{__name__}.{family.name}") for family in pkgutil.iter_modules(__path__)]


def by_class(classes: Collection[type[Module]]) -> dict[type[Module], Fusion]:
    """Return the fused forms of modules by their class, for a model that has modules of ``classes``."""
    return {cls: fusion for family in _FAMILIES for cls, fusion in family.by_class(classes).items()}


def by_place(parent: Module) -> dict[Module, Fusion]:
    """Return the fused forms of those children of ``parent`` of which it tells where their output goes."""
    placed = [family for family in _FAMILIES if hasattr(family, "by_place")]
    return {child: fusion for family in placed for child, fusion in family.by_place(parent).items()}
