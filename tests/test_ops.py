"""The ``torch.library`` operators: registration, fake implementations, graphs, and arguments they must refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import pyactcomp
from pyactcomp import PyactcompError, codec
from pyactcomp.codec import format as fmt
from pyactcomp.codec import reference
from pyactcomp.compiled import codec as compiled_codec

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.bool)
QUANTIZE = torch.ops.pyactcomp.quantize.default
DEQUANTIZE = torch.ops.pyactcomp.dequantize.default
RESTORE = torch.ops.pyactcomp.restore.default

SAMPLES: dict[str, Callable[[], Tensor]] = {
    "matrix": lambda: torch.randn(7, 30),
    "transposed": lambda: torch.randn(7, 30).t(),
    "channels_last": lambda: torch.randn(2, 3, 5, 4).contiguous(memory_format=torch.channels_last),
    "empty": lambda: torch.randn(0, 4),
}


@pytest.fixture(params=["reference", "cpu"])
def impl(request: pytest.FixtureRequest) -> str:
    reason = codec.unavailable_reason(request.param, torch.device("cpu"))
    if reason is not None:
        pytest.skip(f"impl={request.param!r} cannot be used here: {reason}")
    return str(request.param)


def sample(name: str, dtype: torch.dtype) -> Tensor:
    x = SAMPLES[name]()
    return torch.empty_like(x, dtype=dtype).copy_(x > 0 if dtype is torch.bool else x)


def widths(dtype: torch.dtype) -> tuple[int, ...]:
    return (1,) if dtype is torch.bool else fmt.BITS


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck_passes_for_both_operators(name: str, dtype: torch.dtype, impl: str) -> None:
    x = sample(name, dtype)
    for bits in widths(dtype):
        torch.library.opcheck(QUANTIZE, (x, bits, 64, False, 0, impl))
        packed = QUANTIZE(x, bits, 64, False, 0, impl)
        torch.library.opcheck(DEQUANTIZE, (packed, x.shape, x.stride(), dtype, bits, 64, impl))


def test_opcheck_passes_for_stochastic_rounding_and_inputs_that_require_grad(impl: str) -> None:
    x = torch.randn(3, 100, requires_grad=True)
    torch.library.opcheck(QUANTIZE, (x, 4, 128, True, 7, impl))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SAMPLES)
def test_fake_results_have_the_shape_strides_and_dtype_of_real_ones(name: str, dtype: torch.dtype, impl: str) -> None:
    x = sample(name, dtype)
    for bits in widths(dtype):
        packed = QUANTIZE(x, bits, 128, False, 0, impl)
        restored = DEQUANTIZE(packed, x.shape, x.stride(), dtype, bits, 128, impl)
        with FakeTensorMode() as mode:
            fake_packed = QUANTIZE(mode.from_tensor(x), bits, 128, False, 0, impl)
            fake = DEQUANTIZE(fake_packed, x.shape, x.stride(), dtype, bits, 128, impl)
        assert packed.numel() == fmt.packed_nbytes(x.numel(), bits, 128)
        for got, real in ((fake_packed, packed), (fake, restored)):
            assert (got.shape, got.stride(), got.dtype, got.device) == (
                real.shape,
                real.stride(),
                real.dtype,
                real.device,
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operators_give_the_definitions_bytes_and_values(dtype: torch.dtype, impl: str) -> None:
    x = sample("matrix", dtype)
    for bits in widths(dtype):
        packed = QUANTIZE(x, bits, 64, False, 0, impl)
        restored = DEQUANTIZE(packed, x.shape, x.stride(), dtype, bits, 64, impl)
        if dtype is torch.bool:
            assert torch.equal(packed, reference.pack_bool(x.view(-1)))
            assert torch.equal(restored, x)
        else:
            assert torch.equal(packed, reference.quantize(x.view(-1), bits=bits))
            expected = reference.dequantize(packed, x.numel(), dtype=dtype, bits=bits)
            assert torch.equal(restored.view(-1), expected)


def rows_apart(length: int, dtype: torch.dtype) -> Tensor:
    """Return the last of three tensors whose rows lie side by side, as values beside queries and keys."""
    return torch.randn(4, 5, 3 * length).to(dtype)[..., 2 * length :].unflatten(-1, (2, -1))


@pytest.mark.parametrize("copied", [False, True], ids=["views", "copies"])
@pytest.mark.parametrize("group_size", fmt.GROUP_SIZES)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_codes_and_parameters_are_restored_as_one_tensor(dtype: torch.dtype, group_size: int, copied: bool) -> None:
    x = torch.randn(7, 30).to(dtype)
    x[3, 4] = float("inf")
    codes, groups = compiled_codec.quantize(x, group_size)
    if copied:
        codes, groups = codes.clone(), groups.clone()
    torch.library.opcheck(RESTORE, (codes, groups, dtype, group_size))
    packed = reference.quantize(x.flatten(), group_size=group_size)
    expected = reference.dequantize(packed, x.numel(), dtype=dtype, group_size=group_size)
    assert torch.equal(RESTORE(codes, groups, dtype, group_size), expected.view(7, 30))


def test_restore_refuses_what_are_no_codes() -> None:
    codes, groups = compiled_codec.quantize(torch.randn(7, 30), 64)
    for arguments in (
        (codes.float(), groups, torch.float32, 64),
        (codes, groups.long(), torch.float32, 64),
        (codes, groups[1:], torch.float32, 64),
        (codes, groups, torch.float32, 128),
        (codes, groups, torch.float64, 64),
        (codes, groups, torch.bool, 64),
    ):
        with pytest.raises(TypeError):
            RESTORE(*arguments)


@pytest.mark.parametrize("length", [6, 64])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_rows_apart_have_the_bytes_of_their_copy(dtype: torch.dtype, length: int, impl: str) -> None:
    x = rows_apart(length, dtype)
    for bits in fmt.BITS:
        torch.library.opcheck(QUANTIZE, (x, bits, 64, False, 0, impl))
        assert torch.equal(
            QUANTIZE(x, bits, 64, False, 0, impl), QUANTIZE(x.contiguous(), bits, 64, False, 0, "reference")
        )


@pytest.mark.parametrize("name", [name for name in SAMPLES if name != "empty"])
def test_a_full_graph_round_trip_equals_eager(name: str, impl: str) -> None:
    def through_operators(x: Tensor) -> Tensor:
        packed = torch.ops.pyactcomp.quantize(x * 2, 8, 64, True, 3, impl)
        restored: Tensor = torch.ops.pyactcomp.dequantize(packed, x.shape, x.stride(), x.dtype, 8, 64, impl)
        return restored + 1

    x = sample(name, torch.float32)
    torch.compiler.reset()
    compiled = torch.compile(through_operators, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), through_operators(x))
    # Another size, under which the graph holds symbols instead of numbers.
    y = torch.cat([x, x], dim=x.dim() - 1)
    assert torch.equal(compiled(y), through_operators(y))


def test_a_full_graph_with_quantize_and_dequantize_equals_eager(impl: codec.Impl) -> None:
    def round_trip(x: Tensor) -> Tensor:
        return pyactcomp.codec.dequantize(pyactcomp.codec.quantize(x.t(), impl=impl), impl=impl) * 2

    x = torch.randn(20, 30)
    torch.compiler.reset()
    compiled = torch.compile(round_trip, backend="aot_eager", fullgraph=True)
    expected = round_trip(x)
    got = compiled(x)
    assert torch.equal(got, expected)
    assert got.stride() == expected.stride()


# Called directly, with nothing in between that validates.

CAUGHT = (TypeError, ValueError, PyactcompError)


@pytest.mark.parametrize(
    "args",
    [
        pytest.param((torch.zeros(64), 3, 64, False, 0), id="bits"),
        pytest.param((torch.zeros(64), 8, 65, False, 0), id="group-size"),
        pytest.param((torch.zeros(64), 8, 0, False, 0), id="group-size-zero"),
        pytest.param((torch.zeros(64), 1, 64, False, 0), id="one-bit-floats"),
        pytest.param((torch.zeros(64, dtype=torch.bool), 8, 64, False, 0), id="eight-bit-booleans"),
        pytest.param((torch.zeros(64, dtype=torch.int32), 8, 64, False, 0), id="integers"),
        pytest.param((torch.zeros(64, dtype=torch.float64), 8, 64, False, 0), id="float64"),
        pytest.param((torch.zeros(64, 64)[:, ::2], 8, 64, False, 0), id="gaps"),
        pytest.param((torch.zeros(64, 64)[::2].t(), 8, 64, False, 0), id="columns-apart"),
        pytest.param((torch.zeros(64, 64, dtype=torch.bool)[:, :32], 1, 64, False, 0), id="boolean-rows-apart"),
        pytest.param((torch.zeros(64, 1).expand(64, 2), 8, 64, False, 0), id="expanded"),
    ],
)
def test_quantize_operator_refuses_what_it_cannot_pack(args: tuple[Any, ...], impl: str) -> None:
    with pytest.raises(CAUGHT):
        QUANTIZE(*args, impl)


def dequantize_arguments(**changed: Any) -> list[Any]:
    arguments: dict[str, Any] = {
        "packed": torch.zeros(216, dtype=torch.uint8),
        "shape": (10, 20),
        "stride": (20, 1),
        "dtype": torch.float32,
        "bits": 8,
        "group_size": 128,
    }
    return list((arguments | changed).values())


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"packed": torch.zeros(215, dtype=torch.uint8)}, id="truncated"),
        pytest.param({"packed": torch.zeros(216)}, id="packed-dtype"),
        pytest.param({"packed": torch.zeros(432, dtype=torch.uint8)[::2]}, id="packed-stepped"),
        pytest.param({"packed": torch.zeros(1, dtype=torch.uint8).expand(216)}, id="packed-expanded"),
        pytest.param({"stride": (0, 1)}, id="stride-zero"),
        pytest.param({"stride": (1, 1)}, id="stride-overlapping"),
        pytest.param({"stride": (40, 2)}, id="stride-gaps"),
        pytest.param({"dtype": torch.int32}, id="dtype-integer"),
        pytest.param({"dtype": torch.float64}, id="dtype-float64"),
        pytest.param({"dtype": torch.bool}, id="dtype-bool"),
        pytest.param({"bits": 1}, id="one-bit-floats"),
        pytest.param({"bits": 7}, id="bits"),
        pytest.param({"group_size": 100}, id="group-size"),
        pytest.param({"group_size": 0}, id="group-size-zero"),
    ],
)
def test_dequantize_operator_refuses_what_it_cannot_restore(changed: dict[str, Any]) -> None:
    # The definition, so that a check that is missing shows as a failure: a kernel would write beyond its output.
    assert DEQUANTIZE(*dequantize_arguments(), "reference").shape == (10, 20)
    with pytest.raises(CAUGHT):
        DEQUANTIZE(*dequantize_arguments(**changed), "reference")
