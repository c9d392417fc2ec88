"""Finds the factors behind a divisor: the derivative is largest where they are smallest, so codes are too coarse.

Also the factors behind an exponential, and the tensors of which a divisor is the sum or the norm.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from ..codec.layouts import Layout, contiguous_layout, row_of, spans_rows
from ..readers.forms import BFLOAT16, CODES, Reading
from ..readers.nodes import CAST, EXPONENTIAL, VIEWS, producer, unviewed
from ..readers.table import PRODUCTS, SHORT_PRODUCTS
from ..torch_private import saved_form
from .recipes import FromRecipe
from .saved import Gathered, Pending, Region, Same, View

# Nodes visited by one walk: twice the longest norm composed of operators.
_FARTHEST = 32
# Of the logarithm of a mixture's density, logsumexp(log_weights - (d @ scale).pow(2).sum(-1) / 2 + scale.logdet()): the
# product, its operands, the power, and the nodes of numbers, views and other summands between.
_BEHIND_EXPONENTIAL = 24
EXPONENTIALS = {
    **dict.fromkeys(("aten::exp", "aten::exp2", "aten::expm1"), False),
    **dict.fromkeys(("aten::_softmax", "aten::_log_softmax", "aten::logsumexp"), True),
}
"""Operators that take exponentials, and whether they compare scores."""
_PRODUCTS = frozenset(("MulBackward0", "PowBackward0", "DivBackward0"))
# The same elements, also in other places.
_ARRANGED = VIEWS | {"SqueezeBackward1", "SqueezeBackward2", "CloneBackward0", CAST}
_SUMS = frozenset(("AddBackward0", "SubBackward0", "RsubBackward0", "RsubBackward1", "NegBackward0"))
# Of w.tril() / (w.tril().sum(-1) + eps).clamp(min=1): the nodes of numbers, views and masks on the way to w.
_OWN_SUM = 6
# The nodes of a reduction of real ** 2 + imaginary ** 2, and of one more sum.
_SUMMANDS = 6
_NORM = "LinalgVectorNormBackward0"
# 256 filters of 2,048 frequencies. The frozen weights of a model that is fine-tuned are larger.
_LARGEST_FILTERS = 1 << 19
_TOTALS = frozenset(("SumBackward0", "SumBackward1", "MeanBackward0", "MeanBackward1"))
_OF_A_SUM = frozenset(("AddBackward0", "MulBackward0", "DivBackward0", "ClampBackward1", "ClampMinBackward0", CAST))
_MASKS = frozenset(("TrilBackward0", "TriuBackward0", "MaskedFillBackward0", "WhereBackward0", "CloneBackward0", CAST))
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


Coded = Region | Gathered | FromRecipe
"""Operands in codes, or recomputed from codes."""


def coded_behind(node: Node | None, group_size: int) -> Iterator[Coded]:
    """Yield the stored operands in codes behind a divisor, and the exponentials in 16 bits of a sum at the walk's end.

    ``node`` computed the divisor, or divides. The walk ends at an operator whose every result sums a whole group of
    elements or more (a sum, a matrix product): there codes are as exact as the result. An autograd function of the user
    counts as an elementwise operator.
    """
    left: deque[Node | None] = deque((node,))
    seen: set[Node] = set()
    while left and len(seen) < _FARTHEST:
        node = left.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = node.name()
        if name.startswith(_ENDS) and not _is_filter(node, group_size):
            continue
        if isinstance(node, BackwardCFunction) and _ends_walk(type(node)):
            continue
        if _gathers(node, name, group_size):
            yield from _coded_across_rows(node, group_size)
            yield from _exponentials(node)
            continue
        yield from (region for _, region in _coded(node))
        left.extend(behind for behind, _ in node.next_functions)


def summed_behind(divisor: Node | None) -> tuple[Node, ...]:
    """Return the nodes of the tensors that a divisor sums up, with and without masks; empty if it is no sum.

    A constant may be added, and the sum may be a multiple, clamped, cast or viewed.
    """
    node = divisor
    for _ in range(_OWN_SUM):
        name = "" if node is None else node.name()
        if node is None or name in _TOTALS:
            break
        if not (name in _OF_A_SUM or name in VIEWS):
            return ()
        inputs = [behind for behind, _ in node.next_functions]
        node = inputs[0] or inputs[-1]
    return () if node is None or node.name() not in _TOTALS else _unmasked(node.next_functions[0][0])


def divides_by_own_sum(dividend: Tensor, summed: tuple[Node, ...]) -> bool:
    """Return whether a divisor sums up the dividend, or either without a mask; for :func:`summed_behind`."""
    return not set(summed).isdisjoint(_unmasked(producer(dividend)[1]))


def is_share(factor: Tensor) -> bool:
    """Return whether a factor is the quotient of a tensor and its own sum; the other may be the logarithm of it."""
    quotient = producer(factor)[1]
    if quotient is None or quotient.name() != "DivBackward0":
        return False
    (dividend, _), (divisor, _) = quotient.next_functions
    return not set(summed_behind(divisor)).isdisjoint(_unmasked(dividend))


def normalised(operand: Tensor) -> tuple[Node, ...]:
    """Return the node of an operand that is the quotient of a tensor and its own norm; empty for another operand."""
    quotient = producer(operand)[1]
    if quotient is None:
        return ()
    (dividend, _), (divisor, _) = quotient.next_functions
    for _ in range(_OWN_SUM):
        name = "" if divisor is None else divisor.name()
        if divisor is None or not (name == _NORM or name in _OF_A_SUM or name in VIEWS):
            break
        behind = divisor.next_functions[0][0]
        if name == _NORM:
            return (quotient,) if behind is dividend else ()
        divisor = behind
    return ()


def _unmasked(node: Node | None) -> tuple[Node, ...]:
    """Return the nodes of a tensor and of the tensors that it is a view, a copy, a multiple or a masked part of."""
    found: list[Node] = []
    while node is not None and len(found) < _OWN_SUM:
        name = node.name()
        if name not in VIEWS:
            found.append(node)
        inputs = [behind for behind, _ in node.next_functions]
        if not (name in VIEWS or name in _MASKS or (name == "MulBackward0" and None in inputs)):
            break
        node = inputs[0] or inputs[-1]
    return tuple(found)


def products_behind(saved: Tensor, reading: Reading) -> Iterator[Coded]:
    """Yield the operands in codes of products and powers behind an exponential, as in exp(-rate * x * x + y).

    Such a bump passes a gradient only where the product is small, and a softmax or ``logsumexp`` to the largest scores
    alone. Behind these two, squared distances and quadratic forms of differences count, and other scores do not, as
    those of attention. The reader is one of ``EXPONENTIALS``.
    """
    node = producer(saved)[1]
    if node is not None and reading.operator != "aten::logsumexp":  # the others save their results
        node = node.next_functions[0][0]
    left = deque([(node, not EXPONENTIALS[reading.operator])])
    for _ in range(_BEHIND_EXPONENTIAL):
        if not left:
            break
        node, counts = left.popleft()
        if node is None:
            continue
        name = node.name()
        if name in _PRODUCTS or name in _ROWS_OF:
            quadratic = _reads_difference(node)
            if name in _ROWS_OF and not quadratic:
                continue
            counts = counts or quadratic or name == "PowBackward0"
            if counts:
                yield from (region for _, region in _coded(node))
        elif not (name in _SUMS or name in _ARRANGED or name in _TOTALS):
            continue
        left.extend((behind, counts) for behind, _ in node.next_functions)


def _reads_difference(node: Node) -> bool:
    """Return whether an operand of a product is a difference, as in a quadratic form."""
    made = [unviewed(behind, _ARRANGED) for behind, _ in node.next_functions]
    return any(each is not None and each.name() == "SubBackward0" for each in made)


@functools.lru_cache(maxsize=1024)
def _ends_walk(kind: Any) -> bool:
    """Return whether an autograd function keeps its operands as exact as divisors behind it need them.

    The package's own functions pack by themselves, and a checkpointed block is decided as a whole.
    """
    module: str = kind._forward_cls.__module__
    return module.startswith("pyactcomp.") or module == "torch.utils.checkpoint"


def _stored(node: Node, operand: str) -> tuple[Layout | None, object]:
    """Return the layout that a node restores an operand in, and what is stored of the operand."""
    stored = saved_form(node, operand)
    if isinstance(stored, (Pending, Same)):
        stored = stored.stored
    layout = getattr(stored, "layout", None)
    return layout, stored.region if isinstance(stored, View) else stored


def _coded(node: Node) -> Iterator[tuple[Layout | None, Coded]]:
    """Yield the operands in codes that a node saves, each with the layout that the node restores."""
    for operand in _operands(type(node)):
        layout, stored = _stored(node, operand)
        if isinstance(stored, (Region, Gathered)) and stored.form.need == CODES:
            yield layout, stored
        elif isinstance(stored, FromRecipe) and stored.sharpens:
            yield layout, stored


def _exponentials(total: Node) -> Iterator[Region]:
    """Yield the stored exponentials that a sum adds up, also under a mask, in 16 bits so far.

    Where one of them is nearly the whole sum, the gradient of the sum's log cancels that of the exponent.
    """
    left = deque(behind for behind, _ in total.next_functions)
    seen: set[Node] = set()
    while left and len(seen) < _FARTHEST:
        node = left.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == EXPONENTIAL:
            _, stored = _stored(node, "result")
            if isinstance(stored, Region) and stored.form is BFLOAT16:
                yield stored
        elif node.name() == "MulBackward0":
            left.extend(behind for behind, _ in node.next_functions)


def _coded_across_rows(node: Any, group_size: int) -> Iterator[Coded]:
    """Yield the operands of a reduction, and of its summands, whose groups span several of the reduced rows.

    Such groups are as wide as their largest row, and codes are off by as much in their smallest.
    """
    left = deque((node,))
    for place in range(_SUMMANDS):
        if not left:
            break
        read = left.popleft()
        for layout, region in _coded(read):
            if layout is None or spans_rows(_elements_reduced(node, layout), group_size):
                yield region
        if place == 0 or read.name() in _SUMS:
            left.extend(behind for behind, _ in read.next_functions if behind is not None)


def _elements_reduced(node: Any, layout: Layout) -> float:
    """Return the adjacent elements of an operand that go into one number; infinity where all of them do."""
    if node.name() == "NativeGroupNormBackward0":
        channels: int = node._saved_C // node._saved_group
        return channels * node._saved_HxW if layout == contiguous_layout(layout.shape) else channels
    dims = getattr(node, "_saved_dim", None)
    return _row(layout, dims) if isinstance(dims, tuple) else math.inf


@functools.lru_cache(maxsize=1024)
def meets_several(layout: Layout, divisor: torch.Size, group_size: int) -> bool:
    """Return whether a group of a factor spans rows that a tensor of the shape ``divisor`` has one number each for.

    Where an operator with an unbounded derivative made that number, the gradient of a small row is as large as the
    factors of that row are small, and a group is off by as much in all its rows.
    """
    if len(divisor) == len(layout.shape):
        dims = [dim for dim, (own, other) in enumerate(zip(layout.shape, divisor, strict=True)) if own != other == 1]
        others = tuple(1 if dim in dims else own for dim, own in enumerate(layout.shape))
    else:  # a reduction without keepdim
        dims, left = [], list(divisor)
        for dim, own in enumerate(layout.shape):
            if left and left[0] == own:
                left.pop(0)
            else:
                dims.append(dim)
        others = () if left else tuple(divisor)
    return bool(dims) and others == divisor and spans_rows(_row(layout, tuple(dims)), group_size)


def _row(layout: Layout, dims: tuple[int, ...]) -> int:
    """Return the length of the rows along ``dims`` that have one number each, for :func:`spans_rows`."""
    count = math.prod(layout.shape[dim] for dim in _dims(dims, layout))
    return row_of(_elements_in_a_row(layout, dims), None if count == math.prod(layout.shape) else count)


def _dims(dims: tuple[int, ...], layout: Layout) -> set[int]:
    """Return dimensions counted from the first; torch gives negative ones back as unsigned numbers of 64 bits."""
    return {(dim - 2**64 if dim >= 2**63 else dim) % max(len(layout.shape), 1) for dim in dims}


def _elements_in_a_row(layout: Layout, dims: tuple[int, ...]) -> int:
    """Return the adjacent elements in memory that a reduction over ``dims`` adds up."""
    rank = len(layout.shape)
    reduced = _dims(dims, layout)
    elements = 1
    for _, dim in sorted((layout.stride[dim], dim) for dim in range(rank) if layout.shape[dim] != 1):
        if dim not in reduced:
            break
        elements *= layout.shape[dim]
    return elements


def _gathers(node: Any, name: str, group_size: int) -> bool:
    """Return whether each element of a node's output sums a whole group of elements or more."""
    rows = _ROWS_OF.get(name)
    if rows is not None:
        if _is_filter_bank(node):
            return False
        layout = getattr(saved_form(node, rows), "layout", None)
        return layout is None or _elements_in_a_row(layout, (len(layout.shape) - 1,)) >= group_size
    if not node.next_functions:
        return False
    read, number = node.next_functions[0]
    if read is None:
        return False
    leaf = getattr(read, "variable", None)
    shape = read._input_metadata[number].shape if leaf is None else leaf.shape
    few: bool = math.prod(shape) >= group_size * math.prod(node._input_metadata[-1].shape)
    return few


def _is_filter(node: Node, group_size: int) -> bool:
    """Return whether a convolution has a constant weight, and each element of the result sums less than a group."""
    if len(node.next_functions) < 2 or node.next_functions[1][0] is not None:
        return False
    layout = getattr(saved_form(node, "weight"), "layout", None) if "weight" in _operands(type(node)) else None
    return layout is not None and math.prod(layout.shape[1:]) < group_size


def _is_filter_bank(node: Node) -> bool:
    """Return whether a matrix product has a constant operand no larger than a filter bank, such as a mel scale's.

    Each element of the result may then sum a few elements of a row.
    """
    if None not in [behind for behind, _ in node.next_functions[-2:]]:
        return False
    # Of the constant alone: the derivative needs no other operand.
    layouts = [getattr(saved_form(node, operand), "layout", None) for operand in _operands(type(node))]
    return any(layout is not None and math.prod(layout.shape) <= _LARGEST_FILTERS for layout in layouts)


def is_factor(tensor: Tensor, reading: Reading, group_size: int) -> bool:
    """Return whether an operand is a factor of an elementwise product, or of a matrix product with short rows."""
    short = reading.operator in SHORT_PRODUCTS and tensor.shape[-1] < group_size
    return short or reading.operator in PRODUCTS
