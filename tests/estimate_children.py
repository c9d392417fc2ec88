"""Children of estimates and plans that fork from one process, which has imported torch on phantom tensors already.

Each child would import torch for two seconds of its own before it answers. A test file that imports ``forked`` has
children that begin where the program of the child would answer, with the environment, the folder, the search path and
the files that it would have had. A fork that crashes is told from the others, as a child of its own is.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import os
import pickle
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from pyactcomp.estimate import process

_ANSWER = """with os.fdopen(int(descriptor), "wb") as answers:
    answer(native, sys.stdin.buffer, answers)
"""
# An estimate makes fake tensors, which import half as much again.
_SERVE = "import torch._dynamo\nimport estimate_children\nestimate_children.serve(native, answer, int(descriptor))\n"
_Popen = subprocess.Popen
_SIZE = 1 << 20


def serve(native: Any, answer: Any, descriptor: int) -> None:
    """Fork for each message of a socket, until it is closed. Runs in the process that forks."""
    with socket.socket(fileno=descriptor) as requests:
        while message := requests.recvmsg(_SIZE, socket.CMSG_SPACE(4 * 4)):
            if not message[0]:
                return
            kind, value = pickle.loads(message[0])
            if kind == "wait":
                requests.send(pickle.dumps(os.waitstatus_to_exitcode(os.waitpid(value, 0)[1])))
                continue
            files = array.array("i", message[1][0][2])
            child = os.fork()
            if child == 0:
                requests.close()
                _answered(native, answer, *files, **value)
            with contextlib.suppress(OSError):  # it has ended, or was as fast
                os.setpgid(child, child)
            for file in files:
                os.close(file)
            requests.send(pickle.dumps(child))


def _answered(
    native: Any,
    answer: Any,
    questions: int,
    said: int,
    errors: int,
    answers: int,
    environment: Mapping[str, str],
    folder: str,
) -> None:
    status = 1
    try:
        os.setpgid(0, 0)
        for descriptor, file in enumerate((questions, said, errors)):
            os.dup2(file, descriptor)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        paths = environment["PYTHONPATH"].split(os.pathsep)
        sys.path[:] = ["", *paths, *(path for path in sys.path[1:] if path not in paths)]
        with os.fdopen(questions, "rb") as asked, os.fdopen(answers, "wb") as told:
            answer(native, asked, told)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class _Forking:
    """The process that forks, of one program of children, and the socket to it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = process._START.replace(_ANSWER, _SERVE)
        assert program != process._START, "the program of a child ends otherwise"
        self.socket = ours
        with theirs:
            self.process = _Popen(
                [*command[:2], program, *command[3:-1], str(theirs.fileno())],
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def ask(self, kind: str, value: Any, files: Sequence[int] = ()) -> Any:
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        self.socket.sendmsg([pickle.dumps((kind, value))], passed)
        return pickle.loads(self.socket.recv(_SIZE))

    def close(self) -> None:
        self.socket.close()
        self.process.wait()


_forking: dict[tuple[str, ...], _Forking] = {}


@atexit.register
def _end() -> None:
    while _forking:
        _forking.popitem()[1].close()


class _Forked:
    """What :class:`.process.Child` asks of a process."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: Any,
        stderr: Any,
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        start_new_session: bool,
    ) -> None:
        assert command[2] == process._START
        assert stdin == subprocess.PIPE
        assert start_new_session
        program = tuple(command[:-1])
        if program not in _forking:
            _forking[program] = _Forking(command, env)
        self._forking, self.returncode = _forking[program], None
        reading, writing = os.pipe()
        files = [reading, stdout.fileno(), stderr.fileno(), *pass_fds]
        self.pid = self._forking.ask("fork", {"environment": dict(env), "folder": os.getcwd()}, files)
        os.close(reading)
        self.stdin = os.fdopen(writing, "wb")

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = self._forking.ask("wait", self.pid)
        return self.returncode

    def communicate(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.wait()


class _Subprocess:
    """The names of ``subprocess`` that :mod:`.process` reads."""

    PIPE = subprocess.PIPE
    Popen = _Forked


@pytest.fixture(autouse=True, scope="module")
def forked() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "subprocess", _Subprocess)
        yield
