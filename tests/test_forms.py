"""Contract under test: the native kernels of the 16-bit forms, casts and comparisons give what plain torch defines.

The same cases run on the CPU, with and without AVX2, and on CUDA: special values, every alignment of whole elements,
sizes around those of tiles and vectors, and buffers whose surroundings must not change.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from pyactcomp.codec import bind_form
from pyactcomp.codec.kernels import Kernel, cpu, plain
from pyactcomp.readers.forms import Comparison

CANARY = 0xA5
MAPS = ["bfloat16", "float16", "probability", "log_probability", "artanh", "scaled"]
# The logarithms of both differ by roundings: the code may be the next one.
ONE_CODE_APART = {"probability", "log_probability", "artanh"}
WIDE = [torch.float32, torch.float64]
CASTS = [(narrow, wide) for wide in WIDE for narrow in (torch.bfloat16, torch.float16)] + [WIDE]
FLOATS = [*WIDE, torch.bfloat16, torch.float16]
SIZES = (0, 1, 7, 8, 9, 255, 256, 257, 1000, 4 * 4096 + 7)
# Above the number of elements from which a warp on CUDA takes several chunks, and no multiple of anything.
LARGE = 132 * 64 * 256 + 4099
TARGETS = ["cpu", "cpu_baseline", pytest.param("cuda", marks=pytest.mark.gpu)]
on_every_target = pytest.mark.parametrize("target", TARGETS)


def native(
    target: str,
    encoding: str,
    dtype: torch.dtype,
    narrow: torch.dtype | None = None,
    comparison: Comparison | None = None,
) -> Kernel:
    if target == "cuda":
        return bind_form("cuda", encoding, dtype, torch.device("cuda"), narrow, comparison)
    return cpu.bind_form(encoding, dtype, torch.device("cpu"), narrow, comparison, simd=target == "cpu")


def device_of(target: str) -> str:
    return "cuda" if target == "cuda" else "cpu"


SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 2.0**-149, -(2.0**-149), 2.0**-126, 2.0**-24, 2.0**-25]
SPECIAL += [65504.0, -65504.0, 65519.0, 65520.0, -65520.0, 1e9, 3.4028234663852886e38, -3.4028234663852886e38]
# Around the largest bfloat16: the last one that rounds down, the first that rounds up.
SPECIAL += [3.3895313892515355e38, 3.3961775292304601e38, 3.3961773e38]


def values(encoding: str, dtype: torch.dtype, numel: int) -> Tensor:
    """Return values such as a form holds, with special ones between, all in the first 256 where so many fit."""
    draw = torch.Generator().manual_seed(numel)
    x = torch.randn(numel, generator=draw, dtype=torch.float64)
    special = torch.tensor(SPECIAL + ([1e300, -1e300, 1e-310] if dtype is torch.float64 else []), dtype=torch.float64)
    if encoding == "probability":
        x = (8 * x).sigmoid()
        special = torch.tensor([math.nan, 0.0, 1.0, 0.5, 1 - 2.0**-24, 2.0**-149, 1e-38, 6e-39, 2.0**-25, 0.25])
    elif encoding == "log_probability":
        x = -(x.abs() * 10.0 ** (2 * x))
        special = torch.tensor([math.nan, -math.inf, 0.0, -0.0, 1e-9, -(2.0**-24), -87.5, -88.5, -1e9, -0.03125, -0.03])
    elif encoding == "artanh":
        x = x.tanh()
        special = torch.tensor([math.nan, 1.0, -1.0, 0.0, -0.0, 2.0**-149, 1 - 2.0**-24, 2.0**-25, 1.5, -2.0])
    elif encoding == "scaled":
        # Parts of 256 whose magnitudes are apart: some are all tiny, some hold what is no number.
        x *= 10.0 ** (torch.arange(numel) // 256 % 60 - 30)
        special = special[special.isfinite()] if numel > 1000 else special
    places = torch.arange(min(len(special), numel // 2)) * 2
    x[places] = special[: len(places)].to(torch.float64)
    return x.to(dtype)


def poisoned(nbytes: int, device: str, offset: int) -> tuple[Tensor, Tensor]:
    """Return a buffer, and the ``nbytes`` bytes in it from ``offset`` on."""
    buffer = torch.full((nbytes + 128,), CANARY, dtype=torch.uint8, device=device)
    return buffer, buffer[offset : offset + nbytes]


def assert_untouched(buffer: Tensor, nbytes: int, offset: int) -> None:
    assert bool((buffer[:offset] == CANARY).all())
    assert bool((buffer[offset + nbytes :] == CANARY).all())


def encode(kernel: Kernel, x: Tensor, device: str, offset: int, step: int) -> Tensor:
    """Pack ``x``, both pointers ``offset`` elements from an aligned one, of ``step`` bytes in the packed form."""
    source = torch.empty(x.numel() + offset, dtype=x.dtype, device=device)[offset:].copy_(x)
    nbytes = kernel.packed_nbytes(x.numel())
    buffer, packed = poisoned(nbytes, device, offset * step)
    kernel.encode(source, packed, 0)
    assert_untouched(buffer, nbytes, offset * step)
    return packed.cpu()


def decode(
    kernel: Kernel, packed: Tensor, numel: int, dtype: torch.dtype, device: str, offset: int, step: int
) -> Tensor:
    _, source = poisoned(packed.numel(), device, offset * step)
    source.copy_(packed)
    nbytes = numel * dtype.itemsize
    buffer, out = poisoned(nbytes, device, offset * dtype.itemsize)
    kernel.decode(source, out.view(dtype))
    assert_untouched(buffer, nbytes, offset * dtype.itemsize)
    return out.view(dtype).cpu()


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Compare bits; all NaN are alike."""
    assert actual.dtype == expected.dtype
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.itemsize]
    assert torch.equal(actual[~nan].view(bits), expected[~nan].view(bits))


def assert_one_apart(actual: Tensor, expected: Tensor) -> None:
    """Compare codes in int16, or float16 as the places among all of float16."""
    if actual.dtype is torch.float16:
        assert torch.equal(actual.isnan(), expected.isnan())
        actual, expected = (each[~expected.isnan()].view(torch.int16).int() for each in (actual, expected))
        actual, expected = (torch.where(each < 0, -(each & 0x7FFF), each) for each in (actual, expected))
    assert int((actual.int() - expected.int()).abs().max()) <= 1 if len(expected) else True


STORED = {"bfloat16": torch.bfloat16, "probability": torch.int16, "log_probability": torch.int16}


def check(target: str, encoding: str, dtype: torch.dtype, numel: int, offset: int) -> None:
    kernel, exact = native(target, encoding, dtype), plain.bind(encoding, None, by_triton=False)
    device, x = device_of(target), values(encoding, dtype, numel)
    packed = encode(kernel, x, device, offset, 2)
    expected = torch.empty_like(packed)
    exact.encode(x, expected, 0)
    stored = STORED.get(encoding, torch.float16)
    elements, expected_elements = packed[: 2 * numel].view(stored), expected[: 2 * numel].view(stored)
    if encoding in ONE_CODE_APART:
        assert_one_apart(elements, expected_elements)
    else:
        assert_same(elements, expected_elements)
    assert torch.equal(packed[2 * numel :], expected[2 * numel :])
    assert_restored(kernel, exact, encoding, expected, numel, dtype, device, offset)


def assert_restored(
    kernel: Kernel,
    exact: Kernel,
    encoding: str,
    packed: Tensor,
    numel: int,
    dtype: torch.dtype,
    device: str,
    offset: int,
) -> None:
    restored = decode(kernel, packed, numel, dtype, device, offset, 2)
    wanted = torch.empty(numel, dtype=torch.float64 if encoding in ONE_CODE_APART else dtype)
    exact.decode(packed, wanted)
    if encoding in ONE_CODE_APART:
        # A logit of up to 88 is rounded, and then some more.
        rtol = 16 * torch.finfo(dtype).eps * 88 / 2
        torch.testing.assert_close(restored.double(), wanted, rtol=rtol, atol=0, equal_nan=True)
    else:
        assert_same(restored, wanted)


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("encoding", MAPS)
@on_every_target
def test_a_form_is_stored_and_restored_as_defined(target: str, encoding: str, dtype: torch.dtype) -> None:
    for numel, offset in itertools.product(SIZES, (0, 1, 8)):
        try:
            check(target, encoding, dtype, numel, offset)
        except AssertionError as error:
            raise AssertionError(f"{numel} elements, {offset} off: {error}") from error


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("encoding", MAPS)
def test_a_form_that_fills_the_device_is_stored_and_restored_as_defined(encoding: str, dtype: torch.dtype) -> None:
    check("cuda", encoding, dtype, LARGE, 0)


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("encoding", MAPS)
@on_every_target
def test_every_packed_element_is_restored_as_defined(target: str, encoding: str, dtype: torch.dtype) -> None:
    numel = 2**16
    kernel, exact = native(target, encoding, dtype), plain.bind(encoding, None, by_triton=False)
    elements = (torch.arange(numel) - 2**15).to(torch.int16).view(torch.uint8)
    # Of what is scaled, the exponents from -126 to 126, in turn.
    exponents = (torch.arange(kernel.packed_nbytes(numel) // 2 - numel) % 253 - 126).to(torch.int16).view(torch.uint8)
    packed = torch.cat([elements, exponents])
    assert_restored(kernel, exact, encoding, packed, numel, dtype, device_of(target), 0)


@pytest.mark.parametrize(("narrow", "wide"), CASTS, ids=str)
@on_every_target
def test_a_cast_keeps_every_value(target: str, narrow: torch.dtype, wide: torch.dtype) -> None:
    if narrow.itemsize == 2:
        bits = (torch.arange(2**16) - 2**15).to(torch.int16).view(narrow)
    else:
        bits = torch.cat(
            [torch.randn(2**16, generator=torch.Generator().manual_seed(0)), torch.tensor(SPECIAL)]
        ).float()
    kernel = native(target, "cast", wide, narrow)
    for numel, offset in itertools.product((*SIZES, len(bits)), (0, 1, 8)):
        x = bits[:numel].to(wide)
        packed = encode(kernel, x, device_of(target), offset, narrow.itemsize)
        assert_same(packed.view(narrow), bits[:numel])
        assert_same(decode(kernel, packed, numel, wide, device_of(target), offset, narrow.itemsize), x)


BOUNDS = [(-0.5, 0.75), (0.0, 0.0), (-math.inf, 6.0), (0.1, math.inf), (math.inf, -math.inf), (math.nan, 1.0)]
RELATIONS = ["above", "below", "not below", "between", "within", "not outside"]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("relation", RELATIONS)
@on_every_target
def test_an_answer_is_stored_and_restored_as_defined(target: str, relation: str, dtype: torch.dtype) -> None:
    for (low, high), numel, offset in itertools.product(BOUNDS, SIZES, (0, 1, 8)):
        if dtype.itemsize == 2 and low == 0.1:
            continue  # such a tensor is kept: 16 bits do not hold the bound
        comparison = Comparison(relation, low, high, 2.0, math.nan)  # type: ignore[arg-type]
        x = values("bfloat16", dtype, numel)
        bounds = torch.tensor([low, high], dtype=dtype)
        near = torch.cat([bounds, *(torch.nextafter(bounds, bounds.new_tensor([end, end])) for end in (-9.0, 9.0))])
        x[numel - min(numel, 6) :] = near[: min(numel, 6)]
        kernel = native(target, "comparison", dtype, comparison=comparison)
        packed = encode(kernel, x, device_of(target), offset, 1)
        answers = comparison(x)
        expected = torch.empty_like(packed)
        cpu.bind(torch.bool, 1, 64, False, False, torch.device("cpu")).encode(answers, expected, 0)
        assert torch.equal(packed, expected), (low, high, numel, offset)
        wanted = torch.full((numel,), math.nan, dtype=dtype).masked_fill_(answers, 2.0)
        assert_same(decode(kernel, packed, numel, dtype, device_of(target), offset, 1), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_answers_that_fill_the_device_are_stored_and_restored_as_defined(dtype: torch.dtype) -> None:
    comparison = Comparison("between", -0.5, 0.75, 0.25, 2.0)
    x = values("bfloat16", dtype, LARGE)
    kernel = native("cuda", "comparison", dtype, comparison=comparison)
    packed = encode(kernel, x, "cuda", 0, 1)
    answers = comparison(x)
    expected = torch.empty_like(packed)
    cpu.bind(torch.bool, 1, 64, False, False, torch.device("cpu")).encode(answers, expected, 0)
    assert torch.equal(packed, expected)
    wanted = torch.full((LARGE,), 2.0, dtype=dtype).masked_fill_(answers, 0.25)
    assert_same(decode(kernel, packed, LARGE, dtype, "cuda", 0, 1), wanted)


@pytest.mark.parametrize("encoding", MAPS)
def test_bytes_depend_neither_on_threads_nor_on_flushing_of_subnormal_numbers(encoding: str) -> None:
    numel = 3 * (1 << 17) + 65
    x = values(encoding, torch.float32, numel)
    kernel = native("cpu", encoding, torch.float32)
    before = torch.get_num_threads()
    flushes = torch.set_flush_denormal(True)
    try:
        torch.set_num_threads(3)
        packed = encode(kernel, x, "cpu", 0, 2)
        restored = decode(kernel, packed, numel, torch.float32, "cpu", 0, 2)
    finally:
        torch.set_num_threads(before)
        torch.set_flush_denormal(False)
    if not flushes:
        pytest.skip("this processor cannot flush subnormal numbers")
    torch.set_num_threads(1)
    try:
        assert torch.equal(encode(kernel, x, "cpu", 0, 2), packed)
        assert_same(decode(kernel, packed, numel, torch.float32, "cpu", 0, 2), restored)
    finally:
        torch.set_num_threads(before)


def test_arguments_are_checked() -> None:
    from pyactcomp import _core

    with pytest.raises(ValueError, match="no kernel for cpu stores float16 as scaled"):
        _core.Kernel("scaled", "float16", "cpu")
    with pytest.raises(ValueError, match="no kernel for cpu stores float32 as cast to float32"):
        _core.Kernel("cast", "float32", "cpu", narrow="float32")
    with pytest.raises(ValueError, match=r"relation is one of above, .*, got beside"):
        _core.Comparison("beside", 0.0, 0.0, 0.0, 0.0)


@pytest.mark.gpu
def test_one_launch_packs_and_one_restores_on_the_current_stream_and_under_capture() -> None:
    x = torch.linspace(-2, 2, LARGE, device="cuda")
    for encoding in MAPS:
        kernel = native("cuda", encoding, torch.float32)
        packed = torch.zeros(kernel.packed_nbytes(LARGE), dtype=torch.uint8, device="cuda")
        out = torch.zeros_like(x)
        graph = torch.cuda.CUDAGraph()
        # A launch on any other stream than the captured one fails the capture.
        with torch.cuda.graph(graph):
            kernel.encode(x, packed, 0)
            kernel.decode(packed, out)
        graph.replay()
        expected, wanted = torch.empty_like(packed), torch.empty_like(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            kernel.encode(x, expected, 0)
            kernel.decode(expected, wanted)
            torch.cuda.synchronize()
        kernels = [event for event in profile.events() if "kernel" in event.name and "pac::cuda" in event.name]
        assert len(kernels) == 2, [event.name for event in profile.events()]
        assert torch.equal(packed, expected)
        assert_same(out.cpu(), wanted.cpu())
