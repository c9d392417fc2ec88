"""The keyword ``watch`` of callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..live import Watch


def watch_options(watch: bool | Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the options of the watch that a callback asks for, or None if it asks for none.

    Raises
    ------
    TypeError, ValueError
        If ``watch`` is neither a truth value nor a mapping of options, or an option is wrong.
    """
    if watch is False:
        return None
    if watch is not True and not isinstance(watch, Mapping):
        raise TypeError(f"watch must be True, False or a dict of options of pyactcomp.watch, got {watch!r}")
    options = {} if watch is True else dict(watch)
    Watch(manual=True, **options)  # raises where an option is wrong, before a training begins
    return options
