"""Memory that kernels take while they run and that no operator shows, each rule with its source.

The rules are functions of the GPU and of an operator's arguments; they return the bytes of the blocks that are in use
together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..codec.layouts import layout_of, suggested_layout
from .gpus import Gpu

Rule = Callable[..., list[int]]

# From torch's Reduce.cuh: the threads of a block, and the largest offset in bytes.
_THREADS = 512
_LIMIT = (1 << 31) - 1


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _flash_backward(_gpu: Gpu, grad: Tensor, query: Tensor, key: Tensor, *_: Any, **__: Any) -> list[int]:
    """Return the blocks of FlashAttention 2's backward: sums of each row, dq in float32, dk and dv of all heads.

    ATen's flash_api.cpp, ``mha_bwd``: softmax_d, dq_accum, dk_expanded, dv_expanded.
    """
    batch, heads, rows, width = query.shape
    shared, columns = key.shape[1], key.shape[2]
    rows, padded = _up(rows, 128), _up(width, 32 if width <= 128 else 64)
    expanded = [2 * batch * columns * heads * width] * 2 if shared != heads else []
    return [4 * batch * heads * rows, 4 * batch * heads * rows * padded, *expanded]


def _efficient_backward(_gpu: Gpu, grad: Tensor, query: Tensor, *_: Any, **__: Any) -> list[int]:
    """Return the blocks of the memory-efficient backward: sums of each row, and dq in float32 for 16-bit elements.

    ATen's attention_backward.cu, ``_efficient_attention_backward``: delta and the kernel's workspace.
    """
    batch, heads, rows, width = query.shape
    workspace = [] if query.dtype is torch.float32 else [4 * batch * heads * _up(rows, 64) * _up(width, 32)]
    return [4 * batch * heads * rows, *workspace]


def _embedding_backward(_gpu: Gpu, grad: Tensor, indices: Tensor, *_: Any, **__: Any) -> list[int]:
    """Return the blocks of an embedding's backward: sorted indices and positions, sums of segments in float32.

    ATen's Embedding.cu sorts above 3072 indices; EmbeddingBackwardKernel.cu sums the segments.
    """
    count, width = indices.numel(), grad.shape[-1]
    return [] if count <= 3072 else [8 * count] * 4 + [4 * count * width]


class _Dim(NamedTuple):
    size: int
    stride: int


def _merged(dims: Iterable[_Dim]) -> list[_Dim]:
    """Return the dimensions with neighbours merged where one stride covers both."""
    found: list[_Dim] = []
    for dim in dims:
        if found and found[-1].size * found[-1].stride == dim.stride:
            found[-1] = _Dim(found[-1].size * dim.size, found[-1].stride)
        else:
            found.append(dim)
    return found


def _in_32_bits(reduced: list[_Dim], kept: list[_Dim], itemsize: int) -> bool:
    """Halve the longest dimension until offsets take 32 bits, as TensorIterator does; return whether it had to."""
    halved = False
    while itemsize * sum((dim.size - 1) * dim.stride for dim in (*reduced, *kept)) >= _LIMIT:
        dims = max(reduced, kept, key=lambda each: max(((d.size - 1) * d.stride for d in each), default=0))
        longest = max(dims, key=lambda dim: (dim.size - 1) * dim.stride)
        dims[dims.index(longest)] = _Dim(-(-longest.size // 2), longest.stride)
        halved = True
    return halved


def _power_of_2(n: int) -> int:
    return 1 << max(n.bit_length() - 1, 0)


def reduction(gpu: Gpu, x: Tensor, over: Collection[int], accumulator: int, out_size: int) -> list[int]:
    """Return the blocks of a reduction: what its thread blocks put together in memory, and their semaphores.

    ATen's Reduce.cuh, ``setReduceConfig``: where there are few outputs and many inputs of each, several thread blocks
    share an output. Each of them writes its part, which may be as much as the tensor that is reduced.

    Parameters
    ----------
    over : collection of int
        The dimensions that are reduced; empty for all.
    accumulator, out_size : int
        Bytes of the elements in which the kernel accumulates, and of those of the result.
    """
    over = {d % x.dim() for d in over} if over else set(range(x.dim()))
    dims = [(d, _Dim(x.shape[d], x.stride(d))) for d in reversed(range(x.dim())) if x.shape[d] != 1]
    reduced = _merged(sorted((dim for d, dim in dims if d in over), key=lambda dim: dim.stride))
    kept = _merged(dim for d, dim in dims if d not in over)
    if not reduced or x.numel() == 0:
        return []
    halved = _in_32_bits(reduced, kept, x.itemsize)
    inputs, outputs = (math.prod(dim.size for dim in each) for each in (reduced, kept))
    lanes_reduce = not kept or reduced[0].stride < kept[0].stride
    width, height, vector = (inputs, outputs, 1) if lanes_reduce else (outputs, inputs, 1)
    if lanes_reduce and reduced[0].stride == 1 and inputs >= 128 and len(reduced) == 1:
        width //= 4
    elif not lanes_reduce and kept[0].stride == 1:
        strides = [dim.stride for dim in (*reduced, *kept[1:])]
        vector = math.gcd(4, x.storage_offset(), kept[0].size, *strides)
        width //= vector
    threads = _THREADS // vector
    across, down = (min(_power_of_2(n), threads) for n in (width, height))
    lines = min(down, threads // min(across, 32))
    lanes = min(across, threads // lines)
    values = -(-inputs // lanes) if lanes_reduce else inputs
    if values < min(16 * lines, 256):
        return []
    values = -(-values // lines)
    grid = outputs // vector if lanes_reduce else -(-(outputs // vector) // lanes)
    room = gpu.processors * (gpu.threads // (lanes * lines))
    if values < 256 or grid > room:
        return []
    shares = max(min(-(-room // grid), -(-values // 16)), -(-values // 256))
    if shares == 1:
        return []
    parts = accumulator * outputs * shares * (1 if lanes_reduce else lanes * vector)
    # 16-bit results cannot hold the sums of the halves.
    return [parts, 4 * grid, *([accumulator * outputs] if halved and out_size < accumulator else [])]


def _sum(gpu: Gpu, x: Tensor, over: Collection[int] | None = None, *_: Any, **named: Any) -> list[int]:
    """Return the blocks of a sum, which takes elements of the result's dtype, or of 16 bits.

    ATen's ReduceOpsUtils.h, ``make_reduction_from_out_ty``.
    """
    out = named["out"].dtype if "out" in named else named.get("dtype") or x.dtype
    casts = x.dtype is not out and not (x.itemsize == 2 and out is torch.float32)
    copied = [x.numel() * out.itemsize] if casts else []
    return [*copied, *reduction(gpu, x, over or (), max(out.itemsize, 4), out.itemsize)]


def _norm(gpu: Gpu, x: Tensor, _: Any = 2, over: Collection[int] | None = None, *__: Any, **named: Any) -> list[int]:
    return _sum(gpu, x, over, **named)


def _extreme(gpu: Gpu, x: Tensor, over: Collection[int] = (), *_: Any, **__: Any) -> list[int]:
    return reduction(gpu, x, over, x.itemsize, x.itemsize)


def _channels_last_copies(x: Tensor, weight: Tensor, out: torch.Size, groups: int) -> list[int]:
    """Return the workspace in which cuDNN keeps copies of a convolution's input, weight and output.

    Its kernels for tensor cores take channels last, of whole 16 bytes: what is not so is copied, to or from. Measured
    on an H200 with cuDNN 9.19 (bench/results/convolutions.json): in 16 bits the workspaces of kernels wider than one
    element over several channels are these bytes, and up to 20 MiB more for partial sums. Convolutions in groups, of
    one channel and in float32 differ too much for a rule.
    """
    if groups != 1 or x.itemsize != 2 or x.shape[1] == 1 or weight[0, 0].numel() == 1:
        return []
    last = any(suggested_layout(layout_of(each)).stride[1] == 1 for each in (x, weight))
    whole = 16 // x.itemsize
    copied = [size for size in (x.shape, weight.shape, out) if not last or size[1] % whole]
    copies = x.itemsize * sum(math.prod((first, _up(channels, whole), *rest)) for first, channels, *rest in copied)
    return [copies] if copies else []


def _convolution(_gpu: Gpu, x: Tensor, weight: Tensor, _bias: Tensor | None, *how: Any) -> list[int]:
    stride, padding, dilation, transposed, _added, groups = how
    if transposed:
        return []
    spatial = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=False)
    sides = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in spatial]
    return _channels_last_copies(x, weight, torch.Size([x.shape[0], weight.shape[0], *sides]), groups)


def _convolution_backward(gpu: Gpu, grad: Tensor, x: Tensor, weight: Tensor, *args: Any) -> list[int]:
    """Return cuDNN's copies, or the blocks of the sum that gives the gradient of the bias, which it leaves to PyTorch.

    ATen's Convolution.cpp, ``convolution_backward``.
    """
    *_, transposed, _added, groups, (_, _, of_bias) = args
    copies = [] if transposed else _channels_last_copies(x, weight, grad.shape, groups)
    sums = []
    if of_bias:
        over = [d for d in range(grad.dim()) if d != 1]
        sums = reduction(gpu, grad, over, max(grad.itemsize, 4), grad.itemsize)
    return max(copies, sums, key=sum)


#: Operators that write their result, and whose kernels take memory beside it.
REDUCTIONS = ("sum.IntList_out", "mean.out", "amax.out", "amin.out", "linalg_vector_norm.out")

RULES: dict[str, Rule] = {
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::convolution_backward": _convolution_backward,
    "aten::convolution": _convolution,
    "aten::sum": _sum,
    "aten::mean": _sum,
    "aten::linalg_vector_norm": _norm,
    "aten::amax": _extreme,
    "aten::amin": _extreme,
}

#: Matrix products, which take cuBLAS's workspace of the thread at the first call, and those that take cuBLASLt's.
PRODUCTS = {"mm", "bmm", "baddbmm", "addmv", "mv", "dot", "vdot", "addbmm"}
BIASED_PRODUCTS = {"addmm", "_addmm_activation"}


def multiplies(gpu: Gpu, operator: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operator calls cuBLAS.

    Grouped products do where CUTLASS has no kernel. ATen's GroupedBlas.cpp: it has them for bfloat16 on Hopper and on
    Blackwell's data-centre cards.
    """
    name = operator._schema.name.partition("::")[2]
    if name == "_grouped_mm":
        return gpu.major not in (9, 10) or any(each.dtype is not torch.bfloat16 for each in args[:2])
    return name in PRODUCTS or name in BIASED_PRODUCTS


def blocks_of(gpu: Gpu, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Return the bytes of the blocks that an operator's kernels take besides its results."""
    rule = RULES.get(operator._schema.name)
    return [] if rule is None else rule(gpu, *args, **kwargs)
