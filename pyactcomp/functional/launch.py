"""Helpers for launching fused kernels: compiled launchers, rounding keys, buffers for codes."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..codec import format as fmt
from ..codec.kernels import triton as codec_kernels
from ..engine.recompute import mark_as_packed
from ..readers.observer import observer
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
    """Return the launcher of the kernel ``name`` in ``kernels``; ``constants`` are its constexpr arguments."""
    return codec_kernels.Launcher(getattr(kernels, name), constants, warps, device, registers)


class Plan(NamedTuple):
    """How the library launches a kernel over some elements: launchers, each with the number of its programs.

    Attributes
    ----------
    launches : tuple
    stored, nbytes : int
        Packed elements, padding of rows included, and their bytes.
    """

    launches: tuple[tuple[codec_kernels.Launcher, int], ...]
    stored: int
    nbytes: int


@functools.lru_cache(maxsize=64)
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 1 in the interpreter."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def argument(t: Tensor | None, stand_in: Tensor) -> Tensor:
    """Return a contiguous ``t`` for a kernel; ``stand_in``, which the kernel does not read, for None."""
    return stand_in if t is None else t.contiguous()


def written_bits(bits: int | None) -> int | None:
    """Return the width of the codes to write: 0 (write none) where saved tensors are dropped."""
    return 0 if bits is not None and saves_are_dropped() else bits


def buffer(x: Tensor, how: Saving, numel: int | None = None) -> Tensor:
    """Return a buffer for the codes of ``x``, padded to ``numel`` elements if given."""
    assert how.bits is not None
    nbytes = _packed_nbytes(x.numel() if numel is None else numel, how.bits, how.group_size)
    return mark_as_packed(observer().buffer(x, nbytes), x)


# Sizes repeat from step to step.
_packed_nbytes = functools.lru_cache(maxsize=1024)(fmt.packed_nbytes)
