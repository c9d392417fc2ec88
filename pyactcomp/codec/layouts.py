"""Layouts (shape and strides) of tensors, one cached object for each."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """Order of a tensor's elements in memory; ``dense`` is the result of :func:`is_dense`."""

    shape: torch.Size
    stride: tuple[int, ...]
    dense: bool


def layout_of(tensor: Tensor) -> Layout:
    """Return the layout of a strided tensor; sizes must be integers, not symbols of a traced graph.

    Layouts repeat from step to step. Sharing one object saves allocations: Python's garbage collector counts and visits
    every object kept for a saved tensor.
    """
    return layout_with(tensor.size(), tensor.stride())


@functools.lru_cache(maxsize=4096)
def layout_with(shape: torch.Size, stride: tuple[int, ...]) -> Layout:
    """Return the layout with a shape and strides."""
    return Layout(shape, stride, is_dense(shape, stride))


def arranged(tensor: Tensor, layout: Layout) -> Tensor:
    """Return ``tensor`` with the strides of ``layout``: the same tensor if the strides match, else a copy."""
    if tensor.stride() == layout.stride:
        return tensor
    return torch.empty_strided(layout.shape, layout.stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def dense(tensor: Tensor) -> Tensor:
    """Return ``tensor`` without gaps or overlaps, its dimensions in the order of torch's elementwise results."""
    return tensor if layout_of(tensor).dense else tensor.clone()


@functools.lru_cache(maxsize=1024)
def contiguous_layout(shape: torch.Size) -> Layout:
    """Return the layout of a contiguous tensor."""
    return layout_of(torch.empty(shape, device="meta"))


@functools.lru_cache(maxsize=1024)
def elementwise_layout(first: Layout, second: Layout) -> Layout:
    """Return the layout of torch's result for an elementwise operator on two operands, in this order."""
    a, b = (torch.empty_strided(each.shape, each.stride, device="meta") for each in (first, second))
    return layout_of(a + b)


@functools.lru_cache(maxsize=1024)
def suggested_layout(layout: Layout) -> Layout:
    """Return the layout of a copy in the memory format that torch infers from the strides of ``layout`` for cuDNN.

    ``Tensor::suggest_memory_format`` has no Python binding. The format is channels-last where strides ascend from
    channels over the last dimensions to the first, with or without gaps, and contiguous otherwise.
    """
    empty = torch.empty(layout.shape, device="meta")
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if len(layout.shape) in formats and _ascends_from_channels(layout):
        return layout_of(empty.to(memory_format=formats[len(layout.shape)]))
    return layout_of(empty)


def _ascends_from_channels(layout: Layout) -> bool:
    extent, channels = 0, layout.stride[1]
    for dim in (1, *reversed(range(2, len(layout.shape))), 0):
        length, step = layout.shape[dim], layout.stride[dim]
        # If only the first dimension has more than one element, strides do not identify a format.
        if length == 0 or step < max(extent, 1) or (dim == 0 and extent == channels):
            return False
        extent = step * length
    return True


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether elements fill a range of memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for step, length in sorted((s, n) for s, n in zip(stride, shape, strict=True) if n != 1):
        if step != expected:
            return length == 0 or 0 in shape
        expected *= length
    return True


def spans_rows(length: float, group_size: int) -> bool:
    """Return whether groups of consecutive elements span several rows of ``length`` elements; infinity is one row."""
    return length < group_size or (length < math.inf and length % group_size != 0)


def row_of(adjacent: int, reduced: int | None) -> int:
    """Return the length of a row for :func:`spans_rows`, if ``adjacent`` of ``reduced`` elements go into one number.

    A number of more elements than are adjacent, as of a channel in all samples, averages out the errors of the groups
    at the ends of each run. Group sizes are powers of two: such a run counts as the power of two below. So does the one
    row of a tensor that has no other (``reduced`` is None), which no group leaves.
    """
    return adjacent if adjacent in (0, reduced) else 1 << (adjacent.bit_length() - 1)


class Rows(NamedTuple):
    """Rows apart in memory: elements of a row, and elements between the end of one and the next."""

    length: int
    gap: int


@functools.lru_cache(maxsize=1024)
def rows_of(shape: tuple[int, ...], stride: tuple[int, ...]) -> Rows | None:
    """Return the rows of a tensor whose order is that of a contiguous one, with one gap; None for other layouts.

    Values that share a projection with queries and keys are such a tensor.

    Examples
    --------
    >>> import torch
    >>> values = torch.empty(16, 3, 64).select(1, 2)
    >>> rows_of(values.shape, values.stride())
    Rows(length=64, gap=128)
    """
    length, pitch, rows = 1, 0, 1
    for size, step in reversed(list(zip(shape, stride, strict=True))):
        if size == 1:
            continue
        if not pitch and step == length:
            length *= size
        elif step == pitch * rows if pitch else step > length > 1:
            pitch, rows = pitch or step, rows * size
        else:
            return None
    return Rows(length, pitch - length) if pitch else None


def overlaps(layout: Layout) -> bool:
    """Return whether elements may overlap in memory: a stride is below the extent of smaller-stride dimensions."""
    extent = 1
    for step, length in sorted((s, n) for s, n in zip(layout.stride, layout.shape, strict=True) if n != 1):
        if step < extent:
            return True
        extent = step * (length - 1) + extent
    return False
