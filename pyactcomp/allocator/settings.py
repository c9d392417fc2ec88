"""Where settings come from: arguments over ``PYACTCOMP_ALLOC_CONF`` over the defaults."""

from __future__ import annotations

import os

from .._core import AllocatorConfig

VARIABLE = "PYACTCOMP_ALLOC_CONF"

_FIELDS = (
    "growth",
    "max_split_size",
    "max_non_split_rounding",
    "large_segment_size",
    "roundup_power2_divisions",
    "garbage_collection_threshold",
    "memory_fraction",
    "initial_pool_size",
)


def disabled() -> bool:
    """Return whether the environment switches pyactcomp off."""
    return os.environ.get("PYACTCOMP_DISABLE") == "1"


def from_environment() -> AllocatorConfig:
    """Return the settings of the environment, or raise ValueError that names the variable."""
    try:
        return AllocatorConfig.parse(os.environ.get(VARIABLE, ""))
    except ValueError as error:
        raise ValueError(f"{VARIABLE} in the environment: {error}") from None


def override(base: AllocatorConfig, **values: object) -> AllocatorConfig:
    """Return ``base`` with every value that is not None in its place."""
    given = {name: value for name, value in values.items() if value is not None}
    return AllocatorConfig(**{name: getattr(base, name) for name in _FIELDS} | given)
