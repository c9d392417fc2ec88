"""The way past Triton's Python to the C function that launches a compiled kernel."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import triton

hooks: Callable[[], tuple[Any, Any]] = functools.partial(
    attrgetter("knobs.runtime.launch_enter_hook", "knobs.runtime.launch_exit_hook"), triton
)
"""Return Triton's hooks of a launch, by which a profiler sees launches; :func:`direct` would leave them out."""


class Direct(NamedTuple):
    """How to launch a compiled kernel: ``function(programs, 1, 1, stream, *fixed, *arguments)``.

    If ``packs``, the kernel's arguments are one tuple. Called by :class:`.triton.Launcher` without a function around
    it: a launch must cost less than the kernel takes.
    """

    function: Callable[..., object]
    fixed: tuple[object, ...]
    packs: bool


def direct(compiled: Any) -> Direct | None:
    """Return the function that launches a compiled kernel, with what it is given; None in an unknown Triton.

    The public ``compiled[grid](*arguments)`` makes a closure, a dictionary for hooks and a second closure, calls the
    two chains of hooks, and then a function in C. Which arguments that function takes besides the kernel's, and in
    which order, differs between releases of Triton: call Triton's launcher once with a stand-in for the function, and
    see what the stand-in gets.

    Parameters
    ----------
    compiled : triton.compiler.CompiledKernel
        Has been launched before, so that it is loaded onto the device.
    """
    try:
        return _bound(compiled)
    except (AttributeError, TypeError, ValueError):
        return None


def _bound(compiled: Any) -> Direct | None:
    hooks()  # raises in a release where hooks are elsewhere
    launcher = copy.copy(compiled.run)
    launch = launcher.launch
    found: list[object] = []
    launcher.launch = lambda *given: found.extend(given)
    # Triton multiplies the numbers of programs to allocate memory for kernels that need some: no number can be
    # multiplied here, so for such a kernel this raises TypeError.
    grid, stream, first, second = (object() for _ in range(4))
    launcher(grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, first, second)
    if found[:4] != [grid, 1, 1, stream]:
        return None
    if found[-2:] == [first, second]:
        return Direct(launch, tuple(found[4:-2]), False)
    return Direct(launch, tuple(found[4:-1]), True) if found[-1] == (first, second) else None
