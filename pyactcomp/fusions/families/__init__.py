"""Families of modules with fused classes: each file or folder here is one family, found by listing this package.

A family defines ``by_class`` (fusions for modules of a class) and may define ``by_place`` (fusions for the children of
a given parent).
"""

from __future__ import annotations

import pkgutil
from collections.abc import Collection
from importlib import import_module

from torch.nn import Module

from ..fusion import Fusion

_FAMILIES = [import_module(f"{__name__}.{family.name}") for family in pkgutil.iter_modules(__path__)]


def by_class(classes: Collection[type[Module]]) -> dict[type[Module], Fusion]:
    """Return the fusions of all families for a model with modules of ``classes``."""
    return {cls: fusion for family in _FAMILIES for cls, fusion in family.by_class(classes).items()}


def by_place(parent: Module) -> dict[Module, Fusion]:
    """Return the fusions of children whose output goes to a known sibling, by the class of ``parent``."""
    placed = [family for family in _FAMILIES if hasattr(family, "by_place")]
    return {child: fusion for family in placed for child, fusion in family.by_place(parent).items()}
