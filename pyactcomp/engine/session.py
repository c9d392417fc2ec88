"""One configuration in use: opens and closes the hooks of each forward, and keeps state between forwards."""

from __future__ import annotations

import os
import threading
import warnings
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch.nn import Module

from ..codec.seeds import Seeds
from ..config import Config
from ..errors import HookConflictError
from ..readers.observer import transformed
from ..torch_private import hooks_on_top, saved_tensor_hooks_enabled, top_saved_tensor_hooks
from .frame import Frame, frame_of
from .packing import Packing
from .record import Recorder, name_of_hooks
from .silence import (
    DISABLED,
    NO_GRAD_MODE,
    NOT_YET,
    NOTHING_SAVED,
    TRANSFORMED,
    GradientWithoutForward,
    silence_of,
    stepped_aside,
)


def close_abandoned() -> None:
    """Deactivate hooks of this thread whose forward has ended."""
    while (top := top_saved_tensor_hooks()) is not None:
        frame = frame_of(top[0])
        if frame is None or not isinstance(frame.packing, Session) or not frame.abandoned():
            return
        frame.packing.drop(frame)


def close_interrupted(module: Module) -> None:
    """Close the frame of a module's forward in this thread that ends by KeyboardInterrupt, SystemExit or their like.

    Torch runs no forward hook then.
    """
    top = top_saved_tensor_hooks()
    frame = None if top is None else frame_of(top[0])
    session = None if frame is None else frame.packing
    if frame is not None and isinstance(session, Session) and session.root is not None:
        if session.root() is module:
            session.drop(frame)


def close_frame(frame: Frame) -> None:
    """Close a frame; hooks that the forward left open on top stay active, as without the frame."""
    top = top_saved_tensor_hooks()
    if top is not None and frame_of(top[0]) is frame:
        frame.close()
    else:
        with hooks_on_top(lambda hook: frame_of(hook) is frame, frame.pair()):
            frame.close()


class Session(Packing):
    """One configuration in use: opens a :class:`Frame` for each forward.

    Keeps kernels, seeds and the first record between forwards. Copying or pickling a session gives a fresh session with
    the same configuration.

    Attributes
    ----------
    recorder : Recorder or None
        Record of the first training forward.
    silence : str
        Why nothing was recorded or compressed so far; empty once something is.
    """

    def __init__(
        self, config: Config, seeds: Seeds | None = None, tape: int = 0, offloads_blocks: bool = False
    ) -> None:
        super().__init__(config, seeds, tape)
        self.offloads_blocks = offloads_blocks
        self.recorder: Recorder | None = None
        self.silence = NOT_YET
        self._watch: GradientWithoutForward | None = None
        self.paused = False
        self._frames = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        number = 0 if self.offloading is None else self.offloading.number
        return Session, (self.config, self.seeds, number, self.offloads_blocks)

    def serve(self, tape: int) -> None:
        """Let the compiled graphs of the model find what leaves by a number."""
        if self.offloading is not None:
            self.offloading.number = tape

    def _stack(self) -> list[Frame | None]:
        stack: list[Frame | None] | None = getattr(self._frames, "stack", None)
        if stack is None:
            stack = self._frames.stack = []
        return stack

    def frame(self) -> Frame | None:
        """Return the frame of the innermost forward in progress in this thread."""
        stack = self._stack()
        return stack[-1] if stack else None

    def open(self, module: Module | None, *, active: bool = True, caller: FrameType | None = None) -> None:
        """Activate the hooks for a forward of ``module``, or step aside where hooks must not be active.

        Torch runs a module's forward hooks after an Exception, but not after KeyboardInterrupt. ``caller``, the running
        frame that would call :meth:`close`, lets the next forward find hooks left open where no
        :func:`close_interrupted` was called.

        Follow every call by one of :meth:`close`, even if this call raises or ``active`` is False.

        Raises
        ------
        HookConflictError
            If other hooks are active and the configuration has ``on_conflict="raise"``.
        """
        close_abandoned()
        stack = self._stack()
        stack.append(None)
        if not active or self.paused:
            return
        aside = self._steps_aside()
        if aside is not None:
            if self.recorder is None:
                self.silence = aside
            return
        if module is not None:
            self.root = ref(module)
        frame = self._new_frame(module)
        frame.open(caller)
        stack[-1] = frame

    def close(self, *, completed: bool = True) -> None:
        """Undo the last :meth:`open` of this thread; do not report an incomplete forward."""
        stack = self._stack()
        frame = stack.pop() if stack else None
        if frame is not None:
            close_frame(frame)
            if completed and frame.recorder is not None:
                self._keep_record(frame.recorder)

    def _keep_record(self, recorder: Recorder) -> None:
        """Keep the record of a forward, unless it was a dry run; warn if nothing was compressed."""
        if recorder.is_dry:
            return
        silence = silence_of(recorder, self.lossless)
        if not recorder.saved and silence is None:
            self.silence = NOTHING_SAVED
            return
        first = self.recorder is None
        self.recorder, self.silence = recorder, silence or ""
        if silence is not None and first:
            self.fall_silent(silence)

    def fall_silent(self, why: str) -> None:
        """Warn that nothing was compressed, for the report too; not if a warning has told of a graph that is kept."""
        self.silence = why
        if not self.warned_of_compile:
            warnings.warn(why, stacklevel=3)

    def watch_gradients(self, module: Module) -> None:
        """Tell if a gradient reaches a parameter of ``module`` before a call of :meth:`stop_watching`."""
        self._watch = GradientWithoutForward(module, self.fall_silent)

    def stop_watching(self) -> None:
        """Stop what :meth:`watch_gradients` began."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def drop(self, frame: Frame) -> None:
        """Close an abandoned frame of this thread, and forget the frames opened inside."""
        stack = self._stack()
        if frame in stack:
            del stack[stack.index(frame) :]
        close_frame(frame)

    def drop_all(self) -> None:
        """Close all frames of this thread, innermost first."""
        while stack := self._stack():
            frame = stack.pop()
            if frame is not None:
                close_frame(frame)

    def _new_frame(self, module: Module | None) -> Frame:
        records = self.recorder is None and torch.is_grad_enabled()
        if self.recorder is None and not records:
            self.silence = NO_GRAD_MODE
        return Frame(self, module, Recorder(module) if records else None)

    def _steps_aside(self) -> str | None:
        """Return why hooks must not be active now, or None; raise where the program has to choose."""
        if os.environ.get("PYACTCOMP_DISABLE") == "1":
            return DISABLED
        if not saved_tensor_hooks_enabled() or transformed():
            return TRANSFORMED
        top = top_saved_tensor_hooks()
        if top is None or frame_of(top[0]) is not None:
            return None
        name = name_of_hooks(top)
        if self.config.on_conflict == "skip":
            return stepped_aside(name)
        if top[0].__module__ == "torch.utils.checkpoint":
            advice = (
                "compressing inside a checkpointed function would silently disable the checkpointing; open pyactcomp "
                "outside of it (compress the whole model)"
            )
        else:
            advice = "only the innermost pair runs, so one of the two would silently do nothing; use one of them"
        raise HookConflictError(f"other saved-tensor hooks are active here ({name}): {advice}")
