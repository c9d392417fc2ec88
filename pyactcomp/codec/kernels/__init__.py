"""Implementations of the packed format; each module offers ``bind`` and ``unavailable_reason``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..layouts import Rows

if TYPE_CHECKING:
    from ... import _core


class Kernel(Protocol):
    """One implementation bound to a stored form of tensors of one dtype, and to a device.

    Kernels check no arguments: ``codec`` has validated them, and every saved tensor passes here.
    """

    def packed_nbytes(self, numel: int) -> int:
        """Return the size in bytes of the packed form of ``numel`` elements."""

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        """Write the packed form of ``source``, a dense tensor read in storage order, to ``out`` (uint8)."""

    def decode(self, packed: Tensor, out: Tensor) -> None:
        """Restore ``packed`` (uint8) into ``out``, a dense tensor written in storage order."""


class Comparison(Protocol):
    """A comparison whose answers are stored, as :class:`pyactcomp.readers.forms.Comparison` describes it."""

    @property
    def relation(self) -> str:
        """Name of the relation."""

    @property
    def low(self) -> float:
        """Lower bound."""

    @property
    def high(self) -> float:
        """Upper bound."""

    @property
    def yes(self) -> float:
        """Restored value of an element for which the answer is yes."""

    @property
    def no(self) -> float:
        """Restored value of an element for which the answer is no."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return a boolean tensor: where the comparison is true."""


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


def native_codes(
    target: str, index: int, dtype: torch.dtype, bits: int, group_size: int, stochastic: bool, keep_positive: bool
) -> _core.Kernel:
    """Return the native kernel of codes, or of booleans if ``dtype`` is bool."""
    from ... import _core

    if dtype is torch.bool:
        return _core.Kernel("booleans", "bool", target, index)
    return _core.Kernel(
        "codes",
        _NATIVE[dtype],
        target,
        index,
        bits=bits,
        group_size=group_size,
        stochastic=stochastic,
        keep_positive=keep_positive,
    )


def native_form(
    target: str,
    index: int,
    encoding: str,
    dtype: torch.dtype,
    narrow: torch.dtype | None,
    comparison: Comparison | None,
) -> _core.Kernel:
    """Return the native kernel of a form between codes and the tensor as it is."""
    from ... import _core

    if narrow is not None:
        return _core.Kernel(encoding, _NATIVE[dtype], target, index, narrow=_NATIVE[narrow])
    if comparison is not None:
        c = comparison
        asked = _core.Comparison(c.relation, c.low, c.high, c.yes, c.no)
        return _core.Kernel(encoding, _NATIVE[dtype], target, index, comparison=asked)
    return _core.Kernel(encoding, _NATIVE[dtype], target, index)
