"""``PYACTCOMP_ALLOCATOR=1``: the allocator without a change of code, in every process that inherits the variable.

``pyactcomp.pth``, which Python reads at its start, lets ``_pyactcomp_startup`` call :func:`attach` as torch initialises
CUDA.
"""

from __future__ import annotations

import os

from .._core import AllocatorConfig
from ..errors import PyactcompError
from . import settings
from .attach import attach_by_variable, is_enabled

VARIABLE = "PYACTCOMP_ALLOCATOR"


def attach() -> str | None:
    """Attach the allocator if the environment asks for it; return the obstacle, or None.

    Calls no driver and initialises nothing of torch: CUDA_VISIBLE_DEVICES may still change, and the process still fork.
    """
    if not _asked() or is_enabled():
        return None
    wrong = _wrong_value()
    try:
        if wrong is None:
            attach_by_variable(settings.from_environment())
    except (PyactcompError, ValueError) as error:
        return str(error)
    return wrong


def hand_on(config: AllocatorConfig) -> None:
    """Let the processes that this one starts have the allocator too, with these settings."""
    os.environ[VARIABLE] = "1"
    os.environ[settings.VARIABLE] = str(config)


def _asked() -> bool:
    """Return whether the environment asks for the allocator, if only by a wrong value."""
    return os.environ.get(VARIABLE, "") not in ("", "0") and not settings.disabled()


def _wrong_value() -> str | None:
    value = os.environ.get(VARIABLE)
    return None if value == "1" else f"{VARIABLE} is 1, or 0 for torch's allocator; got {value!r}"
