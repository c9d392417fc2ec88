"""Launches of the rotary position embedding kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from ..launch import launcher
from . import kernels

# Strides are counted in units of eight elements, so the compiler knows accesses to be aligned.
_UNIT = 8
# Elements of each half a program, eight a thread: six 16-byte loads of bfloat16. On an H200 0.85 of the
# copy's rate over the queries of a Llama (67 MB); nothing better from 512 to 2048 with 1 to 8 warps.
_TILE = 1024
_WARPS = 4
_LARGEST_HALF = 256


def _strides(x: Tensor) -> list[int]:
    """Return the strides of all dimensions but the last; 0 for a dimension of size 1."""
    return [0 if n == 1 else s for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True)]


def serves(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether the kernel serves x and out [batch, tokens, heads, dim], cos and sin [batch or 1, tokens, dim]."""
    dim = x.shape[-1]
    return (
        dim // 2 <= _LARGEST_HALF
        and all(t.dtype in (torch.float32, torch.bfloat16, torch.float16) for t in (out, cos))
        and all(t.stride(-1) == 1 and all(s % _UNIT == 0 for s in _strides(t)) for t in (x, out, cos))
        and (cos.dtype, cos.shape, cos.stride()) == (sin.dtype, sin.shape, sin.stride())
        # Rows are counted in 32 bits.
        and x.numel() // dim < 2**31 - _TILE
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, *, backward: bool) -> None:
    """Rotate x [batch, tokens, heads, dim] into ``out``, or a gradient backwards.

    Bytes moved per bfloat16 element: 4, and those of cos and sin once for all heads.
    """
    half = x.shape[-1] // 2
    lanes = 1 << (half - 1).bit_length()
    rows = max(_TILE // lanes, 1)
    # Strides of batch, token and head; of batch and token for the tables.
    strides = [s // _UNIT for t in (x, out, cos) for s in _strides(t)]
    launch = launcher(kernels, "rope_kernel", (half, lanes, rows, backward), _WARPS, x.device)
    numel = x.numel()
    programs = -(-numel // (2 * half * rows))
    launch(programs, (x, cos, sin, out), (numel, x.shape[2], x.shape[1], *strides))
