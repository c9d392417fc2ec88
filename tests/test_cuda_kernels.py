"""Contract under test: the CUDA kernels give the reference's bytes, at every alignment, on the given stream."""

from __future__ import annotations

import native_cases as cases
import pytest
import torch
from torch import Tensor

from pyactcomp.codec import format as fmt
from pyactcomp.codec import reference
from pyactcomp.codec.kernels import cpu, cuda
from pyactcomp.errors import ImplementationUnavailableError

CANARY = 0xA5
SEED = 0x1234_5678_9ABC_DEF0

# One wave of single chunks; above it a warp takes four.
SMALL = 132 * 64 * 256
CPU, DEVICE = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(scope="module", autouse=True)
def _kernels_are_built(request: pytest.FixtureRequest) -> None:
    reason = cuda.unavailable_reason()
    if torch.cuda.is_available() and reason is not None:
        pytest.skip(reason)


def poisoned(nbytes: int, offset: int) -> tuple[Tensor, Tensor]:
    """Return a poisoned buffer and its part of ``nbytes``, ``offset`` bytes beyond an aligned address."""
    buffer = torch.full((nbytes + 512,), CANARY, dtype=torch.uint8, device=DEVICE)
    return buffer, buffer[256 + offset : 256 + offset + nbytes]


def assert_poisoned_around(buffer: Tensor, nbytes: int, offset: int) -> None:
    assert bool((buffer[: 256 + offset] == CANARY).all())
    assert bool((buffer[256 + offset + nbytes :] == CANARY).all())


def encode(x: Tensor, bits: int, group_size: int, stochastic: bool, offset: int = 0) -> Tensor:
    nbytes = fmt.packed_nbytes(x.numel(), bits, group_size)
    buffer, packed = poisoned(nbytes, offset)
    cuda.bind(x.dtype, bits, group_size, stochastic, False, DEVICE).encode(x, packed, SEED)
    assert_poisoned_around(buffer, nbytes, offset)
    return packed


def decode(packed: Tensor, numel: int, dtype: torch.dtype, bits: int, group_size: int, offset: int = 0) -> Tensor:
    nbytes = numel * dtype.itemsize
    buffer, out = poisoned(nbytes, offset)
    cuda.bind(dtype, bits, group_size, False, False, DEVICE).decode(packed, out.view(dtype))
    assert_poisoned_around(buffer, nbytes, offset)
    return out.view(dtype)


def check_parity(x: Tensor, bits: int, group_size: int, stochastic: bool) -> None:
    """Against the C++ host codec, which test_native.py compares with the reference."""
    host = cpu.bind(x.dtype, bits, group_size, stochastic, False, CPU)
    expected = torch.empty(fmt.packed_nbytes(x.numel(), bits, group_size), dtype=torch.uint8)
    host.encode(x, expected, SEED)
    restored = torch.empty_like(x)
    host.decode(expected, restored)
    packed = encode(x.to(DEVICE), bits, group_size, stochastic)
    cases.assert_same_bytes(packed, expected)
    cases.assert_same_bytes(decode(packed, x.numel(), x.dtype, bits, group_size), restored)


# Of one vector, of no multiple of a group and of a chunk, of whole chunks; and where the kernel takes a copy.
ROWS = ((8, 8), (72, 8), (192, 384), (1024, 2048), (4096, 8), (20, 8), (64, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("bits", fmt.BITS)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_rows_apart_have_the_bytes_of_their_copy(dtype: torch.dtype, bits: int, stochastic: bool) -> None:
    for length, gap in ROWS:
        # One size for a chunk a warp, one for four.
        for numel in (7 * length, 2 * SMALL // length * length):
            # Aligned, and beyond an aligned address.
            for start in (0, 8, 3):
                rows = numel // length
                memory = torch.randn(rows * (length + gap) + start, device=DEVICE).to(dtype)
                memory[memory.numel() // 2] = float("inf")
                x = memory[start:].view(rows, length + gap)[:, :length]
                packed = torch.ops.pyactcomp.quantize(x, bits, 64, stochastic, 7, "cuda")
                copied = torch.ops.pyactcomp.quantize(x.contiguous(), bits, 64, stochastic, 7, "cuda")
                assert torch.equal(packed, copied), (length, gap, numel, start)


@pytest.mark.gpu
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("bits", fmt.BITS)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_cuda_bytes_equal_the_host_codec(dtype: torch.dtype, bits: int, stochastic: bool) -> None:
    for group_size in fmt.GROUP_SIZES:
        for numel in cases.SIZES:
            for name, case in cases.CASES.items():
                try:
                    check_parity(case(numel).to(dtype), bits, group_size, stochastic)
                except AssertionError as error:
                    raise AssertionError(f"{name}, numel={numel}, group_size={group_size}: {error}") from error


@pytest.mark.gpu
def test_cuda_bytes_equal_the_reference() -> None:
    x = cases.CASES["specials"](5000)
    packed = encode(x.to(DEVICE), 8, 64, False)
    cases.assert_same_bytes(packed, reference.quantize(x))
    cases.assert_same_bytes(decode(packed, 5000, torch.float32, 8, 64), reference.dequantize(packed.cpu(), 5000))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["normal", "specials", "smallest_step"])
@pytest.mark.parametrize("numel", [SMALL, SMALL + 1, SMALL + 4 * 1024, 3 * SMALL + 777])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_cuda_large_tensors_equal_the_host_codec(dtype: torch.dtype, numel: int, name: str) -> None:
    x = cases.CASES[name](numel).to(dtype)
    for bits, group_size, stochastic in ((8, 64, False), (8, 128, False), (4, 256, True), (2, 64, True)):
        check_parity(x, bits, group_size, stochastic)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", fmt.BITS)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_cuda_division_equals_the_host_division_on_ties(dtype: torch.dtype, bits: int) -> None:
    # Halves of a step, in every magnitude from the smallest step up: the quotient is exactly k + 1/2.
    numel = 64 * 240
    group = torch.arange(numel) // 64
    steps = (1 + (group * 37 % 128) / 128.0) * 2.0 ** (group % 240 - 118.0)
    levels = fmt.levels(bits)
    halves = torch.arange(numel) % (2 * levels + 1) / 2
    halves[::64], halves[1::64] = 0.0, float(levels)
    x = halves * steps
    check_parity(x.to(torch.float32).to(dtype), bits, 64, False)


@pytest.mark.gpu
@pytest.mark.parametrize("numel", [1000, 3 * SMALL + 777])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_cuda_misaligned_pointers_give_the_same_bytes(dtype: torch.dtype, numel: int) -> None:
    whole = cases.CASES["normal"](numel + 1).to(dtype).to(DEVICE)
    x = whole[1:]
    expected = encode(x.clone(), 8, 64, False)
    restored = decode(expected, numel, dtype, 8, 64)
    for offset in (0, 1, 4, 8):
        packed = encode(x, 8, 64, False, offset)
        cases.assert_same_bytes(packed, expected)
        out_offset = dtype.itemsize if offset else 0
        cases.assert_same_bytes(decode(packed, numel, dtype, 8, 64, out_offset), restored)


@pytest.mark.gpu
def test_cuda_bool_bytes_equal_the_reference() -> None:
    kernel = cuda.bind(torch.bool, 1, 64, False, False, DEVICE)
    for numel in (*cases.SIZES, 7, 8, 9, SMALL + 5):
        for shift in (0, 1):
            x = (torch.rand(numel + 1, generator=torch.Generator().manual_seed(numel)) < 0.5).to(DEVICE)[shift:]
            nbytes = fmt.packed_bool_nbytes(x.numel())
            buffer, packed = poisoned(nbytes, shift)
            kernel.encode(x, packed, 0)
            assert_poisoned_around(buffer, nbytes, shift)
            cases.assert_same_bytes(packed, reference.pack_bool(x.cpu()))
            buffer, out = poisoned(x.numel(), shift)
            kernel.decode(packed, out.view(torch.bool))
            assert_poisoned_around(buffer, x.numel(), shift)
            cases.assert_same_bytes(out.view(torch.bool), x)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.slow
def test_cuda_more_than_two_to_the_31_elements() -> None:
    period = 64 * 1021  # no power of two: an index that wraps would meet other values
    repeats = 2**31 // period + 3
    numel = repeats * period
    needed = numel * 2 * 2 + fmt.packed_nbytes(numel, 8, 64) + 2**30
    free = torch.cuda.mem_get_info()[0]
    if free < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of device memory, {free / 2**30:.0f} are free")
    pattern = cases.CASES["normal"](period).to(torch.bfloat16)
    x = pattern.to(DEVICE).repeat(repeats)
    packed = torch.empty(fmt.packed_nbytes(numel, 8, 64), dtype=torch.uint8, device=DEVICE)
    kernel = cuda.bind(torch.bfloat16, 8, 64, False, False, DEVICE)
    kernel.encode(x, packed, 0)
    expected = reference.quantize(pattern)
    codes = packed[: fmt.parameters_offset(numel, 8)].view(repeats, period)
    assert bool((codes == expected[:period].to(DEVICE)).all())
    parameters = packed[fmt.parameters_offset(numel, 8) :].view(repeats, -1)
    assert bool((parameters == expected[period:].to(DEVICE)).all())
    x.zero_()
    kernel.decode(packed, x)
    restored = reference.dequantize(expected, period, dtype=torch.bfloat16).to(DEVICE)
    assert bool((x.view(repeats, period) == restored).all())


@pytest.mark.gpu
def test_cuda_launches_on_the_current_stream_and_under_capture() -> None:
    x = cases.CASES["normal"](SMALL).to(DEVICE)
    kernel = cuda.bind(torch.float32, 8, 64, False, False, DEVICE)
    packed = torch.zeros(fmt.packed_nbytes(SMALL, 8, 64), dtype=torch.uint8, device=DEVICE)
    out = torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    # A launch on any other stream than the captured one fails the capture.
    with torch.cuda.graph(graph):
        kernel.encode(x, packed, 0)
        kernel.decode(packed, out)
    x.copy_(cases.CASES["outliers"](SMALL))
    graph.replay()
    torch.cuda.synchronize()
    expected = reference.quantize(x.cpu())
    cases.assert_same_bytes(packed, expected)
    cases.assert_same_bytes(out, reference.dequantize(expected, SMALL))


@pytest.mark.gpu
def test_cuda_never_synchronises() -> None:
    x = cases.CASES["specials"](SMALL).to(DEVICE)
    kernel = cuda.bind(torch.float32, 8, 64, True, False, DEVICE)
    packed = torch.empty(fmt.packed_nbytes(SMALL, 8, 64), dtype=torch.uint8, device=DEVICE)
    kernel.encode(x, packed, 0)
    busy = torch.cuda.Event()
    torch.cuda._sleep(200_000_000)
    kernel.encode(x, packed, 0)
    kernel.decode(packed, x)
    busy.record()
    assert not busy.query(), "the calls returned only after the device had finished"


@pytest.mark.gpu
def test_cuda_launch_uses_and_restores_the_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    other = torch.device("cuda", 1)
    x = cases.CASES["normal"](5000)
    packed = torch.empty(fmt.packed_nbytes(5000, 8, 64), dtype=torch.uint8, device=other)
    torch.cuda.set_device(0)
    cuda.bind(torch.float32, 8, 64, False, False, other).encode(x.to(other), packed, 0)
    assert torch.cuda.current_device() == 0
    assert torch.ones(1, device="cuda").device.index == 0
    cases.assert_same_bytes(packed, reference.quantize(x))


@pytest.mark.gpu
def test_cuda_launch_failure_is_an_exception_and_leaves_no_error_behind() -> None:
    from pyactcomp import PyactcompError, _core

    kernel = _core.Kernel("codes", "float32", "cuda", torch.cuda.device_count())
    with pytest.raises(PyactcompError, match="cudaErrorInvalidDevice"):
        kernel.encode(0, 0, 64, 0, 0)
    x = cases.CASES["normal"](1000)
    check_parity(x, 8, 64, False)


def test_cuda_bind_says_why_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = cuda.unavailable_reason()
    if reason is None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        reason = cuda.unavailable_reason()
    assert reason is not None
    with pytest.raises(ImplementationUnavailableError) as caught:
        cuda.bind(torch.float32, 8, 64, False, False, torch.device("cuda"))
    assert reason in str(caught.value)


def test_cuda_unavailable_reasons_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyactcomp import _core

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(_core, "has_cuda_codec", False)
    assert "without nvcc" in str(cuda.unavailable_reason())
    monkeypatch.setattr(_core, "has_cuda_codec", True)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "CUDA build of torch" in str(cuda.unavailable_reason())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "no CUDA device" in str(cuda.unavailable_reason())
