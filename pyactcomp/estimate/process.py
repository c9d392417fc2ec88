"""Starts the child process, in which torch is imported after a device that is not there, and asks it.

torch asks for CUDA once, during its import, and keeps the answer. So the library of phantom tensors is
loaded first, in a new process. Builds of torch with and without CUDA take the same way; a GPU is hidden from the child.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ..errors import ImplementationUnavailableError, PyactcompError
from ..layout import Layout
from ..torch_private import extensions
from .result import Question, Recorded

# The program of the child. The libraries of torch come first, since ours is linked to them. The line that torch's
# registry of CUDA hooks prints about the replacement goes nowhere.
_START = """
import ctypes, importlib.machinery, importlib.util, os, sys
folder, library, private, descriptor = sys.argv[1:]
errors = os.dup(2)
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
ctypes.CDLL(f"{folder}/libtorch_global_deps.so", ctypes.RTLD_GLOBAL)
for name in ("c10", "torch_cpu", "torch", "torch_python"):
    ctypes.CDLL(f"{folder}/lib{name}.so")
def load(name, file):
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
native = load("pyactcomp._phantom", library)
native.register_device()
import torch
load("private", private).pretend_streams()  # the package keeps these functions of torch as it is imported
from pyactcomp.estimate.child import answer
os.dup2(errors, 2)
with os.fdopen(int(descriptor), "wb") as answers:
    answer(native, sys.stdin.buffer, answers)
"""

_INSIDE = "PYACTCOMP_PHANTOM"  # set in a child's environment


class Child:
    """A child process that answers one question in several modes; a context manager.

    Parameters
    ----------
    question : Question

    Raises
    ------
    PyactcompError
        If the model cannot be found or built. Nothing is left running.
    ImplementationUnavailableError
        If the library of phantom tensors can neither be loaded nor compiled.
    """

    def __init__(self, question: Question) -> None:
        if _INSIDE in os.environ:
            raise PyactcompError(
                "this program estimates or plans while a child process imports it for a model's classes: put what it "
                'runs under `if __name__ == "__main__":`'
            )
        self._errors = tempfile.TemporaryFile()
        reading, writing = os.pipe()
        environment = {
            **os.environ,
            _INSIDE: "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "HF_HUB_OFFLINE": "1",
        }
        for name in ("TRITON_INTERPRET", "PYACTCOMP_ALLOCATOR", "PYACTCOMP_DISABLE", "LD_PRELOAD"):
            environment.pop(name, None)
        folder, private = Path(torch.__file__).parent / "lib", Path(__file__).parents[1] / "torch_private/phantom.py"
        command = [sys.executable, "-c", _START, str(folder), _library(), str(private), str(writing)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=self._errors,
                stderr=self._errors,
                env=environment,
                pass_fds=[writing],
                start_new_session=True,
            )
        finally:
            os.close(writing)
        self._answers = os.fdopen(reading, "rb")
        try:
            self._send(question)
            self._receive()
        except BaseException:
            self.close()
            raise

    def record(self, mode: str | Layout, batch: int, seq: int | None) -> Recorded:
        """Return the events of a training in a mode, or by a layout of the blocks.

        Raises
        ------
        PyactcompError
            If the model cannot run in this mode.
        """
        self._send((mode, batch, seq))
        recorded: Recorded = self._receive()
        return recorded

    def close(self) -> None:
        """End the process, and the fork of it that may be running."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._answers.close()
        self._errors.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer is missing then, and tells why
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()

    def _receive(self) -> Any:
        try:
            kind, value = pickle.load(self._answers)
        except EOFError:
            self._process.wait()
            kind, value = "failed", self._said() or f"the process ended with status {self._process.returncode}"
        if kind == "refused":
            raise PyactcompError(value)
        if kind == "failed":
            last = value.strip().splitlines()[-1] if value.strip() else "no reason given"
            raise PyactcompError(f"the model does not train on phantom tensors: {last}\n{value}")
        return value

    def _said(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-4000:]


def _library() -> str:
    extension, reason = extensions.load_or_build("_phantom", lambda: extensions.build("_phantom"))
    if extension is None:
        raise ImplementationUnavailableError(f"pyactcomp cannot estimate here: {reason}")
    assert extension.__file__ is not None
    return extension.__file__
