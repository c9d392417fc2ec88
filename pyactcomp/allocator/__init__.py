"""A caching allocator for torch's CUDA memory, open to inspection, and the same core on a simulated device.

Importing touches no GPU; :func:`enable` replaces torch's own allocator.
"""

from .._core import AllocatorConfig, CachingAllocator, SimulatedDevice
from ..snapshots import explain, read_snapshot, replay, tune
from .attach import enable, is_enabled, library_path
from .observe import PressureHandle, Scope, on_pressure, scope, stats
from .pausing import Paused, Resumed, hold, pause, paused, register_mem_pool, release_host_memory, resume, tag, untagged

__all__ = [
    "AllocatorConfig",
    "CachingAllocator",
    "Paused",
    "PressureHandle",
    "Resumed",
    "Scope",
    "SimulatedDevice",
    "enable",
    "explain",
    "hold",
    "is_enabled",
    "library_path",
    "on_pressure",
    "pause",
    "paused",
    "read_snapshot",
    "register_mem_pool",
    "release_host_memory",
    "replay",
    "resume",
    "scope",
    "stats",
    "tag",
    "tune",
    "untagged",
]
