"""Triton kernels that compute a function and write, or read, the codes of its input in the same pass.

The functions are Triton's language, not Python.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from ..kernels.triton_ops import (
    any_flagged,
    decode_tile,
    element_index,
    encode_any_tile,
    encode_tile,
    load_codes,
    load_float,
    load_tile,
    restore_escapes,
    store_codes,
    store_raw,
    tile_offsets,
    to_raw,
)

# gelu(x) by tanh is x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x**3): nothing cancels.
_TWO_SQRT_TWO_OVER_PI = tl.constexpr(1.5957691216057308)
_CUBIC = tl.constexpr(0.044715)
# erfc(z) = (a1 t + ... + a5 t**5) exp(-z**2), t = 1 / (1 + p z), z >= 0, within 1.5e-7: Abramowitz and Stegun,
# 7.1.26. With z = |x| / sqrt(2) the exponential is the one of the derivative too. The a are halved here.
_P = tl.constexpr(0.3275911 * 0.7071067811865476)
_A1 = tl.constexpr(0.254829592 / 2)
_A2 = tl.constexpr(-0.284496736 / 2)
_A3 = tl.constexpr(1.421413741 / 2)
_A4 = tl.constexpr(-1.453152027 / 2)
_A5 = tl.constexpr(1.061405429 / 2)
_INV_SQRT_TWO_PI = tl.constexpr(0.3989422804014327)


@triton.jit
def _reciprocal(x):
    """Return 1 / x for x >= 1 within 4 ulp, in a quarter of the instructions of a correctly rounded division."""
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def _normal(x):
    """Return the normal distribution's Phi(x) and exp(-x**2 / 2)."""
    t = _reciprocal(tl.fma(tl.abs(x), _P, 1.0))
    exponential = tl.exp(-0.5 * x * x)
    polynomial = tl.fma(tl.fma(tl.fma(tl.fma(t, _A5, _A4), t, _A3), t, _A2), t, _A1)
    tail = polynomial * t * exponential
    return tl.where(x < 0, tail, 1.0 - tail), exponential


@triton.jit
def _sigmoid_two_u(x):
    return _reciprocal(1.0 + tl.exp(-_TWO_SQRT_TWO_OVER_PI * (x + _CUBIC * x * x * x)))


@triton.jit
def _gelu(x, TANH: tl.constexpr):
    if TANH:
        y = x * _sigmoid_two_u(x)
    else:
        phi, _ = _normal(x)
        y = x * phi
    return y


@triton.jit
def _gelu_derivative(x, TANH: tl.constexpr):
    if TANH:
        s = _sigmoid_two_u(x)
        d = s + x * s * (1.0 - s) * _TWO_SQRT_TWO_OVER_PI * (1.0 + 3.0 * _CUBIC * x * x)
    else:
        phi, exponential = _normal(x)
        d = phi + x * exponential * _INV_SQRT_TWO_PI
    return d


@triton.jit
def _restore(
    packed,
    start,
    left,
    numel,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    RUN: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    codes, parameters = load_codes(packed, start, left, numel, BITS, GROUP, GROUPS, RUN, PARTIAL)
    x = decode_tile(codes, parameters)
    if any_flagged(parameters):
        x = restore_escapes(x, codes, parameters, float("-inf"), float("inf"), float("nan"), BITS)
    return x


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
    COMPILED: tl.constexpr,
):
    """Compute gelu of [numel] elements and pack them; last tile first, as ``encode_kernel``."""
    TILE: tl.constexpr = GROUPS * GROUP
    DTYPE: tl.constexpr = out.dtype.element_ty
    RUN: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    start = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * TILE
    index, high = element_index(start, key1, GROUP, GROUPS)
    key = key0.to(tl.uint32)
    if numel - start >= TILE:
        values = load_tile(x + start, TILE, GROUP, GROUPS, False)
        codes, parameters = encode_tile(values, index, high, key, BITS, STOCHASTIC, False, COMPILED)
        store_codes(packed, codes, parameters, start, TILE, numel, BITS, RUN, False)
        store_raw(out + start, to_raw(_gelu(values, TANH), DTYPE, COMPILED), TILE, False)
    else:
        left = (numel - start).to(tl.int32)
        values = load_tile(x + start, left, GROUP, GROUPS, True)
        codes, parameters = encode_any_tile(values, index, high, key, BITS, STOCHASTIC, False)
        store_codes(packed, codes, parameters, start, left, numel, BITS, RUN, True)
        store_raw(out + start, to_raw(_gelu(values, TANH), DTYPE, COMPILED), left, True)


@triton.jit
def _gelu_backward(
    packed,
    grad,
    out,
    start,
    left,
    numel,
    TANH: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    COMPILED: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    RUN: tl.constexpr = 128 // out.dtype.element_ty.primitive_bitwidth
    x = _restore(packed, start, left, numel, BITS, GROUP, GROUPS, RUN, PARTIAL)
    g = load_tile(grad + start, left, GROUP, GROUPS, PARTIAL)
    store_raw(out + start, to_raw(g * _gelu_derivative(x, TANH), out.dtype.element_ty, COMPILED), left, PARTIAL)


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
    COMPILED: tl.constexpr,
):
    """Compute the gradient of gelu from codes."""
    TILE: tl.constexpr = GROUPS * GROUP
    start = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * TILE
    if numel - start >= TILE:
        _gelu_backward(packed, grad, out, start, TILE, numel, TANH, BITS, GROUP, GROUPS, COMPILED, False)
    else:
        left = (numel - start).to(tl.int32)
        _gelu_backward(packed, grad, out, start, left, numel, TANH, BITS, GROUP, GROUPS, COMPILED, True)


@triton.jit(do_not_specialize=["numel", "key0", "key1"])
def layer_norm_forward_kernel(
    x,
    weight,
    bias,
    out,
    packed,
    mean,
    rstd,
    numel: tl.int64,
    eps: tl.float32,
    key0: tl.uint32,
    key1: tl.uint32,
    N: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Normalise rows of N elements, whole groups, and pack them; a row a program, the last one first."""
    PARTIAL: tl.constexpr = N != GROUP * GROUPS
    RUN: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    start = row * N
    values = load_tile(x + start, N, GROUP, GROUPS, PARTIAL)
    index, high = element_index(start, key1, GROUP, GROUPS)
    codes, parameters = encode_tile(values, index, high, key0.to(tl.uint32), BITS, STOCHASTIC, False, COMPILED)
    store_codes(packed, codes, parameters, start, N, numel, BITS, RUN, PARTIAL)

    offsets = tile_offsets(GROUP, GROUPS)
    present = offsets < N
    average = tl.sum(tl.where(present, values, 0.0)) * (1.0 / N)
    centred = tl.where(present, values - average, 0.0)
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(centred * centred) * (1.0 / N) + eps))
    y = centred * scale
    if HAS_WEIGHT:
        y = y * load_float(weight, offsets, present)
    if HAS_BIAS:
        y = y + load_float(bias, offsets, present)
    store_raw(out + start, to_raw(y, out.dtype.element_ty, COMPILED), N, PARTIAL)
    tl.store(mean + row, average)
    tl.store(rstd + row, scale)


@triton.jit(do_not_specialize=["numel"])
def layer_norm_backward_kernel(
    packed,
    mean,
    rstd,
    weight,
    grad,
    out,
    grad_weight,
    grad_bias,
    numel: tl.int64,
    N: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Compute the gradients of a layer norm from codes.

    Program p takes the rows p, p + programs, ... and leaves its sums for weight and bias in row p of the
    [programs, N] results.
    """
    PARTIAL: tl.constexpr = N != GROUP * GROUPS
    RUN: tl.constexpr = 128 // out.dtype.element_ty.primitive_bitwidth
    offsets = tile_offsets(GROUP, GROUPS)
    present = offsets < N
    sum_weight = tl.zeros([GROUPS, GROUP], tl.float32)
    sum_bias = tl.zeros([GROUPS, GROUP], tl.float32)
    rows = (numel // N).to(tl.int32)
    row = tl.program_id(0)
    while row < rows:
        start = row.to(tl.int64) * N
        scale = tl.load(rstd + row)
        x = _restore(packed, start, N, numel, BITS, GROUP, GROUPS, RUN, PARTIAL)
        x = tl.where(present, (x - tl.load(mean + row)) * scale, 0.0)
        g = load_float(grad + start, offsets, present)
        sum_weight += g * x
        sum_bias += g
        if HAS_WEIGHT:
            g = g * load_float(weight, offsets, present)
        along = tl.sum(g * x) * (1.0 / N)
        average = tl.sum(g) * (1.0 / N)
        dx = (g - (x * along + average)) * scale
        store_raw(out + start, to_raw(dx, out.dtype.element_ty, COMPILED), N, PARTIAL)
        row += tl.num_programs(0)
    target = tl.program_id(0) * N + offsets
    tl.store(grad_weight + target, sum_weight, mask=present)
    tl.store(grad_bias + target, sum_bias, mask=present)
