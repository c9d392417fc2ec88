"""Layouts: each once, and dense where the elements fill their extent."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyactcomp.codec.layouts import is_dense, layout_of, rows_of, suggested_layout


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=4),
)
def test_is_dense_agrees_with_enumerating_the_elements(dimensions: list[tuple[int, int]]) -> None:
    shape = tuple(length for length, _ in dimensions)
    stride = tuple(step for _, step in dimensions)
    offsets = sorted(
        sum(i * s for i, s in zip(index, stride, strict=True)) for index in itertools.product(*map(range, shape))
    )
    assert is_dense(shape, stride) == (offsets == list(range(len(offsets))))


@given(st.permutations(range(4)), st.lists(st.integers(0, 4), min_size=4, max_size=4))
def test_is_dense_for_every_order_of_dimensions(order: list[int], shape: list[int]) -> None:
    x = torch.empty(shape).permute(order)
    assert is_dense(tuple(x.shape), x.stride())


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 24)), max_size=4))
def test_rows_are_in_order_with_one_gap(dimensions: list[tuple[int, int]]) -> None:
    shape = tuple(length for length, _ in dimensions)
    stride = tuple(step for _, step in dimensions)
    offsets = [
        sum(i * s for i, s in zip(index, stride, strict=True)) for index in itertools.product(*map(range, shape))
    ]
    # Rows of at least two elements, more than one of them, and at least one element between any two.
    possible = [
        (length, gap)
        for length in range(2, len(offsets))
        for gap in range(1, 24)
        if len(offsets) % length == 0
        and offsets == [i // length * (length + gap) + i % length for i in range(len(offsets))]
    ]
    found = rows_of(shape, stride)
    assert ([] if found is None else [tuple(found)]) == possible


def test_tensors_laid_out_alike_share_one_layout() -> None:
    x = torch.empty(3, 5, 7).transpose(0, 2)
    layout = layout_of(x)
    assert layout == (x.size(), x.stride(), True)
    assert layout_of(torch.empty(3, 5, 7, dtype=torch.int8).transpose(0, 2)) is layout
    assert layout_of(torch.empty(7, 5, 3)) is not layout
    assert not layout_of(x[:, ::2]).dense


def laid_out(shape: tuple[int, ...], order: tuple[int, ...], gaps: int) -> torch.Tensor:
    """Return a tensor whose dimensions lie in memory in an order, the innermost with gaps."""
    whole = torch.randn(*(shape[dim] for dim in order), gaps)[..., 0]
    return whole.permute(*(order.index(dim) for dim in range(len(shape))))


@pytest.mark.parametrize(
    "shape", [(2, 3, 4, 5), (1, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1), (2, 3, 4, 1), (2, 1, 1, 1), (1, 1, 1, 5)]
)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_suggested_layout_is_that_in_which_torch_pools(shape: tuple[int, ...], depth: int) -> None:
    """Pooling a window of one element copies, into the memory format that torch sees in the strides."""
    pool = torch.nn.functional.max_pool3d if depth else torch.nn.functional.max_pool2d
    shape = (*shape[:2], depth, *shape[2:]) if depth else shape
    for order in itertools.permutations(range(len(shape))):
        for gaps in (1, 2):
            x = laid_out(shape, order, gaps)
            assert suggested_layout(layout_of(x)).stride == pool(x, 1).stride(), (order, gaps, x.stride())


def test_the_suggested_layout_of_what_no_format_has_is_contiguous() -> None:
    for x in (torch.randn(3, 4).t(), torch.randn(2, 3, 4).transpose(0, 1), torch.randn(1, 3, 4, 5).expand(2, 3, 4, 5)):
        assert suggested_layout(layout_of(x)).stride == x.contiguous().stride()
