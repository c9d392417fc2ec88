"""Implementations of the packed format; each module offers ``bind`` and ``unavailable_reason``."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..layouts import Rows


class Kernel(Protocol):
    """One implementation bound to a dtype, a width, a group size, a rounding and a device.

    Kernels check no arguments: ``codec`` has validated them, and every saved tensor passes here.
    """

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        """Write the packed form of ``source``, a dense tensor read in storage order, to ``out`` (uint8)."""

    def decode(self, packed: Tensor, out: Tensor) -> None:
        """Restore ``packed`` (uint8) into ``out``, a dense tensor written in storage order."""


@runtime_checkable
class RowsKernel(Protocol):
    """A kernel that reads rows apart in memory; the others read a contiguous copy."""

    def encode_rows(self, source: Tensor, rows: Rows, out: Tensor, seed: int) -> None:
        """Write the packed form of ``source``, whose rows have gaps between them, to ``out`` (uint8)."""


_NATIVE = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
    torch.bool: "bool",
}


def native_dtype(dtype: torch.dtype) -> str:
    """Return the native module's name for ``dtype``."""
    return _NATIVE[dtype]
