"""pyactcomp makes training fit in memory: one call stores the activations saved for backward in 8 bits."""

from typing import TYPE_CHECKING, Any

from . import functional, offload
from ._version import __version__
from .checkpoint import checkpoint, use_checkpoint
from .climb import BatchSize, Ladder, Rung, find_batch_size, find_executable_batch_size
from .codec import Packed, dequantize, ops, quantize
from .compress import compress, compressed, decompress
from .config import Config
from .errors import HookConflictError, ImplementationUnavailableError, PyactcompError
from .estimate import Estimate, estimate
from .live import Memory, Watch, memory, watch
from .readers import register_reader
from .report import Report, report
from .verify import Verification, verify

if TYPE_CHECKING:
    from . import allocator

__all__ = [
    "BatchSize",
    "Config",
    "Estimate",
    "HookConflictError",
    "ImplementationUnavailableError",
    "Ladder",
    "Memory",
    "Packed",
    "PyactcompError",
    "Report",
    "Rung",
    "Verification",
    "Watch",
    "__version__",
    "allocator",
    "checkpoint",
    "compress",
    "compressed",
    "decompress",
    "dequantize",
    "estimate",
    "find_batch_size",
    "find_executable_batch_size",
    "functional",
    "memory",
    "offload",
    "ops",
    "quantize",
    "register_reader",
    "report",
    "use_checkpoint",
    "verify",
    "watch",
]


def __getattr__(name: str) -> Any:
    # Import the allocator on first use: the allocator needs the native module, compression does not.
    if name == "allocator":
        import importlib

        return importlib.import_module(f"{__name__}.allocator")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
