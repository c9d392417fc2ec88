"""An implementation that launches nothing: the sizes of every stored form, for tensors without memory.

An estimate (:mod:`pyactcomp.estimate`) runs in a process whose CUDA tensors have addresses and no memory. There this
implementation comes before all others, and Triton's launchers start nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import Comparison, Kernel, native_codes, native_form

if TYPE_CHECKING:
    from ... import _core

_nothing = False


def launch_nothing() -> None:
    """Launch no kernel for CUDA tensors in this process from now on."""
    global _nothing
    _nothing = True


def launches_nothing() -> bool:
    """Return whether this process launches no kernels for CUDA tensors."""
    return _nothing


def unavailable_reason() -> str | None:
    """Return why tensors do have memory here, or None in an estimate."""
    return None if _nothing else "kernels are left out in an estimate alone"


def bind(
    dtype: torch.dtype, bits: int, group_size: int, stochastic: bool, keep_positive: bool, device: torch.device
) -> Kernel:
    """Return the sizes of one format."""
    return _Sizes(native_codes("cpu", 0, dtype, bits, group_size, stochastic, keep_positive))


def bind_form(
    encoding: str,
    dtype: torch.dtype,
    device: torch.device,
    narrow: torch.dtype | None,
    comparison: Comparison | None,
) -> Kernel:
    """Return the sizes of a form between codes and the tensor as it is."""
    return _Sizes(native_form("cpu", 0, encoding, dtype, narrow, comparison))


class _Sizes:
    """The sizes of a native kernel, and none of its work."""

    def __init__(self, native: _core.Kernel) -> None:
        self.packed_nbytes = native.packed_nbytes

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        """Leave the buffer as it is."""

    def decode(self, packed: Tensor, out: Tensor) -> None:
        """Leave the tensor as it is."""
