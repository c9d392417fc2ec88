"""Docstrings name objects as Sphinx does, ``:func:`compress```: on the site these are links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|meth|attr|data|exc|mod):`~?([\w.]+)`")
# Documented where they are defined: a function and a module may have one name.
_PUBLIC = {
    found.rpartition(".")[2]: found
    for page in Path("docs/api").glob("*.md")
    for found in re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), re.MULTILINE)
}


def _link(match: re.Match[str]) -> str:
    name = match.group(1).rpartition(".")[2]
    return f"[`{name}`][{_PUBLIC[name]}]" if name in _PUBLIC else f"`{name}`"


class Roles(griffe.Extension):
    """Rewrites roles in every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite those of one object."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(_link, obj.docstring.value)
