"""The codec: pack tensors into codes of 8, 4 or 2 bits and restore them, on CPU and GPU, in one format."""

from .api import (
    IMPLS,
    ROUNDINGS,
    Impl,
    Packed,
    Rounding,
    bind,
    bind_form,
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
    "bind_form",
    "dequantize",
    "is_format",
    "quantize",
    "resolve",
    "unavailable_reason",
]
