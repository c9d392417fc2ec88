"""Launches of the kernels of window attention and of the residual addition after it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..launch import argument, buffer, launcher, processors
from ..saving import Saving
from . import kernels

# With 4 warps and 64 tokens, a thread holds 32 scores of each tile. Compiled for sm_90 with heads of 32, nothing spills
# within these limits; with 128 registers, backward would spill 144 bytes a thread. Four programs of the forward and
# three of the backward then run on a multiprocessor at a time.
WARPS = 4
FORWARD_REGISTERS = 128
BACKWARD_REGISTERS = 168
BACKWARD_PROGRAMS = 3
# Tokens of one window; the scores of more would not stay in registers.
MOST_TOKENS = 64
# Elements of a program of the residual addition: 16 a thread, as in the codec's kernels.
TILE = 2048


def attention_serves(qkv: Tensor, heads: int, how: Saving) -> bool:
    """Return whether the fused window attention serves qkv [windows, tokens, 3 * heads * head_dim]."""
    width = qkv.shape[2] // 3
    head = width // heads
    return (
        # Dtypes of the tensor cores: in float32 a fused kernel is no faster than separate products.
        qkv.dtype in (torch.bfloat16, torch.float16)
        and qkv.is_contiguous()
        and qkv.shape[1] <= MOST_TOKENS
        and head in (16, 32, 64)
        and (how.bits is None or _packs(qkv, width, how))
    )


def _packs(qkv: Tensor, width: int, how: Saving) -> bool:
    """Return whether the forward kernel packs qkv; queries, keys and values are each ``width`` wide."""
    return (
        how.bits == 8
        # A tile of tokens by 256 does not fit the registers.
        and how.group_size <= 128
        and width % how.group_size == 0
        and (not how.stochastic or qkv.numel() <= 2**32)
    )


Recompute = Callable[[Tensor], Tensor]
AttentionBackward = Callable[[Tensor, Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor]]


def window_attention(
    qkv: Tensor, heads: int, bias: Tensor, mask: Tensor | None, scale: float, how: Saving
) -> tuple[Tensor, Tensor, Recompute, AttentionBackward]:
    """Return the output, the saved qkv (packed or itself), the recompute and the backward.

    The recompute takes the saved qkv; the backward takes the saved qkv, the bias, the mask and the output's gradient.
    """
    count, tokens, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    shape, numel = qkv.shape, qkv.numel()
    dtype, device = qkv.dtype, qkv.device
    rows = max(16, 1 << (tokens - 1).bit_length())
    # Group size 0 tells the kernels to read qkv itself.
    form = (tokens, rows, heads, width // heads, mask is not None, 0 if how.bits is None else how.group_size)
    windows = 1 if mask is None else mask.shape[0]
    bias = bias.contiguous()

    def attend_from(kept: Tensor) -> Tensor:
        result = torch.empty((count, tokens, width), dtype=dtype, device=device)
        launch = launcher(kernels, "window_attention_recompute_kernel", form, WARPS, device)
        tensors = (kept, bias, argument(mask, bias), result)
        launch(count * heads, tensors, (numel, windows, scale))
        return result

    def attend_and_pack() -> tuple[Tensor, Tensor]:
        out, packed = qkv.new_empty(count, tokens, width), buffer(qkv, how)
        # The tile of a larger group needs more registers than the limit.
        registers = FORWARD_REGISTERS if how.group_size == 64 else None
        constants = *form, how.stochastic
        launch = launcher(kernels, "window_attention_forward_kernel", constants, WARPS, device, registers)
        tensors = (qkv, bias, argument(mask, bias), out, packed)
        launch(count * (width // how.group_size), tensors, (numel, windows, scale, *how.keys))
        return out, packed

    def backward(kept: Tensor, bias: Tensor, mask: Tensor | None, grad: Tensor) -> tuple[Tensor, Tensor]:
        grad, bias = grad.contiguous(), bias.contiguous()
        grad_qkv = torch.empty(shape, dtype=dtype, device=device)
        programs = max(1, min(count, _programs(device) // heads))
        partial = torch.empty((programs, heads, tokens, tokens), dtype=torch.float32, device=device)
        launch = launcher(kernels, "window_attention_backward_kernel", form, WARPS, device, BACKWARD_REGISTERS)
        tensors = (kept, bias, argument(mask, bias), grad, grad_qkv, partial)
        launch(programs * heads, tensors, (numel, windows, scale))
        return grad_qkv, partial.sum(0)

    out, kept = (attend_from(qkv), qkv) if how.bits is None else attend_and_pack()
    return out, kept, attend_from, backward


@functools.lru_cache(maxsize=64)
def _programs(device: torch.device) -> int:
    """Return how many programs share the windows of a backward: as many as run at a time, as each writes a sum."""
    if device.type != "cuda":
        return 8
    return BACKWARD_PROGRAMS * processors(device)


def _columns(width: int) -> int:
    """Return the largest power of two up to 128 dividing the width."""
    return min(width & -width, 128)


def residual_add(
    x: Tensor, branch: Tensor, scale: Tensor | None, rows: Tensor | None, sample: int, dtype: torch.dtype
) -> Tensor:
    """Return x + scale * branch for contiguous x and branch [n, width]."""
    out = torch.empty_like(x, dtype=dtype)
    launch, programs, scalars = _residual("residual_add_forward_kernel", branch, scale, rows, sample)
    launch(programs, (x, branch, argument(scale, x), argument(rows, x), out), scalars)
    return out


def residual_add_backward(
    grad: Tensor, scale: Tensor | None, rows: Tensor | None, sample: int, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of the branch from the gradient of the sum."""
    grad = grad.contiguous()
    grad_branch = torch.empty_like(grad, dtype=dtype)
    launch, programs, scalars = _residual("residual_add_backward_kernel", grad_branch, scale, rows, sample)
    launch(programs, (grad, argument(scale, grad), argument(rows, grad), grad_branch), scalars)
    return grad_branch


def _residual(
    name: str, branch: Tensor, scale: Tensor | None, rows: Tensor | None, sample: int
) -> tuple[Callable[..., None], int, tuple[int, int]]:
    width = branch.shape[1]
    columns = _columns(width)
    form = (width, columns, TILE // columns, scale is not None, rows is not None)
    return launcher(kernels, name, form, WARPS, branch.device), -(-branch.numel() // TILE), (branch.numel(), sample)
