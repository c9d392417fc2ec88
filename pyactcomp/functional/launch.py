"""What launches of fused kernels share: a kernel with its constants, the keys of rounding and the buffer of codes."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..codec import format as fmt
from ..codec.kernels import triton as codec_kernels
from ..engine.recompute import mark_as_packed
from ..torch_private import saves_are_dropped
from .saving import Saving


@functools.lru_cache(maxsize=1024)
def launcher(
    kernels: ModuleType,
    name: str,
    constants: tuple[Any, ...],
    warps: int,
    device: torch.device,
    registers: int | None = None,
) -> codec_kernels.Launcher:
    """Return the launcher of the kernel ``name`` of the module ``kernels``.

    ``constants`` are those of the kernel but the last one, which is whether it is compiled.
    """
    constants = (*constants, not codec_kernels.interpreted())
    return codec_kernels.Launcher(getattr(kernels, name), constants, warps, device, registers)


@functools.lru_cache(maxsize=64)
def processors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; 1 where kernels are interpreted."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def keys(how: Saving) -> tuple[int, int]:
    """Return the two keys of stochastic rounding, or zeros where rounding is to nearest."""
    return fmt.random_keys(how.seed) if how.stochastic else (0, 0)


def written_bits(bits: int | None) -> int | None:
    """Return the bits of the codes that a kernel has to write: 0 where they are thrown away, in a buffer that is."""
    return 0 if bits is not None and saves_are_dropped() else bits


def buffer(x: Tensor, how: Saving) -> Tensor:
    """Return a buffer for the codes of ``x``."""
    assert how.bits is not None
    nbytes = fmt.packed_nbytes(x.numel(), how.bits, how.group_size)
    return mark_as_packed(torch.empty(nbytes, dtype=torch.uint8, device=x.device), x)


def copy_buffer(x: Tensor) -> Tensor:
    """Return a buffer of bytes for a copy of ``x``, which hooks keep as they keep codes."""
    return mark_as_packed(torch.empty(x.nbytes, dtype=torch.uint8, device=x.device), x)


def bytes_of(x: Tensor) -> Tensor:
    """Return the bytes of a contiguous ``x``, which hooks keep as they keep codes, as they are."""
    return mark_as_packed(x.detach().view(-1).view(torch.uint8), x)
