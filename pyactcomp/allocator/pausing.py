"""Gives the physical memory of a program, or of parts of the program, back for a while; addresses and tensors stay.

Longer than 400 lines: ten public names, whose docstrings are nearly half of the lines.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ContextDecorator, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch

from .. import _core
from .._core import CachingAllocator
from ..errors import PyactcompError, check_choice
from ..torch_private import extensions
from .attach import is_enabled
from .settings import disabled

Keep = Literal["cpu", "drop"]
KEEPS = ("cpu", "drop")

_lock = threading.Lock()
_kept: dict[str, Keep] = {}
"""What each opened tag does with its contents by default."""
_options: dict[tuple[CachingAllocator, str], tuple[bool, bool]] = {}
"""For each paused tag of a device: whether contents are saved, whether an allocation resumes. An undo needs both."""


@dataclass(frozen=True)
class Paused:
    """A pause, over all devices.

    Attributes
    ----------
    released, saved, pinned : int
        Bytes of device memory given back; bytes of contents kept in host memory; bytes of host memory pinned anew for
        the contents. Later pauses use pinned memory again.
    seconds : float
        Duration.
    skipped : tuple of str
        Memory that stayed, with the reason.
    """

    released: int
    saved: int
    pinned: int
    seconds: float
    skipped: tuple[str, ...]


@dataclass(frozen=True)
class Resumed:
    """A resume, over all devices.

    Attributes
    ----------
    mapped, restored : int
        Bytes of device memory taken; bytes of contents copied back.
    seconds : float
        Duration.
    """

    mapped: int
    restored: int
    seconds: float


def pause(
    tags: str | Iterable[str] | None = None,
    keep: Keep | None = None,
    *,
    on_allocation: Literal["raise", "resume"] = "raise",
) -> Paused:
    """Give the physical memory of this process's CUDA tensors back to the devices.

    Addresses, tensors, CUDA graphs and ``torch.cuda.memory_allocated`` stay as they are; ``memory_reserved`` falls.
    Contents of live memory blocks go to pinned host memory or are dropped; :func:`resume` takes memory and restores the
    contents. Frees while paused are bookkeeping.

    The call waits for the devices. Until :func:`resume`, no kernel may touch paused memory: an access is an illegal
    address for CUDA, which ends the process's use of the device.

    Parameters
    ----------
    tags : str or iterable of str, optional
        The tags to pause; ``""`` stands for memory without a tag. By default all memory that is not paused yet. A tag
        is paused on each device where it runs.
    keep : {"cpu", "drop"}, optional
        Keep the contents in pinned host memory, or drop them. By default the ``keep`` of each tag, and ``"cpu"`` for
        memory without a tag.
    on_allocation : {"raise", "resume"}
        What an allocation in paused memory does: raise an error, or resume the memory of that tag first.

    Returns
    -------
    Paused

    Raises
    ------
    ValueError
        If a tag was never opened, or an option is none of the above.
    PyactcompError
        If the allocator is not enabled, a tag is paused already on every device, a CUDA graph is being captured, the
        host has too little memory for the contents, or ``growth`` is ``"malloc"``. Everything is as before then, but
        for contents that one of several devices dropped before another refused, since a capture began meanwhile.

    Notes
    -----
    Pools given to :func:`hold` or with an allocator of their own stay and are named in ``skipped``, and so does memory
    that is open in other processes or from before :func:`enable`. ``PYACTCOMP_DISABLE=1`` turns the call into a no-op.

    Examples
    --------
    >>> from pyactcomp import allocator
    >>> if allocator.is_enabled():
    ...     print(allocator.pause().released)
    ...     generate_elsewhere()
    ...     allocator.resume()
    """
    if keep is not None:
        check_choice("keep", keep, KEEPS)
    check_choice("on_allocation", on_allocation, ("raise", "resume"))
    if disabled():
        return Paused(0, 0, 0, 0.0, ())
    devices = _running("pause")
    begin = time.perf_counter()
    with _lock:
        named = _named(tags)
        wanted = ["", *_kept] if named is None else named
        of_device = []
        for device in devices:
            already = device.paused()
            kept = {tag: (keep or _kept.get(tag, "cpu")) == "cpu" for tag in wanted if tag not in already}
            if kept:
                of_device.append((device, kept))
        nowhere = _missing(wanted, of_device)
        if devices and nowhere and (named is not None or not of_device):
            raise PyactcompError(f"paused already: {_described(nowhere)}; call resume() first")
        for device, kept in of_device:
            device.check_pause(kept)
        resumes = on_allocation == "resume"
        # Contents are dropped last: a device or a host without room for contents has then lost none.
        parts = [
            (device, part)
            for saved in (True, False)
            for device, kept in of_device
            if (part := {tag: saves for tag, saves in kept.items() if saves is saved})
        ]
        reports: list[dict[str, Any]] = []
        try:
            for device, part in parts:
                reports.append(device.pause(part, resumes))
                _options.update({(device, tag): (saves, resumes) for tag, saves in part.items()})
        except BaseException as error:
            for device, part in reversed(parts[: len(reports)]):
                # One by one: a tag that cannot be resumed keeps no other tag paused. Allocations may have resumed some.
                for tag in [tag for tag in device.paused() if tag in part]:
                    with _noted(error, f"{_described([tag])} stays paused on a device"):
                        device.resume([tag])
            raise
    skipped = [_reason(pool) for report in reports for pool in report["skipped"]]
    if named is None:
        skipped += _outside(devices)
    released, saved_bytes, pinned = (sum(r[key] for r in reports) for key in ("released", "saved", "pinned"))
    return Paused(released, saved_bytes, pinned, time.perf_counter() - begin, tuple(skipped))


def resume(tags: str | Iterable[str] | None = None) -> Resumed:
    """Take physical memory for paused tags again and restore their contents.

    Parameters
    ----------
    tags : str or iterable of str, optional
        The tags to resume; ``""`` stands for memory without a tag. By default everything that is paused. A tag is
        resumed on each device where it is paused.

    Returns
    -------
    Resumed

    Raises
    ------
    ValueError
        If a tag was never opened.
    PyactcompError
        If the allocator is not enabled, a tag is paused on no device, or, without ``tags``, nothing is paused.
    torch.OutOfMemoryError
        If a device has too little memory. Everything is still paused then.

    Examples
    --------
    >>> from pyactcomp import allocator
    >>> if allocator.is_enabled():
    ...     allocator.pause()
    ...     print(allocator.resume().seconds)
    """
    if disabled():
        return Resumed(0, 0, 0.0)
    devices = _running("resume")
    begin = time.perf_counter()
    with _lock:
        named = _named(tags)
        of_device = []
        for device in devices:
            already = device.paused()
            wanted = list(already) if named is None else [tag for tag in named if tag in already]
            if wanted:
                of_device.append((device, wanted))
        nowhere = _missing(named or (), of_device)
        if nowhere:
            raise PyactcompError(f"not paused: {_described(nowhere)}")
        if not of_device:
            raise PyactcompError("nothing is paused: call pause() first")
        reports: list[dict[str, int]] = []
        try:
            for device, wanted in of_device:
                reports.append(device.resume(wanted))
        except BaseException as error:
            for device, wanted in reversed(of_device[: len(reports)]):
                for tag in wanted:
                    # A tag paused by the core itself has no options here.
                    saves, resumes = _options.get((device, tag), (True, False))
                    with _noted(error, f"{_described([tag])} stays resumed on a device"):
                        device.pause({tag: saves}, resumes)
            raise
        for device, wanted in of_device:
            for tag in wanted:
                _options.pop((device, tag), None)
    seconds = time.perf_counter() - begin
    return Resumed(sum(r["mapped"] for r in reports), sum(r["restored"] for r in reports), seconds)


def paused() -> dict[str, int]:
    """Return the paused tags, ``""`` for memory without a tag, and the bytes that :func:`resume` takes for each.

    Examples
    --------
    >>> from pyactcomp import allocator
    >>> allocator.paused()
    {}
    """
    found: dict[str, int] = {}
    for device in _allocators():
        for tag, (released, _saved) in device.paused().items():
            found[tag] = found.get(tag, 0) + released
    return found


def running(tag: str) -> bool:
    """Return whether a device exists on which the tag is not paused."""
    return any(tag not in device.paused() for device in _allocators())


class _Entered(ContextDecorator):
    """Gives the thread a tag, from each entry to the exit."""

    def __init__(self) -> None:
        # For each thread (several may enter one object): the tags that the thread had before, the latest last.
        self._before: dict[int, list[int]] = {}

    def _enter(self, number: int) -> None:
        before = _subclass().set_tag(number)
        self._before.setdefault(threading.get_ident(), []).append(before)

    def __exit__(self, *exception: object) -> None:
        thread = threading.get_ident()
        before = self._before.get(thread)
        if not before:
            return
        _subclass().set_tag(before.pop())
        if not before:
            del self._before[thread]


class tag(_Entered):
    """Give the CUDA memory allocated inside a tag, so that the memory can be paused by itself.

    A tag has addresses and physical memory of its own. A thread's allocations take the innermost tag that the thread
    opened; autograd's worker threads take the tag of the thread that called backward; other threads take none. A CUDA
    graph's pool and a ``torch.cuda.MemPool`` belong to the tag in which they were made. Any number of threads may enter
    one object, each any number of times.

    Parameters
    ----------
    name : str
        The tag's name. The same name may be opened any number of times.
    keep : {"cpu", "drop"}
        What :func:`pause` does with the contents by default: keep them in pinned host memory, or drop them.

    Raises
    ------
    ValueError
        If the name is empty, or was opened with another ``keep``.
    PyactcompError
        On entering, if the allocator is not enabled or the subclass of torch's allocator is missing.

    Notes
    -----
    With ``PYACTCOMP_DISABLE=1`` the tag does nothing.

    Examples
    --------
    >>> import torch
    >>> from pyactcomp import allocator
    >>> if allocator.is_enabled():
    ...     with allocator.tag("kv", keep="drop"):
    ...         cache = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    ...     allocator.pause("kv")
    """

    def __init__(self, name: str, keep: Keep = "cpu") -> None:
        if not isinstance(name, str):
            raise TypeError(f"a tag has a string as its name, got {name!r}")
        if not name:
            raise ValueError("a tag needs a name: the empty name stands for memory without a tag")
        check_choice("keep", keep, KEEPS)
        super().__init__()
        self.name, self.keep = name, keep

    def __enter__(self) -> tag:
        if disabled():
            return self
        _subclass()  # Raises before the name is recorded.
        with _lock:
            known = _kept.setdefault(self.name, self.keep)
        if known != self.keep:
            raise ValueError(
                f"the tag {self.name!r} was opened with keep={known!r} before, got keep={self.keep!r}: use one keep "
                "for a tag, or pass keep to pause()"
            )
        self._enter(_core.tag_named(self.name))
        return self


class untagged(_Entered):
    """Give the memory allocated inside no tag, also within a :class:`tag`.

    Examples
    --------
    >>> from pyactcomp import allocator
    >>> if allocator.is_enabled():
    ...     with allocator.tag("weights"), allocator.untagged():
    ...         pass
    """

    def __enter__(self) -> untagged:
        if not disabled():
            self._enter(0)
        return self


def hold(pool: Any, held: bool = True) -> None:
    """Keep a memory pool as it is while other memory is paused, because a library knows the physical memory.

    Parameters
    ----------
    pool : torch.cuda.MemPool or tuple of int
        The pool or the pool's id.
    held : bool
        False ends the hold.

    Raises
    ------
    PyactcompError
        If the allocator is not enabled, no device has the pool, or the pool is paused.

    Examples
    --------
    >>> import torch
    >>> from pyactcomp import allocator
    >>> if allocator.is_enabled():
    ...     allocator.hold(torch.cuda.MemPool())
    """
    if disabled():
        return
    identity = tuple(getattr(pool, "id", pool))
    having = [device for device in _running("hold") if device.pool_use_count(identity) > 0]
    if not having:
        raise PyactcompError(f"no device has a memory pool {identity}: pass a torch.cuda.MemPool that is in use")
    for device in having:
        device.hold(identity, held)


def register_mem_pool(backend: Any, pool: Any) -> None:
    """Register a memory pool with a process group's backend, as ``backend.register_mem_pool(pool)``, and hold the pool.

    NCCL keeps handles of the physical memory, so :func:`pause` skips the pool until ``hold(pool, False)``.

    Parameters
    ----------
    backend : torch.distributed.ProcessGroupNCCL
        A backend with ``register_mem_pool``.
    pool : torch.cuda.MemPool
        The pool.

    Raises
    ------
    PyactcompError
        As for :func:`hold`; nothing is registered then.

    Examples
    --------
    >>> from pyactcomp import allocator
    >>> allocator.register_mem_pool(backend, pool)  # doctest: +SKIP
    """
    hold(pool)
    try:
        backend.register_mem_pool(pool)
    except BaseException:
        hold(pool, False)
        raise


def release_host_memory() -> None:
    """Give pinned host memory that no paused memory needs back to the host.

    Examples
    --------
    >>> from pyactcomp import allocator
    >>> allocator.release_host_memory()
    """
    for device in _allocators():
        device.trim_host()


def saved(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return the addresses and sizes of the pinned memory with a paused tensor's contents, in order."""
    device = _core.runtime_existing(tensor.device.index)
    return [] if device is None or tensor.nbytes == 0 else device.saved(tensor.data_ptr(), tensor.nbytes)


def _subclass() -> ModuleType:
    _running("tag")
    extension, missing = extensions.load("_torch_allocator")
    if extension is None:
        raise PyactcompError(f"tags need the subclass of torch's allocator, and {missing}")
    return extension


def _allocators() -> list[CachingAllocator]:
    if not is_enabled():
        return []
    found = [_core.runtime_existing(index) for index in range(torch.cuda.device_count())]
    return [device for device in found if device is not None]


def _running(call: str) -> list[CachingAllocator]:
    if not is_enabled():
        raise PyactcompError(f"{call} needs pyactcomp's allocator: call pyactcomp.allocator.enable() first")
    return _allocators()


def _named(tags: str | Iterable[str] | None) -> list[str] | None:
    if tags is None:
        return None
    names = [tags] if isinstance(tags, str) else list(dict.fromkeys(tags))
    unknown = [name for name in names if name and name not in _kept]
    if unknown:
        known = ", ".join(map(repr, _kept)) or "none"
        raise ValueError(f"no tag is named {', '.join(map(repr, unknown))}; opened so far: {known}")
    return names


@contextmanager
def _noted(error: BaseException, consequence: str) -> Iterator[None]:
    """Let a failing step of an undo become a note of the error that is undone, and the undo go on."""
    try:
        yield
    except Exception as failure:
        # What add_note does; Python 3.10 has no such method.
        vars(error).setdefault("__notes__", []).append(f"{consequence}: {failure}")


def _missing(tags: Iterable[str], of_device: Iterable[tuple[CachingAllocator, Iterable[str]]]) -> list[str]:
    """Return the tags that no device has."""
    found = {tag for _, of_one in of_device for tag in of_one}
    return [tag for tag in tags if tag not in found]


def _described(tags: Iterable[str]) -> str:
    return ", ".join(f"the tag {tag!r}" if tag else "memory without a tag" for tag in tags)


def _reason(pool: tuple[tuple[int, int], int, str]) -> str:
    identity, size, why = pool
    return f"the memory pool {identity} with {size} bytes {why}"


def _outside(devices: list[CachingAllocator]) -> list[str]:
    """Memory that torch counts and our allocators do not: from before enable."""
    counted = sum(torch.cuda.memory_reserved(index) for index in range(torch.cuda.device_count()))
    ours = sum(device.counters()["reserved_bytes.all.current"] for device in devices)
    return [f"{counted - ours} bytes allocated before enable()"] if counted > ours else []
