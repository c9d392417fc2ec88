"""The way past Triton's Python to the C function that launches a compiled kernel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import triton

Launch = Callable[[int, int, tuple[object, ...]], object]

_hooks = attrgetter("launch_enter_hook", "launch_exit_hook")


def launches_are_watched() -> bool:
    """Return whether a profiler of Triton's wants to see launches. Then :func:`direct` would leave out its hooks."""
    for hook in _hooks(triton.knobs.runtime):
        # A chain of hooks in Triton 3.5 and later, a function or None before.
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


def direct(compiled: Any) -> Launch | None:
    """Return a function (programs, stream, arguments) that launches a compiled kernel; None in an unknown Triton.

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


def _bound(compiled: Any) -> Launch | None:
    launches_are_watched()  # raises in a release where hooks are elsewhere
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
        fixed = tuple(found[4:-2])
        return lambda programs, stream, arguments: launch(programs, 1, 1, stream, *fixed, *arguments)
    if found[-1] == (first, second):
        fixed = tuple(found[4:-1])
        return lambda programs, stream, arguments: launch(programs, 1, 1, stream, *fixed, arguments)
    return None
