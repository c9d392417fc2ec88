"""Stochastic rounding without bias, and the generator behind it."""

from __future__ import annotations

import math
from fractions import Fraction
from statistics import NormalDist

import pytest
import torch
from format_oracle import CHANCE, contents, oracle_uniform, randn
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pyactcomp.codec import format as fmt
from pyactcomp.codec import reference


def on_unit_grid(bits: int, groups: int) -> Tensor:
    """Return groups whose minimum is 0 and whose step is 1, so that a code is the element, rounded."""
    levels = 2**bits - 1
    x = torch.rand(groups, 64, generator=torch.Generator().manual_seed(bits)) * levels
    x[:, 0], x[:, 1] = 0, levels
    return x.view(-1)


@pytest.mark.parametrize("bits", fmt.BITS)
def test_stochastic_rounding_is_unbiased(bits: int) -> None:
    x = on_unit_grid(bits, 32)
    n, seeds = x.numel(), 600
    total = torch.zeros(n, dtype=torch.float64)
    for seed in range(seeds):
        packed = reference.quantize(x, bits=bits, stochastic=True, seed=seed)
        total += reference.dequantize(packed, n, bits=bits)
    fraction = x.double() - x.double().floor()
    variance = seeds * fraction * (1 - fraction)
    excess = total - seeds * x.double()
    # All elements together: n * seeds independent Bernoulli numbers, so a normal deviate.
    z = float(excess.sum() / variance.sum().sqrt())
    assert abs(z) <= NormalDist().inv_cdf(1 - CHANCE / 2)
    # Each element alone: Bernstein's inequality, which also holds for fractions near 0 and 1, with a union over n.
    log = math.log(2 * n / CHANCE)
    assert (excess.abs() <= log / 3 + (log**2 / 9 + 2 * log * variance).sqrt()).all()
    # And the spread is that of a Bernoulli number: chi-square with n degrees, near enough normal.
    free = variance > 20
    chi = float((excess[free] ** 2 / variance[free]).sum())
    degrees = int(free.sum())
    assert abs(chi - degrees) <= NormalDist().inv_cdf(1 - CHANCE / 2) * math.sqrt(2 * degrees) * 1.1


@pytest.mark.parametrize("bits", fmt.BITS)
def test_stochastic_rounding_takes_one_of_the_two_neighbours(bits: int) -> None:
    x = on_unit_grid(bits, 32)
    restored = reference.dequantize(reference.quantize(x, bits=bits, stochastic=True, seed=5), x.numel(), bits=bits)
    assert ((restored == x.floor()) | (restored == x.ceil())).all()
    assert (restored != x.round()).any()


def test_stochastic_rounding_goes_up_only_where_the_draw_is_below_the_fraction() -> None:
    index = torch.arange(1, 63)
    draw = reference.uniform(11, index)
    for fraction, code in ((draw, 0), (torch.nextafter(draw, torch.tensor(1.0)), 1)):
        x = torch.cat([torch.tensor([0.0]), fraction, torch.tensor([255.0])])
        packed = reference.quantize(x, stochastic=True, seed=11)
        assert packed[1:63].tolist() == [code] * 62


def test_stochastic_rounding_is_a_function_of_the_seed() -> None:
    x = randn(1000)
    torch_state = torch.get_rng_state()
    first, again, other = (contents(reference.quantize(x, stochastic=True, seed=s)) for s in (2**64 - 1, 2**64 - 1, 0))
    assert first == again
    codes = sum(a != b for a, b in zip(first[:1000], other[:1000], strict=True))
    # Two independent draws differ with probability 2 f (1 - f) at a fraction f, so in a third of the elements.
    assert abs(codes - 1000 / 3) <= NormalDist().inv_cdf(1 - CHANCE / 2) * math.sqrt(1000 * 2 / 9)
    assert first[1008:] == other[1008:]
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_nearest_rounding_ignores_the_seed() -> None:
    x = randn(1000)
    assert contents(reference.quantize(x, seed=1)) == contents(reference.quantize(x, seed=2))


@given(seed=st.integers(0, 2**64 - 1), index=st.integers(0, 2**40))
def test_uniform_equals_the_integer_oracle(seed: int, index: int) -> None:
    got = reference.uniform(seed, torch.tensor([index]))
    assert got.dtype is torch.float32
    assert Fraction(float(got)) == oracle_uniform(seed, index)
    assert 0 <= float(got) < 1


def test_random_keys_are_the_outputs_of_splitmix64() -> None:
    # The first outputs of the published generator for the seeds 0 and 1234567.
    for seed, output in ((0, 0xE220A8397B1DCDAF), (1234567, 6457827717110365317)):
        low, high = fmt.random_keys(seed)
        assert high << 32 | low == output


def chi_square_quantile(degrees: int, probability: float) -> float:
    """Return the quantile by Wilson and Hilferty's cube, good to a per mille at these degrees."""
    term = 2 / (9 * degrees)
    return degrees * (1 - term + NormalDist().inv_cdf(probability) * math.sqrt(term)) ** 3


def check_uniform(cells: Tensor, count: int) -> None:
    observed = torch.bincount(cells, minlength=count).double()
    expected = cells.numel() / count
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert chi_square_quantile(count - 1, CHANCE) < statistic < chi_square_quantile(count - 1, 1 - CHANCE)


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
@pytest.mark.parametrize("start", [0, 2**32 - 2**19, 7 * 2**32])
def test_uniform_is_distributed_evenly(seed: int, start: int) -> None:
    index = torch.arange(start, start + 2**20)
    u = reference.uniform(seed, index)
    check_uniform((u * 256).long(), 256)
    # The lowest of its 24 bits, neighbours in the tensor, the same place in two groups, and two seeds in a row.
    check_uniform((u * 2**24).long() % 256, 256)
    coarse = (u * 16).long()
    check_uniform(coarse[0::2] * 16 + coarse[1::2], 256)
    check_uniform(coarse.view(-1, 2, 64)[:, 0].reshape(-1) * 16 + coarse.view(-1, 2, 64)[:, 1].reshape(-1), 256)
    following = (reference.uniform((seed + 1) % 2**64, index) * 16).long()
    check_uniform(coarse * 16 + following, 256)


def test_uniform_uses_the_high_word_of_the_index() -> None:
    index = torch.arange(2**14)
    draws = [(reference.uniform(3, index + high * 2**32) * 16).long() for high in (0, 1, 2)]
    # Independent of each other: the high word neither is dropped nor shifts the sequence.
    check_uniform(draws[0] * 16 + draws[1], 256)
    check_uniform(draws[1] * 16 + draws[2], 256)
