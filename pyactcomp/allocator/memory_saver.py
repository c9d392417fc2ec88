"""The names of torch_memory_saver over :func:`pyactcomp.allocator.pause`: change the import, and programs run.

``from pyactcomp.allocator.memory_saver import torch_memory_saver`` takes the place of ``from torch_memory_saver import
torch_memory_saver``. The first use enables the allocator. Differences: no ``LD_PRELOAD``, so ``hook_mode`` has no
effect; an allocation in a paused region, and pausing or resuming twice, raise; contents go to pinned host memory only
(``enable_disk_backup`` and ``cpu_backup_backend="mmap"`` raise); ``get_cpu_backup`` returns None once memory is
resumed; the whole program is paused by :func:`pyactcomp.allocator.pause`, not by ``TMS_INIT_ENABLE``.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from . import attach, pausing
from .settings import disabled
from .variable import VARIABLE

__all__ = ["TorchMemorySaver", "configure_subprocess", "torch_memory_saver"]

_DEFAULT = "default"


class TorchMemorySaver:
    """The class of :data:`torch_memory_saver`; see torch_memory_saver's README for the contract.

    Examples
    --------
    >>> from pyactcomp.allocator.memory_saver import torch_memory_saver
    >>> with torch_memory_saver.region("kv"):  # doctest: +SKIP
    ...     cache = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    >>> torch_memory_saver.pause("kv")  # doctest: +SKIP
    """

    def __init__(self) -> None:
        # The tags of one region's name: contents are kept, or dropped.
        self._tags: dict[str, set[str]] = {}
        self._retains = False
        self._hook_mode: str | None = None

    @contextmanager
    def region(
        self,
        tag: str = _DEFAULT,
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: Literal["mmap", "pinned"] | None = None,
    ) -> Iterator[None]:
        """Make the memory allocated inside pauseable under a tag."""
        if enable_disk_backup:
            raise NotImplementedError("contents go to host memory, not to a disk: use enable_cpu_backup=True")
        with self._tagged(tag, enable_cpu_backup, cpu_backup_backend):
            yield

    @contextmanager
    def cuda_graph(
        self,
        cuda_graph: torch.cuda.CUDAGraph,
        pool: Any = None,
        stream: torch.cuda.Stream | None = None,
        capture_error_mode: str = "global",
        tag: str = _DEFAULT,
        enable_cpu_backup: bool = False,
        cpu_backup_backend: Literal["mmap", "pinned"] | None = None,
    ) -> Iterator[None]:
        """Capture a graph as ``torch.cuda.graph`` does, with the graph's memory under a tag."""
        with (
            self._tagged(tag, enable_cpu_backup, cpu_backup_backend),
            torch.cuda.graph(cuda_graph, pool=pool, stream=stream, capture_error_mode=capture_error_mode),
        ):
            yield

    @contextmanager
    def disable(self) -> Iterator[None]:
        """Allocate outside any region."""
        self._enable()
        with pausing.untagged():
            yield

    def pause(self, tag: str | None = None) -> None:
        """Release the physical memory of one tag, or of all regions; a tag without a region has none."""
        self._enable()
        tags = self._named(tag)
        running = [each for each in tags if pausing.running(each)]
        if running or (tag and tags):
            pausing.pause(running or tags)

    def resume(self, tag: str | None = None) -> None:
        """Take physical memory again for one tag, or for all paused regions."""
        self._enable()
        tags = self._named(tag)
        waiting = [each for each in tags if each in pausing.paused()]
        if waiting or (tag and tags):
            pausing.resume(waiting or tags)
        if not self._retains:
            pausing.release_host_memory()

    @property
    def enabled(self) -> bool:
        """True: torch_memory_saver has the same."""
        return True

    @property
    def hook_mode(self) -> str | None:
        """The mode that was set; without effect."""
        return self._hook_mode

    @hook_mode.setter
    def hook_mode(self, mode: Literal["preload", "torch"]) -> None:
        if mode not in ("preload", "torch"):
            raise ValueError(f"hook_mode is 'preload' or 'torch', and has no effect here; got {mode!r}")
        self._hook_mode = mode

    @property
    def retain_cpu_backup(self) -> bool:
        """Whether pinned host memory stays for the next pause; False gives idle host memory back at each resume."""
        return self._retains

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        self._retains = bool(value)

    @property
    def memory_margin_bytes(self) -> int:
        """Not supported: NotImplementedError names the setting to use."""
        raise NotImplementedError("the allocator has no margin: set memory_fraction in allocator.enable")

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        raise NotImplementedError("the allocator has no margin: set memory_fraction in allocator.enable")

    def set_disk_backup_dir(self, path: str) -> None:
        """Not supported: contents go to host memory."""
        raise NotImplementedError("contents go to host memory, not to a disk: use enable_cpu_backup=True")

    def get_cpu_backup(self, x: torch.Tensor, zero_copy: bool = False) -> torch.Tensor | None:
        """Return the contents of a paused tensor as a CPU tensor, or None if they were not kept or are restored.

        With ``zero_copy`` the result is the pinned memory itself, valid until the next resume.
        """
        if not x.is_cuda or not x.is_contiguous():
            raise ValueError(f"expected a contiguous CUDA tensor, got {x.device}, strides {x.stride()}")
        ranges = pausing.saved(x)
        if sum(size for _, size in ranges) != x.nbytes or x.nbytes == 0:
            return None
        views = [
            torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
            for address, size in ranges
        ]
        if zero_copy and len(views) > 1:
            raise NotImplementedError(f"the tensor lies in {len(views)} pieces of pinned memory: use zero_copy=False")
        flat = views[0] if zero_copy else torch.cat(views)
        return flat.view(x.dtype).view(x.shape)

    def _enable(self) -> None:
        if not attach.is_enabled() and not disabled():
            attach.enable()

    def _tagged(self, tag: str, kept: bool, backend: str | None) -> pausing.tag:
        if backend is not None and not kept:
            raise ValueError("cpu_backup_backend requires enable_cpu_backup=True")
        if backend == "mmap":
            raise NotImplementedError("contents go to pinned host memory: leave cpu_backup_backend out")
        self._enable()
        name = f"memory_saver:{tag}:{'kept' if kept else 'dropped'}"
        self._tags.setdefault(tag, set()).add(name)
        return pausing.tag(name, "cpu" if kept else "drop")

    def _named(self, tag: str | None) -> list[str]:
        # torch_memory_saver walks the allocations with a tag, of which there may be none; an empty tag means all.
        return sorted(self._tags.get(tag, ()) if tag else set().union(*self._tags.values()))


torch_memory_saver = TorchMemorySaver()


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """Enable the allocator in the processes that are started inside."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
