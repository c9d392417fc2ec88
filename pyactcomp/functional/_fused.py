"""Launches of the fused kernels: what a function computes, what it keeps, and how it goes back."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import codec
from .. import format as fmt
from ..kernels import triton as codec_kernels
from ._saving import Saving

# A row stays in the registers of one program: 16 elements a thread, at most 512 threads.
LONGEST_ROW = 8192


@functools.lru_cache(maxsize=256)
def _launcher(
    kernel: str, constants: tuple[Any, ...], warps: int, device: torch.device, registers: int | None = None
) -> codec_kernels.Launcher:
    from . import _fused_kernels

    # The constants end with whether the kernel is compiled.
    constants = (*constants, not codec_kernels.interpreted())
    return codec_kernels.Launcher(getattr(_fused_kernels, kernel), constants, warps, device, registers)


def _keys(how: Saving) -> tuple[int, int]:
    return fmt.random_keys(how.seed) if how.stochastic else (0, 0)


def _buffer(x: Tensor, bits: int, group_size: int) -> Tensor:
    return torch.empty(fmt.packed_nbytes(x.numel(), bits, group_size), dtype=torch.uint8, device=x.device)


def gelu(x: Tensor, approximate: str, how: Saving) -> tuple[Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]:
    """Return gelu of x, the packed x, and the function from that and the output's gradient to that of x."""
    assert how.bits is not None
    if not codec.is_dense(tuple(x.shape), x.stride()):
        x = x.contiguous()
    shape, stride = x.shape, x.stride()
    out = torch.empty_strided(shape, stride, dtype=x.dtype, device=x.device)
    packed = _buffer(x, how.bits, how.group_size)
    form = (approximate == "tanh", how.bits, how.group_size, codec_kernels.TILE // how.group_size)
    programs = -(-x.numel() // codec_kernels.TILE)
    warps, registers = codec_kernels.WARPS, codec_kernels.REGISTERS
    forward = _launcher("gelu_forward_kernel", (*form, how.stochastic), warps, x.device, registers)
    forward(programs, (x, out, packed), (x.numel(), *_keys(how)))

    def backward(packed: Tensor, grad: Tensor) -> Tensor:
        if grad.stride() != stride:
            grad = torch.empty_strided(shape, stride, dtype=grad.dtype, device=grad.device).copy_(grad)
        grad_x = torch.empty_strided(shape, stride, dtype=grad.dtype, device=grad.device)
        launch = _launcher("gelu_backward_kernel", form, codec_kernels.WARPS, grad.device)
        launch(programs, (packed, grad, grad_x), (grad.numel(),))
        return grad_x

    return out, packed, backward


def layer_norm_serves(x: Tensor, shape: tuple[int, ...], how: Saving) -> bool:
    """Return whether the fused layer norm serves rows of this shape."""
    length = math.prod(shape)
    return (
        x.is_contiguous()
        and length % how.group_size == 0
        and length <= LONGEST_ROW
        # A row may not straddle a multiple of 2**32, where the high half of an element's index changes.
        and (not how.stochastic or x.numel() <= 2**32)
    )


LayerNormBackward = Callable[..., tuple[Tensor | None, ...]]


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shape: tuple[int, ...],
    eps: float,
    dtype: torch.dtype,
    how: Saving,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], LayerNormBackward]:
    """Return the normalised x, what is kept of it (packed x, mean, rstd) and the function that goes back.

    That takes what is kept, the weight, the output's gradient and which gradients of x, weight and bias are wanted.
    """
    assert how.bits is not None
    length = math.prod(shape)
    rows = x.numel() // length
    groups = 1 << (length // how.group_size - 1).bit_length()
    warps = min(max(groups * how.group_size // 512, 1), 16)
    form = (length, weight is not None)
    codes = (how.bits, how.group_size, groups)
    out, packed = torch.empty_like(x, dtype=dtype), _buffer(x, how.bits, how.group_size)
    mean, rstd = x.new_empty(rows, dtype=torch.float32), x.new_empty(rows, dtype=torch.float32)
    launch = _launcher("layer_norm_forward_kernel", (*form, bias is not None, *codes, how.stochastic), warps, x.device)
    tensors = (x, x if weight is None else weight.contiguous(), x if bias is None else bias.contiguous(), out, packed)
    launch(rows, (*tensors, mean, rstd), (x.numel(), eps, *_keys(how)))
    x_dtype = x.dtype

    def backward(
        packed: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, grad: Tensor, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        grad = grad.contiguous()
        grad_x = torch.empty_like(grad, dtype=x_dtype)
        programs = min(rows, _programs(grad.device))
        sums = grad.new_empty((2, programs, length), dtype=torch.float32)
        launch = _launcher("layer_norm_backward_kernel", (*form, *codes), warps, grad.device)
        gamma = grad if weight is None else weight.contiguous()
        launch(programs, (packed, mean, rstd, gamma, grad, grad_x, sums[0], sums[1]), (grad.numel(),))
        grad_weight, grad_bias = (sums[i].sum(0).view(shape) if needs[i + 1] else None for i in (0, 1))
        return grad_x, grad_weight, grad_bias

    return out, (packed, mean, rstd), backward


@functools.lru_cache(maxsize=64)
def _programs(device: torch.device) -> int:
    """Return how many programs share the rows of a layer norm's backward: four a multiprocessor."""
    if device.type != "cuda":
        return 4
    return 4 * int(torch.cuda.get_device_properties(device).multi_processor_count)
