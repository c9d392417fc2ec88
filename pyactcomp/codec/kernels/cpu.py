"""The codec for CPU tensors, in C++: vectorised, multi-threaded, without the GIL."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import Comparison, Kernel, native_codes, native_form

if TYPE_CHECKING:
    from ... import _core


def unavailable_reason() -> str | None:
    """Return why the C++ kernels cannot run here, or None."""
    try:
        from ... import _core  # noqa: F401
    except ImportError as error:
        return f"the native module pyactcomp._core does not load ({error}); reinstall pyactcomp with a C++17 compiler"
    return None


def bind(
    dtype: torch.dtype,
    bits: int,
    group_size: int,
    stochastic: bool,
    keep_positive: bool,
    device: torch.device,
    *,
    simd: bool = True,
) -> Kernel:
    """Return the kernel for one format; ``device`` is the CPU.

    ``simd=False`` restricts it to the baseline instruction set.
    """
    return CpuKernel(native_codes(_target(simd), -1, dtype, bits, group_size, stochastic, keep_positive))


def bind_form(
    encoding: str,
    dtype: torch.dtype,
    device: torch.device,
    narrow: torch.dtype | None,
    comparison: Comparison | None,
    *,
    simd: bool = True,
) -> Kernel:
    """Return the kernel for one form between codes and the tensor as it is; ``device`` is the CPU."""
    return CpuKernel(native_form(_target(simd), -1, encoding, dtype, narrow, comparison))


def _target(simd: bool) -> str:
    return "cpu" if simd else "cpu_baseline"


class CpuKernel:
    """A native kernel on the CPU."""

    def __init__(self, native: _core.Kernel) -> None:
        # For callers in C++, by `native.bound`.
        self.native = native
        self.packed_nbytes = native.packed_nbytes
        self._encode = native.encode
        self._decode = native.decode

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        """Write the packed form of ``source`` to ``out``."""
        self._encode(source.data_ptr(), out.data_ptr(), source.numel(), seed, torch.get_num_threads())

    def decode(self, packed: Tensor, out: Tensor) -> None:
        """Restore ``packed`` into ``out``."""
        self._decode(packed.data_ptr(), out.data_ptr(), out.numel(), torch.get_num_threads())
