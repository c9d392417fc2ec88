"""The exceptions of pyactcomp.

Wrong arguments raise :class:`TypeError` or :class:`ValueError`. A state without a correct answer raises
:class:`PyactcompError` or a subclass. Every message names the value, the expected values and the remedy. The option
checks shared by several calls are here too.
"""

from __future__ import annotations

from collections.abc import Collection


class PyactcompError(RuntimeError):
    """Base class of the errors raised by pyactcomp for a state rather than an argument."""


class ImplementationUnavailableError(PyactcompError):
    """An implementation requested by name cannot run here; pyactcomp never falls back silently."""


class HookConflictError(PyactcompError):
    """Another pair of saved-tensor hooks is active where pyactcomp would install hooks."""


def check_choice(name: str, value: object, allowed: Collection[object]) -> None:
    """Raise ValueError unless ``value`` is one of the ``allowed`` values; 8.0 is not 8."""
    if not isinstance(value, (str, int, type(None))) or value not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}")


def check_tile(tile: object) -> None:
    """Raise ValueError unless ``tile`` is a number of tokens, "auto" or None."""
    number = isinstance(tile, int) and not isinstance(tile, bool) and tile >= 1
    if not (number or tile is None or (isinstance(tile, str) and tile == "auto")):
        raise ValueError(f"tile must be a number of tokens, at least 1, 'auto' or None, got {tile!r}")


def check_integer(name: str, value: object, limit: int) -> None:
    """Raise TypeError unless ``value`` is an integer, and ValueError unless it is in [0, limit)."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if not 0 <= value < limit:
        raise ValueError(f"{name} must be at least 0 and below {limit}, got {value}")
