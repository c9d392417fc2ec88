"""Calls in processes of their own, forked from one that has the libraries imported, each with a time limit."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

Job = TypeVar("Job")


@dataclass(frozen=True)
class Failed:
    """A call that gave no result: ``kind`` is "error", "crash" or "timeout"."""

    kind: str
    reason: str


@dataclass
class _Running:
    job: Any
    process: Any
    results: Connection
    deadline: float


def first_line(problem: BaseException | str) -> str:
    """Return the first line of an error's text with the error's name before it, and no path of this machine."""
    text = problem if isinstance(problem, str) else f"{type(problem).__name__}: {problem}"
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    # A validation error says in its second line what is wrong.
    line = " ".join(lines[:2]) if lines and lines[0].endswith(":") else (lines or [""])[0]
    words = [word if not word.lstrip("'\"(").startswith("/") else "(path)" for word in line.split()]
    return " ".join(words)[:160]


def _call(function: Callable[[Any], Any], job: Any, results: Connection) -> None:
    try:
        results.send(function(job))
    except Exception as problem:  # any error is the job's result
        results.send(Failed("error", first_line(problem)))


def _ended(process: Any) -> Failed:
    process.join()
    code = process.exitcode
    name = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
    return Failed("crash", f"the process ended with {name}")


def results(
    jobs: Iterable[Job],
    function: Callable[[Job], Any],
    *,
    limit_s: float,
    workers: int = 1,
    preload: tuple[str, ...] = (),
) -> Iterator[tuple[Job, Any]]:
    """Yield each job with what ``function(job)`` returned in a process of its own, or with a `Failed`.

    Parameters
    ----------
    jobs : iterable
        Started in order, each once a worker is free.
    function : callable
        A module's function; it, the jobs and the results are pickled.
    limit_s : float
        Seconds after which a process is killed.
    workers : int
        Processes at a time.
    preload : tuple of str
        Modules that the process imports from which all others are forked.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    queue = iter(jobs)
    running: list[_Running] = []
    try:
        while True:
            while len(running) < workers and (job := next(queue, None)) is not None:
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_call, args=(function, job, theirs), daemon=True)
                process.start()
                theirs.close()
                running.append(_Running(job, process, ours, time.monotonic() + limit_s))
            if not running:
                return
            soonest = min(each.deadline for each in running)
            ready = wait([each.results for each in running], timeout=max(0.0, soonest - time.monotonic()))
            for each in list(running):
                if each.results in ready:
                    try:
                        result = each.results.recv()
                    except EOFError:
                        result = _ended(each.process)
                elif time.monotonic() >= each.deadline:
                    result = Failed("timeout", f"not done after {limit_s:g} s")
                else:
                    continue
                running.remove(each)
                _stop(each)
                yield each.job, result
    finally:
        for each in running:
            _stop(each)


def _stop(running: _Running) -> None:
    """End a process whose result is there, or is wanted no more."""
    running.process.kill()
    running.process.join()
    running.results.close()
