"""The packed format as Triton functions on tiles of shape [groups, group_size].

``reference.py`` defines the results. An ordinary tile takes the fast path: no masks, no clamps, no special values. The
fast path detects other tiles (see ``encode_ordinary_tile``); a scalar branch then encodes the tile on the slow path.

The interpreter has no fused multiply-add and truncates in conversions to bfloat16: ``COMPILED`` is false there.
The functions are Triton's language, not Python.

Longer than 400 lines: packing and restoring are each other's inverse, and share their exceptions.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from .. import format as fmt

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether the kernels below run in Triton's interpreter, on CPU tensors."""
COMPILED = tl.constexpr(not INTERPRETED)
"""The opposite, for kernels: of a module's globals they read constexpr values alone."""

_MAX_FINITE = tl.constexpr(fmt.MAX_FINITE)
_MAX_FINITE_BITS = tl.constexpr(fmt.float32_bits(fmt.MAX_FINITE))
_MIN_STEP = tl.constexpr(fmt.MIN_STEP)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_ALIGNMENT = tl.constexpr(fmt.ALIGNMENT)

# x + 1.5 * 2**23 rounds x half to even to an integer in the low bits, without a conversion.
ROUNDER = tl.constexpr(12582912.0)
_UNIFORM_STEP = tl.constexpr(2.0**-24)
_ROUNDER_BITS = tl.constexpr(fmt.float32_bits(12582912.0))
# Above the bits of any code plus ROUNDER, below the bits of NaN.
NO_CODE_BITS = tl.constexpr(fmt.float32_bits(2.0**24))


@triton.jit
def _bits(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _mix(x):
    """Chris Wellons' lowbias32."""
    x = x ^ (x >> 16)
    x = x * tl.full([], 0x21F0AAAD, tl.uint32)
    x = x ^ (x >> 15)
    x = x * tl.full([], 0x735A2D97, tl.uint32)
    return x ^ (x >> 15)


@triton.jit
def tile_offsets(GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Return the offsets of a tile's elements, [GROUPS, GROUP]."""
    return tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def load_float(pointer, offsets, mask=None):
    """Load as float32; 0 where the mask is false."""
    other = None if mask is None else 0
    if pointer.dtype.element_ty == tl.bfloat16:
        raw = tl.load(pointer.to(tl.pointer_type(tl.uint16), bitcast=True) + offsets, mask=mask, other=other)
        x = _float(raw.to(tl.uint32) << 16)
    else:
        x = tl.load(pointer + offsets, mask=mask, other=other).to(tl.float32)
    return x


@triton.jit
def load_tile(source, left, GROUP: tl.constexpr, GROUPS: tl.constexpr, PARTIAL: tl.constexpr):
    """Load [GROUPS, GROUP] elements as float32; of a PARTIAL tile the first ``left`` exist.

    The last element fills the absent positions, to leave the minimum and maximum of the last group unchanged.
    """
    offsets = tile_offsets(GROUP, GROUPS)
    if PARTIAL:
        present = offsets < left
        x = tl.where(present, load_float(source, offsets, present), load_float(source, left - 1))
    else:
        x = load_float(source, offsets)
    return x


@triton.jit
def to_raw(x, DTYPE: tl.constexpr):
    """Return the bits of float32 values rounded half to even to DTYPE."""
    if DTYPE == tl.float32:
        raw = _bits(x)
    elif COMPILED or DTYPE == tl.float16:
        raw = x.to(DTYPE).to(tl.uint16, bitcast=True)
    else:
        bits = tl.where(x == x, _bits(x), 0x7FC00000)
        raw = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).to(tl.uint16)
    return raw


@triton.jit
def _round_down_to_bfloat16(x):
    bits = _bits(x)
    return _float((bits + tl.where(x < 0, 0xFFFF, 0).to(tl.uint32)) & 0xFFFF0000)


@triton.jit
def _round_up_positive_to_bfloat16(x):
    return _float((_bits(x) + 0xFFFF) & 0xFFFF0000)


@triton.jit
def negative(x):
    """Return -x as a product, folded into the instruction that reads -x; Triton's -x is a separate 0 - x."""
    return x * -1.0


@triton.jit
def reciprocal(x):
    """Return 1 / x within an ulp for normal x up to 2**126: one instruction, where a division takes nine."""
    if COMPILED:
        result = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        result = 1.0 / x
    return result


@triton.jit
def power_of_two(x):
    """Return 2 ** x within 2 ulp, below 2**-126 zero: one instruction, where ``tl.exp2`` takes four for subnormals."""
    if COMPILED:
        result = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        result = tl.exp2(x)
    return result


@triton.jit
def _reciprocal_of_step(step):
    """Return the correctly rounded 1 / step, a bfloat16 from MIN_STEP to below 2**126, or NaN.

    A step of Newton's method leaves a relative error of 2**-46. The reciprocal of an 8-bit number is a float32 or at
    least 2**-33 away from the midpoint of two.
    """
    if COMPILED:
        close = reciprocal(step)
        result = tl.fma(close, tl.fma(negative(step), close, 1.0), close)
    else:
        result = tl.div_rn(1.0, step)
    return result


@triton.jit
def divide(a, b, reciprocal, BY_RECIPROCAL: tl.constexpr):
    """Return a / b, ``reciprocal`` being 1 / b.

    BY_RECIPROCAL takes one multiplication and two fused multiply-adds; ``tl.div_rn`` takes about nine instructions and
    a branch for each element, and the next elements wait for the branch. The quotient is correctly rounded (Markstein's
    theorem) if ``reciprocal`` is and the remainder is exact: if the last bit of the quotient times the last bit of
    ``b`` is 2**-149 or more, and the quotient normal. A zero keeps the sign.
    """
    if BY_RECIPROCAL:
        quotient = a * reciprocal
        result = tl.fma(tl.fma(quotient, b, negative(a)), negative(reciprocal), quotient)
    else:
        result = tl.div_rn(a, b)
    return result


@triton.jit
def uniform(index, high, key):
    """Return the generator's numbers at the indices of ``element_index``; ``reference.uniform`` defines them."""
    return (_mix(_mix(index ^ key) ^ high) >> 8).to(tl.float32) * _UNIFORM_STEP


@triton.jit
def _round_codes(quotient, index, high, key, STOCHASTIC: tl.constexpr):
    """Round stochastically to an integer in float32; for rounding to nearest, leave the quotient to ``ROUNDER``."""
    if STOCHASTIC:
        # Compiled tl.floor flushes subnormal numbers.
        nearest = (quotient + ROUNDER) - ROUNDER
        whole = nearest - (nearest > quotient).to(tl.float32)
        quotient = whole + (uniform(index, high, key) < quotient - whole).to(tl.float32)
    return quotient


@triton.jit
def encode_any_tile(x, index, high, key, BITS: tl.constexpr, STOCHASTIC: tl.constexpr, KEEP_POSITIVE: tl.constexpr):
    """Encode a tile with or without flagged groups, step by step as ``reference.quantize``."""
    magnitude = _bits(x) & 0x7FFFFFFF
    finite = magnitude < _INFINITY_BITS
    flagged = tl.max(magnitude, 1, keep_dims=True) > _MAX_FINITE_BITS
    clamped = tl.where(finite, tl.minimum(tl.maximum(x, -_MAX_FINITE), _MAX_FINITE), 0.0)
    lowest = tl.min(tl.where(finite, clamped, float("inf")), 1, keep_dims=True)
    highest = tl.max(tl.where(finite, clamped, float("-inf")), 1, keep_dims=True)
    empty = lowest > highest
    lowest = tl.where(empty, 0.0, lowest)
    highest = tl.where(empty, 0.0, highest)

    ORDINARY: tl.constexpr = (1 << BITS) - 1
    FLAGGED: tl.constexpr = (1 << BITS) - 4
    largest = tl.where(flagged, FLAGGED * 1.0, ORDINARY * 1.0)
    minimum = _round_down_to_bfloat16(lowest + 0.0)
    step = _round_up_positive_to_bfloat16(tl.div_rn(highest - minimum, tl.maximum(largest, 1.0)))
    step = tl.maximum(step, _MIN_STEP)
    rounded = _round_codes(tl.div_rn(clamped - minimum, step), index, high, key, STOCHASTIC)
    if KEEP_POSITIVE:
        rounded = tl.where((minimum == 0.0) & (clamped > 0.0), tl.maximum(rounded, 1.0), rounded)
    # Clamping before the final rounding gives the same codes: both bounds are integers.
    codes = _bits(tl.minimum(tl.maximum(rounded, 0.0), largest) + ROUNDER)
    codes = tl.where(x == float("-inf"), FLAGGED + 1, codes)
    codes = tl.where(x == float("inf"), FLAGGED + 2, codes)
    codes = tl.where(x != x, FLAGGED + 3, codes)
    step_bits = tl.where(empty, 0, _bits(step)) | (flagged.to(tl.uint32) << 31)
    return codes.to(tl.uint8), (_bits(minimum) >> 16) | step_bits


@triton.jit
def encode_ordinary_tile(
    x,
    index,
    high,
    key,
    BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    KEEP_POSITIVE: tl.constexpr,
):
    """Return codes in the low bits of uint32 [groups, group_size], and parameters (uint32) [groups, 1].

    If ``without_code`` is true for the codes, the tile is not ordinary: encode the tile by ``encode_any_tile``.
    ``index`` is the low half of the elements' indices, ``high`` the keyed hash of the high half.
    """
    LEVELS: tl.constexpr = (1 << BITS) - 1
    lowest = tl.min(x, 1, keep_dims=True)
    highest = tl.max(x, 1, keep_dims=True)
    minimum = _round_down_to_bfloat16(lowest + 0.0)
    # Exact for steps from MIN_STEP on: the last bit of the quotient is at least 2**-141.
    step = divide(highest - minimum, LEVELS * 1.0, 1.0 / LEVELS, COMPILED)
    step = tl.maximum(_round_up_positive_to_bfloat16(step), _MIN_STEP)
    parameters = (_bits(minimum) >> 16) | _bits(step)
    # A NaN divisor marks a group with a magnitude above _MAX_FINITE, an infinity or a NaN.
    ordinary = tl.maximum(highest, -lowest) <= _MAX_FINITE
    divisor = tl.where(ordinary, step, float("nan"))
    # Exact for quotients from 1/2 on: the last bit of the quotient is at least 2**-24, of the step 2**-125. A smaller
    # quotient may be off by an ulp: rounding to nearest gives the same code, stochastic rounding may not.
    quotient = divide(x - minimum, divisor, _reciprocal_of_step(divisor), COMPILED and not STOCHASTIC)
    # No clamp: minimum is rounded down and step up, so the quotients of an ordinary group are in [0, LEVELS].
    bits = _bits(_round_codes(quotient, index, high, key, STOCHASTIC) + ROUNDER)
    if KEEP_POSITIVE:
        bits = tl.where((minimum == 0.0) & (x > 0.0), tl.maximum(bits, _ROUNDER_BITS + 1), bits)
    return bits, parameters


@triton.jit
def without_code(bits):
    """Return whether ``encode_ordinary_tile`` met a tile that is not ordinary."""
    return tl.max(bits) >= NO_CODE_BITS


@triton.jit
def encode_tile(
    x,
    index,
    high,
    key,
    BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    KEEP_POSITIVE: tl.constexpr,
):
    """Return codes (uint8) [groups, group_size] and parameters (uint32) [groups, 1] of a float32 tile."""
    bits, parameters = encode_ordinary_tile(x, index, high, key, BITS, STOCHASTIC, KEEP_POSITIVE)
    codes = bits.to(tl.uint8)
    if without_code(bits):
        codes, parameters = encode_any_tile(x, index, high, key, BITS, STOCHASTIC, KEEP_POSITIVE)
    return codes, parameters


@triton.jit
def decode_tile(codes, parameters):
    """Return the float32 values of ordinary codes (uint8) [groups, group_size], parameters (uint32) [groups, 1]."""
    # 2**23 + code has the code in the low bits: an exact conversion without a conversion instruction.
    minimum, step = _minimum_and_step(parameters)
    return (_float(codes.to(tl.uint32) | 0x4B000000) - 8388608.0) * step + minimum


@triton.jit
def _minimum_and_step(parameters):
    return _float(parameters << 16), _float(parameters & 0x7FFF0000)


@triton.jit
def bounds_of(parameters, BITS: tl.constexpr):
    """Return a lower and an upper bound of the elements of each ordinary group, float32 [groups, 1] each."""
    minimum, step = _minimum_and_step(parameters)
    return minimum, tl.fma(step, ((1 << BITS) - 1) * 1.0, minimum)


@triton.jit
def any_flagged(parameters):
    """Return whether the tile has a flagged group."""
    return tl.max(parameters) >= 0x80000000


@triton.jit
def restore_escapes(values, codes, parameters, MINUS_INF, INF, NAN, BITS: tl.constexpr):
    """Replace the values of escape codes in flagged groups by -inf, inf and NaN."""
    FLAGGED: tl.constexpr = (1 << BITS) - 4
    escape = tl.where(parameters >= 0x80000000, codes.to(tl.int32) - FLAGGED, 0)
    values = tl.where(escape == 1, MINUS_INF, values)
    values = tl.where(escape == 2, INF, values)
    return tl.where(escape == 3, NAN, values)


@triton.jit
def _parameter_pointer(buffer, start, numel, BITS: tl.constexpr, GROUP: tl.constexpr):
    begin = (((numel * BITS + 7) >> 3) + (_ALIGNMENT - 1)) & -_ALIGNMENT
    return (buffer + begin).to(tl.pointer_type(tl.uint32), bitcast=True) + start // GROUP


@triton.jit
def _pack(codes, BITS: tl.constexpr):
    if BITS == 8:
        return codes
    PER_BYTE: tl.constexpr = 8 // BITS
    SHAPE: tl.constexpr = [codes.shape[0], codes.shape[1] // PER_BYTE, PER_BYTE]
    shifts = tl.arange(0, PER_BYTE)[None, None, :] * BITS
    return tl.sum(tl.reshape(codes, SHAPE).to(tl.uint32) << shifts.to(tl.uint32), 2).to(tl.uint8)


@triton.jit
def store_codes(
    out, codes, parameters, start, left, numel, BITS: tl.constexpr, RUN: tl.constexpr, PARTIAL: tl.constexpr
):
    """Store the tile from element ``start`` of ``numel``; a PARTIAL tile has ``left`` elements.

    RUN is the number of consecutive elements of a thread, as in ``load_codes``.
    """
    GROUPS: tl.constexpr = codes.shape[0]
    GROUP: tl.constexpr = codes.shape[1]
    PER_BYTE: tl.constexpr = 8 // BITS
    group = tl.arange(0, GROUPS)[:, None]
    parameter_pointer = _parameter_pointer(out, start, numel, BITS, GROUP) + group
    byte = tile_offsets(GROUP // PER_BYTE, GROUPS)
    code_pointer = tl.max_contiguous(out + start // PER_BYTE + byte, [1, RUN // PER_BYTE])
    if PARTIAL:
        # The zero bytes up to the parameters are codes of absent elements.
        # Written as a product, so the compiler knows the alignment: consecutive codes are present or absent together.
        end = (((left * BITS + 7) >> 3) + (_ALIGNMENT - 1)) // _ALIGNMENT * _ALIGNMENT
        codes = tl.where(tile_offsets(GROUP, GROUPS) < left, codes, 0)
        tl.store(code_pointer, _pack(codes, BITS), mask=byte < end)
        tl.store(parameter_pointer, parameters, mask=group * GROUP < left)
    else:
        tl.store(code_pointer, _pack(codes, BITS))
        tl.store(parameter_pointer, parameters)


@triton.jit
def _unpack(packed, BITS: tl.constexpr):
    if BITS == 8:
        return packed
    PER_BYTE: tl.constexpr = 8 // BITS
    shifts = tl.arange(0, PER_BYTE)[None, None, :] * BITS
    codes = (packed[:, :, None].to(tl.uint32) >> shifts.to(tl.uint32)) & ((1 << BITS) - 1)
    return tl.reshape(codes, [packed.shape[0], packed.shape[1] * PER_BYTE]).to(tl.uint8)


@triton.jit
def load_codes(
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
    """Load the codes and parameters of a tile from ``store_codes``.

    Set RUN to the number of elements in a thread's 16-byte access to the accompanying tensor: the compiler then needs
    no exchange through shared memory.
    """
    PER_BYTE: tl.constexpr = 8 // BITS
    group = tl.arange(0, GROUPS)[:, None]
    parameter_pointer = _parameter_pointer(packed, start, numel, BITS, GROUP) + group
    byte = tile_offsets(GROUP // PER_BYTE, GROUPS)
    code_pointer = tl.max_contiguous(packed + start // PER_BYTE + byte, [1, RUN // PER_BYTE])
    if PARTIAL:
        codes = tl.load(code_pointer, mask=byte * PER_BYTE < left, other=0)
        parameters = tl.load(parameter_pointer, mask=group * GROUP < left, other=0)
    else:
        codes = tl.load(code_pointer)
        parameters = tl.load(parameter_pointer)
    return _unpack(codes, BITS), parameters


@triton.jit
def store_raw(pointer, raw, left, PARTIAL: tl.constexpr):
    """Store a tile of ``to_raw``."""
    GROUPS: tl.constexpr = raw.shape[0]
    GROUP: tl.constexpr = raw.shape[1]
    offsets = tile_offsets(GROUP, GROUPS)
    target = pointer.to(tl.pointer_type(raw.dtype), bitcast=True) + offsets
    if PARTIAL:
        tl.store(target, raw, mask=offsets < left)
    else:
        tl.store(target, raw)


@triton.jit
def element_index(start, key1, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Return the low halves of a tile's element indices and the keyed hash of their common high half."""
    offsets = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    high = (start >> 32).to(tl.uint32) * 0x9E3779B9 + key1.to(tl.uint32)
    return start.to(tl.uint32) + offsets.to(tl.uint32), high
