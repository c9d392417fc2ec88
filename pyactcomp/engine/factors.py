"""Finds the factors behind a divisor: the derivative is largest where they are smallest, so codes are too coarse."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from ..readers.forms import CODES, Reading
from ..readers.table import PRODUCTS, SHORT_PRODUCTS
from ..torch_private import saved_form
from .saved import Gathered, Pending, Region, Same, View

# Nodes visited by one walk: twice the longest norm composed of operators.
_FARTHEST = 32
# The first factor of a matrix product: each element of the result sums over a row of this factor.
_ROWS_OF = {
    "MmBackward0": "self",
    "BmmBackward0": "self",
    "MvBackward0": "self",
    "DotBackward0": "self",
    "AddmmBackward0": "mat1",
    "BaddbmmBackward0": "batch1",
}
# Each result of a convolution or of attention sums many elements, so the walk ends there.
_ENDS = ("Convolution", "CudnnConvolution", "ScaledDotProduct")


@functools.lru_cache(maxsize=1024)
def _operands(kind: type) -> tuple[str, ...]:
    """Return the names of the operands saved by nodes of a class; empty for a Python autograd function."""
    return tuple(name.removeprefix("_raw_saved_") for name in dir(kind) if name.startswith("_raw_saved_"))


def coded_behind(node: Node | None, group_size: int) -> Iterator[Region | Gathered]:
    """Yield the stored operands in codes behind a divisor.

    ``node`` computed the divisor, or divides. The walk ends at an operator whose every result sums a whole group of
    elements or more (a sum, a matrix product): there codes are as exact as the result.
    """
    left: deque[Node | None] = deque((node,))
    seen: set[Node] = set()
    while left and len(seen) < _FARTHEST:
        node = left.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = node.name()
        if name.startswith(_ENDS) or isinstance(node, BackwardCFunction) or _gathers(node, name, group_size):
            continue
        for operand in _operands(type(node)):
            stored = saved_form(node, operand)
            if isinstance(stored, (Pending, Same)):
                stored = stored.stored
            if isinstance(stored, View):
                stored = stored.region
            if isinstance(stored, (Region, Gathered)) and stored.form.need == CODES:
                yield stored
        left.extend(behind for behind, _ in node.next_functions)


def _gathers(node: Any, name: str, group_size: int) -> bool:
    """Return whether each element of a node's output sums a whole group of elements or more."""
    rows = _ROWS_OF.get(name)
    if rows is not None:
        stored = saved_form(node, rows)
        shape = getattr(stored, "layout", None)
        return shape is None or shape.shape[-1] >= group_size
    if not node.next_functions:
        return False
    read, number = node.next_functions[0]
    if read is None:
        return False
    leaf = getattr(read, "variable", None)
    shape = read._input_metadata[number].shape if leaf is None else leaf.shape
    few: bool = math.prod(shape) >= group_size * math.prod(node._input_metadata[-1].shape)
    return few


def is_factor(tensor: Tensor, reading: Reading, group_size: int) -> bool:
    """Return whether an operand is a factor of an elementwise product, or of a matrix product with short rows."""
    short = reading.operator in SHORT_PRODUCTS and tensor.shape[-1] < group_size
    return short or reading.operator in PRODUCTS
