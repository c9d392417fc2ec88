"""Calls a function that may run out of memory, and leaves nothing of the failed call alive."""

from __future__ import annotations

import gc
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

T = TypeVar("T")

# What the libraries below torch say. A status of "not supported" is no lack of memory, though it may look like one.
_OUT_OF_MEMORY = re.compile(
    r"(CUDA|HIP) error: out of memory|Triton Error \[(CUDA|HIP)\]: out of memory|"
    r"\b(CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CUFFT)_(STATUS_)?(\w+_)?ALLOC(ATION)?_FAILED\b|"
    r"DefaultCPUAllocator: (can't|not enough memory: you tried to) allocate"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one that it was raised from, says that memory ran out.

    Examples
    --------
    >>> is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    True
    >>> is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"))
    False
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError):
            return True
        if isinstance(cause, RuntimeError) and _OUT_OF_MEMORY.search(str(cause)):
            return True
        cause = cause.__cause__
    return False


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What a call returned, or the text of the error if memory ran out."""

    value: T | None
    failure: str | None


def attempt(call: Callable[[], T], describe: Callable[[BaseException], object] | None = None) -> Outcome[T]:
    """Call a function; if memory runs out, free what the call held, and return the error's text.

    An error holds its traceback, a traceback its frames, and a frame its variables: the activations and the graph of
    the failed step. All go before this function returns, but after ``describe``, which takes the error, was called. Any
    other error is raised as it is.
    """
    failure: str | None = None
    try:
        return Outcome(call(), None)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failure = f"{type(error).__name__}: {error}"
        if describe is not None:
            describe(error)
        for each in _chain(error):
            traceback.clear_frames(each.__traceback__)
            each.__traceback__ = None
    # Here, outside of the handler, Python no longer holds the error.
    free()
    return Outcome(None, failure)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the errors that it holds."""
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            left += [each.__cause__, each.__context__]


def gpu_in_use() -> bool:
    """Return whether this process has initialised CUDA; asking does not."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def free() -> None:
    """Free what only cycles of Python objects hold, and give cached memory back."""
    gc.collect()
    give_back()


def give_back() -> None:
    """Give the memory that the allocator caches back to the GPU."""
    if gpu_in_use():
        torch.cuda.empty_cache()
