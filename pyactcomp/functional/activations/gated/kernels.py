"""Triton kernels of silu(gate) * up: with codes of both operands, and with exactly torch's results.

torch's CUDA kernels are compiled with contraction: a product followed by a sum is a ``tl.fma`` here.
The functions are Triton's language, not Python.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from ....codec.kernels.triton_ops import (
    COMPILED,
    NO_CODE_BITS,
    ROUNDER,
    bounds_of,
    divide,
    element_index,
    encode_any_tile,
    encode_ordinary_tile,
    load_tile,
    negative,
    power_of_two,
    reciprocal,
    store_codes,
    store_raw,
    to_raw,
    without_code,
)
from ...kernel_parts import COPY, FLAT_GROUP, FLAT_GROUPS, FLAT_TILE, place, restore, rounded

# For larger |x|, 1 + exp(-x) or the quotient x / (1 + exp(-x)) may leave the range where the short ways are exact.
_FAR = tl.constexpr(64.0)
# log2(e) in two float32 parts, as in libdevice.
_MINUS_LOG2_E = tl.constexpr(-1.4426950216293335)
_MINUS_LOG2_E_REST = tl.constexpr(-1.925963033500011e-08)
_BIAS = tl.constexpr(127.0)


@triton.jit
def _divisor(x):
    """Return 1 + exp(-x) as torch's CUDA kernels compute it."""
    if COMPILED:
        result = 1.0 + libdevice.exp(negative(x))
    else:
        result = 1.0 + tl.exp(negative(x))
    return result


@triton.jit
def _ordinary_divisor(x):
    """Return ``_divisor(x)`` for |x| up to _FAR, in 7 instructions instead of 10: no step saturates."""
    if COMPILED:
        # libdevice's exp: 2**f * 2**j, j = floor(-x log2(e)). The low bits of ``shifted`` are j plus the exponent bias.
        shifted = libdevice.fma_rd(x, _MINUS_LOG2_E, ROUNDER + _BIAS)
        j = shifted - (ROUNDER + _BIAS)
        f = tl.fma(x, _MINUS_LOG2_E, negative(j))
        f = tl.fma(x, _MINUS_LOG2_E_REST, f)
        power = (shifted.to(tl.uint32, bitcast=True) << 23).to(tl.float32, bitcast=True)
        result = tl.fma(power_of_two(f), power, 1.0)
    else:
        result = _divisor(x)
    return result


@triton.jit
def _silu(x, DTYPE: tl.constexpr, EXACT: tl.constexpr):
    """Return sigmoid(x), and silu(x) rounded to DTYPE; EXACT: to the bit as torch's CUDA kernels."""
    if EXACT:
        divisor = _divisor(x)
        sigmoid = tl.div_rn(1.0, divisor)
        silu = tl.div_rn(x, divisor)
    else:
        sigmoid = reciprocal(1.0 + power_of_two(x * _MINUS_LOG2_E))
        silu = x * sigmoid
    return sigmoid, rounded(silu, DTYPE)


@triton.jit
def _ordinary_silu(x, DTYPE: tl.constexpr):
    """Return the EXACT silu(x) for |x| up to _FAR; for 16-bit types without the branches of a division.

    With a reciprocal within an ulp, the quotient before rounding to float32 is within 2**-45 of x / divisor. Whether
    this error, or an exponential near 1, ever changes a rounding to 16 bits depends on the device. There are finitely
    many x: the GPU tests compare them all.
    """
    if DTYPE == tl.float32:
        _, silu = _silu(x, DTYPE, True)
    else:
        divisor = _ordinary_divisor(x)
        silu = rounded(divide(x, divisor, reciprocal(divisor), COMPILED), DTYPE)
    return silu


@triton.jit
def _exact_silu(x, DTYPE: tl.constexpr):
    """Return the EXACT silu(x) for any x."""
    silu = _ordinary_silu(x, DTYPE)
    # True for an infinity too. The maximum ignores NaN, but the short way returns NaN for NaN.
    if tl.max(tl.abs(x)) > _FAR:
        _, silu = _silu(x, DTYPE, True)
    return silu


@triton.jit
def _silu_mul_gradients(gate, up, grad, DTYPE: tl.constexpr, EXACT: tl.constexpr):
    """Return the unrounded gradients of gate and up."""
    sigmoid, silu = _silu(gate, DTYPE, EXACT)
    of_silu = rounded(grad * up, DTYPE)
    return of_silu * sigmoid * tl.fma(gate, 1.0 - sigmoid, 1.0), grad * silu


@triton.jit(do_not_specialize=["numel", "key0", "key1", "up_key0", "up_key1"])
def silu_mul_forward_kernel(
    # Tensors read, and tensors written: the product, and the codes of each operand.
    gate,
    up,
    out,
    packed_gate,
    packed_up,
    numel: tl.int64,
    # Keys of stochastic rounding: of gate, and of up.
    key0: tl.uint32,
    key1: tl.uint32,
    up_key0: tl.uint32,
    up_key1: tl.uint32,
    # Codes: bits of a code, elements of a group, groups of a tile, and rounding.
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    # Whether up is packed too; the elements of a program.
    PACK_UP: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Compute silu(gate) * up of [numel] elements and pack both operands, or only gate."""
    PARTIAL: tl.constexpr = UNIT != GROUPS * GROUP
    DTYPE: tl.constexpr = out.dtype.element_ty
    RUN: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    start, left = place(numel, GROUPS * GROUP, UNIT)
    g = load_tile(gate + start, left, GROUP, GROUPS, PARTIAL)
    u = load_tile(up + start, left, GROUP, GROUPS, PARTIAL)
    index, high = element_index(start, key1, GROUP, GROUPS)
    key = key0.to(tl.uint32)
    up_index, up_high = element_index(start, up_key1, GROUP, GROUPS)
    up_key = up_key0.to(tl.uint32)
    # Equal to torch to the bit: a deep model amplifies changed roundings to bfloat16, to 2.7 % of a Llama's gradient.
    silu = _ordinary_silu(g, DTYPE)
    g_bits, g_parameters = encode_ordinary_tile(g, index, high, key, BITS, STOCHASTIC, False)
    u_bits, u_parameters = g_bits, g_parameters
    if PACK_UP:
        u_bits, u_parameters = encode_ordinary_tile(u, up_index, up_high, up_key, BITS, STOCHASTIC, False)
    g_codes = g_bits.to(tl.uint8)
    u_codes = u_bits.to(tl.uint8)
    # One test for all rare cases: each test is an exchange between the warps.
    lowest, highest = bounds_of(g_parameters, BITS)
    far = tl.where(tl.maximum(highest, negative(lowest)) > _FAR, NO_CODE_BITS, 0).to(tl.uint32)
    if without_code(tl.maximum(tl.maximum(g_bits, u_bits), far)):
        _, silu = _silu(g, DTYPE, True)
        g_codes, g_parameters = encode_any_tile(g, index, high, key, BITS, STOCHASTIC, False)
        u_codes, u_parameters = g_codes, g_parameters
        if PACK_UP:
            u_codes, u_parameters = encode_any_tile(u, up_index, up_high, up_key, BITS, STOCHASTIC, False)
    store_raw(out + start, to_raw(silu * u, DTYPE), left, PARTIAL)
    store_codes(packed_gate, g_codes, g_parameters, start, left, numel, BITS, RUN, PARTIAL)
    if PACK_UP:
        store_codes(packed_up, u_codes, u_parameters, start, left, numel, BITS, RUN, PARTIAL)


@triton.jit(do_not_specialize=["numel"])
def silu_mul_backward_kernel(
    packed_gate,
    up,
    grad,
    grad_gate,
    grad_up,
    numel: tl.int64,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    UP_PACKED: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Compute the gradients of silu(gate) * up from the codes of gate, and the codes of up or up itself."""
    PARTIAL: tl.constexpr = UNIT != GROUPS * GROUP
    DTYPE: tl.constexpr = grad_gate.dtype.element_ty
    RUN: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    start, left = place(numel, GROUPS * GROUP, UNIT)
    gate = restore(packed_gate, start, left, numel, BITS, GROUP, GROUPS, RUN, PARTIAL)
    up = restore(up, start, left, numel, BITS if UP_PACKED else COPY, GROUP, GROUPS, RUN, PARTIAL)
    g = load_tile(grad + start, left, GROUP, GROUPS, PARTIAL)
    of_gate, of_up = _silu_mul_gradients(gate, up, g, DTYPE, False)
    store_raw(grad_gate + start, to_raw(of_gate, DTYPE), left, PARTIAL)
    store_raw(grad_up + start, to_raw(of_up, DTYPE), left, PARTIAL)


@triton.jit(do_not_specialize=["numel"])
def silu_mul_recompute_kernel(
    packed_gate,
    up,
    out,
    numel: tl.int64,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    UP_PACKED: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Recompute silu(gate) * up from the codes of gate, and the codes of up or up itself."""
    PARTIAL: tl.constexpr = UNIT != GROUPS * GROUP
    DTYPE: tl.constexpr = out.dtype.element_ty
    RUN: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    start, left = place(numel, GROUPS * GROUP, UNIT)
    gate = restore(packed_gate, start, left, numel, BITS, GROUP, GROUPS, RUN, PARTIAL)
    up = restore(up, start, left, numel, BITS if UP_PACKED else COPY, GROUP, GROUPS, RUN, PARTIAL)
    _, silu = _silu(gate, DTYPE, False)
    store_raw(out + start, to_raw(silu * up, DTYPE), left, PARTIAL)


@triton.jit(do_not_specialize=["numel"])
def silu_mul_exact_kernel(gate, up, out, numel: tl.int64, UNIT: tl.constexpr):
    """Compute silu(gate) * up of [numel] elements."""
    PARTIAL: tl.constexpr = UNIT != FLAT_TILE
    DTYPE: tl.constexpr = gate.dtype.element_ty
    start, left = place(numel, FLAT_TILE, UNIT)
    g = load_tile(gate + start, left, FLAT_GROUP, FLAT_GROUPS, PARTIAL)
    u = load_tile(up + start, left, FLAT_GROUP, FLAT_GROUPS, PARTIAL)
    y = rounded(_exact_silu(g, DTYPE) * u, DTYPE)
    store_raw(out + start, to_raw(y, out.dtype.element_ty), left, PARTIAL)


@triton.jit(do_not_specialize=["numel"])
def silu_mul_exact_backward_kernel(gate, up, grad, grad_gate, grad_up, numel: tl.int64, UNIT: tl.constexpr):
    """Compute the gradients of silu(gate) * up."""
    PARTIAL: tl.constexpr = UNIT != FLAT_TILE
    DTYPE: tl.constexpr = gate.dtype.element_ty
    start, left = place(numel, FLAT_TILE, UNIT)
    a = load_tile(gate + start, left, FLAT_GROUP, FLAT_GROUPS, PARTIAL)
    b = load_tile(up + start, left, FLAT_GROUP, FLAT_GROUPS, PARTIAL)
    g = load_tile(grad + start, left, FLAT_GROUP, FLAT_GROUPS, PARTIAL)
    of_gate, of_up = _silu_mul_gradients(a, b, g, DTYPE, True)
    store_raw(grad_gate + start, to_raw(of_gate, DTYPE), left, PARTIAL)
    store_raw(grad_up + start, to_raw(of_up, DTYPE), left, PARTIAL)
