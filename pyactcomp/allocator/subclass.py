"""Finds the subclass of torch's allocator, which is compiled for one version of torch."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

import torch

_NAME = "pyactcomp._torch_allocator"
_REMEDY = "run pyactcomp build-allocator"


def load() -> tuple[ModuleType | None, str | None]:
    """Return the extension, or None and why it cannot be used and what to do."""
    if importlib.util.find_spec(_NAME) is None:
        return None, f"its torch subclass is not built: {_REMEDY}"
    try:
        extension = importlib.import_module(_NAME)
    except ImportError as error:
        return None, f"its torch subclass does not load with torch {torch.__version__} ({error}): {_REMEDY}"
    if extension.BUILT_FOR != torch.__version__:
        return None, (
            f"its torch subclass is built for torch {extension.BUILT_FOR}, and this is {torch.__version__}: {_REMEDY}"
        )
    return extension, None
