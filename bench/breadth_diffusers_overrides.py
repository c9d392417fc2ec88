"""Where the rules over names do not give a model of diffusers: what single classes need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

FIELDS: dict[str, dict[str, Any]] = {}
INPUTS: dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {}
