"""Lossless packing of a float cast from a narrower dtype: store the narrower dtype."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..codec.kernels import triton


class NarrowKernel:
    """Stores a tensor in a narrower dtype; implements :class:`pyactcomp.codec.kernels.Kernel`."""

    def __init__(self, dtype: torch.dtype, by_triton: bool) -> None:
        self.dtype = dtype
        self._by_triton = by_triton

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        """Cast ``source``, a dense tensor in storage order, into the bytes of ``out``."""
        out.view(self.dtype).copy_(source.detach().as_strided((source.numel(),), (1,)))

    def decode(self, packed: Tensor, out: Tensor) -> None:
        """Cast back into ``out``, a dense tensor in storage order."""
        source, target = packed.view(self.dtype), out.as_strided((out.numel(),), (1,))
        if self._by_triton and takes_triton(out):
            triton.widen(source, target)
        else:
            target.copy_(source)


narrow_kernel = functools.lru_cache(maxsize=8)(NarrowKernel)


def takes_triton(wide: Tensor) -> bool:
    """Return whether Triton's elementwise kernels read or write a tensor: float32 on a GPU."""
    return wide.is_cuda and wide.dtype is torch.float32 and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return triton.unavailable_reason() is None


_EXACT = {
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float64),
    (torch.float16, torch.float64),
    (torch.float32, torch.float64),
}


def is_exact_cast(source: torch.dtype | None, dtype: torch.dtype) -> bool:
    """Return whether the wider ``dtype`` represents every value of ``source`` exactly."""
    return (source, dtype) in _EXACT
