"""The 16-bit forms' errors against formulas, and one bit an element against torch's own derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import pyactcomp
from pyactcomp.codec import format as fmt
from pyactcomp.codec import probability
from pyactcomp.config import Config
from pyactcomp.engine.halves import form_kernel
from pyactcomp.readers.forms import (
    ARTANH,
    BFLOAT16,
    LOG,
    LOG_PROBABILITY,
    PROBABILITY,
    SCALED,
    Comparison,
    Form,
)

FORMS = [BFLOAT16, LOG, LOG_PROBABILITY, PROBABILITY, ARTANH, SCALED]
WIDE = [torch.float32, torch.float64]
# Half a unit in the last place of 8 bits and of 11; float16's subnormals are 2**-24 apart.
BFLOAT16_HALF_ULP, FLOAT16_HALF_ULP, SUBNORMAL_HALF_ULP = 2.0**-8, 2.0**-11, 2.0**-25
# Logarithms and their inverses are computed in the tensor's own dtype, to a few units in the last place.
FEW = 16


def named(form: Form) -> str:
    return form.name


Through = Callable[[Form, Tensor], Tensor]


@pytest.fixture(params=["cpu", "reference"])
def through(request: pytest.FixtureRequest) -> Through:
    """Return a function that stores a dense tensor in a form and restores it: natively, or in plain torch."""

    def stored(form: Form, x: Tensor) -> Tensor:
        kernel = form_kernel(form, request.param, x.dtype, x.device)
        buffer = torch.empty(kernel.packed_nbytes(x.numel()), dtype=torch.uint8)
        kernel.encode(x, buffer, 0)
        out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
        kernel.decode(buffer, out)
        return out

    return stored


def values(form: Form, dtype: torch.dtype, numel: int = 4097) -> Tensor:
    """Return an odd number of values such as a reader of the form saves, of all magnitudes."""
    torch.manual_seed(0)
    spread = torch.randn(numel, dtype=torch.float64) * torch.logspace(-6, 0.8, numel, dtype=torch.float64)
    if form in (LOG, LOG_PROBABILITY):
        return (-spread.abs()).to(dtype)
    if form is PROBABILITY:
        p = (6 * spread).sigmoid().to(dtype)
        return p[(p >= torch.finfo(torch.bfloat16).tiny) & (p < 1)]
    if form is ARTANH:
        y = spread.tanh().to(dtype)
        return y[y.abs() < 1]
    return spread.to(dtype)


def of_rounded(z: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bound of the error of what float16 holds, computed in ``dtype``."""
    return FLOAT16_HALF_ULP * z.abs() + SUBNORMAL_HALF_ULP + FEW * torch.finfo(dtype).eps * (1 + z.abs())


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_bfloat16_is_relative_at_every_magnitude(through: Through, dtype: torch.dtype) -> None:
    for scale in (1.0, 1e30, 1e-30):
        x = values(BFLOAT16, dtype) * scale
        error = (through(BFLOAT16, x) - x).abs()
        assert bool((error <= BFLOAT16_HALF_ULP * x.abs()).all())


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_logarithms_are_relative_and_saturate(through: Through, dtype: torch.dtype) -> None:
    x = values(LOG, dtype) * 100
    error = (through(LOG, x) - x).abs()
    assert bool((error <= FLOAT16_HALF_ULP * x.abs() + SUBNORMAL_HALF_ULP).all())
    far = torch.tensor([-65504.0, -65520.0, -1e9, torch.finfo(torch.float32).min, -math.inf, 1e9], dtype=dtype)
    assert through(LOG, far).tolist() == [-65504.0] * 5 + [65504.0]
    assert not through(LOG, far)[:5].exp().any()


def moved_by_half_a_step(logit: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bound of the relative error of a logit's exponential, where the dtype rounds logits and codes."""
    step = torch.where(logit < probability.MIDDLE, probability.COARSE, probability.FINE)
    eps = torch.finfo(dtype).eps
    return torch.expm1(step * (0.5 + probability.NAN * eps) + FEW * eps * (1 + logit.abs()))


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_a_probability_and_its_distance_from_one_are_both_relative(through: Through, dtype: torch.dtype) -> None:
    p = torch.cat([values(PROBABILITY, dtype), torch.logspace(-37, -1, 999, dtype=dtype)])
    p = p[p < 1 - 2.0**-23]
    got, p = through(PROBABILITY, p).double(), p.double()
    # dp = p (1 - p) dz; beside it p's own dtype ends near one.
    moved = p * (1 - p) * moved_by_half_a_step(torch.logit(p), dtype)
    assert bool(((got - p).abs() <= moved + FEW * torch.finfo(dtype).eps * p * (p > 0.5)).all())
    assert bool(((got >= 0) & (got <= 1)).all())
    # Equal probabilities of two, too, so that they add up to one.
    on_grid = torch.tensor([0.0, 0.5, 1.0], dtype=dtype)
    assert torch.equal(through(PROBABILITY, on_grid), on_grid)
    assert torch.equal(through(LOG_PROBABILITY, on_grid[1:].log()), on_grid[1:].log())


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_the_exponential_of_a_log_probability_and_its_distance_from_one_are_both_relative(
    through: Through, dtype: torch.dtype
) -> None:
    x = torch.cat([values(LOG_PROBABILITY, dtype), torch.linspace(-87, 0, 999, dtype=dtype)])
    x = x[x < -(2.0**-23)]
    got, x = through(LOG_PROBABILITY, x).double(), x.double()
    moved = moved_by_half_a_step(x - (-x.expm1()).log(), dtype)
    assert bool(((got - x).expm1().abs() <= moved).all())
    rest = -torch.expm1(x)
    assert bool(((-torch.expm1(got) - rest).abs() <= rest * moved).all())
    far = torch.tensor([-200.0, -1e9, torch.finfo(torch.float32).min, -math.inf, 0.0, 1e-9], dtype=dtype)
    assert torch.equal(through(LOG_PROBABILITY, far).float().exp(), torch.tensor([0.0] * 4 + [1.0] * 2))
    assert not through(LOG_PROBABILITY, far)[4:].any()


def test_every_code_of_a_probability_is_its_own() -> None:
    codes = torch.arange(-(2**15), 2**15).to(torch.int16)
    for encode, decode in (
        (probability.encode, probability.decode),
        (probability.encode_log, probability.decode_log),
    ):
        assert torch.equal(encode(decode(codes, torch.float64)), codes)


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_one_less_the_square_of_a_tanh_is_relative(through: Through, dtype: torch.dtype) -> None:
    y = values(ARTANH, dtype)
    got, y = through(ARTANH, y).double(), y.double()
    # d log(1 - y**2) = -2 y dz; beside it y's own dtype ends near one.
    moved = torch.expm1(2 * of_rounded(torch.atanh(y), dtype))
    eps = FEW * torch.finfo(dtype).eps
    assert bool((((1 - got**2) - (1 - y**2)).abs() <= (1 - y**2) * moved + eps * y.abs()).all())
    assert bool(((got - y).abs() <= of_rounded(torch.atanh(y), dtype)).all())
    ends = torch.tensor([-1.0, 0.0, 1.0], dtype=dtype)
    assert torch.equal(through(ARTANH, ends), ends)


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30, 2.0**14, 2.0**15, 65504.0])
def test_scaled_is_relative_down_to_a_fraction_of_the_largest(
    through: Through, scale: float, dtype: torch.dtype
) -> None:
    x = values(SCALED, dtype) * torch.logspace(-8, 0, 4097, dtype=dtype) * scale
    x[7] = 0
    largest = float(x.abs().max())
    assert bool((x.abs() < 2.0**-28 * largest).any())
    error = (through(SCALED, x) - x).abs()
    near = x.abs() >= 2.0**-24 * largest
    assert bool((error <= FLOAT16_HALF_ULP * x.abs())[near].all())
    # The largest of each part is at least 2**14 over the power of two, where float16's subnormals end; the power is at
    # most 2**126.
    largest_of_part = torch.cat([part.abs().amax().expand(len(part)) for part in x.split(256)])
    assert bool(
        (error <= FLOAT16_HALF_ULP * x.abs() + SUBNORMAL_HALF_ULP * (largest_of_part / 2**14 + 2.0**-126)).all()
    )
    assert through(SCALED, x)[7] == 0


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=named)
def test_values_that_are_no_numbers_come_back(through: Through, form: Form, dtype: torch.dtype) -> None:
    x = torch.full((9,), -0.5 if form is LOG_PROBABILITY else 0.5, dtype=dtype)
    x[4] = math.nan
    got = through(form, x)
    assert torch.equal(got.isnan(), x.isnan())
    if form in (BFLOAT16, SCALED):
        x[2], x[6] = math.inf, -math.inf
        got = through(form, x)
        assert got[[2, 6]].tolist() == [math.inf, -math.inf]
        assert torch.equal(got.isnan(), x.isnan())
    # The neighbours are as they would be alone: nothing more of a batch is lost.
    numbers = x.isfinite()
    assert bool(((got - x).abs() <= 2.0**-8 * x.abs())[numbers].all())


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=named)
def test_zeros_come_back(through: Through, form: Form, dtype: torch.dtype) -> None:
    assert torch.equal(through(form, torch.zeros(5, dtype=dtype)), torch.zeros(5, dtype=dtype))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x[:4000].view(16, 250).t(),
    "permuted": lambda x: x[:3990].view(5, 21, 38).permute(2, 0, 1),
    "channels last": lambda x: x[:3990].view(2, 7, 15, 19).contiguous(memory_format=torch.channels_last),
    "offset": lambda x: x[33:3990],
    "scalar": lambda x: x[5],
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMS, ids=named)
def test_elements_stay_in_their_places_in_every_dense_layout(
    through: Through, form: Form, layout: str, dtype: torch.dtype
) -> None:
    x = LAYOUTS[layout](values(form, dtype))
    got = through(form, x)
    assert got.stride() == x.stride()
    # The same elements in the order of memory: whatever the form does to an element and the largest of all.
    in_memory = x.as_strided((x.numel(),), (1,)).clone()
    assert torch.equal(got.as_strided((x.numel(),), (1,)), through(form, in_memory))


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("form", FORMS, ids=named)
def test_a_buffer_has_two_bytes_an_element(form: Form, impl: str) -> None:
    kernel = form_kernel(form, impl, torch.float32, torch.device("cpu"))
    for numel in (0, 1, 5, 4096):
        # An exponent for each part of 256 elements.
        assert kernel.packed_nbytes(numel) - 2 * numel == (0 if form is not SCALED else 2 * -(-numel // 256))


# One bit.

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
LOW, HIGH = -0.5, 0.75
CLIPPING: dict[str, Callable[[Tensor], Tensor]] = {
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "leaky_relu of a negative slope": lambda x: F.leaky_relu(x, -0.3),
    "leaky_relu in place": lambda x: F.leaky_relu(x, 0.1, inplace=True),
    "threshold": lambda x: F.threshold(x, HIGH, 20.0),
    "threshold in place": lambda x: F.threshold(x, HIGH, -20.0, inplace=True),
    "hardtanh": lambda x: F.hardtanh(x, LOW, HIGH),
    "hardtanh in place": lambda x: F.hardtanh(x, LOW, HIGH, inplace=True),
    "relu6": F.relu6,
    "hardsigmoid": F.hardsigmoid,
    "hardshrink": lambda x: F.hardshrink(x, HIGH),
    "softshrink": lambda x: F.softshrink(x, HIGH),
    "clamp": lambda x: x.clamp(LOW, HIGH),
    "clamp to one number": lambda x: x.clamp(HIGH, HIGH),
    "clamp from below": lambda x: x.clamp(min=LOW),
    "clamp from above": lambda x: x.clamp(max=HIGH),
    "clamp_min": lambda x: x.clamp_min(LOW),
    "clamp_max": lambda x: x.clamp_max(HIGH),
    "clamp in place": lambda x: x.clamp_(LOW, HIGH),
}


def around_the_bounds(dtype: torch.dtype) -> Tensor:
    """Return 4,096 values: all bounds and their neighbours, zeros, infinities and NaN among random ones."""
    torch.manual_seed(0)
    bounds = torch.tensor([LOW, HIGH, -HIGH, 0.0, 3.0, -3.0, 6.0, -0.0], dtype=dtype)
    up, down = (torch.nextafter(bounds.float(), torch.tensor(end)).to(dtype) for end in (math.inf, -math.inf))
    if dtype is not torch.float32:
        up, down = (torch.nextafter(bounds, torch.tensor(end, dtype=dtype)) for end in (math.inf, -math.inf))
    ends = torch.tensor([math.inf, -math.inf, math.nan], dtype=dtype)
    special = torch.cat((bounds, up, down, ends))
    return torch.cat((special, 4 * torch.randn(4096 - len(special)).to(dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CLIPPING)
def test_one_bit_gives_the_gradient_of_torch(name: str, dtype: torch.dtype) -> None:
    x = around_the_bounds(dtype)
    if name.startswith(("hardtanh", "relu6", "hardshrink", "softshrink")):
        # Torch's own kernels disagree: zero in a CPU's vectors, the gradient in their remainder and on a GPU.
        x = x.nan_to_num(0.0, math.inf, -math.inf)
    x.requires_grad_()
    weight = torch.linspace(1, 2, 4096).to(dtype)

    def gradient(out: Tensor) -> Tensor:
        return torch.autograd.grad(out, x, weight)[0]

    exact = gradient(CLIPPING[name](x * 1))
    with pyactcomp.compressed(min_bytes=0) as c:
        out = CLIPPING[name](x * 1)
    torch.testing.assert_close(gradient(out), exact, rtol=0, atol=0, equal_nan=True)
    assert pyactcomp.report(c).stored_bytes == fmt.packed_nbytes(4096, 1, 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bound", [0.7, 1.001])
def test_a_bound_that_16_bits_do_not_hold_is_compared_as_torch_does(bound: float, dtype: torch.dtype) -> None:
    """Some operators round it to the tensor's dtype and some do not, so the tensor is kept."""
    here = torch.tensor(bound, dtype=dtype)
    ends = (torch.tensor(end, dtype=dtype) for end in (math.inf, -math.inf))
    x = torch.cat((torch.stack([here, *(torch.nextafter(here, end) for end in ends)]), torch.randn(253).to(dtype)))
    x.requires_grad_()
    for clip in (F.threshold, F.hardshrink, F.softshrink, torch.clamp_min, torch.clamp_max):
        arguments = (bound, 20.0) if clip is F.threshold else (bound,)
        (exact,) = torch.autograd.grad(clip(x * 1, *arguments).sum(), x)
        with pyactcomp.compressed(min_bytes=0) as c:
            out = clip(x * 1, *arguments)
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], exact)
        kept = 256 * x.itemsize if x.itemsize == 2 else fmt.packed_nbytes(256, 1, 64)
        assert pyactcomp.report(c).stored_bytes == kept


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("relation", ["above", "below", "not below", "between", "within", "not outside"])
def test_what_a_bit_is_restored_to_answers_as_the_element_did(relation: str, impl: str) -> None:
    # A pair for each: the two sides of one bound, or inside of two.
    yes, no = {"above": (2.0, -2.0), "below": (-2.0, 2.0), "not below": (2.0, -2.0)}.get(relation, (0.0, 2.0))
    comparison = Comparison(relation, -0.5, 0.5, yes, no)  # type: ignore[arg-type]
    packing = pyactcomp.engine.packing.Packing(Config(impl=impl))  # type: ignore[arg-type]
    kernel = packing.storing(torch.empty(1), Form("1 bit", 1, comparison)).kernel
    x = torch.tensor([math.nan, -math.inf, -1.0, -0.5, 0.0, 0.5, 1.0, math.inf])
    low, high = x > -0.5, x < 0.5
    expected = {
        "above": low,
        "below": high,
        "not below": ~(x <= -0.5),
        "between": low & high,
        "within": (x >= -0.5) & (x <= 0.5),
        "not outside": ~((x <= -0.5) | (x >= 0.5)),
    }[relation]
    buffer = torch.empty(fmt.packed_nbytes(8, 1, 64), dtype=torch.uint8)
    kernel.encode(x, buffer, 0)
    out = torch.empty(8)
    kernel.decode(buffer, out)
    assert torch.equal(out, torch.where(expected, yes, no))
    assert torch.equal(comparison(out), expected)
