"""pyactcomp makes training fit in memory: one call stores the activations saved for backward in 8 bits."""

from typing import TYPE_CHECKING, Any

from . import functional, offload
from ._version import __version__
from .checkpoint import checkpoint, use_checkpoint
from .climb import Ladder, Rung, find_batch_size, find_executable_batch_size
from .codec import ops as _ops  # noqa: F401  registers torch.ops.pyactcomp
from .compress import compress, compressed, decompress
from .errors import HookConflictError, PyactcompError
from .estimate import estimate
from .live import memory, watch
from .moved import moved
from .plan import plan
from .readers import register_reader
from .report import report
from .verify import verify

if TYPE_CHECKING:
    from . import allocator, snapshots

__all__ = [
    "HookConflictError",
    "Ladder",
    "PyactcompError",
    "Rung",
    "__version__",
    "allocator",
    "checkpoint",
    "compress",
    "compressed",
    "decompress",
    "estimate",
    "find_batch_size",
    "find_executable_batch_size",
    "functional",
    "memory",
    "offload",
    "plan",
    "register_reader",
    "report",
    "snapshots",
    "use_checkpoint",
    "verify",
    "watch",
]


def __getattr__(name: str) -> Any:
    # Imported on first use: both need `_core`, of which compression uses the kernels alone.
    if name in ("allocator", "snapshots"):
        import importlib

        return importlib.import_module(f"{__name__}.{name}")
    return moved(__name__, name)
