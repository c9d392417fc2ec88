"""What torch's dropout draws on a GPU, for kernels that drop elements on the way and keep no mask."""

from __future__ import annotations

import functools
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from ...torch_private import dispatch_mode_active, draw_from_generator
from ..launch import processors

# Threads of a program of torch's kernel, and numbers that each call of its generator gives a thread.
_PROGRAM = 256
_QUAD = 4
_VECTOR_BYTES = 16
# Kernels count quads in 32 bits.
_MOST_ELEMENTS = 2**34


class Noise(NamedTuple):
    """Which elements one dropout keeps, as the arguments of a kernel.

    Torch's kernel has Philox (Salmon et al., 2011) make four numbers for each thread and call, and drops by the first
    of them the first of four elements that lie side by side. Where the elements of a tensor are taken four by four in
    runs of ``quads``, run r is thread ``r % threads``'s, and quad q of it call ``counter + r // threads * quads + q``.

    Attributes
    ----------
    seed, counter : int
        Of torch's generator, the counter in calls.
    threads, quads : int
        With 0 quads there is no dropout.
    below : int
        Elements are kept whose number, of 32 bits, is below it.
    scales : tuple of float
        What kept elements, and their gradients, are multiplied by: torch rounds the two otherwise.
    """

    seed: int
    counter: int
    threads: int
    quads: int
    below: int
    scales: tuple[float, float]

    def arguments(self, backward: bool) -> tuple[int | float, ...]:
        """Return the scalars that the kernel of the forward or backward takes."""
        return self.seed, self.counter, self.threads, self.below, self.scales[backward]


QUIET = Noise(seed=0, counter=0, threads=1, quads=0, below=0, scales=(1.0, 1.0))
"""No dropout."""


def draw(x: Tensor, p: float) -> Noise:
    """Draw which elements of a contiguous tensor to keep, as ``torch.native_dropout(x, p, True)`` would.

    The size is whole vectors of 16 bytes. The generator goes on as far. QUIET, and nothing is drawn, where torch's
    kernel shares out the elements in another way; where x is not on a GPU, or of more elements than the kernels count;
    while a CUDA graph is captured, in which each replay draws anew; and where a dispatch mode looks on, which may keep
    what dropout returned for a second run, as selective checkpointing does.
    """
    numel = x.numel()
    if not x.is_cuda or numel > _MOST_ELEMENTS or x.data_ptr() % _VECTOR_BYTES:
        return QUIET
    if dispatch_mode_active() or torch.cuda.is_current_stream_capturing():
        return QUIET
    threads = min(-(-numel // _PROGRAM), _most_programs(x.device)) * _PROGRAM
    quads = _VECTOR_BYTES // (_QUAD * x.itemsize)
    seed, offset = draw_from_generator(x.get_device(), ((numel - 1) // (threads * _QUAD) + 1) * _QUAD)
    # The seed's 64 bits, as the signed integer that kernels take.
    return Noise(seed - (seed >> 63 << 64), offset // _QUAD, threads, quads, *_threshold(p))


@functools.lru_cache(maxsize=64)
def _most_programs(device: torch.device) -> int:
    threads = torch.cuda.get_device_properties(device).max_threads_per_multi_processor
    return processors(device) * int(threads // _PROGRAM)


def _float32(x: float) -> float:
    return float(struct.unpack("f", struct.pack("f", x))[0])


@functools.lru_cache(maxsize=256)
def _threshold(p: float) -> tuple[int, tuple[float, float]]:
    """Return below which numbers elements are kept, and the two scales.

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
