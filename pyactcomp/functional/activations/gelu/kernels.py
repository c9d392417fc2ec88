"""Triton kernels of GELU and of HF's chain of operators for GELU.

The GELU kernels write the codes of the input in the pass computing the output, and read them in backward.
The functions are Triton's language, not Python.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from ....codec.kernels.triton_ops import (
    COMPILED,
    element_index,
    encode_tile,
    load_tile,
    power_of_two,
    reciprocal,
    store_codes,
    store_raw,
    to_raw,
)
from ...kernel_parts import FLAT_GROUP, FLAT_GROUPS, FLAT_TILE, place, restore, rounded

# The tanh form of gelu(x) is x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x**3): without cancellation.
_TWO_SQRT_TWO_OVER_PI = tl.constexpr(1.5957691216057308)
_LOG2_E = tl.constexpr(1.4426950408889634)
_SQRT_TWO_OVER_PI = tl.constexpr(0.7978845608028654)
_CUBIC = tl.constexpr(0.044715)
# erfc(z) = (a1 t + ... + a5 t**5) exp(-z**2), t = 1 / (1 + p z), z >= 0, within 1.5e-7: Abramowitz and Stegun,
# 7.1.26. With z = |x| / sqrt(2) the derivative has the same exponential. The coefficients a are halved here.
_P = tl.constexpr(0.3275911 * 0.7071067811865476)
_A1 = tl.constexpr(0.254829592 / 2)
_A2 = tl.constexpr(-0.284496736 / 2)
_A3 = tl.constexpr(1.421413741 / 2)
_A4 = tl.constexpr(-1.453152027 / 2)
_A5 = tl.constexpr(1.061405429 / 2)
_INV_SQRT_TWO_PI = tl.constexpr(0.3989422804014327)
# Compiled by Triton, libdevice's tanh flushes subnormals. Below this bound tanh(x) rounds to x.
_TANH_IS_IDENTITY = tl.constexpr(2.0**-40)


@triton.jit
def _normal(x):
    """Return the normal distribution function Phi(x), and exp(-x**2 / 2)."""
    t = reciprocal(tl.fma(tl.abs(x), _P, 1.0))
    exponential = power_of_two(x * x * (-0.5 * _LOG2_E))
    polynomial = tl.fma(tl.fma(tl.fma(tl.fma(t, _A5, _A4), t, _A3), t, _A2), t, _A1)
    tail = polynomial * t * exponential
    return tl.where(x < 0, tail, 1.0 - tail), exponential


@triton.jit
def _sigmoid_two_u(x):
    A: tl.constexpr = -_TWO_SQRT_TWO_OVER_PI * _LOG2_E
    return reciprocal(1.0 + power_of_two(x * tl.fma(x * x, A * _CUBIC, A)))


@triton.jit
def _gelu_and_derivative(x, TANH: tl.constexpr):
    if TANH:
        s = _sigmoid_two_u(x)
        slope = tl.fma(x * x, 3.0 * _CUBIC * _TWO_SQRT_TWO_OVER_PI, _TWO_SQRT_TWO_OVER_PI)
        y = x * s
        d = tl.fma(y * (1.0 - s), slope, s)
    else:
        phi, exponential = _normal(x)
        y = x * phi
        d = tl.fma(x * exponential, _INV_SQRT_TWO_PI, phi)
    return y, d


@triton.jit
def _gelu(x, TANH: tl.constexpr):
    y, _ = _gelu_and_derivative(x, TANH)
    return y


@triton.jit(do_not_specialize=["numel", "key0", "key1"])
def gelu_forward_kernel(
    x,
    out,
    packed,
    numel: tl.int64,
    key0: tl.uint32,
    key1: tl.uint32,
    TANH: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Compute gelu of [numel] elements and, unless BITS is 0, pack the elements."""
    PARTIAL: tl.constexpr = UNIT != GROUPS * GROUP
    DTYPE: tl.constexpr = out.dtype.element_ty
    RUN: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    start, left = place(numel, GROUPS * GROUP, UNIT)
    values = load_tile(x + start, left, GROUP, GROUPS, PARTIAL)
    if BITS != 0:
        index, high = element_index(start, key1, GROUP, GROUPS)
        codes, parameters = encode_tile(values, index, high, key0.to(tl.uint32), BITS, STOCHASTIC, False)
        store_codes(packed, codes, parameters, start, left, numel, BITS, RUN, PARTIAL)
    store_raw(out + start, to_raw(_gelu(values, TANH), DTYPE), left, PARTIAL)


@triton.jit
def _backward(
    packed,
    grad,
    numel,
    TANH: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Return, of the program's tile: gelu, the gradient, the index of the first element, and the count of elements.

    x is restored from codes. BITS, GROUP, GROUPS and UNIT: see :mod:`...kernel_parts`.
    """
    PARTIAL: tl.constexpr = UNIT != GROUPS * GROUP
    RUN: tl.constexpr = 128 // grad.dtype.element_ty.primitive_bitwidth
    start, left = place(numel, GROUPS * GROUP, UNIT)
    x = restore(packed, start, left, numel, BITS, GROUP, GROUPS, RUN, PARTIAL)
    g = load_tile(grad + start, left, GROUP, GROUPS, PARTIAL)
    y, derivative = _gelu_and_derivative(x, TANH)
    return y, g * derivative, start, left


@triton.jit(do_not_specialize=["numel"])
def gelu_backward_kernel(
    packed,
    grad,
    out,
    numel: tl.int64,
    TANH: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Compute the gradient of gelu from codes."""
    _, g, start, left = _backward(packed, grad, numel, TANH, BITS, GROUP, GROUPS, UNIT)
    store_raw(out + start, to_raw(g, out.dtype.element_ty), left, UNIT != GROUPS * GROUP)


@triton.jit(do_not_specialize=["numel"])
def gelu_backward_recompute_kernel(
    packed,
    grad,
    out,
    again,
    numel: tl.int64,
    TANH: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Compute the gradient of gelu and gelu itself from codes."""
    y, g, start, left = _backward(packed, grad, numel, TANH, BITS, GROUP, GROUPS, UNIT)
    store_raw(out + start, to_raw(g, out.dtype.element_ty), left, UNIT != GROUPS * GROUP)
    store_raw(again + start, to_raw(y, again.dtype.element_ty), left, UNIT != GROUPS * GROUP)


@triton.jit(do_not_specialize=["numel"])
def gelu_recompute_kernel(
    packed,
    out,
    numel: tl.int64,
    TANH: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Compute gelu from codes."""
    PARTIAL: tl.constexpr = UNIT != GROUPS * GROUP
    DTYPE: tl.constexpr = out.dtype.element_ty
    start, left = place(numel, GROUPS * GROUP, UNIT)
    x = restore(packed, start, left, numel, BITS, GROUP, GROUPS, 128 // DTYPE.primitive_bitwidth, PARTIAL)
    store_raw(out + start, to_raw(_gelu(x, TANH), DTYPE), left, PARTIAL)


@triton.jit
def _chain(x, X: tl.constexpr, C: tl.constexpr):
    """Return the two factors of 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x**3))), and the tanh."""
    cube = rounded(rounded(x * x, C) * x, C)
    inner = rounded(x + rounded(cube * _CUBIC, C), C)
    inner = rounded(inner * _SQRT_TWO_OVER_PI, C)
    if COMPILED:
        tanh = tl.where(tl.abs(inner) < _TANH_IS_IDENTITY, inner, libdevice.tanh(inner))
    else:
        tanh = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * inner))
    tanh = rounded(tanh, C)
    return rounded(0.5 * x, X), rounded(1.0 + tanh, C), tanh


@triton.jit(do_not_specialize=["numel"])
def new_gelu_kernel(x, out, numel: tl.int64, WIDE: tl.constexpr, UNIT: tl.constexpr):
    """Compute HF's chain of operators with all their roundings; WIDE: float32 from pow on, as under autocast."""
    PARTIAL: tl.constexpr = UNIT != FLAT_TILE
    C: tl.constexpr = tl.float32 if WIDE else x.dtype.element_ty
    start, left = place(numel, FLAT_TILE, UNIT)
    values = load_tile(x + start, left, FLAT_GROUP, FLAT_GROUPS, PARTIAL)
    half, factor, _ = _chain(values, x.dtype.element_ty, C)
    y = rounded(half * factor, C)
    store_raw(out + start, to_raw(y, out.dtype.element_ty), left, PARTIAL)


@triton.jit(do_not_specialize=["numel"])
def new_gelu_backward_kernel(x, grad, out, numel: tl.int64, WIDE: tl.constexpr, UNIT: tl.constexpr):
    """Compute the gradient of ``new_gelu_kernel`` as autograd does, operator by operator."""
    PARTIAL: tl.constexpr = UNIT != FLAT_TILE
    X: tl.constexpr = out.dtype.element_ty
    C: tl.constexpr = tl.float32 if WIDE else X
    start, left = place(numel, FLAT_TILE, UNIT)
    values = load_tile(x + start, left, FLAT_GROUP, FLAT_GROUPS, PARTIAL)
    g = load_tile(grad + start, left, FLAT_GROUP, FLAT_GROUPS, PARTIAL)
    half, factor, tanh = _chain(values, X, C)
    of_half = rounded(rounded(g * factor, C), X)
    of_tanh = rounded(g * half, C)
    if C == tl.float32:
        # torch's CUDA kernel is compiled with contraction.
        slope = tl.fma(-tanh, tanh, 1.0)
    else:
        slope = rounded(1.0 - rounded(tanh * tanh, C), C)
    of_inner = rounded(rounded(of_tanh * slope, C) * _SQRT_TWO_OVER_PI, C)
    of_cube = rounded(of_inner * _CUBIC, C)
    cube_slope = rounded(3.0 * rounded(values * values, C), C)
    through_cube = rounded(rounded(of_cube * cube_slope, C), X)
    # Add in the order of autograd's nodes: the sum, the cube, the half.
    total = rounded(rounded(of_inner, X) + through_cube, X)
    total += rounded(0.5 * of_half, X)
    store_raw(out + start, to_raw(total, X), left, PARTIAL)
