"""A caching allocator for torch's CUDA memory, open to inspection, and the same core on a simulated device.

Importing touches no GPU; :func:`enable` replaces torch's own allocator.
"""

from .._core import AllocatorConfig, CachingAllocator, SimulatedDevice
from ..snapshots import explain, read_snapshot, replay, tune
from .attach import enable, is_enabled, library_path
from .observe import PressureHandle, Scope, on_pressure, scope, stats

__all__ = [
    "AllocatorConfig",
    "CachingAllocator",
    "PressureHandle",
    "Scope",
    "SimulatedDevice",
    "enable",
    "explain",
    "is_enabled",
    "library_path",
    "on_pressure",
    "read_snapshot",
    "replay",
    "scope",
    "stats",
    "tune",
]
