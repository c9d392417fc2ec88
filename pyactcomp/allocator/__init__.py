"""A caching allocator for torch's CUDA memory, open to inspection, and the same core on a simulated device.

Importing touches no GPU; :func:`enable` replaces torch's own allocator.
"""

from typing import Any

from .._core import AllocatorConfig, CachingAllocator, SimulatedDevice
from ..moved import moved
from .attach import enable, is_enabled, library_path
from .observe import on_pressure, scope, stats
from .pausing import hold, pause, paused, register_mem_pool, release_host_memory, resume, tag, untagged

__all__ = [
    "AllocatorConfig",
    "CachingAllocator",
    "SimulatedDevice",
    "enable",
    "hold",
    "is_enabled",
    "library_path",
    "on_pressure",
    "pause",
    "paused",
    "register_mem_pool",
    "release_host_memory",
    "resume",
    "scope",
    "stats",
    "tag",
    "untagged",
]


def __getattr__(name: str) -> Any:
    return moved(__name__, name)
