"""Shapes and strides of tensors, one object for each pair of them."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """How elements lie in memory; ``dense`` is what :func:`is_dense` says of it."""

    shape: torch.Size
    stride: tuple[int, ...]
    dense: bool


def layout_of(tensor: Tensor) -> Layout:
    """Return the layout of a strided tensor, whose sizes must be integers, not the symbols of a graph.

    Layouts repeat from step to step. What is held for each saved tensor should not be made for each: Python's garbage
    collector counts and visits it.
    """
    return _layout(tensor.size(), tensor.stride())


@functools.lru_cache(maxsize=4096)
def _layout(shape: torch.Size, stride: tuple[int, ...]) -> Layout:
    return Layout(shape, stride, is_dense(shape, stride))


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether elements fill their extent exactly once, in whatever order of dimensions."""
    expected = 1
    for step, length in sorted((s, n) for s, n in zip(stride, shape, strict=True) if n != 1):
        if step != expected:
            return length == 0 or 0 in shape
        expected *= length
    return True
