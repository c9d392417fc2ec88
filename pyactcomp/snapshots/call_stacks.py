"""Call stacks cut to the innermost lines of the user's own code, without torch's around them."""

from __future__ import annotations

import re
from pathlib import PurePath

from .model import Frame, Snapshot

#: Lines of a stack to tell allocations apart: the layer, the model around it, and the caller.
DEPTH = 3

_LIBRARIES = re.compile(
    r"(site|dist)-packages[/\\](torch|triton|pyactcomp)[/\\]|[/\\]pytorch[/\\](torch|c10)[/\\]|<frozen "
)
_PLUMBING = re.compile(r"unwind|CapturedTraceback|gather_with_cpp|c10::|^_?Py")


def fold_stacks(snapshot: Snapshot) -> list[tuple[Frame, ...]]:
    """Return each stack of a snapshot as the innermost lines of the user's own Python code, innermost first.

    A stack without such lines (autograd's threads have none) gives the innermost stack frame with a meaningful name; an
    empty stack gives nothing.
    """
    own = [_is_own(frame) for frame in snapshot.frames]
    folded: list[tuple[Frame, ...]] = []
    for stack in snapshot.stacks:
        chosen = [number for number in stack if own[number]][:DEPTH]
        if not chosen:
            chosen = [number for number in stack if not _PLUMBING.search(snapshot.frames[number].name)][:1] or list(
                stack[:1]
            )
        folded.append(tuple(snapshot.frames[number] for number in chosen))
    return folded


def _is_own(frame: Frame) -> bool:
    python = frame.filename.endswith(".py") or frame.filename.startswith(("<stdin>", "<string>", "<ipython"))
    return python and not _LIBRARIES.search(frame.filename)


def shortened(frame: Frame) -> str:
    """Return a stack frame in few characters: ``model.py:12 forward``; without a line number, the name alone."""
    name = PurePath(frame.filename.replace("\\", "/")).name
    return f"{name}:{frame.line} {frame.name}" if frame.line > 0 and name != "??" else frame.name
