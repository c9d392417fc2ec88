"""The child process: torch with a CUDA device that is not there. Answers the questions of :mod:`.process`."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
import os
import pickle
import signal
import sys
import traceback
from typing import Any, BinaryIO

import torch

from ..codec.kernels import none
from ..engine import offloading
from ..errors import PyactcompError
from ..torch_private import phantom as private
from .operators import Operators, line_of
from .programs import builder
from .result import Question
from .training import quiet, record

_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
_MOST_DENIED = 16  # a check in each of four steps takes four runs, each of which ends earlier than the next


def answer(native: Any, requests: BinaryIO, answers: BinaryIO) -> None:
    """Read a :class:`Question` and then (mode or Layout, batch, seq) until the end, and write an answer to each.

    An answer is ``("recorded", Recorded)``, ``("refused", str)`` or ``("failed", str)``, pickled. Each mode runs in a
    fork: so it starts with the addresses, workspaces and classes of a fresh process. Modules are imported once: this
    process imports what a fork did, before the next.
    """
    _end_with_parent()
    quiet()
    none.launch_nothing()
    question: Question = pickle.load(requests)
    gpu = question.gpu
    private.pretend(gpu.properties, native.live)
    native.set_device(gpu.major, gpu.minor, *gpu.workspaces)
    offloading.links[torch.device("cuda", 0)] = native.Link()
    try:
        operators = Operators.serve(native, gpu)
        build = builder(question.model)
    except PyactcompError as error:
        _write(answers, ("refused", str(error)))
        return
    except Exception as error:
        _write(answers, ("refused", _raised(error, 0)))
        return
    _write(answers, ("ready", None))
    while True:
        try:
            mode, batch, seq = pickle.load(requests)
        except EOFError:
            return
        asked = dataclasses.replace(question, batch=batch, seq=seq)
        _run(native, build, asked, mode, operators, answers)


@dataclasses.dataclass
class _Raised:
    """An error of the program's own: its words, the events of memory until then, and the last true boolean, if any."""

    said: str
    events: int
    last_true: int | None


@dataclasses.dataclass
class _Told:
    """What a fork tells this process: the error if the program raised one, and the modules that it imported."""

    raised: _Raised | None
    imported: list[str]


def _run(native: Any, build: Any, asked: Question, mode: Any, operators: Operators, answers: BinaryIO) -> None:
    """Run a mode in a fork, which writes its answer.

    A program that raises may have asked whether something is wrong, such as a label out of range: then the last boolean
    should have been false, and another fork reads it so. If it gets no further, the error is the program's own.
    """
    denied: set[int] = set()
    raised = furthest = _in_fork(native, build, asked, mode, operators, answers, denied)
    while furthest is not None and furthest.last_true is not None and len(denied) < _MOST_DENIED:
        denied.add(furthest.last_true)
        raised = _in_fork(native, build, asked, mode, operators, answers, denied)
        if raised is None or raised.events <= furthest.events:
            break
        furthest = raised
    if raised is not None and furthest is not None:
        _write(answers, ("refused", furthest.said))


def _in_fork(
    native: Any, build: Any, asked: Question, mode: Any, operators: Operators, answers: BinaryIO, denied: set[int]
) -> _Raised | None:
    """Return the error if the program raised one, else None: the answer is written."""
    reading, writing = os.pipe()
    known = set(sys.modules)
    process = os.fork()
    if process == 0:
        _end_with_parent()
        native.deny(denied)
        kind, found = _answer(native, build, asked, mode, operators)
        raised = None
        if kind == "raised":
            # No answer is wrong where a loop waits for another.
            given = 0 if native.waiting() else native.answers()
            true = [each for each in range(given) if each not in denied]
            raised = _Raised(found, native.count(), true[-1] if true else None)
        else:
            _write(answers, (kind, found))
        with open(writing, "wb") as telling:
            pickle.dump(_Told(raised, [name for name in sys.modules if name not in known]), telling)
        sys.stderr.flush()
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as telling:
        said = telling.read()
    _, status = os.waitpid(process, 0)
    if status != 0:
        _write(answers, ("failed", f"the process of mode {mode} ended with status {status}"))
        return None
    told = pickle.loads(said)
    assert isinstance(told, _Told)
    for name in told.imported:
        with contextlib.suppress(Exception):  # a module that the program made, or found by a path that it added
            importlib.import_module(name)
    return told.raised


def _answer(native: Any, build: Any, asked: Question, mode: Any, operators: Operators) -> tuple[str, Any]:
    try:
        return "recorded", record(native, build, asked, mode, native.reads, operators)
    except PyactcompError as error:
        return "refused", str(error)
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:  # an operator that refuses, inside another error
            if isinstance(cause, PyactcompError):
                return "refused", str(cause)
            cause = cause.__cause__ or cause.__context__
        reads = native.reads() + sum(operators.reads.values())
        return "raised", _raised(error, reads)


def _end_with_parent() -> None:
    """Let the kernel end this process when its parent ends, however that ends: a mode may take minutes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _raised(error: Exception, reads: int) -> str:
    """Return the text for an error of the program's own, which may come from what it read on the host."""
    place = line_of(reversed(list(traceback.walk_tb(error.__traceback__))))
    said = " ".join(str(error).split()).rstrip(".")
    values = "1 value" if reads == 1 else f"{reads} values"
    advice = (
        f"By then it had read {values} on the host, where numbers were taken to be 0 and answers true, or false where "
        "it raised after true: if it decides by these, measure it with a real batch, or give a function without that "
        "branch"
        if reads
        else "It had read no values by then, so a GPU may well raise it too: try a small batch on the CPU, and other "
        "--dtype and --autocast"
    )
    text = f"the model does not train on phantom tensors: {type(error).__name__}{place}: {said}. {advice}"
    return f"{text}\n{traceback.format_exc()}"


def _write(answers: BinaryIO, message: tuple[str, Any]) -> None:
    pickle.dump(message, answers)
    answers.flush()
