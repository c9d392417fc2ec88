"""The codec in aten gives the bytes of the reference."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from pyactcomp.codec import format as fmt
from pyactcomp.codec import reference
from pyactcomp.compiled import codec, plans
from pyactcomp.compiled.joint import storage_order

CASES = {
    "normal": lambda: torch.randn(4, 512),
    "positive": lambda: torch.randn(4, 512).relu(),
    "tiny": lambda: torch.randn(4, 512) * 2.0**-140,
    "huge": lambda: torch.randn(4, 512) * 2.0**127,
    "constant": lambda: torch.full((4, 512), -3.1),
    "zero": lambda: torch.zeros(4, 512) * -1,
    "one outlier": lambda: torch.randn(4, 512).index_fill(1, torch.tensor([7]), 1e30),
    "non-finite": lambda: (
        torch.randn(4, 512)
        .index_fill(1, torch.tensor([0, 65]), float("inf"))
        .index_fill(1, torch.tensor([1, 130]), float("nan"))
        .index_fill(1, torch.tensor([2, 200]), -float("inf"))
    ),
    "nothing finite": lambda: torch.full((4, 512), float("nan")),
}


@pytest.mark.parametrize("group_size", fmt.GROUP_SIZES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keep_positive", [False, True])
def test_codes_and_parameters_are_those_of_the_reference(
    case: str, group_size: int, dtype: torch.dtype, keep_positive: bool
) -> None:
    x = CASES[case]().to(dtype)
    packed = reference.quantize(x.flatten(), group_size=group_size, keep_positive=keep_positive)
    codes, groups = codec.quantize(x, group_size, keep_positive)
    at = fmt.parameters_offset(x.numel(), 8)
    assert torch.equal(codes.flatten(), packed[: x.numel()])
    halves = packed[at:].clone().view(torch.int16).view(-1, 2)
    assert torch.equal(groups.to(torch.int16), halves[:, 0])
    assert torch.equal((groups >> 16).to(torch.int16), halves[:, 1])
    expected = reference.dequantize(packed, x.numel(), dtype=dtype, group_size=group_size)
    restored = codec.dequantize(codes, groups, group_size, dtype).flatten()
    assert torch.equal(restored.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(restored.isnan(), expected.isnan())


def test_float16_saturates_as_in_the_reference() -> None:
    inf = float("inf")
    x = torch.tensor([0.0, 1 / 3, 65504.0, 65519.0, 65520.0, -65520.0, 1e9, -3e38, inf, -inf, float("nan")])
    expected = reference._round_to(x, torch.float16)
    assert expected[:8].isfinite().all()
    assert torch.equal(codec.saturate(x).to(torch.float16).view(torch.int16), expected.view(torch.int16))


def test_bits_are_those_of_the_reference() -> None:
    x = torch.rand(3, 5, 72) > 0.5
    packed = codec.pack_bits(x)
    assert torch.equal(packed, reference.pack_bool(x.flatten()))
    assert torch.equal(reference.unpack_bool(packed, x.numel()).view_as(x), x)
    assert torch.equal(codec.unpack_bits(packed.view(3, 5, 9)), x)


@pytest.mark.parametrize("apart", [True, False], ids=["one gap", "two gaps"])
def test_rows_are_packed_where_they_are(apart: bool) -> None:
    projection = torch.randn(16, 8, 3 * 64)
    values = projection[..., 128:] if apart else projection[:, :4, 128:]
    order = storage_order(values)
    assert order is not None
    plan = plans._code_plan(values, order, 64, False, False)
    copies = [node for node in make_fx(plan.pack)(values).graph.nodes if "clone" in str(node.target)]
    assert bool(copies) != apart
    codes, groups = plan.pack(values)
    expected = codec.quantize(values.permute(order).contiguous(), 64)
    assert torch.equal(codes, expected[0])
    assert torch.equal(groups, expected[1])


@pytest.mark.parametrize("magnitude", [2.0**-120, 1.0, 2.0**127])
def test_scaled_halves_are_exact_to_half_an_ulp_of_float16(magnitude: float) -> None:
    x = torch.randn(4096).clamp(-1.9, 1.9) * magnitude
    restored = codec.unscale(*codec.scale(x))
    # 2**-11 of an element, and half the smallest float16 of the largest, which is scaled to at least 2**14.
    bound = x.abs() * 2.0**-11 + x.abs().amax() * 2.0**-39
    assert bool(((restored - x).abs() <= bound).all())


@pytest.mark.parametrize("other", [float("nan"), float("inf"), -float("inf")])
def test_scaled_halves_survive_a_neighbour_that_is_no_number(other: float) -> None:
    x = torch.randn(4096)
    x[5] = other
    restored = codec.unscale(*codec.scale(x))
    assert torch.equal(restored[5].nan_to_num(), x[5].nan_to_num())
    # Not scaled: half the smallest float16.
    bound = x.abs() * 2.0**-11 + 2.0**-25
    assert bool(((restored - x).abs() <= bound)[x.isfinite()].all())


@pytest.mark.parametrize("shape", [(8, 64), (3, 5), (2, 3, 8), (2, 16, 3, 5), (2, 24, 3, 3)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "innermost dimension first", "apart"])
def test_bits_return(shape: tuple[int, ...], layout: str) -> None:
    x = torch.rand(shape) < 0.5
    if layout == "innermost dimension first":
        x = x.transpose(1, -1).contiguous().transpose(1, -1)
    elif layout == "apart":
        x = torch.stack([x, ~x], 1).select(1, 0)
    order = storage_order(x)
    assert order is not None
    plan = plans._bit_plan(x, order)
    assert isinstance(plan, plans.Plan)
    (packed,) = plan.pack(x)
    # Inductor lays out results of four dimensions anew.
    assert packed.dim() != 4
    assert torch.equal(packed.flatten(), reference.pack_bool(x.permute(order).flatten()))
    assert torch.equal(plan.restore(packed), x)
    copies = [node for node in make_fx(plan.pack)(x).graph.nodes if "clone" in str(node.target)]
    assert bool(copies) == (layout == "apart")


def test_channels_last_is_packed_without_a_copy() -> None:
    x = torch.randn(2, 64, 3, 5).to(memory_format=torch.channels_last)
    order = storage_order(x)
    assert order == [0, 2, 3, 1]
    plan = plans._code_plan(x, order, 64, False, False)
    names = {str(node.target) for node in make_fx(plan.pack)(x).graph.nodes if node.op == "call_function"}
    assert not [name for name in names if "clone" in name or "permute" in name]
    codes, groups = plan.pack(x)
    assert codes.dim() != 4
    expected = codec.quantize(x.permute(order).contiguous(), 64)
    assert torch.equal(codes.flatten(), expected[0].flatten())
    assert torch.equal(groups, expected[1])
    assert torch.equal(plan.restore(codes, groups), codec.dequantize(*expected, 64, x.dtype)[0].permute(0, 3, 1, 2))
