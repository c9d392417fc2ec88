"""Who refers to an object: the way from a variable of the program to the object, as Python would write the way."""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections import deque
from collections.abc import Iterable
from itertools import filterfalse
from types import CellType, FrameType, FunctionType, GeneratorType, MethodType
from typing import Any

from .held import alive

_PACKAGE = os.path.dirname(__file__) + os.sep
# Each look takes 10 to 100 ms in a large program; a way that is longer says nothing.
_MOST_LOOKS = 40
_LONGEST_KEY = 40


def way_to(target: object) -> str:
    """Return the way to an object, as in ``history[3] in train() (train.py:12)``; empty if nothing in Python holds it.

    The search asks Python's garbage collector for referrers, nearest first, up to a variable of a module or function.
    """
    running = _variables_of_running_functions()
    # Objects, and the way from each to the target: two lists, whose own references are no answer.
    objects: list[Any] = [target]
    ways: list[str] = [""]
    seen = {id(objects), id(ways), id(target)}
    nearest = ""
    at = 0
    while at < len(objects) and at < _MOST_LOOKS:
        if (variable := running.get(id(objects[at]))) is not None:
            return variable.replace("{}", ways[at])
        referrers = _referrers(objects[at])
        seen.add(id(referrers))
        for referrer in referrers:
            if id(referrer) in seen:
                continue
            seen.add(id(referrer))
            variable = _variable(referrer, objects[at], ways[at])
            if variable is not None:
                return variable
            owner, way = _step(referrer, objects[at], ways[at])
            seen.add(id(owner))
            nearest = nearest or f"{way or 'a part'} of a {type(owner).__name__}"
            objects.append(owner)
            ways.append(way)
        at += 1
    return nearest


def _referrers(held: object) -> list[Any]:
    """Return the referrers, without the frames of this package."""
    return list(filterfalse(_is_own, gc.get_referrers(held)))


def _is_own(referrer: object) -> bool:
    return isinstance(referrer, FrameType) and referrer.f_code.co_filename.startswith(_PACKAGE)


def _variable(referrer: Any, held: object, way: str) -> str | None:
    """Return the variable by which a function or a frame that ended holds an object, or None for other referrers."""
    if isinstance(referrer, CellType):
        for function in _referrers_of_referrers(referrer, FunctionType):
            cells = list(function.__closure__ or ())
            at = next((i for i, cell in enumerate(cells) if cell is referrer), None)
            if at is not None:
                code = function.__code__
                name = f"{code.co_freevars[at]}{way}"
                return f"{name}, a variable of the closure {function.__qualname__} ({_file(code, code.co_firstlineno)})"
    if isinstance(referrer, FunctionType):
        code = referrer.__code__
        return f"{way or 'a default'} of {referrer.__qualname__}() ({_file(code, code.co_firstlineno)})"
    frame = referrer.gi_frame if isinstance(referrer, GeneratorType) else referrer
    if not isinstance(frame, FrameType):
        return None
    name = next((name for name, number in _locals(frame) if number == id(held)), "a variable")
    text = f"{name}{way} in {_place(frame)}"
    error = next((each for each in alive(BaseException) if _passed(each, frame)), None)
    if error is None:
        return text
    return f"{text}, kept by the traceback of {type(error).__name__}: {way_to(error)}".removesuffix(": ")


def _referrers_of_referrers(held: object, kind: type) -> list[Any]:
    return [each for between in _referrers(held) for each in _referrers(between) if isinstance(each, kind)]


def _passed(error: BaseException, frame: FrameType) -> bool:
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame is frame:
            return True
        trace = trace.tb_next
    return False


def _step(referrer: Any, held: object, way: str) -> tuple[Any, str]:
    """Return the object that a referrer belongs to, and the way from there."""
    if isinstance(referrer, dict):
        key = _key(referrer.items(), held)
        for owner in _referrers(referrer):
            if _namespace(owner) is referrer or (isinstance(owner, type) and vars(owner).get(key) is held):
                return owner, f".{key}{way}"
        return referrer, f"[{_short(key)}]{way}"
    if isinstance(referrer, (list, tuple, deque)):
        index = _key(enumerate(referrer), held)
        return referrer, way if isinstance(held, CellType) else f"[{_short(index)}]{way}"
    if isinstance(referrer, (CellType, MethodType)):
        return referrer, way
    names = {**(_namespace(referrer) or {}), **_slots(referrer)}
    key = _key(names.items(), held)
    return referrer, way if key is None else f".{key}{way}"


def _key(items: Iterable[tuple[Any, object]], held: object) -> Any:
    return next((key for key, value in items if value is held), None)


def _short(key: object) -> str:
    text = repr(key) if isinstance(key, (str, int, float, tuple)) else "..."
    return text if len(text) <= _LONGEST_KEY else "..."


def _namespace(owner: object) -> dict[str, Any] | None:
    try:
        found = object.__getattribute__(owner, "__dict__")
    except (AttributeError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def _slots(owner: object) -> dict[str, object]:
    names = [name for kind in type(owner).__mro__ for name in _as_names(vars(kind).get("__slots__", ()))]
    return {
        name: getattr(owner, name) for name in names if name not in ("__dict__", "__weakref__") and hasattr(owner, name)
    }


def _as_names(slots: Any) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _variables_of_running_functions() -> dict[int, str]:
    """Return the variables of modules and of running functions, which the collector does not see, by their values' id.

    ``{}`` stands where the way from the variable goes.
    """
    found: dict[int, str] = {}
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            if not frame.f_code.co_filename.startswith(_PACKAGE):
                for name, number in _locals(frame):
                    found.setdefault(number, f"{name}{{}} in {_place(frame)}")
            frame = frame.f_back
    del top  # this function's own frame in the end: a frame that refers to itself outlives its call
    for module in list(sys.modules.values()):
        for name, value in list((_namespace(module) or {}).items()):
            found.setdefault(id(value), f"{name}{{}} in the module {getattr(module, '__name__', '')}")
    return found


def _locals(frame: FrameType) -> list[tuple[str, int]]:
    values = frame.f_locals
    found = [(name, id(value)) for name, value in values.items()]
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        values.clear()  # a copy, by which the frame would hold each value even after the function has let go
    return found


def _place(frame: FrameType) -> str:
    name = frame.f_code.co_name
    return f"{'the module' if name == '<module>' else f'{name}()'} ({_file(frame.f_code, frame.f_lineno)})"


def _file(code: Any, line: int | None) -> str:
    return f"{os.path.basename(code.co_filename)}:{line}"
