"""``pyactcomp run``: runs an unmodified program with the allocator enabled from the first line."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from .._core import AllocatorConfig
from . import settings, variable
from .attach import activate


def prepare(conf: str | None = None, growth: str | None = None, max_split_size: str | None = None) -> None:
    """Enable the allocator, here and in child processes.

    ``conf`` overrides the environment's settings, and the other arguments override both.

    Raises
    ------
    ValueError
        If a setting is malformed.
    PyactcompError
        If the allocator cannot be enabled.
    """
    if not settings.disabled():
        config = AllocatorConfig.parse(conf or "", settings.from_environment())
        config = settings.override(config, growth=growth, max_split_size=max_split_size)
        activate(config)
        variable.hand_on(config)


def execute(target: str, arguments: Sequence[str], *, module: bool) -> None:
    """Run a script, or a module by name, as ``python`` does: as ``__main__``, with ``sys.argv`` set.

    The program's exceptions are raised here, SystemExit too.
    """
    sys.argv = [target, *arguments]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.realpath(target))
    if module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")
