"""The codec: packs tensors in codes of 8, 4 or 2 bits and restores them, on the CPU and the GPU, in one format."""

from .api import (
    IMPLS,
    ROUNDINGS,
    Impl,
    Packed,
    Rounding,
    bind,
    dequantize,
    is_format,
    quantize,
    resolve,
    unavailable_reason,
)

__all__ = [
    "IMPLS",
    "ROUNDINGS",
    "Impl",
    "Packed",
    "Rounding",
    "bind",
    "dequantize",
    "is_format",
    "quantize",
    "resolve",
    "unavailable_reason",
]
