"""``watch()``: the memory of a training, step by step."""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.nn import Module

from ..errors import PyactcompError
from .breakdown import Memory, check_arguments, measure
from .device import Counters, find_device, resident_bytes
from .leaks import FEWEST_STEPS, LeakCheck, Leaks
from .records import Sample, Step

# A breakdown waits until this many times its own duration has passed: half a percent of the time.
_PAUSE = 200


class Watch:
    """Watch the memory of a training in a ``with`` statement: exact peaks of each step, a curve, and leaks.

    Parameters
    ----------
    model : Module, optional
        Whose weights and gradients the breakdowns count; by default those of all modules alive.
    optimizer : Optimizer, optional
        A step ends with each ``optimizer.step()``. Without an optimizer, or with ``manual=True``, call :meth:`step` at
        the end of each.
    steps : int, optional
        Check this many steps for leaks, at least 8. These steps are slower, by 0.1 s or so and some microseconds
        for each call of torch; later ones are not.
    path : str or Path, optional
        Append a line of JSON for each step to this file.
    log : callable, optional
        Called at the end of each step as ``log(scalars, step=number)``, which ``wandb.log`` and ``accelerator.log``
        are.
    interval : float
        Seconds between two samples of the thread.
    device : torch.device, int or str, optional
        As for :func:`pyactcomp.memory`.
    manual : bool, optional
        Whether :meth:`step` ends a step although an optimizer is given.

    Attributes
    ----------
    steps : list of Step
    samples : list of Sample

    Raises
    ------
    TypeError, ValueError
        If an argument is of another type or out of range.
    OSError
        On entering, if ``path`` cannot be written.

    Warns
    -----
    UserWarning
        Once, if the allocator had to free its unused memory and try again in two steps in a row: training slows down
        long before it runs out of memory. At the end of a check, if tensors grow from step to step.

    Notes
    -----
    Peaks come from the allocator's counters, which are reset at the end of each step, so
    ``torch.cuda.max_memory_allocated()`` covers the current step alone. A breakdown is taken once 200 times the
    duration of the last has passed. The thread calls no CUDA function.

    Examples
    --------
    >>> import torch, pyactcomp
    >>> model = torch.nn.Linear(64, 64)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> with pyactcomp.watch(model, optimizer, steps=8) as w:
    ...     for _ in range(8):
    ...         optimizer.zero_grad()
    ...         model(torch.randn(8, 64)).sum().backward()
    ...         optimizer.step()
    >>> print(w.leaks())
    nothing grows from step to step
    >>> w.steps[0].memory.optimizer       # two states as large as the weights, and a counter for each parameter
    33288
    """

    def __init__(
        self,
        model: Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        steps: int | None = None,
        path: str | Path | None = None,
        log: Callable[..., object] | None = None,
        interval: float = 1.0,
        device: torch.device | int | str | None = None,
        manual: bool | None = None,
    ) -> None:
        check_arguments("watch()", model, optimizer)
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int)):
            raise TypeError(f"steps must be an integer, the number of steps to check for leaks, got {steps!r}")
        if steps is not None and steps < FEWEST_STEPS:
            raise ValueError(
                f"steps must be at least {FEWEST_STEPS}, to tell a leak from a cache that fills; got {steps}"
            )
        if isinstance(interval, bool) or not isinstance(interval, (int, float)):
            raise TypeError(f"interval must be a number of seconds, got {interval!r}")
        if not 0.01 <= interval <= 3600:
            raise ValueError(f"interval must be from 0.01 to 3600 seconds, got {interval}")
        if log is not None and not callable(log):
            raise TypeError(f"log must be callable, as wandb.log is, got {log!r}")
        self._model, self._optimizer = model, optimizer
        self._manual = optimizer is None if manual is None else manual
        if not self._manual and optimizer is None:
            raise ValueError("manual=False ends a step with optimizer.step(): give the optimizer")
        self._device = find_device(device, model)
        self._check_steps, self._interval, self._log = steps, float(interval), log
        self._path = None if path is None else Path(path)
        self.steps: list[Step] = []
        self.samples: list[Sample] = []
        self._check: LeakCheck | None = None
        self._leaks = Leaks()
        self._file: TextIO | None = None
        self._hook: Any = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._breakdown: Memory | None = None
        self._next_breakdown = 0.0
        self._warned = False

    def __enter__(self) -> Watch:
        """Begin; see :meth:`start`."""
        return self.start()

    def __exit__(self, *exception: object) -> None:
        """End; see :meth:`stop`."""
        self.stop()

    def start(self) -> Watch:
        """Begin to watch, where a ``with`` statement does not fit.

        Raises
        ------
        PyactcompError
            If this watch has begun before.
        """
        if self._thread is not None:
            raise PyactcompError("this watch has begun before: make a new one")
        if self._path is not None:
            self._file = self._path.open("a")
        self._began = time.perf_counter()
        if self._device is not None:
            self._device.reset_peaks()
            self._retries = self._device.counters().retries
        if self._optimizer is not None:
            # accelerate's optimizer calls the program's.
            inner = getattr(self._optimizer, "optimizer", self._optimizer)
            self._hook = inner.register_step_post_hook(self._after_optimizer)
        if self._check_steps is not None:
            self._check = LeakCheck()
            self._check.start()
        self._sample()
        self._thread = threading.Thread(target=self._run, name="pyactcomp.watch", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """End; a second call does nothing."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._hook is not None:
            self._hook.remove()
        if self._check is not None:
            self._end_check()
        if self._file is not None:
            self._file.close()
        self._hook = self._file = None

    def step(self) -> None:
        """End a step.

        Raises
        ------
        PyactcompError
            Outside of the ``with`` statement, and if each ``optimizer.step()`` ends a step.
        """
        if self._thread is None or self._stop.is_set():
            raise PyactcompError("step() ends a step inside of `with pyactcomp.watch() as w`: the watch is not running")
        if not self._manual:
            raise PyactcompError(
                "the watch ends a step with each optimizer.step(): leave step() out, or give watch(..., manual=True)"
            )
        self._end_step()

    def leaks(self) -> Leaks:
        """Return the tensors that grew from step to step, by line.

        Returns
        -------
        Leaks
            A tuple of :class:`Leak`; empty if nothing grew, or fewer than 8 steps were made. Before the check is over:
            what grew so far.

        Raises
        ------
        PyactcompError
            If the watch was made without ``steps``.
        """
        if self._check_steps is None:
            raise PyactcompError(f"leaks() needs a check: give watch(steps=...), at least {FEWEST_STEPS}")
        return self._leaks if self._check is None else self._check.leaks()

    def scalars(self) -> dict[str, float]:
        """Return figures of the last step by name, in GiB, for TensorBoard and W&B; empty before the first.

        ``memory/activations`` is the peak without weights, gradients and optimizer state: activations, and temporary
        tensors at that moment.
        """
        if not self.steps:
            return {}
        last = self.steps[-1]
        parts = next((each.memory for each in reversed(self.steps) if each.memory is not None), None)
        sizes = {
            "allocated": last.allocated,
            "peak": last.peak_allocated,
            "reserved": last.peak_reserved,
            "resident": last.resident,
            "others": self.samples[-1].others if self.samples else None,
        }
        if parts is not None:
            sizes |= {name: getattr(parts, name) for name in ("weights", "gradients", "optimizer")}
            if last.peak_allocated is not None:
                model = parts.weights + parts.gradients + parts.optimizer
                sizes["activations"] = max(0, last.peak_allocated - model)
        found = {f"memory/{name}": size / 2**30 for name, size in sizes.items() if size is not None}
        return found if last.retries is None else {**found, "memory/retries": float(last.retries)}

    def plot(self, path: str | Path) -> None:
        """Draw the steps and samples to a file: .png, .svg or .pdf.

        Raises
        ------
        PyactcompError
            If there are no steps yet, or matplotlib is missing.
        ValueError
            If the file's name ends otherwise.
        """
        from .plot import draw

        draw(self.steps, self.samples, Path(path))

    def _after_optimizer(self, *_: object) -> None:
        self._break_down()
        if not self._manual:
            self._end_step()

    def _break_down(self) -> None:
        began = time.perf_counter()
        if began >= self._next_breakdown:
            self._breakdown = measure(self._model, self._optimizer, self._device)
            now = time.perf_counter()
            self._next_breakdown = now + _PAUSE * (now - began)

    def _end_step(self) -> None:
        if self._optimizer is None:
            self._break_down()
        counters = retries = None
        if self._device is not None:
            counters = self._device.counters()
            self._device.reset_peaks()
            retries, self._retries = counters.retries - self._retries, counters.retries
        made = Step(
            len(self.steps) + 1,
            time.perf_counter() - self._began,
            *_figures(counters),
            retries=retries,
            resident=resident_bytes(),
            memory=self._breakdown,
        )
        self._breakdown = None
        self.steps.append(made)
        if self._file is not None:
            self._file.write(json.dumps(asdict(made)) + "\n")
            self._file.flush()
        self._warn_of_retries()
        if self._log is not None:
            self._log(self.scalars(), step=made.step)
        if self._check is not None:
            self._check.step()
            if self._check.steps == self._check_steps:
                self._end_check()
                if self._leaks:
                    warnings.warn(f"tensors grow from step to step:\n{self._leaks}", stacklevel=3)

    def _end_check(self) -> None:
        assert self._check is not None
        self._leaks = self._check.leaks()
        self._check.stop()
        self._check = None

    def _warn_of_retries(self) -> None:
        if self._warned or len(self.steps) < 2 or not all(each.retries for each in self.steps[-2:]):
            return
        self._warned = True
        warnings.warn(
            f"the allocator ran out of memory in steps {len(self.steps) - 1} and {len(self.steps)}, gave unused memory "
            "back and tried again (num_alloc_retries): such steps are slow, and the next may fail. Take a smaller "
            "batch, compress the activations (pyactcomp.compress), or use pyactcomp.allocator, which fragments less",
            stacklevel=4,
        )

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._sample()

    def _sample(self) -> None:
        counters = None if self._device is None else self._device.counters()
        others = None if self._device is None else self._device.other_processes()
        allocated, reserved = (None, None) if counters is None else (counters.allocated, counters.reserved)
        seconds = time.perf_counter() - self._began
        self.samples.append(Sample(seconds, allocated, reserved, others, resident_bytes()))


def _figures(counters: Counters | None) -> tuple[int | None, int | None, int | None, int | None]:
    if counters is None:
        return None, None, None, None
    return counters.allocated, counters.reserved, counters.peak_allocated, counters.peak_reserved


watch = Watch
