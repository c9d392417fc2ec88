"""Where settings come from: arguments over ``PYACTCOMP_ALLOC_CONF`` over the defaults."""

from __future__ import annotations

import os

from .._core import AllocatorConfig

VARIABLE = "PYACTCOMP_ALLOC_CONF"


def disabled() -> bool:
    """Return whether the environment switches pyactcomp off."""
    return os.environ.get("PYACTCOMP_DISABLE") == "1"


def from_environment() -> AllocatorConfig:
    """Return the environment's settings; a ValueError names the variable."""
    try:
        return AllocatorConfig.parse(os.environ.get(VARIABLE, ""))
    except ValueError as error:
        raise ValueError(f"{VARIABLE} in the environment: {error}") from None


def override(base: AllocatorConfig, **values: object) -> AllocatorConfig:
    """Return ``base`` with the values that are not None."""
    return base.replace(**{name: value for name, value in values.items() if value is not None})
