"""The random numbers of torch's dropout on a GPU, for fused kernels with dropout and without a stored mask."""

from __future__ import annotations

import functools
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from ...torch_private import dispatch_mode_active, draw_from_generator
from ..launch import processors

# Threads in a block of torch's kernel, and random numbers per thread and generator call.
_PROGRAM = 256
_QUAD = 4
_VECTOR_BYTES = 16
# The kernels count quads (four elements) in 32 bits.
_MOST_ELEMENTS = 2**34


class Noise(NamedTuple):
    """One dropout, as arguments of a kernel: the random numbers and the threshold.

    In torch's kernel, Philox (Salmon et al., 2011) makes four numbers per thread and call, one for each of four
    neighbouring elements (a quad). Runs of ``quads`` quads go to the threads in turn: run r belongs to thread
    ``r % threads``, and quad q of run r uses generator call ``counter + r // threads * quads + q``.

    Attributes
    ----------
    seed, counter : int
        State of torch's generator; the counter is in calls.
    threads, quads : int
        Threads of torch's kernel, and quads in a run; ``quads = 0`` means no dropout.
    below : int
        Keep an element if its 32-bit random number is below this.
    scales : tuple of float
        Factors of kept elements in forward and of their gradients in backward. Torch rounds the two differently.
    """

    seed: int
    counter: int
    threads: int
    quads: int
    below: int
    scales: tuple[float, float]

    @property
    def of_forward(self) -> tuple[int | float, ...]:
        """The scalar arguments of a forward kernel."""
        return self.seed, self.counter, self.threads, self.below, self.scales[0]


QUIET = Noise(seed=0, counter=0, threads=1, quads=0, below=0, scales=(1.0, 1.0))
"""No dropout."""


def draw(x: Tensor, p: float) -> Noise:
    """Draw the dropout of a contiguous tensor, equal to ``torch.native_dropout(x, p, True)``.

    The size of ``x`` must be whole vectors of 16 bytes. The generator advances as far as torch's would. Returns QUIET
    and draws nothing if ``x`` is unaligned (torch's kernel then assigns elements differently), not on a GPU, or has
    more elements than the kernels count; during CUDA graph capture, since each replay draws anew; and under a dispatch
    mode, since the mode may hold dropout's output for a second run, as selective checkpointing does.
    """
    numel = x.numel()
    if not x.is_cuda or numel > _MOST_ELEMENTS or x.data_ptr() % _VECTOR_BYTES:
        return QUIET
    if dispatch_mode_active() or torch.cuda.is_current_stream_capturing():
        return QUIET
    threads = min(-(-numel // _PROGRAM), _most_programs(x.device)) * _PROGRAM
    quads = _VECTOR_BYTES // (_QUAD * x.itemsize)
    seed, offset = draw_from_generator(x.get_device(), ((numel - 1) // (threads * _QUAD) + 1) * _QUAD)
    # Kernels take the 64 bits of the seed as a signed integer.
    return Noise(seed - (seed >> 63 << 64), offset // _QUAD, threads, quads, *_threshold(p))


@functools.lru_cache(maxsize=64)
def _most_programs(device: torch.device) -> int:
    threads = torch.cuda.get_device_properties(device).max_threads_per_multi_processor
    return processors(device) * int(threads // _PROGRAM)


def _float32(x: float) -> float:
    return float(struct.unpack("f", struct.pack("f", x))[0])


@functools.lru_cache(maxsize=256)
def _threshold(p: float) -> tuple[int, tuple[float, float]]:
    """Return the bound below which a number keeps its element, and the two scales.

    Torch compares (number + 1/2) / 2**32, rounded to float32 after the conversion and after the sum, with 1 - p.
    """
    kept = _float32(1.0 - p)
    low, high = 0, 2**32
    while low < high:
        middle = (low + high) // 2
        # In float64 the sum is exact.
        if _float32(_float32(middle) * 2.0**-32 + 2.0**-33) < kept:
            low = middle + 1
        else:
            high = middle
    return low, (_float32(1.0 / kept), _float32(1.0 / (1.0 - p)))
