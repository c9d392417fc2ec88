"""Sizes of memory as texts, such as "20GiB"."""

from __future__ import annotations

import re

_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B)\s*", re.IGNORECASE)
_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))


def unit_of(size: int) -> tuple[int, str]:
    """Return the bytes and the name of the largest binary unit in which a number of bytes is at least one."""
    return next((scale, unit) for scale, unit in _UNITS if size >= scale or scale == 1)


def size_text(size: int) -> str:
    """Return a number of bytes with a binary unit: "1.50 GiB"."""
    scale, unit = unit_of(size)
    return f"{size / scale:.2f} {unit}" if scale > 1 else f"{size} {unit}"


def bytes_of(text: object) -> int | None:
    """Return the bytes that a text such as "20GiB" or "1.5 TB" names; None for anything else."""
    found = _TEXT.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return None
    number, unit = found[1], found[2].upper()
    scale: int = (1024 if "I" in unit else 1000) ** (" KMGT".index(unit[0]))
    return round(float(number) * scale)


def budget_of(budget: object) -> int | None:
    """Return a budget of memory in bytes; None for ``"auto"``.

    Raises
    ------
    ValueError
        For anything but ``"auto"``, a whole number above 0, also as a text, and a size such as ``"20GiB"``.
    """
    if budget == "auto":
        return None
    size = int(budget) if isinstance(budget, str) and budget.isdecimal() else bytes_of(budget) or budget
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    raise ValueError(f'budget must be a number of bytes above 0, a text like "20GiB", or "auto", got {budget!r}')
