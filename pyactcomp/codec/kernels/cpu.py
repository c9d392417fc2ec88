"""The codec for CPU tensors, in C++: vectorised, multi-threaded, without the GIL."""

from __future__ import annotations

import torch
from torch import Tensor

from . import Kernel, native_dtype


def unavailable_reason() -> str | None:
    """Return why the C++ kernels cannot run here, or None."""
    try:
        from ... import _core  # noqa: F401
    except ImportError as error:
        return f"the native module pyactcomp._core does not load ({error}); reinstall pyactcomp with a C++17 compiler"
    return None


def bind(
    dtype: torch.dtype, bits: int, group_size: int, stochastic: bool, keep_positive: bool, device: torch.device
) -> Kernel:
    """Return the kernel for one format; ``device`` is the CPU."""
    return CpuKernel(dtype, bits, group_size, stochastic, keep_positive)


class CpuKernel:
    """One format on the CPU.

    Parameters
    ----------
    dtype, bits, group_size, stochastic, keep_positive
        As for :func:`bind`.
    simd : bool
        False restricts the kernel to the baseline instruction set.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        bits: int,
        group_size: int,
        stochastic: bool,
        keep_positive: bool,
        *,
        simd: bool = True,
    ) -> None:
        from ... import _core

        kernel = _core.Kernel(
            "booleans" if dtype is torch.bool else "codes",
            native_dtype(dtype),
            "cpu" if simd else "cpu_baseline",
            bits=8 if dtype is torch.bool else bits,
            group_size=group_size,
            stochastic=stochastic,
            keep_positive=keep_positive,
        )
        self._encode = kernel.encode
        self._decode = kernel.decode

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        """Write the packed form of ``source`` to ``out``."""
        self._encode(source.data_ptr(), out.data_ptr(), source.numel(), seed, torch.get_num_threads())

    def decode(self, packed: Tensor, out: Tensor) -> None:
        """Restore ``packed`` into ``out``."""
        self._decode(packed.data_ptr(), out.data_ptr(), out.numel(), torch.get_num_threads())
