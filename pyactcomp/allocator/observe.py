"""Observes the enabled allocator: statistics, scopes around parts of a program, callbacks before memory runs out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import _core, torch_private
from .._core import CachingAllocator
from ..errors import PyactcompError
from .attach import is_enabled
from .settings import disabled

Device = torch.device | int | str | None


def _allocator(device: Device) -> CachingAllocator:
    if not is_enabled():
        raise PyactcompError("the allocator is not enabled: call pyactcomp.allocator.enable() first")
    if isinstance(device, int):
        index = device
    else:
        named = torch.device("cuda" if device is None else device)
        if named.type != "cuda":
            raise ValueError(f"expected a CUDA device, got {device!r}")
        index = torch.cuda.current_device() if named.index is None else named.index
    if not 0 <= index < torch.cuda.device_count():
        raise ValueError(f"there is no device {device!r}: torch finds {torch.cuda.device_count()} CUDA devices")
    return _core.runtime_device(index)


def stats(device: Device = None) -> dict[str, Any]:
    """Return the allocator's statistics.

    Parameters
    ----------
    device : torch.device, int or str, optional
        The current device by default.

    Returns
    -------
    dict
        The keys of ``torch.cuda.memory_stats``, and: ``utilization``, peak active over peak reserved bytes;
        ``fragmentation.external``, 1 - largest free block / free bytes; ``fragmentation.internal``, 1 - requested /
        allocated bytes; ``fragmentation.free_below.SIZE``, the share of the free bytes in memory blocks below this
        size; ``free_blocks.SIZE``, the number of free blocks of this size and up to twice as large;
        ``free_bytes.stream.STREAM`` and ``free_bytes.largest``; ``pins``, the blocks in use that keep most free bytes
        from being merged or given back, with the call stack of the allocation if memory history is recorded;
        ``pieces_moved``, ``stream_steals`` and ``driver_seconds``.

    Raises
    ------
    PyactcompError
        If the allocator is not enabled.
    ValueError
        If there is no such device.

    Notes
    -----
    With ``PYACTCOMP_DISABLE=1`` these are the statistics of torch's own allocator, without the additional keys.

    Examples
    --------
    >>> from pyactcomp.allocator import CachingAllocator, SimulatedDevice
    >>> allocator = CachingAllocator(SimulatedDevice("1GiB"))      # the same without a GPU
    >>> address = allocator.allocate(1000)
    >>> allocator.stats()["allocated_bytes.all.current"]
    1024
    """
    if disabled():
        return dict(torch.cuda.memory_stats(device))
    found = _allocator(device).stats()
    if found["pins"] and torch_private.history_enabled():
        # torch recorded the stacks, in a form only torch can read.
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        stacks = {block["address"]: block["frames"] for segment in segments for block in segment["blocks"]}
        for pin in found["pins"]:
            pin["frames"] = stacks.get(pin["address"], pin["frames"])
    return found


@dataclass
class Scope:
    """Counts a device's allocations, of every thread, inside a ``with`` statement.

    Scopes nest: an outer scope counts the allocations of inner ones too. Scopes of several threads may overlap, and one
    object may be entered by several threads: the attributes are those of the exit last made. With
    ``PYACTCOMP_DISABLE=1`` nothing is counted.

    Attributes
    ----------
    name : str
        Name, for the ``repr``.
    device : torch.device, int, str or None
        None: the current device on entering.
    allocated_bytes, reserved_bytes : int
        Bytes at the end minus bytes at the beginning.
    peak_bytes : int
        Peak of the allocated bytes, above the bytes at the beginning.
    total_bytes, allocations : int
        Bytes and number of all allocations, freed since or not.

    Raises
    ------
    PyactcompError
        On entering, if the allocator is not enabled.

    Examples
    --------
    >>> import torch
    >>> from pyactcomp import allocator
    >>> if allocator.is_enabled():
    ...     with allocator.scope("step") as step:
    ...         x = torch.ones(1000, device="cuda")
    ...     print(step.allocated_bytes)
    """

    name: str
    device: Device = None
    allocated_bytes: int = field(default=0, init=False)
    peak_bytes: int = field(default=0, init=False)
    total_bytes: int = field(default=0, init=False)
    allocations: int = field(default=0, init=False)
    reserved_bytes: int = field(default=0, init=False)
    _open: list[tuple[int, CachingAllocator, int]] = field(default_factory=list, init=False, repr=False, compare=False)
    """One tuple for each entry: the thread, the allocator and the allocator's number of the scope."""

    def __enter__(self) -> Scope:
        if not disabled():
            allocator = _allocator(self.device)
            self._open.append((threading.get_ident(), allocator, allocator.push_scope()))
        return self

    def __exit__(self, *exception: object) -> None:
        entries = list(self._open)
        if not entries:
            return
        # A scope may also be left by another thread than the one that entered.
        own = [entry for entry in entries if entry[0] == threading.get_ident()]
        entry = (own or entries)[-1]
        self._open.remove(entry)
        _, allocator, number = entry
        for name, value in allocator.pop_scope(number).items():
            setattr(self, name, value)


scope = Scope


class PressureHandle:
    """The registration of a function by :func:`on_pressure`, until :meth:`remove` or the end of a ``with``."""

    def __init__(self, function: Callable[[int], bool], allocator: CachingAllocator | None) -> None:
        self._function = function
        self._allocator = allocator
        self._id = None if allocator is None else allocator.add_pressure_callback(function)

    def __call__(self, missing_bytes: int) -> bool:
        """Call the function: a decorated function stays callable."""
        return self._function(missing_bytes)

    def remove(self) -> None:
        """Unregister the function; a second call does nothing."""
        if self._allocator is not None and self._id is not None:
            self._allocator.remove_pressure_callback(self._id)
            self._id = None

    def __enter__(self) -> PressureHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def on_pressure(function: Callable[[int], bool], device: Device = None) -> PressureHandle:
    """Call a function before an allocation would fail, to free memory.

    Parameters
    ----------
    function : callable
        Takes the number of missing bytes and returns whether memory was freed; if so, the allocation is tried again.
        Runs in the thread of the allocation. An exception counts as False, and the out-of-memory error quotes it.
    device : torch.device, int or str, optional
        The current device by default.

    Returns
    -------
    PressureHandle
        Has ``remove()``, and is a context manager. The handle can be called like the function, so ``on_pressure`` works
        as a decorator.

    Raises
    ------
    TypeError
        If ``function`` is not callable.
    PyactcompError
        If the allocator is not enabled.

    Notes
    -----
    With ``PYACTCOMP_DISABLE=1`` the function is never called.

    Examples
    --------
    >>> from pyactcomp import allocator
    >>> cache = {}
    >>> def drop_cache(missing_bytes):
    ...     dropped = bool(cache)
    ...     cache.clear()
    ...     return dropped
    >>> if allocator.is_enabled():
    ...     with allocator.on_pressure(drop_cache):
    ...         pass
    """
    if not callable(function):
        raise TypeError(f"on_pressure expects a function of the missing bytes, got {function!r}")
    return PressureHandle(function, None if disabled() else _allocator(device))
