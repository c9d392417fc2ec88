"""Packing that loses nothing: booleans in bits, and floats in the narrower dtype that they were cast from."""

from __future__ import annotations

import torch
from torch import Tensor


class NarrowKernel:
    """Keeps a tensor in a narrower dtype that holds its values exactly; a :class:`pyactcomp.kernels.Kernel`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        """Cast ``source``, a dense tensor in storage order, into the bytes of ``out``."""
        out.view(self.dtype).copy_(source.detach().as_strided((source.numel(),), (1,)))

    def decode(self, packed: Tensor, out: Tensor) -> None:
        """Cast back into ``out``, a dense tensor in storage order."""
        out.as_strided((out.numel(),), (1,)).copy_(packed.view(self.dtype))


_EXACT = {
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float64),
    (torch.float16, torch.float64),
    (torch.float32, torch.float64),
}


def is_exact_cast(source: torch.dtype | None, dtype: torch.dtype) -> bool:
    """Return whether every value of ``source`` is one of the wider ``dtype``."""
    return (source, dtype) in _EXACT
