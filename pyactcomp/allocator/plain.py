"""The pluggable route: attaches through torch's CUDAPluggableAllocator, and serves the calls torch does not forward.

``CUDAPluggableAllocator`` raises when torch asks for statistics and snapshots. torch.cuda and torch.accelerator look
their functions up in torch._C at each call, so replacing them there serves all callers, whatever they have imported.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from .. import _core, torch_private
from .._core import AllocatorConfig, CachingAllocator, SimulatedDevice
from ..errors import PyactcompError

MISSING = (
    "torch.cuda.memory._record_memory_history",
    "out-of-memory observers",
    "torch.compile(mode='reduce-overhead')",
    "torch.cuda.MemPool()",
    "torch.backends.cudnn.benchmark = True",
    "CUDA tensors shared between processes",
)
"""Features that torch's C++ does not forward to a pluggable allocator, or that only a subclass can implement."""


def attach(library: str) -> None:
    """Make the library's functions torch's allocator; CUDA must not be initialised."""
    allocator = torch.cuda.memory.CUDAPluggableAllocator(library, "pyactcomp_malloc", "pyactcomp_free")
    functions = ctypes.CDLL(library)
    setters = torch_private.pluggable_setters(allocator.allocator())  # type: ignore[no-untyped-call]
    for role, set_function in setters.items():
        address = ctypes.cast(getattr(functions, f"pyactcomp_{role}"), ctypes.c_void_p).value
        set_function(cast("int", address))
    try:
        torch.cuda.memory.change_current_allocator(allocator)
    except RuntimeError as error:
        raise PyactcompError(
            f"torch refuses another allocator ({str(error).splitlines()[0]}): something has replaced torch's own "
            "before; call pyactcomp.allocator.enable first"
        ) from error
    torch_private.replace_entry_points(_ENTRY_POINTS)


def _existing_or_empty(device: int) -> CachingAllocator:
    """Return a device's allocator, or an empty stand-in: creating the real one would take a CUDA context's memory."""
    return _core.runtime_existing(device) or CachingAllocator(SimulatedDevice("2MiB"), AllocatorConfig())


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Return dotted keys as nested dictionaries, the form of torch._C's statistics."""
    result: dict[str, Any] = {}
    for key, value in flat.items():
        *path, leaf = key.split(".")
        node = result
        for name in path:
            node = node.setdefault(name, {})
        node[leaf] = value
    return result


def _memory_stats(device: int) -> dict[str, Any]:
    return nested(_existing_or_empty(device).counters())


def _reset_peak_stats(device: int) -> None:
    _existing_or_empty(device).reset_peak_stats()


def _reset_accumulated_stats(device: int) -> None:
    _existing_or_empty(device).reset_accumulated_stats()


def _memory_fraction(device: int) -> float:
    existing = _core.runtime_existing(device)
    return (_core.runtime_config() if existing is None else existing.config).memory_fraction


def _memory_snapshot(selection: Sequence[int] | None) -> dict[str, Any]:
    """Return the segments; ``selection`` is ``(first, second, include_traces)``, the first two a pool's id, or None."""
    pool = (selection[0], selection[1]) if selection else (0, 0)
    devices = [_existing_or_empty(index).snapshot(pool) for index in range(torch.cuda.device_count())]
    return {
        "segments": [segment for device in devices for segment in device["segments"]],
        "device_traces": [[] for _ in devices],
        "allocator_settings": devices[0]["allocator_settings"],
        "external_annotations": [],
    }


def _refuse(what: str) -> Callable[..., Any]:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PyactcompError(
            f"{what} does not work with an allocator attached through torch's CUDAPluggableAllocator, as pyactcomp's "
            "is here: run pyactcomp build-allocator, which compiles a subclass of torch's allocator"
        )

    return refuse


_refuse_history = _refuse("torch.cuda.memory._record_memory_history")


def _record_history(enabled: object, *args: object, **kwargs: object) -> None:
    # A profiler's cleanup switches the recording off even if it was never on.
    if enabled:
        _refuse_history()


_refuse_graph_trees = _refuse("torch.compile(mode='reduce-overhead')")

_ENTRY_POINTS: dict[str, Callable[..., Any]] = {
    "_cuda_memoryStats": _memory_stats,
    "_cuda_resetPeakMemoryStats": _reset_peak_stats,
    "_cuda_resetAccumulatedMemoryStats": _reset_accumulated_stats,
    "_cuda_memorySnapshot": _memory_snapshot,
    "_cuda_getMemoryFraction": _memory_fraction,
    "_cuda_record_memory_history": _record_history,
    "_cuda_record_memory_history_legacy": _record_history,
    "_cuda_isHistoryEnabled": lambda: False,
    "_cuda_attach_out_of_memory_observer": _refuse("torch._C._cuda_attach_out_of_memory_observer"),
    "_cuda_getCheckpointState": _refuse_graph_trees,
    "_cuda_setCheckpointPoolState": _refuse_graph_trees,
    "_cuda_checkPoolLiveAllocations": _refuse_graph_trees,
    # torch.accelerator always asks the native allocator, unused here.
    "_accelerator_isAllocatorInitialized": torch.cuda.is_initialized,
    "_accelerator_getDeviceStats": _memory_stats,
    "_accelerator_resetPeakStats": _reset_peak_stats,
    "_accelerator_resetAccumulatedStats": _reset_accumulated_stats,
    "_accelerator_emptyCache": torch.cuda.empty_cache,
}
