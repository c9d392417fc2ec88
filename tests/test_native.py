"""Contract under test: the C++ codec gives the reference's bytes, with and without AVX2, on any number of threads."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import native_cases as cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pyactcomp.codec import format as fmt
from pyactcomp.codec import reference
from pyactcomp.codec.kernels import Kernel, cpu

CSRC = Path(__file__).resolve().parents[1] / "csrc"
CPU = torch.device("cpu")
CANARY = 0xA5
SEED = 0x1234_5678_9ABC_DEF0


def encode(kernel: Kernel, x: Tensor, nbytes: int, seed: int = SEED) -> Tensor:
    """Pack into the middle of a poisoned buffer; nothing outside may change, and every byte inside must."""
    buffer = torch.full((nbytes + 128,), CANARY, dtype=torch.uint8)
    kernel.encode(x, buffer[64 : 64 + nbytes], seed)
    assert (buffer[:64] == CANARY).all()
    assert (buffer[64 + nbytes :] == CANARY).all()
    return buffer[64 : 64 + nbytes].clone()


def decode(kernel: Kernel, packed: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    buffer = torch.full((numel * dtype.itemsize + 128,), CANARY, dtype=torch.uint8)
    out = buffer[64 : 64 + numel * dtype.itemsize].view(dtype)
    kernel.decode(packed, out)
    assert (buffer[:64] == CANARY).all()
    assert (buffer[64 + numel * dtype.itemsize :] == CANARY).all()
    return out.clone()


def check_parity(x: Tensor, bits: int, group_size: int, stochastic: bool) -> None:
    numel = x.numel()
    packed = reference.quantize(x, bits=bits, group_size=group_size, stochastic=stochastic, seed=SEED)
    restored = reference.dequantize(packed, numel, dtype=x.dtype, bits=bits, group_size=group_size)
    for simd in (True, False):
        kernel = cpu.bind(x.dtype, bits, group_size, stochastic, False, CPU, simd=simd)
        cases.assert_same_bytes(encode(kernel, x, fmt.packed_nbytes(numel, bits, group_size)), packed)
        cases.assert_same_bytes(decode(kernel, packed, numel, x.dtype), restored)


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("bits", fmt.BITS)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_cpu_bytes_equal_the_reference(dtype: torch.dtype, bits: int, stochastic: bool) -> None:
    for group_size in fmt.GROUP_SIZES:
        for numel in cases.SIZES:
            for name, case in cases.CASES.items():
                x = case(numel).to(dtype)
                try:
                    check_parity(x, bits, group_size, stochastic)
                except AssertionError as error:
                    raise AssertionError(f"{name}, numel={numel}, group_size={group_size}: {error}") from error


@given(data=st.data())
def test_cpu_bytes_equal_the_reference_for_any_bit_pattern(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(cases.DTYPES))
    raw = data.draw(st.binary(max_size=600 * dtype.itemsize))
    numel = len(raw) // dtype.itemsize
    x = torch.tensor(list(raw[: numel * dtype.itemsize]), dtype=torch.uint8).view(dtype)
    check_parity(
        x,
        data.draw(st.sampled_from(fmt.BITS)),
        data.draw(st.sampled_from(fmt.GROUP_SIZES)),
        data.draw(st.booleans()),
    )


@pytest.mark.parametrize("simd", [True, False], ids=["simd", "baseline"])
def test_cpu_bool_bytes_equal_the_reference(simd: bool) -> None:
    kernel = cpu.bind(torch.bool, 1, 64, False, False, CPU, simd=simd)
    for numel in (*cases.SIZES, 7, 8, 9):
        x = torch.rand(numel, generator=torch.Generator().manual_seed(numel)) < 0.5
        packed = encode(kernel, x, fmt.packed_bool_nbytes(numel))
        cases.assert_same_bytes(packed, reference.pack_bool(x))
        cases.assert_same_bytes(decode(kernel, packed, numel, torch.bool), x)


@pytest.mark.parametrize("threads", [2, 3, 7])
@pytest.mark.parametrize("dtype", [*cases.DTYPES, torch.bool], ids=str)
def test_cpu_bytes_do_not_depend_on_the_number_of_threads(dtype: torch.dtype, threads: int) -> None:
    # Enough for seven shares, and a partial last group in the last one.
    numel = 7 * (1 << 17) + 65
    x = cases.CASES["specials"](numel)
    x = x > 0 if dtype is torch.bool else x.to(dtype)
    bits, nbytes = (1, fmt.packed_bool_nbytes(numel)) if dtype is torch.bool else (4, fmt.packed_nbytes(numel, 4, 64))
    kernel = cpu.bind(dtype, bits, 64, True, False, CPU)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        packed = encode(kernel, x, nbytes)
        restored = decode(kernel, packed, numel, dtype)
        torch.set_num_threads(threads)
        cases.assert_same_bytes(encode(kernel, x, nbytes), packed)
        cases.assert_same_bytes(decode(kernel, packed, numel, dtype), restored)
    finally:
        torch.set_num_threads(before)


def test_cpu_bytes_do_not_depend_on_flushing_of_subnormal_numbers() -> None:
    x = cases.CASES["subnormal"](1000)
    kernel = cpu.bind(torch.float32, 8, 64, False, False, CPU)
    nbytes = fmt.packed_nbytes(1000, 8, 64)
    packed = encode(kernel, x, nbytes)
    restored = decode(kernel, packed, 1000, torch.float32)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        flushed_packed = encode(kernel, x, nbytes)
        flushed_restored = decode(kernel, packed, 1000, torch.float32)
        tiny = torch.tensor([1e-40])
        still_flushing = float(tiny * 1.0) == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert still_flushing, "the caller's mode was not restored"
    cases.assert_same_bytes(flushed_packed, packed)
    cases.assert_same_bytes(flushed_restored, restored)


def test_cpu_misaligned_pointers_give_the_same_bytes() -> None:
    x = cases.CASES["normal"](1001)[1:]
    buffer = torch.zeros(fmt.packed_nbytes(1000, 8, 64) + 3, dtype=torch.uint8)
    cpu.bind(torch.float32, 8, 64, False, False, CPU).encode(x, buffer[3:], 0)
    cases.assert_same_bytes(buffer[3:], reference.quantize(x))


def test_cpu_dense_tensor_is_read_in_storage_order() -> None:
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last)
    kernel = cpu.bind(x.dtype, 8, 64, False, False, CPU)
    packed = encode(kernel, x, fmt.packed_nbytes(x.numel(), 8, 64))
    cases.assert_same_bytes(packed, reference.quantize(x.permute(0, 2, 3, 1).reshape(-1)))


def test_cpu_is_available() -> None:
    assert cpu.unavailable_reason() is None


def test_codec_arguments_are_checked() -> None:
    from pyactcomp import _core

    with pytest.raises(ValueError, match=r"bits is 8, 4 or 2, got 3"):
        _core.Kernel("codes", "float32", "cpu", bits=3)
    with pytest.raises(ValueError, match=r"group_size is 64, 128 or 256, got 65"):
        _core.Kernel("codes", "float32", "cpu", group_size=65)
    with pytest.raises(ValueError, match=r"dtype is one of float32, .* got int8"):
        _core.Kernel("codes", "int8", "cpu")
    with pytest.raises(ValueError, match=r"no kernel for cpu stores bool as codes"):
        _core.Kernel("codes", "bool", "cpu")
    with pytest.raises(ValueError, match=r"device is the index of a CUDA device, got -1"):
        _core.Kernel("codes", "float32", "cuda")


def test_newton_division_equals_true_division(tmp_path: Path) -> None:
    """The CUDA kernels' two fused operations against the host's division, over all 128 mantissas of a step."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler to build csrc/codec/division_check.cpp")
    program = tmp_path / "division_check"
    # -march=native for a hardware fma; the library's own is as exact and fifty times slower.
    flags = ["-std=c++17", "-O2", "-march=native", "-ffp-contract=off", f"-I{CSRC}"]
    subprocess.run([compiler, *flags, str(CSRC / "codec/division_check.cpp"), "-o", str(program)], check=True)
    result = subprocess.run([program], capture_output=True, text=True, check=True)
    checked, failed = (int(word) for word in result.stdout.split())
    assert checked > 10_000_000
    assert failed == 0, result.stderr
