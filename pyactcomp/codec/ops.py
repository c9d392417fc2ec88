"""The codec as ``torch.library`` operators, for traced graphs.

``torch.ops.pyactcomp.quantize(x, bits, group_size, stochastic, seed, impl, keep_positive=False) -> uint8`` and
``torch.ops.pyactcomp.dequantize(packed, shape, stride, dtype, bits, group_size, impl)``, with fake
implementations. Neither is differentiable. The engine calls the kernels directly, to avoid an operator's few
microseconds of dispatch for each saved tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import codec
from . import format as fmt
from .kernels import RowsKernel
from .layouts import is_dense, rows_of

_library: Any = torch.library.Library("pyactcomp", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "quantize(Tensor x, int bits, int group_size, bool stochastic, int seed, str impl, bool keep_positive=False) "
    "-> Tensor",
    # Packed in storage order, so Inductor must not give an operand another layout than the traced one.
    tags=(torch.Tag.needs_exact_strides,),
)
_library.define(
    "dequantize(Tensor packed, SymInt[] shape, SymInt[] stride, ScalarType dtype, int bits, int group_size, "
    "str impl) -> Tensor"
)


def _check_format(dtype: torch.dtype, bits: int, group_size: int) -> None:
    if dtype is torch.float64 or not codec.is_format(dtype, bits, group_size):
        raise TypeError(f"the operators do not pack {dtype} with {bits} bits in groups of {group_size}")


def _quantize(
    x: Tensor, bits: int, group_size: int, stochastic: bool, seed: int, impl: str, keep_positive: bool = False
) -> Tensor:
    _check_format(x.dtype, bits, group_size)
    rows = None
    if not is_dense(tuple(x.shape), x.stride()):
        rows = rows_of(tuple(x.shape), x.stride())
        if rows is None or x.dtype is torch.bool:
            raise ValueError(
                f"the operator takes dense tensors, and floating-point rows in order with one gap between any two, "
                f"got {x.dtype} of shape {tuple(x.shape)}, strides {x.stride()}; pass a contiguous copy"
            )
    out = torch.empty(fmt.packed_nbytes(x.numel(), bits, group_size), dtype=torch.uint8, device=x.device)
    kernel = codec.bind(impl, x.dtype, bits, group_size, stochastic, keep_positive, x.device)
    if rows is not None and isinstance(kernel, RowsKernel):
        kernel.encode_rows(x, rows, out, seed)
    else:
        kernel.encode(x if rows is None else x.contiguous(), out, seed)
    return out


def _quantize_fake(
    x: Tensor, bits: int, group_size: int, stochastic: bool, seed: int, impl: str, keep_positive: bool = False
) -> Tensor:
    return x.new_empty((fmt.packed_nbytes(x.numel(), bits, group_size),), dtype=torch.uint8)


def _dequantize(
    packed: Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    bits: int,
    group_size: int,
    impl: str,
) -> Tensor:
    _check_format(dtype, bits, group_size)
    if not is_dense(tuple(shape), tuple(stride)):
        raise ValueError(f"the operator restores dense tensors, got shape {tuple(shape)}, strides {tuple(stride)}")
    if packed.dtype is not torch.uint8 or not packed.is_contiguous():
        raise TypeError(f"expected contiguous uint8 codes, got {packed.dtype} with strides {packed.stride()}")
    out = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=packed.device)
    expected = fmt.packed_nbytes(out.numel(), bits, group_size)
    if packed.numel() != expected:
        raise ValueError(f"expected {expected} packed bytes for shape {tuple(shape)}, got {packed.numel()}")
    codec.bind(impl, dtype, bits, group_size, False, False, packed.device).decode(packed, out)
    return out


def _dequantize_fake(
    packed: Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    bits: int,
    group_size: int,
    impl: str,
) -> Tensor:
    return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=packed.device)


_library.impl("quantize", _quantize, "CompositeExplicitAutograd")
_library.impl("dequantize", _dequantize, "CompositeExplicitAutograd")
torch.library.register_fake("pyactcomp::quantize", _quantize_fake, lib=_library)
torch.library.register_fake("pyactcomp::dequantize", _dequantize_fake, lib=_library)

quantize = torch.ops.pyactcomp.quantize.default
