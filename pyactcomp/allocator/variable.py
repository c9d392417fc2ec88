"""``PYACTCOMP_ALLOCATOR=1``: the allocator without a change of code, in every process that inherits the variable.

``pyactcomp.pth``, which Python reads at its start, lets ``_pyactcomp_startup`` call :func:`attach` as torch initialises
CUDA.
"""

from __future__ import annotations

import os
import site
import sys
from pathlib import Path

from .._core import AllocatorConfig
from ..errors import PyactcompError
from . import settings
from .attach import attach_by_variable, is_enabled

VARIABLE = "PYACTCOMP_ALLOCATOR"

# Why the last call of attach() left torch's allocator in place.
_obstacle: str | None = None


def attach() -> str | None:
    """Attach the allocator if the environment asks for it; return the obstacle, or None.

    Calls no driver and initialises nothing of torch: CUDA_VISIBLE_DEVICES may still change, and the process still fork.
    """
    global _obstacle
    if _asked() and not is_enabled():
        _obstacle = _wrong_value()
        try:
            if _obstacle is None:
                attach_by_variable(settings.from_environment())
        except (PyactcompError, ValueError) as error:
            _obstacle = str(error)
    return _obstacle


def hand_on(config: AllocatorConfig) -> None:
    """Let the processes that this one starts have the allocator too, with these settings."""
    os.environ[VARIABLE] = "1"
    os.environ[settings.VARIABLE] = str(config)


def state() -> dict[str, str | bool | None]:
    """Return the state of the variable in this process, for ``pyactcomp doctor``.

    Returns
    -------
    dict
        ``value``; ``on``: whether the environment asks for the allocator; ``attached``: whether it is torch's;
        ``file``: the path of ``pyactcomp.pth``, or None; ``problem``: None, or why the variable has no effect.
    """
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    files = [file for folder in folders if (file := Path(folder, "pyactcomp.pth")).exists()]
    problem = None
    waits = _asked() and not is_enabled()
    if waits and "_pyactcomp_startup" not in sys.modules:
        problem = (
            f"this process has not read {files[0]}: set the variable before Python starts, without -S, -E and -I"
            if files
            else "no pyactcomp.pth is in site-packages: install pyactcomp again"
        )
    elif waits:
        problem = _wrong_value() or _obstacle
    return {
        "value": os.environ.get(VARIABLE),
        "on": _asked(),
        "attached": is_enabled(),
        "file": str(files[0]) if files else None,
        "problem": problem,
    }


def _asked() -> bool:
    """Return whether the environment asks for the allocator, if only by a wrong value."""
    return os.environ.get(VARIABLE, "") not in ("", "0") and not settings.disabled()


def _wrong_value() -> str | None:
    value = os.environ.get(VARIABLE)
    return None if value == "1" else f"{VARIABLE} is 1, or 0 for torch's allocator; got {value!r}"
