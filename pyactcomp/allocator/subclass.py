"""Loads the subclass of torch's allocator, compiled for one version of torch."""

from __future__ import annotations

from types import ModuleType

from ..torch_private import extensions


def load() -> tuple[ModuleType | None, str | None]:
    """Return the extension, or None, with the reason and the remedy."""
    return extensions.load("_torch_allocator")
