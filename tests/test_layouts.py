"""Layouts: each once, and dense where the elements fill their extent."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from pyactcomp.layouts import is_dense, layout_of


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


def test_tensors_laid_out_alike_share_one_layout() -> None:
    x = torch.empty(3, 5, 7).transpose(0, 2)
    layout = layout_of(x)
    assert layout == (x.size(), x.stride(), True)
    assert layout_of(torch.empty(3, 5, 7, dtype=torch.int8).transpose(0, 2)) is layout
    assert layout_of(torch.empty(7, 5, 3)) is not layout
    assert not layout_of(x[:, ::2]).dense
