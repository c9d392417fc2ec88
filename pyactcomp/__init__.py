"""pyactcomp makes training fit: activations saved for backward in 8 bits, with one call."""

from . import functional, ops
from ._version import __version__
from .codec import Packed, dequantize, quantize
from .compress import compress, compressed, decompress
from .config import Config
from .errors import HookConflictError, ImplementationUnavailableError, PyactcompError
from .report import Report, report
from .verify import Verification, verify

__all__ = [
    "Config",
    "HookConflictError",
    "ImplementationUnavailableError",
    "Packed",
    "PyactcompError",
    "Report",
    "Verification",
    "__version__",
    "compress",
    "compressed",
    "decompress",
    "dequantize",
    "functional",
    "ops",
    "quantize",
    "report",
    "verify",
]
