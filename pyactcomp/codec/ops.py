"""The codec as ``torch.library`` operators, for traced graphs.

``torch.ops.pyactcomp.quantize(x, bits, group_size, stochastic, seed, impl, keep_positive=False) -> uint8`` and
``torch.ops.pyactcomp.dequantize(packed, shape, stride, dtype, bits, group_size, impl)``, with fake
implementations. ``torch.ops.pyactcomp.restore(codes, groups, dtype, group_size)`` takes codes and the parameters of
groups as compiled graphs save them: two views of one packed tensor. None is differentiable. The engine calls the
kernels directly, to avoid an operator's few microseconds of dispatch for each saved tensor.
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
_library.define("restore(Tensor codes, Tensor groups, ScalarType dtype, int group_size) -> Tensor")


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


def joined(codes: Tensor, groups: Tensor, group_size: int) -> Tensor:
    """Return the packed tensor that 8-bit codes and the parameters of groups are views of; a copy if they are not."""
    nbytes, at = fmt.packed_nbytes(codes.numel(), 8, group_size), fmt.parameters_offset(codes.numel(), 8)
    if codes.dtype is not torch.uint8 or groups.dtype is not torch.int32 or groups.numel() * 4 != nbytes - at:
        raise TypeError(
            f"expected uint8 codes and {(nbytes - at) // 4} int32 parameters for {codes.numel()} elements in groups of "
            f"{group_size}, got {codes.dtype} and {groups.numel()} {groups.dtype}"
        )
    if codes.is_contiguous() and groups.is_contiguous() and groups.data_ptr() == codes.data_ptr() + at:
        return codes.as_strided((nbytes,), (1,))
    # A hook, as one that offloads, has copied the two.
    packed = torch.empty(nbytes, dtype=torch.uint8, device=codes.device)
    packed[: codes.numel()] = codes.reshape(-1)
    packed[at:] = groups.contiguous().view(torch.uint8)
    return packed


def _restore(codes: Tensor, groups: Tensor, dtype: torch.dtype, group_size: int) -> Tensor:
    _check_format(dtype, 8, group_size)
    packed = joined(codes, groups, group_size)
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    codec.bind("auto", dtype, 8, group_size, False, False, codes.device).decode(packed, out)
    return out


def _restore_fake(codes: Tensor, groups: Tensor, dtype: torch.dtype, group_size: int) -> Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)


_library.impl("quantize", _quantize, "CompositeExplicitAutograd")
_library.impl("dequantize", _dequantize, "CompositeExplicitAutograd")
_library.impl("restore", _restore, "CompositeExplicitAutograd")
torch.library.register_fake("pyactcomp::quantize", _quantize_fake, lib=_library)
torch.library.register_fake("pyactcomp::dequantize", _dequantize_fake, lib=_library)
torch.library.register_fake("pyactcomp::restore", _restore_fake, lib=_library)

quantize = torch.ops.pyactcomp.quantize.default
restore = torch.ops.pyactcomp.restore.default
