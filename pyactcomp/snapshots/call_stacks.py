"""Call stacks as people read them: the innermost lines of their own code, without torch's around them."""

from __future__ import annotations

import re
from pathlib import PurePath

from .model import Frame, Snapshot

#: Lines of a stack that tell allocations apart: the layer, the model around it, and its caller.
DEPTH = 3

_LIBRARIES = re.compile(
    r"(site|dist)-packages[/\\](torch|triton|pyactcomp)[/\\]|[/\\]pytorch[/\\](torch|c10)[/\\]|<frozen "
)
_PLUMBING = re.compile(r"unwind|CapturedTraceback|gather_with_cpp|c10::|^_?Py")


def fold_stacks(snapshot: Snapshot) -> list[tuple[Frame, ...]]:
    """Return of each of a snapshot's stacks the innermost lines of the user's own Python code, innermost first.

    Of a stack without any (autograd's threads have none) the innermost frame that says what ran; of an empty one
    nothing.
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
    """Return a frame in few characters: ``model.py:12 forward``; of one without a line the name alone."""
    name = PurePath(frame.filename.replace("\\", "/")).name
    return f"{name}:{frame.line} {frame.name}" if frame.line > 0 and name != "??" else frame.name
