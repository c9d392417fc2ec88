"""The names of autograd's nodes for views and casts."""

from __future__ import annotations

from .rule import KINDS, Kind

VIEWS = frozenset(f"{name.title().replace('_', '')}Backward0" for name, kind in KINDS.items() if kind is Kind.VIEW)
CAST = "ToCopyBackward0"
