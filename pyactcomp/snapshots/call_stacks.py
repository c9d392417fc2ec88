"""Call stacks cut to the lines that tell a person whose memory it is: the program's own, or the step of backward.

A stack of torch's default recordings has some sixty frames, most of them C++. What is kept, innermost first:

- lines of the program's own Python code;
- where autograd's engine runs, the node whose gradient is computed (its threads have no line of the program);
- generated code: the program's lines it comes from if the file has them, else the compiled graph as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from .model import Frame, Snapshot

#: Lines of a stack to tell allocations apart: the layer, the model around it, and the caller.
DEPTH = 3

_LIBRARIES = re.compile(
    r"(site|dist)-packages[/\\](torch|triton|pyactcomp)[/\\]|[/\\]pytorch[/\\](torch|c10)[/\\]|<frozen "
)
_PLUMBING = re.compile(r"unwind|CapturedTraceback|gather_with_cpp|^c10::|^_?Py")
_ENGINE = re.compile(r"^torch::autograd::((\w+::)*\w*Engine::|Node::operator)")
_NODE = re.compile(r"(?:^|::)(?!PyNode|Function)(\w+)::apply$")
_OPERATOR = re.compile(r"^at::_ops::(\w+)::")
# The cache of compiled code: the name is a hash, and two of its letters are the folder, wherever the cache lies.
_INDUCTOR = re.compile(r"[/\\]([a-z2-7]{2})[/\\](c\1[a-z2-7]{20,})\.py$")
_OF_THE_HASH = 8
_FX = re.compile(r"(^|[/\\])fx_generated_[^/\\]*\.py$|^<eval_with_key>")


def fold_stacks(snapshot: Snapshot) -> list[tuple[Frame, ...]]:
    """Return each stack of a snapshot as its telling lines, innermost first.

    A stack without any gives the innermost line of torch's Python code, else the operator that allocates, else the
    innermost function with a meaningful name; an empty stack gives nothing. A node, a graph or a function is a frame
    without a line.
    """
    folder = _Folder(snapshot.frames)
    return [folder.fold(stack) for stack in snapshot.stacks]


def shortened(frame: Frame) -> str:
    """Return a stack frame in few characters: ``model.py:12 forward``; without a line number, the name alone."""
    name = PurePath(frame.filename.replace("\\", "/")).name
    return f"{name}:{frame.line} {frame.name}" if frame.line > 0 and name != "??" else frame.name


def described(frame: Frame) -> str:
    """Return a stack frame with its whole path, if it has one."""
    if frame.filename in ("", "??"):
        return frame.name
    return f"{frame.filename}:{frame.line} {frame.name}" if frame.line > 0 else f"{frame.filename} {frame.name}"


def is_engine(frame: Frame) -> bool:
    """Return whether a stack frame is autograd's engine, which runs backward."""
    return not _is_python(frame) and bool(_ENGINE.match(cleaned(frame.name)))


def _is_python(frame: Frame) -> bool:
    return frame.filename.endswith(".py") or frame.filename.startswith("<")


class _Folder:
    """The frames of a snapshot, each examined once."""

    def __init__(self, frames: Sequence[Frame]) -> None:
        self.frames = frames
        self.python = [_is_python(frame) for frame in frames]
        self.names = [
            frame.name if python else cleaned(frame.name) for frame, python in zip(frames, self.python, strict=True)
        ]
        self.telling = [_telling(frame) for frame in frames]
        self.engine = [is_engine(frame) for frame in frames]

    def fold(self, stack: Sequence[int]) -> tuple[Frame, ...]:
        """Return the telling lines of a stack."""
        found: list[Frame] = []
        for frame in self._lines(stack):
            if frame not in found[-1:]:
                found.append(frame)
            if len(found) == DEPTH:
                break
        return tuple(found) or self._fallback(stack)

    def _lines(self, stack: Sequence[int]) -> Iterator[Frame]:
        inside: str | None = None  # the outermost C++ function since the engine was left, or since the last own line
        library: Frame | None = None  # the innermost line of torch's Python code, likewise
        told = False
        for number in stack:
            if self.telling[number]:
                yield from self.telling[number]
                inside, library, told = None, None, True
            elif self.python[number]:
                library = library or self.frames[number]
            elif not self.engine[number]:
                inside = self.names[number]
            elif inside is not None:
                # Hooks and functions written in Python run in the engine too.
                if library is not None and not told:
                    yield library
                if node := _NODE.search(inside):
                    yield Frame("", 0, node[1])
                elif library is None and not told:
                    yield Frame("", 0, f"autograd: {inside.removeprefix('torch::autograd::')}")
                inside, library, told = None, None, True

    def _fallback(self, stack: Sequence[int]) -> tuple[Frame, ...]:
        """Return the most telling of frames that are all of torch's inside."""
        meaningful = [number for number in stack if not _PLUMBING.search(self.names[number])] or list(stack[:1])
        lines = [self.frames[number] for number in meaningful if self.python[number]]
        if lines:
            return (lines[0],)
        names = [self.names[number] for number in meaningful]
        # Operators call each other: the outermost is the one that was asked for.
        nodes = [node[1] for name in names if (node := _NODE.search(name))]
        operators = [f"at::{operator[1]}" for name in names if (operator := _OPERATOR.match(name))]
        telling = nodes[-1:] or operators[-1:] or names[:1]
        return tuple(Frame("", 0, name) for name in telling)


def _telling(frame: Frame) -> tuple[Frame, ...]:
    """Return a line of the program's own code, or the lines or the graph that generated code comes from."""
    generated = _INDUCTOR.search(frame.filename)
    if generated:
        return (Frame(frame.filename, 0, f"compiled graph {generated[2][:_OF_THE_HASH]}"),)
    if _FX.search(frame.filename):
        return tuple(line for line in frame.original if _is_own(line))[:1]
    return (frame,) if _is_own(frame) else ()


def _is_own(frame: Frame) -> bool:
    python = frame.filename.endswith(".py") or frame.filename.startswith(("<stdin>", "<string>", "<ipython"))
    return python and not _LIBRARIES.search(frame.filename)


def cleaned(name: str) -> str:
    """Return the qualified name of a C++ function without its return type, template arguments and parameters.

    Examples
    --------
    >>> cleaned("void torch::f<std::vector<int> >(at::Tensor const&) const")
    'torch::f'
    """
    depth = 0
    kept = []
    for character in name.replace("operator()", "operator").replace("(anonymous namespace)::", "").replace("->", ""):
        if character in "<(":
            depth += 1
        elif character in ">)":
            depth = max(0, depth - 1)
        elif depth == 0:
            kept.append(character)
    words = [word for word in "".join(kept).split() if word not in ("const", "const&", "[clone")]
    return words[-1] if words else name
