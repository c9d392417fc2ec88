"""The format's definition against a scalar oracle in exact fractions, and the properties it promises."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from format_oracle import (
    contents,
    float32,
    oracle_bytes,
    oracle_groups,
    oracle_values,
    parameters,
    randn,
    rounded,
    same,
    special,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pyactcomp.codec import format as fmt
from pyactcomp.codec import reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 63, 64, 65)
WIDTHS = [(bits, group_size) for bits in fmt.BITS for group_size in fmt.GROUP_SIZES]


@pytest.mark.parametrize(("bits", "group_size"), WIDTHS)
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_quantize_equals_the_exact_oracle_byte_for_byte(bits: int, group_size: int, stochastic: bool) -> None:
    for kind in range(8):
        dtype = DTYPES[kind % 3] if kind < 3 else torch.float32
        seed = 2**63 + kind
        x = special(2 * group_size + 7 + kind, kind).to(dtype)
        packed = reference.quantize(x, bits=bits, group_size=group_size, stochastic=stochastic, seed=seed)
        groups = oracle_groups(x, bits, group_size, seed if stochastic else None)
        assert contents(packed) == oracle_bytes(groups, bits), f"kind {kind}"
        restored = reference.dequantize(packed, x.numel(), bits=bits, group_size=group_size)
        assert same(restored, torch.tensor(oracle_values(groups, bits))), f"kind {kind}"


@given(
    pattern=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=70),
    bits=st.sampled_from(fmt.BITS),
    seed=st.none() | st.integers(0, 2**64 - 1),
    keep_positive=st.booleans(),
)
def test_quantize_equals_the_oracle_for_any_bit_pattern(
    pattern: list[int], bits: int, seed: int | None, keep_positive: bool
) -> None:
    signed = [p - 2**32 if p >= 2**31 else p for p in pattern]
    x = torch.tensor(signed, dtype=torch.int32).view(torch.float32)
    packed = reference.quantize(x, bits=bits, stochastic=seed is not None, seed=seed or 0, keep_positive=keep_positive)
    groups = oracle_groups(x, bits, 64, seed, keep_positive)
    assert contents(packed) == oracle_bytes(groups, bits)
    assert same(reference.dequantize(packed, x.numel(), bits=bits), torch.tensor(oracle_values(groups, bits)))


def test_oracle_rounding_agrees_with_float32_and_bfloat16_conversion() -> None:
    # The oracle itself against torch's conversions, subnormal numbers and ties included.
    x = torch.cat([randn(500, 1).double() * 2.0**e for e in (-160, -149, -140, -126, -30, 0, 100)])
    expected = x.to(torch.float32)
    assert [float(float32(Fraction(v))) for v in x.tolist()] == expected.tolist()
    ties = torch.arange(0, 1000, dtype=torch.float64) * 2.0**-8 + 1
    assert [float(rounded(Fraction(v), 8, round)) for v in ties.tolist()] == ties.bfloat16().tolist()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("bits", "group_size"), WIDTHS)
def test_packed_size_is_codes_padded_to_16_bytes_and_4_bytes_a_group(n: int, bits: int, group_size: int) -> None:
    code_bytes = math.ceil(n * bits / 8)
    expected = 16 * math.ceil(code_bytes / 16) + 4 * math.ceil(n / group_size)
    packed = reference.quantize(randn(n), bits=bits, group_size=group_size)
    assert packed.dtype is torch.uint8
    assert packed.shape == (expected,)
    assert fmt.packed_nbytes(n, bits, group_size) == expected
    assert packed[code_bytes : 16 * math.ceil(code_bytes / 16)].sum() == 0
    restored = reference.dequantize(packed, n, bits=bits, group_size=group_size)
    error = (restored.double() - randn(n).double()).abs()
    assert (error <= reference.error_bound(randn(n), bits=bits, group_size=group_size)).all()


def test_packed_size_is_exact_beyond_two_to_the_31() -> None:
    assert fmt.packed_nbytes(2**33 + 1, 8, 64) == 2**33 + 16 + 4 * (2**27 + 1)
    assert fmt.packed_nbytes(2**33 + 1, 1, 64) == 2**30 + 1


# "Error to reach": relative L2, float32 in and out, 2**20 elements.


def scattered(x: Tensor) -> Tensor:
    place = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(1))[:256]
    return x.index_copy(0, place, x[place] * 60)


ERRORS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "randn": (lambda x: x, 0.0055),
    "randn-256-times-60": (scattered, 0.0078),
    "gelu": (torch.nn.functional.gelu, 0.0045),
    "relu": (torch.relu, 0.0029),
    "softmax": (lambda x: (2 * x).view(-1, 1024).softmax(dim=1).view(-1), 0.0070),
    "randn-plus-300": (lambda x: x + 300, 0.0070),
}


@pytest.mark.parametrize("name", ERRORS)
def test_relative_error_reaches_the_bar(name: str) -> None:
    make, bar = ERRORS[name]
    x = make(randn(2**20))
    error = (reference.dequantize(reference.quantize(x), x.numel()).double() - x.double()).norm()
    # An offset carries no information: there the error is compared with the spread.
    scale = (x.double() - x.double().mean()).norm() if name == "randn-plus-300" else x.double().norm()
    assert 0 < float(error / scale) <= bar


# The bound.


@given(
    n=st.integers(0, 400),
    seed=st.integers(0, 2**32 - 1),
    exponent=st.floats(-30, 37),
    offset=st.sampled_from((0.0, 1.0, -300.0)),
    dtype=st.sampled_from(DTYPES),
    out=st.sampled_from(DTYPES),
    bits=st.sampled_from(fmt.BITS),
    group_size=st.sampled_from(fmt.GROUP_SIZES),
    stochastic=st.booleans(),
)
def test_error_stays_within_the_bound(
    n: int,
    seed: int,
    exponent: float,
    offset: float,
    dtype: torch.dtype,
    out: torch.dtype,
    bits: int,
    group_size: int,
    stochastic: bool,
) -> None:
    limit = 65504.0 if torch.float16 in (dtype, out) else fmt.MAX_FINITE
    x = ((randn(n, seed).double() + offset) * 10**exponent).clamp(-limit, limit).to(dtype)
    packed = reference.quantize(x, bits=bits, group_size=group_size, stochastic=stochastic, seed=seed)
    restored = reference.dequantize(packed, n, dtype=out, bits=bits, group_size=group_size)
    bound = reference.error_bound(x, bits=bits, group_size=group_size, stochastic=stochastic, dtype=out)
    assert restored.dtype is out
    assert ((restored.double() - x.double()).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", fmt.BITS)
def test_error_bound_is_tight_enough_to_catch_a_step_two_percent_too_large(bits: int, dtype: torch.dtype) -> None:
    n = 2**16
    x = randn(n, dtype=dtype)
    packed = reference.quantize(x, bits=bits)
    minimum, _ = parameters(packed, n, bits)
    exact = reference.dequantize(packed, n, bits=bits).double()
    base = minimum.double().repeat_interleave(64)
    bound = reference.error_bound(x, bits=bits)
    assert float(((exact - x.double()).abs() / bound).max()) > 0.99
    mutated = (exact - base) * 1.02 + base
    assert float(((mutated - x.double()).abs() / bound).max()) > 1


def test_error_bound_is_tight_enough_to_catch_a_rounding_that_is_not_to_nearest() -> None:
    x = randn(2**14)
    packed = reference.quantize(x, stochastic=True, seed=1)
    error = (reference.dequantize(packed, x.numel()).double() - x.double()).abs()
    assert (error <= reference.error_bound(x, stochastic=True)).all()
    assert (error > reference.error_bound(x)).any()


@pytest.mark.parametrize("bits", fmt.BITS)
def test_error_bound_needs_its_ulps_an_ulp_beside_the_middle_of_two_codes(bits: int) -> None:
    groups = 4000
    generator = torch.Generator().manual_seed(bits)
    ends = torch.rand(groups, 2, generator=generator) * torch.tensor([-1.0, 1.0])
    x = torch.cat([ends, ends[:, :1].expand(-1, 62)], dim=1)
    minimum, step = (p.unsqueeze(1) for p in parameters(reference.quantize(x.view(-1), bits=bits), x.numel(), bits))
    code = torch.randint(0, 2**bits - 1, (groups, 62), generator=generator)
    middle = minimum + (code + 0.5) * step
    aside = torch.nextafter(middle, torch.where(code % 2 == 0, math.inf, -math.inf))
    x[:, 2:] = aside.clamp(ends[:, :1], ends[:, 1:])
    restored = reference.dequantize(reference.quantize(x.view(-1), bits=bits), x.numel(), bits=bits).view_as(x)
    excess = (restored.double() - x.double()).abs() - step.double() / 2
    ulps = excess / (x.double().abs().amax(dim=1, keepdim=True) * 2.0**-23)
    # The quotient rounds to a tie, and the even code is the farther one: an ulp of the element. Never more than two.
    assert 0.5 < float(ulps.max()) <= 2


# Non-finite values and the ends of the range.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "group_size"), [(b, g) for b, g in WIDTHS if b != 2])
def test_nonfinite_values_return_and_spoil_no_other_element(bits: int, group_size: int, dtype: torch.dtype) -> None:
    n = 3 * group_size + 5
    clean = randn(n, dtype=dtype)
    x = clean.clone()
    where = [group_size, group_size + 31, 2 * group_size - 1, n - 1]
    x[where] = torch.tensor([math.inf, -math.inf, math.nan, -math.inf], dtype=dtype)
    packed = reference.quantize(x, bits=bits, group_size=group_size)
    restored = reference.dequantize(packed, n, dtype=dtype, bits=bits, group_size=group_size)

    assert same(restored[where], x[where])
    others = torch.ones(n, dtype=torch.bool).index_fill(0, torch.tensor(where), False)
    minimum, step = parameters(packed, n, bits)
    assert (step < 0).tolist() == [False, True, False, True]
    # The step of a flagged group follows from its finite values alone, spread over three codes fewer.
    values = x[group_size : 2 * group_size].float()
    values = values[values.isfinite()]
    spread = float(values.max()) - float(minimum[1])
    assert spread / (2**bits - 4) <= -float(step[1]) <= spread / (2**bits - 4) * (1 + 2.0**-7)
    bound = reference.error_bound(x, bits=bits, group_size=group_size, dtype=dtype)
    assert ((restored.double() - x.double()).abs()[others] <= bound[others]).all()
    assert restored[others].isfinite().all()
    # Untouched groups decode as if there were no such value anywhere.
    alone = reference.dequantize(
        reference.quantize(clean, bits=bits, group_size=group_size), n, dtype=dtype, bits=bits, group_size=group_size
    )
    for group in (0, 2):
        part = slice(group * group_size, (group + 1) * group_size)
        assert torch.equal(restored[part], alone[part])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_finite_values_of_a_flagged_group_in_2_bits_return_as_its_minimum(dtype: torch.dtype) -> None:
    x = randn(64, dtype=dtype)
    x[[3, 10, 63]] = torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype)
    packed = reference.quantize(x, bits=2)
    restored = reference.dequantize(packed, 64, bits=2)
    lowest = float(x[x.isfinite()].min())
    minimum = float(rounded(Fraction(lowest), 8, math.floor))
    expected = torch.where(x.isfinite(), minimum, x.float())
    assert same(restored, expected)


@pytest.mark.parametrize("bits", fmt.BITS)
def test_a_group_without_finite_values_stores_zeros(bits: int) -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, -math.nan] * 16)
    packed = reference.quantize(x, bits=bits)
    assert contents(packed)[fmt.parameters_offset(64, bits) :] == bytes([0, 0, 0, 0x80])
    assert same(reference.dequantize(packed, 64, bits=bits), x)


def test_nan_returns_as_the_canonical_quiet_nan() -> None:
    patterns = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32)
    packed = reference.quantize(patterns.view(torch.float32))
    assert set(reference.dequantize(packed, 4).view(torch.int32).tolist()) == {0x7FC00000}
    assert set(reference.dequantize(packed, 4, dtype=torch.bfloat16).view(torch.int16).tolist()) == {0x7FC0}
    assert set(reference.dequantize(packed, 4, dtype=torch.float16).view(torch.int16).tolist()) == {0x7E00}


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("extreme", [3.4028234663852886e38, 2.0**126 * (1 + 2.0**-23)])
def test_values_beyond_the_range_stay_finite_and_saturate(bits: int, extreme: float) -> None:
    x = randn(128) * 2.0**120
    x[7], x[20] = extreme, -extreme
    packed = reference.quantize(x, bits=bits)
    assert (parameters(packed, 128, bits)[1] < 0).tolist() == [True, False]
    restored = reference.dequantize(packed, 128, bits=bits)
    assert restored.isfinite().all()
    saturated = x.clamp(-fmt.MAX_FINITE, fmt.MAX_FINITE)
    bound = reference.error_bound(saturated, bits=bits)
    # error_bound sees an ordinary group here; a flagged one has 3 levels fewer, and its step is rounded up once more.
    bound[:64] *= (2**bits - 1) / (2**bits - 4) * (1 + 2.0**-7)
    assert ((restored.double() - saturated.double()).abs() <= bound).all()


def test_the_largest_ordinary_value_is_not_flagged() -> None:
    x = torch.linspace(-fmt.MAX_FINITE, fmt.MAX_FINITE, 64)
    packed = reference.quantize(x)
    assert (parameters(packed, 64, 8)[1] > 0).all()
    assert ((reference.dequantize(packed, 64).double() - x.double()).abs() <= reference.error_bound(x)).all()


def test_float16_output_near_its_end_stays_finite() -> None:
    x = torch.empty(1024, 64)
    x[:, :] = torch.linspace(0, 1, 64)
    x[:, 0] = -torch.linspace(1, 65504, 1024)
    x[:, 63] = 65504.0
    x = x.view(-1).half()
    packed = reference.quantize(x)
    # The test means something only where the restored value is beyond what rounds to 65504.
    assert int((reference.dequantize(packed, x.numel()) >= 65520.0).sum()) > 50
    restored = reference.dequantize(packed, x.numel(), dtype=torch.float16)
    assert restored.isfinite().all()
    assert ((restored.double() - x.double()).abs() <= reference.error_bound(x, dtype=torch.float16)).all()


@pytest.mark.parametrize("bits", fmt.BITS)
def test_negative_zero_packs_as_zero(bits: int) -> None:
    zeros = torch.zeros(70)
    packed = reference.quantize(-zeros, bits=bits)
    assert contents(packed) == contents(reference.quantize(zeros, bits=bits))
    restored = reference.dequantize(packed, 70, bits=bits)
    assert restored.view(torch.int32).tolist() == [0] * 70


@pytest.mark.parametrize("bits", fmt.BITS)
def test_subnormal_numbers_return_within_half_the_smallest_step(bits: int) -> None:
    x = torch.arange(-64, 64, dtype=torch.int32).abs().view(torch.float32) * torch.tensor([1.0, -1.0]).repeat(64)
    assert int((x != 0).sum()) == 127
    restored = reference.dequantize(reference.quantize(x, bits=bits), 128, bits=bits)
    assert ((restored.double() - x.double()).abs() <= fmt.MIN_STEP / 2).all()


@given(
    pattern=st.integers(0, 0x7E7F),
    negative=st.booleans(),
    bits=st.sampled_from(fmt.BITS),
    stochastic=st.booleans(),
)
def test_a_constant_group_that_bfloat16_represents_is_exact(
    pattern: int, negative: bool, bits: int, stochastic: bool
) -> None:
    value = torch.tensor([pattern], dtype=torch.int16).view(torch.bfloat16).float()
    x = (-value if negative else value).repeat(67)
    assert float(value) <= fmt.MAX_FINITE
    packed = reference.quantize(x, bits=bits, stochastic=stochastic, seed=pattern)
    assert torch.equal(reference.dequantize(packed, 67, bits=bits), x)


@pytest.mark.parametrize("bits", fmt.BITS)
def test_nearest_rounding_takes_the_even_code_at_ties(bits: int) -> None:
    levels = 2**bits - 1
    x = torch.cat([torch.tensor([0.0, levels]), torch.arange(62) % levels + 0.5])
    packed = reference.quantize(x, bits=bits)
    assert parameters(packed, 64, bits)[1].item() == 1
    expected = [0, levels, *(round(v) for v in x[2:].tolist())]
    assert reference.dequantize(packed, 64, bits=bits).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_output_is_the_float32_output_rounded_half_to_even(dtype: torch.dtype) -> None:
    # Integers from 2048 to 2303 with step 1 lie on and between the numbers of both dtypes, ties included.
    x = torch.cat([torch.arange(2048, 2304).view(-1, 4).t().reshape(-1).float(), special(640, 3), randn(640)])
    x[0:256:64], x[63:256:64] = 2048, 2303
    packed = reference.quantize(x)
    wide = reference.dequantize(packed, x.numel())
    assert len(set(wide[:256].tolist())) > 240
    assert same(reference.dequantize(packed, x.numel(), dtype=dtype).float(), wide.to(dtype).float())


# Groups are independent; what is on the grid stays.


@pytest.mark.parametrize(("bits", "group_size"), WIDTHS)
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_changing_a_group_leaves_all_other_bytes(bits: int, group_size: int, stochastic: bool) -> None:
    n = 4 * group_size + 3
    x = randn(n)
    y = x.clone()
    y[group_size : 2 * group_size] = randn(group_size, 9) * 100 + math.inf * (torch.arange(group_size) == 5)
    a, b = (
        contents(reference.quantize(t, bits=bits, group_size=group_size, stochastic=stochastic, seed=3)) for t in (x, y)
    )
    own = set(range(group_size * bits // 8, 2 * group_size * bits // 8))
    offset = fmt.parameters_offset(n, bits)
    own |= set(range(offset + 4, offset + 8))
    changed = {i for i in range(len(a)) if a[i] != b[i]}
    assert changed <= own
    assert len(changed) > len(own) // 2


@pytest.mark.parametrize("bits", [8, 4])
def test_packing_again_changes_nothing_where_both_end_codes_are_used(bits: int) -> None:
    # A second pass sees another minimum where code 0 is unused, and another range where the last code is; otherwise
    # code * step and its sum with the minimum are exact at this ratio of the two, so the same parameters follow.
    n = 2**16
    levels = 2**bits - 1
    x = randn(n)
    packed = reference.quantize(x, bits=bits)
    restored = reference.dequantize(packed, n, bits=bits)
    minimum, step = parameters(packed, n, bits)
    codes = ((restored - minimum.repeat_interleave(64)) / step.repeat_interleave(64)).round().view(-1, 64)
    both = (codes.amin(dim=1) == 0) & (codes.amax(dim=1) == levels)
    assert int(both.sum()) > 100
    again = reference.quantize(restored, bits=bits)
    second = reference.dequantize(again, n, bits=bits)
    first_parameters = torch.stack([minimum, step], dim=1)
    second_parameters = torch.stack(parameters(again, n, bits), dim=1)
    assert torch.equal(first_parameters[both], second_parameters[both])
    assert torch.equal(restored.view(-1, 64)[both], second.view(-1, 64)[both])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", fmt.BITS)
@pytest.mark.parametrize("lowest", [0, -8])
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_integers_over_the_whole_range_of_codes_never_move(
    bits: int, lowest: int, dtype: torch.dtype, stochastic: bool
) -> None:
    levels = 2**bits - 1
    x = torch.randint(0, levels + 1, (8, 64), generator=torch.Generator().manual_seed(bits))
    x[:, 0], x[:, 1] = 0, levels
    x = (x + lowest).view(-1).to(dtype)
    for seed in range(5):
        packed = reference.quantize(x, bits=bits, stochastic=stochastic, seed=seed)
        assert torch.equal(reference.dequantize(packed, x.numel(), dtype=dtype, bits=bits), x)


# Results of ReLU.


def relu_groups(dtype: torch.dtype) -> Tensor:
    """Return groups of non-negative numbers: with zeros, without, tiny, flagged, and spread over the exponents."""
    x = randn(7 * 64).relu().view(7, 64)
    x[1] += 0.25
    x[2] *= 2.0**-20
    x[3, 5] = math.inf
    x[4] = torch.exp2(torch.linspace(-23, 15, 64))
    x[4, 0] = 0
    x[5] = x[4] + 2.0**-24
    x[6, 1:] = 0
    return x.view(-1).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_keep_positive_keeps_what_is_positive_and_only_that(bits: int, dtype: torch.dtype, stochastic: bool) -> None:
    x = relu_groups(dtype)
    n = x.numel()
    packed, plain = (
        reference.quantize(x, bits=bits, stochastic=stochastic, seed=2, keep_positive=keep) for keep in (True, False)
    )
    seed = 2 if stochastic else None
    assert contents(packed) == oracle_bytes(oracle_groups(x, bits, 64, seed, keep_positive=True), bits)
    restored = reference.dequantize(packed, n, dtype=dtype, bits=bits)
    without = reference.dequantize(plain, n, dtype=dtype, bits=bits)
    assert torch.equal(restored > 0, x > 0)
    assert int(((without > 0) != (x > 0)).sum()) > 20
    # The lifted elements are off by a step at most, all others come back as without.
    lifted = restored != without
    assert ((x[lifted] > 0) & (without[lifted] == 0)).all()
    bound = reference.error_bound(x, bits=bits, stochastic=stochastic, dtype=dtype)
    one_step = reference.error_bound(x, bits=bits, stochastic=True, dtype=dtype)
    error = (restored.double() - x.double()).abs()
    finite = x.isfinite()
    assert (error <= torch.where(lifted, one_step, bound))[finite].all()


def test_keep_positive_leaves_groups_with_another_minimum() -> None:
    x = torch.cat([randn(64), randn(64).abs() + 0.25, -randn(64).abs()])
    assert contents(reference.quantize(x, keep_positive=True)) == contents(reference.quantize(x))


# Booleans.


@pytest.mark.parametrize("n", range(11))
def test_pack_bool_is_exact_for_every_pattern(n: int) -> None:
    for pattern in range(2**n):
        x = torch.tensor([bool(pattern >> i & 1) for i in range(n)], dtype=torch.bool)
        packed = reference.pack_bool(x)
        assert contents(packed) == pattern.to_bytes(-(-n // 8), "little")
        assert torch.equal(reference.unpack_bool(packed, n), x)


@pytest.mark.parametrize("n", [*SIZES, 1000, 4097])
def test_pack_bool_round_trip_and_size(n: int) -> None:
    x = randn(n) > 0
    packed = reference.pack_bool(x)
    assert packed.dtype is torch.uint8
    assert packed.numel() == math.ceil(n / 8) == fmt.packed_nbytes(n, 1, 64)
    assert torch.equal(reference.unpack_bool(packed, n), x)


# Bad arguments.


@pytest.mark.parametrize(("option", "value"), [("bits", 3), ("bits", 0), ("group_size", 63), ("group_size", 512)])
def test_reference_rejects_unknown_widths_and_groups(option: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"{option} must be one of .*got {value}"):
        reference.quantize(torch.zeros(64), **{option: value})
    with pytest.raises(ValueError, match=rf"{option} must be one of .*got {value}"):
        reference.dequantize(torch.zeros(68, dtype=torch.uint8), 64, **{option: value})


@pytest.mark.parametrize("x", [torch.zeros(8, 8), torch.zeros(64, dtype=torch.int32), torch.zeros(64).double()])
def test_reference_rejects_other_shapes_and_dtypes(x: Tensor) -> None:
    with pytest.raises(TypeError, match="expected a flat tensor"):
        reference.quantize(x)
