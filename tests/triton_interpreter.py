"""Triton's interpreter without its repetitions; ``conftest.py`` imports this file where Triton interprets.

Each call of a device function, one that a kernel calls, replaces the functions of ``triton.language`` by interpreted
ones. The launch around the call has done so already: half of the time of an interpreted test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.runtime import interpreter

_launch: Callable[..., None] = interpreter.GridExecutor.__call__
_patch: Callable[[Any], Any] = interpreter._patch_lang
_patched: set[int] = set()
"""Modules, by the address of their variables, whose view of ``triton.language`` this launch has replaced."""


def _launched(self: interpreter.GridExecutor, *arguments: Any, **keywords: Any) -> None:
    _patched.clear()
    _launch(self, *arguments, **keywords)


def _patched_once(function: Any) -> Any:
    module = id(function.__globals__)
    if module in _patched:
        return None
    _patched.add(module)
    return _patch(function)


interpreter.GridExecutor.__call__ = _launched
interpreter._patch_lang = _patched_once
