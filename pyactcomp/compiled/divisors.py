"""Values behind a divisor: the derivative is largest where they are smallest, so codes are too coarse.

What a divisor is computed from stays exact, up to an operator whose every result sums a whole group of elements or
more. Eager mode has the rule of ``readers/rule.py`` in place of this search.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor, fx

from ..codec.layouts import row_of, spans_rows
from ..readers.forms import Form
from ..readers.table import AMPLIFYING, SOLUTIONS
from .checkpointed import Block
from .joint import VIEWS, fewest, is_elementwise, is_multiple, is_smaller, is_view, name_of, value

_NAMES = frozenset(name.removeprefix("aten::").split(".")[0] for name in AMPLIFYING)
_BOTH = {"atan2", "xlogy", "addcdiv", "_linalg_solve_ex", "_cdist_forward"}
# The first factor of a matrix product: each element of the result sums over a row of this factor.
_ROWS_OF = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "addmm": 1, "baddbmm": 1}
REDUCTIONS = {"sum", "mean", "var", "var_mean", "std", "std_mean", "linalg_vector_norm", "norm", "logsumexp"}
# Of every norm the input has a row or a channel for each statistic.
_NORMS = {"native_layer_norm", "_fused_rms_norm", "native_group_norm", "native_batch_norm", "cudnn_batch_norm"}
_NORMS |= {"_native_batch_norm_legit", "_native_batch_norm_legit_functional", "_batch_norm_with_update"}


class Statistics(NamedTuple):
    """What standardizes a value of ``standardized.py``.

    Attributes
    ----------
    mean : str or None
        Name of the mean of each row; None of values from which it is subtracted.
    scale : str
        Name of the deviation of each row, or of its inverse.
    is_inverse : bool
    spreads : bool
        Whether an infinity or NaN in a row leaves the scale zero, infinite or NaN, and so every restored value.
    """

    mean: str | None
    scale: str
    is_inverse: bool
    spreads: bool


class Behind(NamedTuple):
    """Names of values behind divisors, and of functions with a divisor's demands: a small operand counts most.

    Attributes
    ----------
    factors : set of str
        Stay exact.
    rows : set of str
        A group of codes would span several rows, each with a divisor of its own: 16 bits or more.
    saturating : dict of str to Form
        Functions of ``gates.py``: 16 bits of the operand or more.
    blocks : mapping of str to Block
        The checkpointed block of each node in one.
    differences : set of str
        Differences of ``squares.py``: 16 bits or more.
    short : set of str
        Operands of ``products.py``: 16 bits or more.
    standardized : dict of str to Statistics
        Values with a scale for each row, with what standardizes them.
    """

    factors: set[str]
    rows: set[str]
    saturating: dict[str, Form]
    blocks: Mapping[str, Block]
    differences: set[str]
    short: set[str]
    standardized: dict[str, Statistics]


NONE_BEHIND = Behind(set(), set(), {}, {}, set(), set(), {})


def behind_divisors(graph: fx.Graph, tangent: Collection[str], group_size: int) -> Behind:
    """Return the values from which a divisor is computed, of those that depend on no tangent."""
    found = Behind(set(), set(), {}, {}, set(), set(), {})
    waiting = [d for node in graph.nodes if node.name not in tangent for d in _divisors(node)]
    seen: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        tensor = _first_result(node)
        if node in seen or tensor is None or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        seen.add(node)
        found.factors.add(node.name)
        if node.op == "placeholder":
            continue
        name = name_of(node)
        if name in _NORMS or "convolution" in name or "scaled_dot_product" in name:
            continue
        if not _gathers(node, group_size) or _is_squared_distance(node):
            waiting.extend(node.all_input_nodes)
        elif name in REDUCTIONS:
            found.rows.update(_across_rows(node, group_size))
    # Backward may read a view or a multiple of them, of another name, as twice the operand of a square, or the
    # difference from the mean.
    for node in graph.nodes:
        if name_of(node) in SOLUTIONS:
            found.factors.add(node.name)
        from_mean = name_of(node) == "sub" and is_smaller(node.args[1], node.args[0])
        if name_of(node) in VIEWS or name_of(node) == "getitem" or is_multiple(node) or from_mean:
            sources = node.all_input_nodes[:1] if from_mean else node.all_input_nodes
            for names in (found.factors, found.rows):
                if any(source.name in names for source in sources):
                    names.add(node.name)
    return found


def _divisors(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the operands by which an operator, or its derivative, divides."""
    name = name_of(node)
    if name in SOLUTIONS:
        yield from node.all_input_nodes
        return
    if name not in _NAMES or name in _NORMS or not node.args:
        return
    if name == "pow":
        base, power = node.args[0], node.args[1]
        if isinstance(power, (int, float)) and (power >= 1 or power == 0):
            return
        operands = [base, power]
    elif name in _BOTH:
        operands = list(node.args)
    else:
        operands = [node.args[1] if name in ("div", "true_divide") else node.args[0]]
    for operand in operands:
        if isinstance(operand, fx.Node) and not is_at_least_one(operand, name == "log1p"):
            yield operand


def is_at_least_one(node: fx.Node, plus_one: bool) -> bool:
    """Return whether a divisor is at least one and amplifies nothing: 1 + exp(x) of a sigmoid, the sum of a softmax."""
    if plus_one:
        return name_of(node) == "exp"
    if name_of(node) == "sum":
        return _is_sum_of_softmax(node)
    if name_of(node) != "add":
        return False
    numbers = [argument for argument in node.args if isinstance(argument, (int, float))]
    others = [argument for argument in node.args if isinstance(argument, fx.Node)]
    return len(others) == 1 and name_of(others[0]) == "exp" and sum(numbers) >= 1


def _is_sum_of_softmax(node: fx.Node) -> bool:
    """Return whether a sum of exponentials holds exp(0): the largest element of the summed row is subtracted before."""
    exp = node.args[0]
    shifted = exp.args[0] if isinstance(exp, fx.Node) and name_of(exp) == "exp" else None
    if isinstance(shifted, fx.Node) and name_of(shifted) == "mul" and isinstance(shifted.args[1], (int, float)):
        shifted = shifted.args[0]
    if not isinstance(shifted, fx.Node) or name_of(shifted) != "sub":
        return False
    source, largest = shifted.args[:2]
    if not isinstance(largest, fx.Node) or name_of(largest) != "amax" or largest.args[0] is not source:
        return False
    return len(node.args) > 1 and len(largest.args) > 1 and node.args[1] == largest.args[1]


def _gathers(node: fx.Node, group_size: int) -> bool:
    """Return whether each element of a result sums a whole group of elements or more."""
    name = name_of(node)
    if name in _ROWS_OF:
        rows = value(node.args[_ROWS_OF[name]])
        return rows is None or fewest(rows.shape[-1:]) >= group_size
    if name not in REDUCTIONS:
        return False
    source, result = value(node.args[0]), _first_result(node)
    if source is None or result is None:
        return False
    return fewest(source.shape) >= group_size * fewest(result.shape)


def _first_result(node: fx.Node) -> Tensor | None:
    """Return the result of an operator; of several, as those of ``var_mean``, the first one read."""
    return next((tensor for result in (node, *node.users) if (tensor := value(result)) is not None), None)


def _is_squared_distance(product: fx.Node) -> bool:
    """Return whether a product is clamped from below, as the squared distances of ``cdist``: near points cancel."""
    waiting = [product]
    while waiting:
        for user in waiting.pop().users:
            if name_of(user) == "clamp_min":
                return True
            if name_of(user) in VIEWS:
                waiting.append(user)
    return False


def _across_rows(node: fx.Node, group_size: int) -> Iterator[str]:
    """Yield the operand of a reduction, and those of which its elements are computed, if a group spans reduced rows."""
    read = node.args[0]
    if not isinstance(read, fx.Node):
        return
    dims = node.args[1] if len(node.args) > 1 else None
    viewed = [read]
    while is_view(viewed[-1]) and isinstance(viewed[-1].args[0], fx.Node):
        viewed.append(viewed[-1].args[0])
    for source in (read, *(read.all_input_nodes if is_elementwise(read) else ())):
        tensor, like = value(source), value(read)
        if tensor is None or like is None or not tensor.dim() or tensor.dim() != like.dim():
            continue
        reduced = {dim % tensor.dim() for dim in dims} if isinstance(dims, (list, tuple)) and dims else None
        if reduced is not None and spans_rows(row_along(tensor, reduced), group_size):
            yield source.name
            if source is read:
                # Backward may read the value from which a view, or a copy in another order, was made.
                yield from (node.name for node in viewed)


def row_along(tensor: Tensor, dims: Collection[int]) -> int:
    """Return the length of the rows along ``dims`` that have one number each, for :func:`spans_rows`."""
    sizes = [tensor.shape[dim] for dim in dims]
    static = all(isinstance(size, int) for size in sizes) and len(dims) < tensor.dim()
    return row_of(adjacent(tensor, dims), math.prod(sizes) if static else None)


def adjacent(tensor: Tensor, dims: Collection[int]) -> int:
    """Return the adjacent elements in memory that lie along some dimensions alone."""
    if all(isinstance(stride, int) for stride in tensor.stride()):
        order = sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), -dim))
    else:
        order = list(reversed(range(tensor.dim()))) if tensor.is_contiguous() else []
    elements = 1
    for dim in order:
        own = tensor.shape[dim]
        if isinstance(own, int) and own == 1:
            continue
        if dim not in dims or not isinstance(own, int):
            break
        elements *= own
    return elements
