"""Launches of the rotary position embedding kernel."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...codec.kernels.triton import Launcher
from ..launch import launcher
from ..saving import KERNEL_DTYPES
from . import kernels

# Strides are counted in units of eight elements, so the compiler knows accesses to be aligned.
_UNIT = 8
# Elements of each half a program, eight a thread: six 16-byte loads of bfloat16. On an H200 0.85 of the
# copy's rate over the queries of a Llama (67 MB); nothing better from 512 to 2048 with 1 to 8 warps.
_TILE = 1024
_WARPS = 4
_LARGEST_HALF = 256


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, *, backward: bool) -> bool:
    """Rotate x [batch, tokens, heads, dim] into ``out``, or a gradient backwards; False if the kernel serves not.

    ``cos`` and ``sin`` are [batch or 1, tokens, dim]. Bytes moved per bfloat16 element: 4, and those of cos and sin
    once for all heads.
    """
    shape, stride = cos.shape, cos.stride()
    if cos.dtype is not sin.dtype or sin.shape != shape or sin.stride() != stride:
        return False
    tables, ours = (shape, stride, cos.dtype), (out.stride(), out.dtype)
    start = _start(x.shape, x.stride(), *ours, *tables, backward, x.device)
    if start is None:
        return False
    launch, programs, scalars = start
    launch(programs, (x, cos, sin, out), scalars)
    return True


@functools.lru_cache(maxsize=1024)
def _start(
    shape: torch.Size,
    stride: tuple[int, ...],
    out_stride: tuple[int, ...],
    out_dtype: torch.dtype,
    table: torch.Size,
    table_stride: tuple[int, ...],
    table_dtype: torch.dtype,
    backward: bool,
    device: torch.device,
) -> tuple[Launcher, int, tuple[int, ...]] | None:
    """Return the launcher, the programs and the integers for tensors of these layouts; None if they are not served."""
    _, tokens, heads, dim = shape
    numel, half = shape.numel(), dim // 2
    # Strides of batch, token and head; of batch and token for the tables.
    strides = [*_strides(shape, stride), *_strides(shape, out_stride), *_strides(table, table_stride)]
    if (
        half > _LARGEST_HALF
        or any(dtype not in KERNEL_DTYPES for dtype in (out_dtype, table_dtype))
        or any(each[-1] != 1 for each in (stride, out_stride, table_stride))
        or any(each % _UNIT for each in strides)
        # Rows are counted in 32 bits.
        or numel // dim >= 2**31 - _TILE
    ):
        return None
    lanes = 1 << (half - 1).bit_length()
    rows = max(_TILE // lanes, 1)
    launch = launcher(kernels, "rope_kernel", (half, lanes, rows, backward), _WARPS, device)
    return launch, -(-numel // (2 * half * rows)), (numel, heads, tokens, *[each // _UNIT for each in strides])


def _strides(shape: torch.Size, stride: tuple[int, ...]) -> list[int]:
    """Return the strides of all dimensions but the last; 0 for a dimension of size 1."""
    return [0 if n == 1 else s for n, s in zip(shape[:-1], stride[:-1], strict=True)]
