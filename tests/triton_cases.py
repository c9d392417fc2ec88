"""Byte parity of the Triton kernels with the reference, on the device that this process has kernels for.

Run by ``test_triton.py`` in processes of their own, with Triton's interpreter and, where there is a GPU, without.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from native_cases import CASES, DTYPES, SIZES, assert_same_bytes
from torch import Tensor

from pyactcomp.codec import format as fmt
from pyactcomp.codec import probability, reference
from pyactcomp.codec.kernels import triton as kernels
from pyactcomp.codec.kernels.triton_ops import element_index, uniform

DEVICE = torch.device("cpu" if kernels.interpreted() else "cuda")
SEED = 0x0123_4567_89AB_CDEF
RUN = 512
"""Elements of each case in ``every_case``: whole groups of any size, four cases to a tile."""


def is_flagged(x: Tensor) -> bool:
    return not bool((x.abs() <= fmt.MAX_FINITE).all())


def every_case(dtype: torch.dtype) -> Tensor:
    """Return all cases one after another, the ordinary ones first, so that some tiles hold no flagged group."""
    parts = sorted((make(RUN).to(dtype) for make in CASES.values()), key=is_flagged)
    x = torch.cat([*parts, parts[0][: RUN - 67]])
    tiles = [is_flagged(tile) for tile in x.split(kernels.TILE)]
    assert {True, False} <= set(tiles)
    return x


def check(x: Tensor, bits: int, group_size: int, stochastic: bool, keep_positive: bool = False) -> None:
    """Compare the bytes of both directions with the reference's; the buffers' old contents must not show."""
    kernel = kernels.bind(x.dtype, bits, group_size, stochastic, keep_positive, DEVICE)
    expected = reference.quantize(
        x, bits=bits, group_size=group_size, stochastic=stochastic, seed=SEED, keep_positive=keep_positive
    )
    packed = torch.full((fmt.packed_nbytes(x.numel(), bits, group_size),), 0xA5, dtype=torch.uint8, device=DEVICE)
    kernel.encode(x.to(DEVICE), packed, SEED)
    assert_same_bytes(packed, expected)
    restored = torch.full((x.numel(),), 7.0, dtype=x.dtype, device=DEVICE)
    kernel.decode(packed, restored)
    assert_same_bytes(
        restored, reference.dequantize(expected, x.numel(), dtype=x.dtype, bits=bits, group_size=group_size)
    )


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("group_size", fmt.GROUP_SIZES)
@pytest.mark.parametrize("bits", fmt.BITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_are_those_of_the_reference(dtype: torch.dtype, bits: int, group_size: int, stochastic: bool) -> None:
    check(every_case(dtype), bits, group_size, stochastic)


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("bits", fmt.BITS)
def test_bytes_are_those_of_the_reference_with_keep_positive(bits: int, stochastic: bool) -> None:
    check(every_case(torch.float32), bits, 64, stochastic, keep_positive=True)


@pytest.mark.parametrize("position", [0, 1001, kernels.TILE - 1])
@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf"), 3e38, -3e38])
def test_one_special_value_is_seen_in_an_ordinary_tile(special: float, position: int) -> None:
    x = CASES["normal"](kernels.TILE)
    x[position] = special
    check(x, 8, 64, False)


@pytest.mark.parametrize("bits", fmt.BITS)
def test_bytes_are_those_of_the_reference_at_every_size(bits: int) -> None:
    # The whole tiles come after the others, at sizes that 16 divides and at those it does not.
    for n in (*SIZES, kernels.TILE, kernels.TILE + 16, 2 * kernels.TILE - 1):
        check(CASES["normal"](n).to(torch.bfloat16), bits, 64, False)


@pytest.mark.parametrize("offset", [1, 8], ids=["unaligned", "aligned"])
def test_bytes_do_not_depend_on_the_pointer(offset: int) -> None:
    n = kernels.TILE + 100
    x = CASES["normal"](n).to(torch.bfloat16)
    shifted = torch.empty(n + offset, dtype=x.dtype, device=DEVICE)[offset:].copy_(x)
    kernel = kernels.bind(x.dtype, 8, 64, False, False, DEVICE)
    packed = torch.empty(fmt.packed_nbytes(n, 8, 64), dtype=torch.uint8, device=DEVICE)
    kernel.encode(shifted, packed, 0)
    expected = reference.quantize(x)
    assert_same_bytes(packed, expected)
    target = torch.zeros(n + offset, dtype=x.dtype, device=DEVICE)
    kernel.decode(packed, target[offset:])
    assert_same_bytes(target[offset:], reference.dequantize(expected, n, dtype=x.dtype))
    assert not target[:offset].any()


def test_booleans_are_packed_as_in_the_reference() -> None:
    kernel = kernels.bind(torch.bool, 1, 64, False, False, DEVICE)
    for n in (*SIZES, kernels.TILE + 1):
        x = CASES["normal"](n) > 0
        packed = torch.full((fmt.packed_bool_nbytes(n),), 0xA5, dtype=torch.uint8, device=DEVICE)
        kernel.encode(x.to(DEVICE), packed, 0)
        assert_same_bytes(packed, reference.pack_bool(x))
        restored = torch.empty(n, dtype=torch.bool, device=DEVICE)
        kernel.decode(packed, restored)
        assert torch.equal(restored.cpu(), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", [1, kernels.DECODE_TILE, 3 * kernels.DECODE_TILE + 5])
@pytest.mark.parametrize("offset", [0, 1])
def test_widening_keeps_every_value(dtype: torch.dtype, n: int, offset: int) -> None:
    # All the bits there are, again and again.
    bits = torch.arange(n + offset, dtype=torch.int64) * 40503 % 65536
    source = bits.to(torch.int32).to(torch.int16).view(dtype)
    out = torch.full((n + 1,), 7.0, device=DEVICE)
    kernels.widen(source.to(DEVICE)[offset:], out[:n])
    assert torch.equal(out[:n].cpu().nan_to_num(1.5), source[offset:].float().nan_to_num(1.5))
    assert out[n] == 7


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("n", [1, kernels.DECODE_TILE, 3 * kernels.DECODE_TILE + 5])
def test_probabilities_are_stored_as_by_torch(n: int, log: bool) -> None:
    encode = probability.encode_log if log else probability.encode
    decode = probability.decode_log if log else probability.decode
    x = -torch.logspace(-7, 2, n, dtype=torch.float64).flip(0)
    x = (x if log else x.exp()).float()
    x[0] = torch.nan
    codes = torch.full((n + 1,), 7, dtype=torch.int16, device=DEVICE)
    kernels.encode_probabilities(x.to(DEVICE), codes[:n], log)
    # Exponentials and logarithms are a few roundings apart, a fraction of a step.
    assert int((codes[:n].cpu().int() - encode(x).int()).abs().max()) <= 1
    assert codes[n] == 7
    bits = torch.arange(n, dtype=torch.int64) * 40503 % 65536
    codes = (bits - 2**15).to(torch.int16)
    out = torch.full((n + 1,), 7.0, device=DEVICE)
    kernels.decode_probabilities(codes.to(DEVICE), out[:n], log)
    exact = decode(codes, torch.float64)
    torch.testing.assert_close(out[:n].cpu().double(), exact, rtol=16 * 2.0**-24 * 88, atol=0, equal_nan=True)
    assert out[n] == 7


@triton.jit(do_not_specialize=["group", "key0", "key1"])
def _uniform_kernel(out, group: tl.int64, key0: tl.uint32, key1: tl.uint32):
    index, high = element_index(group.to(tl.int64) * 64, key1, 64, 1)
    tl.store(out + tl.arange(0, 64)[None, :], uniform(index, high, key0.to(tl.uint32)))


@pytest.mark.parametrize("start", [0, 2**31, 2**32 - 64, 2**32, 5 * 2**32 + 64 * 1001])
def test_generator_counts_beyond_32_bits(start: int) -> None:
    out = torch.empty(64, device=DEVICE)
    kernels.Launcher(_uniform_kernel, (), 1, out.device)(1, (out,), (start // 64, *fmt.random_keys(SEED)))
    assert_same_bytes(out, reference.uniform(SEED, torch.arange(start, start + 64)))


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_2_to_the_31_elements() -> None:
    n = 2**31 + 2**20
    x = torch.zeros(n, dtype=torch.bfloat16, device=DEVICE)
    tail = CASES["normal"](2**21).to(torch.bfloat16)
    x[-(2**21) :] = tail.to(DEVICE)
    kernel = kernels.bind(x.dtype, 8, 64, False, False, DEVICE)
    packed = torch.empty(fmt.packed_nbytes(n, 8, 64), dtype=torch.uint8, device=DEVICE)
    kernel.encode(x, packed, 0)
    expected = reference.quantize(tail)
    assert_same_bytes(packed[n - 2**21 : n], expected[: 2**21])
    assert_same_bytes(packed[-(2**21) // 16 :], expected[2**21 :])
    assert int(packed[: n - 2**21].count_nonzero()) == 0
    kernel.decode(packed, x.fill_(7))
    assert_same_bytes(x[-(2**21) :], reference.dequantize(expected, 2**21, dtype=x.dtype))
    assert int(x[: -(2**21)].count_nonzero()) == 0
