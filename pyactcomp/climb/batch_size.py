"""Finds the largest batch that trains within a budget: two trials give a line, the third confirms what it predicts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch.nn import Module
from torch.optim import Optimizer

from ..errors import PyactcompError
from ..sizes import budget_of
from .failures import attempt, free, gpu_in_use
from .state import Buffers, HasState, Others, RandomState, Weights

P = ParamSpec("P")
R = TypeVar("R")

#: Steps of a trial: the first creates the optimizer's state, the second runs beside it.
STEPS = 2
# A prediction that promises less than this share more than a size that fits is not worth another trial.
_WORTH = 32


@dataclass(frozen=True)
class Trial:
    """A size that was run, the highest memory of its steps if that was measured, and whether it fits."""

    size: int
    peak_bytes: int | None
    fits: bool
    failure: str | None  #: the error's text, if memory ran out


@dataclass(frozen=True)
class BatchSize:
    """The largest size that fits.

    Attributes
    ----------
    size
        Was run for two steps, optimizer included, within the budget.
    peak_bytes
        The highest memory of these steps; None if nothing measures memory here.
    budget
        In bytes; None where only out-of-memory errors tell.
    trials
        All that was run, in order.
    """

    size: int
    peak_bytes: int | None
    budget: int | None
    trials: tuple[Trial, ...]


def find_batch_size(
    step: Callable[[int], object],
    model: Module,
    optimizer: Optimizer | None = None,
    *,
    budget: int | str | None = None,
    start: int = 1,
    largest: int = 1 << 20,
    power_of_two: bool = False,
    estimate: Callable[[int], int] | None = None,
    others: Iterable[HasState] = (),
    measure: Callable[[Callable[[], None]], int] | None = None,
) -> BatchSize:
    """Find the largest batch, or number of tokens, that trains within a budget.

    The peak grows by the same bytes for each sample, so two trials predict the largest size, and a third confirms it.
    Only if a prediction fails, bisection follows. Each trial is two whole steps, the optimizer's included; no size is
    returned that was not run. Afterwards weights, gradients, buffers, the optimizer's state and all generators are as
    before, and nothing of the trials is allocated.

    Parameters
    ----------
    step : callable
        Takes a size, and trains one step with a batch of it: forward, backward, ``optimizer.step()``, ``zero_grad()``.
        The size may count samples or tokens.
    model : Module
    optimizer : Optimizer, optional
        The one that ``step`` calls. Its state is copied to the host for the trials, as the weights are.
    budget : int or str, optional
        Bytes that this process may reserve, or a text like "20GiB". None or "auto": what is free on the GPU now, and
        what this process has reserved.
    start : int
        The first size to try, if there is no ``estimate``; 2 for a model with batch norms, which refuse one sample.
    largest : int
        No size above is tried.
    power_of_two : bool
        Return the largest power of two; else the largest size.
    estimate : callable, optional
        Takes a size and returns the predicted peak in bytes. Then the first trial is the largest size that the estimate
        has fit.
    others : iterable, optional
        What else ``step`` changes and has ``state_dict``: a GradScaler, a scheduler, an average of weights.
    measure : callable, optional
        Calls the function that it is given, and returns the peak in bytes. None: the memory reserved by torch's
        allocator on the GPU; without a GPU only out-of-memory errors tell.

    Returns
    -------
    BatchSize

    Raises
    ------
    TypeError, ValueError
        For a wrong argument, before anything is run.
    PyactcompError
        If not even one sample fits; the message has the trials. The state is as before.

    Examples
    --------
    >>> import torch, pyactcomp
    >>> model = torch.nn.Linear(8, 8)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> def step(size):
    ...     if size > 100:
    ...         raise torch.OutOfMemoryError("CUDA out of memory.")       # a GPU says so by itself
    ...     model(torch.randn(size, 8)).sum().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> pyactcomp.find_batch_size(step, model, optimizer).size
    100
    """
    limit = _checked(step, model, optimizer, budget, start, largest, measure)
    search = _Search(start, largest, power_of_two, limit, estimate)
    others = list(others)
    measure = measure or (_reserved_peak if gpu_in_use() else None)
    saved = (Weights(model, optimizer), Buffers(model), Others(others), RandomState())

    def put_back() -> None:
        for each in saved:
            each.put_back()

    try:
        while (size := search.next()) is not None:
            outcome = attempt(functools.partial(_run, step, size, measure))
            put_back()
            free()
            search.add(size, outcome.value, outcome.failure)
    except BaseException:
        put_back()
        raise
    best = search.best()
    if best is None:
        tried = ", ".join(f"{trial.size}: {_reason(trial)}" for trial in search.trials)
        raise PyactcompError(
            f"not even a size of {search.least} trains within {_in_words(limit)} (tried {tried}): give more memory, or "
            "compress or checkpoint the model first"
        )
    return BatchSize(best.size, best.peak_bytes, limit, tuple(search.trials))


def _run(step: Callable[[int], object], size: int, measure: Callable[[Callable[[], None]], int] | None) -> int | None:
    def steps() -> None:
        for _ in range(STEPS):
            step(size)
        if gpu_in_use():
            torch.cuda.synchronize()  # an error of a kernel belongs to this trial

    if measure is not None:
        return measure(steps)
    steps()
    return None


def _reserved_peak(run: Callable[[], None]) -> int:
    free()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_reserved()


class _Search:
    """Chooses the next size from the trials so far."""

    def __init__(
        self,
        start: int,
        largest: int,
        power_of_two: bool,
        budget: int | None,
        estimate: Callable[[int], int] | None,
    ) -> None:
        self.trials: list[Trial] = []
        self.least = 1
        self._power_of_two = power_of_two
        self._largest = self._allowed(largest)
        self._start = self._allowed(min(start, largest))
        self._budget = budget
        self._estimate = estimate
        self._predicts = True

    def best(self) -> Trial | None:
        """Return the trial of the largest size that fits."""
        return max((trial for trial in self.trials if trial.fits), key=lambda trial: trial.size, default=None)

    def add(self, size: int, peak: int | None, failure: str | None) -> None:
        """Take the outcome of a trial."""
        within = peak is None or self._budget is None or peak <= self._budget
        self.trials.append(Trial(size, peak, failure is None and within, failure))
        # The third trial is a prediction's. If it does not fit, the peaks are on no line, and bisection follows.
        if len(self.trials) >= 3 and not self.trials[-1].fits:
            self._predicts = False

    def next(self) -> int | None:
        """Return the next size to try; None if the best is known."""
        if not self.trials:
            return self._first()
        best = self.best()
        low = 0 if best is None else best.size
        high = min((trial.size for trial in self.trials if not trial.fits), default=self._largest + 1)
        if self._after(low) >= high:
            return None
        predicted = self._predicted() if low and self._predicts else None
        if predicted is not None:
            if predicted <= low + (low // _WORTH if len(self.trials) >= 3 else 0):
                return None
            return self._allowed(min(predicted, high - 1))
        if high > self._largest and low:
            return self._allowed(min(self._further(low), self._largest))
        return self._between(low, high)

    def _first(self) -> int:
        if self._estimate is None or self._budget is None:
            return self._start
        low, high = self.least, self._largest
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._estimate(middle) <= self._budget else (low, middle - 1)
        return self._allowed(low)

    def _further(self, low: int) -> int:
        """Return a size well above one that fits, so that two trials give a good line, and that surely fits too."""
        peak = self.trials[-1].peak_bytes
        if peak and self._budget is not None and len(self.trials) == 1:
            # Twice the batch takes at most twice the memory, weights included.
            return max(2 * low, low * self._budget // (2 * peak))
        return 2 * low

    def _predicted(self) -> int | None:
        """Return the largest size within the budget on the line through the two largest sizes that were measured."""
        points = sorted({(t.size, t.peak_bytes) for t in self.trials if t.peak_bytes is not None})[-2:]
        if self._budget is None:
            return None
        if len(points) == 1 and self._estimate is not None and self.trials[0].fits:
            return self._first()  # confirmed
        if len(points) < 2:
            return None
        (size, peak), (larger, higher) = points
        if higher <= peak:
            return None
        more = (self._budget - peak) * (larger - size) // (higher - peak)
        return self._allowed(max(1, min(self._largest, size + more)))

    def _between(self, low: int, high: int) -> int | None:
        middle = self._allowed((low + high) // 2)
        if middle <= low:
            middle = self._after(low)
        return middle if middle < high else None

    def _allowed(self, size: int) -> int:
        return 1 << (size.bit_length() - 1) if self._power_of_two and size else size

    def _after(self, size: int) -> int:
        return max(1, 2 * size if self._power_of_two else size + 1)


def _checked(
    step: object,
    model: object,
    optimizer: object,
    budget: int | str | None,
    start: int,
    largest: int,
    measure: object,
) -> int | None:
    """Return the budget in bytes, or raise."""
    if not callable(step):
        raise TypeError(f"step must be a function of a size, got {type(step).__name__}")
    if not isinstance(model, Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer or None, got {type(optimizer).__name__}")
    for name, value in (("start", start), ("largest", largest)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a whole number from 1, got {value!r}")
    limit = None if budget is None else budget_of(budget)
    if limit is None:
        if not gpu_in_use():
            return None
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    if measure is None and not gpu_in_use():
        raise ValueError(f"budget={budget!r} needs a GPU in use, or measure=: nothing measures memory on the CPU")
    return limit


def _reason(trial: Trial) -> str:
    if trial.failure is not None:
        return "out of memory"
    return "fits" if trial.fits else f"{trial.peak_bytes:,} bytes"


def _in_words(limit: int | None) -> str:
    return "the memory there is" if limit is None else f"{limit:,} bytes"


@overload
def find_executable_batch_size(
    function: Callable[..., R],
    starting_batch_size: int = ...,
    reduce_batch_size_fn: Callable[[], int] | None = ...,
) -> Callable[..., R]: ...


@overload
def find_executable_batch_size(
    function: None = ...,
    starting_batch_size: int = ...,
    reduce_batch_size_fn: Callable[[], int] | None = ...,
) -> Callable[[Callable[..., R]], Callable[..., R]]: ...


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Run a whole training again with a smaller batch each time that memory runs out: accelerate's decorator.

    Takes what ``accelerate.utils.find_executable_batch_size`` takes. Between two tries nothing of the failed one stays
    allocated: the error's traceback is emptied, outside of the ``except`` block. A status of "not supported" is no lack
    of memory, and is raised. The function starts anew, so prefer :func:`find_batch_size`, which needs two steps a size.

    Parameters
    ----------
    function : callable
        Takes the batch size as its first argument.
    starting_batch_size : int
    reduce_batch_size_fn : callable, optional
        Takes nothing and returns the next size. None: nine tenths of the size before, at least one less.

    Raises
    ------
    PyactcompError
        If a batch of one does not fit.

    Examples
    --------
    >>> import torch, pyactcomp
    >>> @pyactcomp.find_executable_batch_size(starting_batch_size=128)
    ... def train(batch_size):
    ...     if batch_size > 100:
    ...         raise torch.OutOfMemoryError("CUDA out of memory.")
    ...     return batch_size
    >>> train()
    92
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    size = starting_batch_size

    @functools.wraps(function)
    def train(*args: Any, **kwargs: Any) -> Any:
        nonlocal size
        given = list(inspect.signature(function).parameters)
        if len(given) < len(args) + 1:
            raise TypeError(
                f"{function.__name__} gets the batch size as its first argument from the decorator: call it without"
            )
        while size > 0:
            outcome = attempt(functools.partial(function, size, *args, **kwargs))
            if outcome.failure is None:
                return outcome.value
            size = reduce_batch_size_fn() if reduce_batch_size_fn is not None else size * 9 // 10
        raise PyactcompError(f"{function.__name__} runs out of memory with a batch of one: nothing smaller is left")

    return train
