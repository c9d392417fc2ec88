"""Triton kernels of silu(gate) * up: with codes of both operands, and exactly as torch computes it.

torch's CUDA kernels are compiled with contraction: where their formulas add to a product there is a ``tl.fma``.
The functions are Triton's language, not Python.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from ..kernels.triton_ops import element_index, encode_any_tile, encode_tile, load_tile, store_codes, store_raw, to_raw
from ._kernel_parts import FLAT_GROUP, FLAT_GROUPS, FLAT_TILE, reciprocal, restore, rounded


@triton.jit
def _silu(x, DTYPE: tl.constexpr, EXACT: tl.constexpr, COMPILED: tl.constexpr):
    """Return sigmoid(x), and silu(x) rounded to DTYPE; EXACT as torch's CUDA kernels compute them."""
    if EXACT:
        if COMPILED:
            divisor = 1.0 + libdevice.exp(-x)
        else:
            divisor = 1.0 + tl.exp(-x)
        sigmoid = tl.div_rn(1.0, divisor)
        silu = tl.div_rn(x, divisor)
    else:
        sigmoid = reciprocal(1.0 + tl.exp(-x))
        silu = x * sigmoid
    return sigmoid, rounded(silu, DTYPE, COMPILED)


@triton.jit
def _silu_mul_gradients(gate, up, grad, DTYPE: tl.constexpr, EXACT: tl.constexpr, COMPILED: tl.constexpr):
    """Return the gradients of gate and up, not yet rounded."""
    sigmoid, silu = _silu(gate, DTYPE, EXACT, COMPILED)
    of_silu = rounded(grad * up, DTYPE, COMPILED)
    return of_silu * sigmoid * tl.fma(gate, 1.0 - sigmoid, 1.0), grad * silu


@triton.jit
def _encode_and_store(
    values,
    packed,
    start,
    left,
    numel,
    key0,
    key1,
    BITS: tl.constexpr,
    RUN: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    COMPILED: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    index, high = element_index(start, key1, values.shape[1], values.shape[0])
    key = key0.to(tl.uint32)
    if PARTIAL:
        codes, parameters = encode_any_tile(values, index, high, key, BITS, STOCHASTIC, False)
    else:
        codes, parameters = encode_tile(values, index, high, key, BITS, STOCHASTIC, False, COMPILED)
    store_codes(packed, codes, parameters, start, left, numel, BITS, RUN, PARTIAL)


@triton.jit
def _silu_mul_forward(
    gate,
    up,
    out,
    packed_gate,
    packed_up,
    start,
    left,
    numel,
    key0,
    key1,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    PACK_UP: tl.constexpr,
    COMPILED: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    DTYPE: tl.constexpr = out.dtype.element_ty
    RUN: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    g = load_tile(gate + start, left, GROUP, GROUPS, PARTIAL)
    u = load_tile(up + start, left, GROUP, GROUPS, PARTIAL)
    # To the bit as torch: a deep model amplifies roundings to bfloat16 that turn, to 2.7 % of the gradient of a Llama.
    _, silu = _silu(g, DTYPE, True, COMPILED)
    store_raw(out + start, to_raw(silu * u, DTYPE, COMPILED), left, PARTIAL)
    _encode_and_store(g, packed_gate, start, left, numel, key0, key1, BITS, RUN, STOCHASTIC, COMPILED, PARTIAL)
    if PACK_UP:
        _encode_and_store(u, packed_up, start, left, numel, key0, key1, BITS, RUN, STOCHASTIC, COMPILED, PARTIAL)


@triton.jit(do_not_specialize=["numel", "key0", "key1"])
def silu_mul_forward_kernel(
    gate,
    up,
    out,
    packed_gate,
    packed_up,
    numel: tl.int64,
    key0: tl.uint32,
    key1: tl.uint32,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    PACK_UP: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Compute silu(gate) * up of [numel] elements and pack both, or gate alone."""
    TILE: tl.constexpr = GROUPS * GROUP
    start = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * TILE
    if numel - start >= TILE:
        _silu_mul_forward(
            gate,
            up,
            out,
            packed_gate,
            packed_up,
            start,
            TILE,
            numel,
            key0,
            key1,
            BITS,
            GROUP,
            GROUPS,
            STOCHASTIC,
            PACK_UP,
            COMPILED,
            False,
        )
    else:
        left = (numel - start).to(tl.int32)
        _silu_mul_forward(
            gate,
            up,
            out,
            packed_gate,
            packed_up,
            start,
            left,
            numel,
            key0,
            key1,
            BITS,
            GROUP,
            GROUPS,
            STOCHASTIC,
            PACK_UP,
            COMPILED,
            True,
        )


@triton.jit
def _load_up(
    up,
    start,
    left,
    numel,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    RUN: tl.constexpr,
    PACKED: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    if PACKED:
        values = restore(up, start, left, numel, BITS, GROUP, GROUPS, RUN, PARTIAL)
    else:
        values = load_tile(up + start, left, GROUP, GROUPS, PARTIAL)
    return values


@triton.jit
def _silu_mul_backward(
    packed_gate,
    up,
    grad,
    grad_gate,
    grad_up,
    start,
    left,
    numel,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    UP_PACKED: tl.constexpr,
    COMPILED: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    DTYPE: tl.constexpr = grad_gate.dtype.element_ty
    RUN: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    gate = restore(packed_gate, start, left, numel, BITS, GROUP, GROUPS, RUN, PARTIAL)
    up = _load_up(up, start, left, numel, BITS, GROUP, GROUPS, RUN, UP_PACKED, PARTIAL)
    g = load_tile(grad + start, left, GROUP, GROUPS, PARTIAL)
    of_gate, of_up = _silu_mul_gradients(gate, up, g, DTYPE, False, COMPILED)
    store_raw(grad_gate + start, to_raw(of_gate, DTYPE, COMPILED), left, PARTIAL)
    store_raw(grad_up + start, to_raw(of_up, DTYPE, COMPILED), left, PARTIAL)


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
    COMPILED: tl.constexpr,
):
    """Compute the gradients of silu(gate) * up from codes, those of up or up itself."""
    TILE: tl.constexpr = GROUPS * GROUP
    start = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * TILE
    if numel - start >= TILE:
        _silu_mul_backward(
            packed_gate,
            up,
            grad,
            grad_gate,
            grad_up,
            start,
            TILE,
            numel,
            BITS,
            GROUP,
            GROUPS,
            UP_PACKED,
            COMPILED,
            False,
        )
    else:
        left = (numel - start).to(tl.int32)
        _silu_mul_backward(
            packed_gate,
            up,
            grad,
            grad_gate,
            grad_up,
            start,
            left,
            numel,
            BITS,
            GROUP,
            GROUPS,
            UP_PACKED,
            COMPILED,
            True,
        )


@triton.jit
def _silu_mul_redo(
    packed_gate,
    up,
    out,
    start,
    left,
    numel,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    UP_PACKED: tl.constexpr,
    COMPILED: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    DTYPE: tl.constexpr = out.dtype.element_ty
    RUN: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    gate = restore(packed_gate, start, left, numel, BITS, GROUP, GROUPS, RUN, PARTIAL)
    up = _load_up(up, start, left, numel, BITS, GROUP, GROUPS, RUN, UP_PACKED, PARTIAL)
    _, silu = _silu(gate, DTYPE, False, COMPILED)
    store_raw(out + start, to_raw(silu * up, DTYPE, COMPILED), left, PARTIAL)


@triton.jit(do_not_specialize=["numel"])
def silu_mul_redo_kernel(
    packed_gate,
    up,
    out,
    numel: tl.int64,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    UP_PACKED: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Compute silu(gate) * up from codes, those of up or up itself."""
    TILE: tl.constexpr = GROUPS * GROUP
    start = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * TILE
    if numel - start >= TILE:
        _silu_mul_redo(packed_gate, up, out, start, TILE, numel, BITS, GROUP, GROUPS, UP_PACKED, COMPILED, False)
    else:
        left = (numel - start).to(tl.int32)
        _silu_mul_redo(packed_gate, up, out, start, left, numel, BITS, GROUP, GROUPS, UP_PACKED, COMPILED, True)


@triton.jit
def _silu_mul_exact(gate, up, out, start, left, COMPILED: tl.constexpr, PARTIAL: tl.constexpr):
    DTYPE: tl.constexpr = gate.dtype.element_ty
    g = load_tile(gate + start, left, FLAT_GROUP, FLAT_GROUPS, PARTIAL)
    u = load_tile(up + start, left, FLAT_GROUP, FLAT_GROUPS, PARTIAL)
    _, silu = _silu(g, DTYPE, True, COMPILED)
    y = rounded(silu * u, DTYPE, COMPILED)
    store_raw(out + start, to_raw(y, out.dtype.element_ty, COMPILED), left, PARTIAL)


@triton.jit(do_not_specialize=["numel"])
def silu_mul_exact_kernel(gate, up, out, numel: tl.int64, COMPILED: tl.constexpr):
    """Compute silu(gate) * up of [numel] elements."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * FLAT_TILE
    if numel - start >= FLAT_TILE:
        _silu_mul_exact(gate, up, out, start, FLAT_TILE, COMPILED, False)
    else:
        _silu_mul_exact(gate, up, out, start, (numel - start).to(tl.int32), COMPILED, True)


@triton.jit
def _silu_mul_exact_backward(
    gate, up, grad, grad_gate, grad_up, start, left, COMPILED: tl.constexpr, PARTIAL: tl.constexpr
):
    DTYPE: tl.constexpr = gate.dtype.element_ty
    a = load_tile(gate + start, left, FLAT_GROUP, FLAT_GROUPS, PARTIAL)
    b = load_tile(up + start, left, FLAT_GROUP, FLAT_GROUPS, PARTIAL)
    g = load_tile(grad + start, left, FLAT_GROUP, FLAT_GROUPS, PARTIAL)
    of_gate, of_up = _silu_mul_gradients(a, b, g, DTYPE, True, COMPILED)
    store_raw(grad_gate + start, to_raw(of_gate, DTYPE, COMPILED), left, PARTIAL)
    store_raw(grad_up + start, to_raw(of_up, DTYPE, COMPILED), left, PARTIAL)


@triton.jit(do_not_specialize=["numel"])
def silu_mul_exact_backward_kernel(
    gate,
    up,
    grad,
    grad_gate,
    grad_up,
    numel: tl.int64,
    COMPILED: tl.constexpr,
):
    """Compute the gradients of silu(gate) * up."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * FLAT_TILE
    if numel - start >= FLAT_TILE:
        _silu_mul_exact_backward(gate, up, grad, grad_gate, grad_up, start, FLAT_TILE, COMPILED, False)
    else:
        left = (numel - start).to(tl.int32)
        _silu_mul_exact_backward(gate, up, grad, grad_gate, grad_up, start, left, COMPILED, True)
