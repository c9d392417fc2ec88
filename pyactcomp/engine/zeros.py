"""Finds operands of matrix products whose zeros or small elements count, by the operators that made the operand.

A mask made the zeros, or a sum of products with a feature of a ReLU that is zero in all rows, as in linear attention.
The scales of eigenvectors made the small elements. Also finds squares of similarities.

Zero is on the grid of codes only where zero is a group's least element. Otherwise all zeros of a group come back as one
small number, and a matrix product adds that number up over the length of a row.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from ..readers.forms import Reading
from ..readers.nodes import CAST, HINGES, RANGE_KEPT, VIEWS, producer, unviewed
from ..readers.table import SHORT_PRODUCTS
from ..torch_private import saved_form
from .saved import Kept, Pending, Region, View

# Twice as far as from a transposed copy to a multiple of the masked product.
_FARTHEST = 8
_TRIANGLES = frozenset(("TrilBackward0", "TriuBackward0", "MaskedFillBackward0"))
_MULTIPLES = frozenset(("MulBackward0", "DivBackward0", "NegBackward0"))
_COPIES = frozenset(("CloneBackward0", CAST))
_PROBABILITIES = frozenset(("SoftmaxBackward0", "SafeSoftmaxBackward0"))
_NON_NEGATIVE = _PROBABILITIES | {
    f"{name}Backward0"
    for name in ("Relu", "Exp", "Exp2", "Sigmoid", "Abs", "Sqrt", "Softplus", "LinalgVectorNorm", "Cdist")
}
_NON_NEGATIVE |= {"EuclideanDistBackward0"}
_EIGENVECTORS = frozenset(("LinalgEighBackward0", "LinalgSvdBackward0"))
_MATRIX_PRODUCTS = frozenset(("MmBackward0", "BmmBackward0"))
_SIMILAR = _MATRIX_PRODUCTS | _MULTIPLES
_MATRIX = 2
_PRODUCTS = _MATRIX_PRODUCTS | {"BaddbmmBackward0", "MulBackward0"}
# Keep the rows of zeros of all their inputs.
_ROWS_KEPT = RANGE_KEPT | _MULTIPLES | {"BaddbmmBackward0", "SumBackward0", "SumBackward1", "MeanBackward1"}
_SUMS = (_PRODUCTS | _ROWS_KEPT) - VIEWS - _COPIES - _MULTIPLES - _TRIANGLES
_FEATURES = HINGES | {"ThresholdBackward0", "_ReluBackward"}
# Keep the zeros of one of their inputs.
_FEATURES_KEPT = RANGE_KEPT | _MULTIPLES | _TRIANGLES | {"PowBackward0", "WhereBackward0"}
_WEIGHTS_KEPT = VIEWS | _COPIES
LOSING = _TRIANGLES | _MULTIPLES | _COPIES | _SUMS | {"WhereBackward0"}
"""Names of the nodes behind which :func:`loses_small` finds zeros and small elements."""


def loses_small(operand: Tensor, reading: Reading) -> bool:
    """Return whether codes are too coarse for an operand of a matrix product: a signed one with exact zeros.

    The zeros come from ``tril``, ``where`` or a mask, also below the difference of two results of softmax, or from sums
    of products with features of a ReLU. Of scaled eigenvectors the small ones count.
    """
    if reading.operator not in SHORT_PRODUCTS:
        return False
    _, node = producer(operand)
    for _ in range(_FARTHEST):
        if node is None:
            break
        name = node.name()
        if name in _COPIES or name in VIEWS:  # of most operands there is nothing else to pass
            node = node.next_functions[0][0]
            continue
        if name not in LOSING:
            break
        inputs = [behind for behind, _ in node.next_functions]
        if name in _TRIANGLES:
            return not _is_non_negative(inputs[0])
        if name == "WhereBackward0":
            return None in inputs and not _is_non_negative(inputs[0] or inputs[1])
        if name == "SubBackward0" and all(_is_non_negative(behind, _PROBABILITIES) for behind in inputs):
            return True
        if name in _SUMS or (name == "MulBackward0" and None not in inputs):
            return _scales_eigenvectors(inputs) or _sums_features(operand, node, reading)
        if name == "MulBackward0":
            if _is_mask(node, "other" if inputs[0] is not None else "self"):
                return not _is_non_negative(inputs[0] or inputs[1])
            node = inputs[0] or inputs[1]
        else:
            node = inputs[0]
    return False


def squares_similarities(operand: Tensor, reading: Reading) -> bool:
    """Return whether a power reads a product of two matrices, neither a parameter, or a multiple of one.

    A loss may leave out the diagonal behind the square, or subtract it, and similarities of rows with themselves are
    large. Products of several batches or heads are results of attention, and stay in codes.
    """
    if reading.operator != "aten::pow.Tensor_Scalar" or operand.dim() > _MATRIX:
        return False
    _, node = producer(operand)
    if node is None or node.name() not in _SIMILAR:
        return False
    products = [each for each in _behind(node, _MULTIPLES | VIEWS) if each.name() in _MATRIX_PRODUCTS]
    return any(
        all(each is not None and not _is_parameter(each) for each, _ in product.next_functions) for product in products
    )


def _is_parameter(node: Any) -> bool:
    """Return whether the output of ``node`` is a leaf, or a view, copy or cast of one."""
    return any(hasattr(each, "variable") for each in _behind(node, _WEIGHTS_KEPT))


def _scales_eigenvectors(factors: list[Any]) -> bool:
    """Return whether one of two factors holds eigenvectors or singular vectors, views aside.

    In whitening, ``(U * w.rsqrt()) @ U.T``, the scales of the vectors span orders of magnitude.
    """
    return any(each is not None and each.name() in _EIGENVECTORS for each in map(unviewed, factors))


def _behind(node: Any, passed: Collection[str]) -> list[Any]:
    """Return a node and nodes behind it, through some of those named in ``passed``, and not through a divisor.

    The last input is followed first: each element of a stack, or state of a recurrence, is made as the others are.
    """
    found, left = [node], [node]
    for _ in range(_FARTHEST):
        if not left:
            break
        node = left.pop()
        name = node.name()
        if name in passed:
            inputs = node.next_functions[:1] if name == "DivBackward0" else node.next_functions
            behind = [each for each, _ in inputs if each is not None]
            found += behind
            left += behind
    return found


def _sums_features(operand: Tensor, node: Any, reading: Reading) -> bool:
    """Return whether ``node``, behind an operand, sums up products with features that the reader then adds up.

    The features are those of a ReLU. A feature that is zero everywhere leaves a row or column of zeros, and linear
    attention divides a query with that feature alone by nearly nothing, so codes of the zeros would be amplified. A
    result of attention stays in codes, since the reader adds up the elements of values, and so does a layer's result.
    """
    # The features of the first factor are the rows of the sum, those of the second the columns.
    rows = operand.stride(-2 if reading.operand.endswith("2") else -1) != 1
    for product in _behind(node, _ROWS_KEPT):
        name = product.name()
        if name in _PRODUCTS and _multiplies_features(name, product, rows):
            return True
    return False


def _multiplies_features(name: str, product: Any, rows: bool) -> bool:
    """Return whether the features of a ReLU are the rows, or columns, of a signed matrix product or outer product."""
    (first, number), (second, other) = product.next_functions[-2:]
    if first is None or second is None:
        return False
    if name == "MulBackward0":
        shapes = first._input_metadata[number].shape, second._input_metadata[other].shape
        if product._input_metadata[0].shape in shapes:  # no outer product
            return False
        if shapes[0][-1] != 1:
            first, second = second, first
    features, values = (first, second) if rows else (second, first)
    for node in _behind(features, _FEATURES_KEPT):
        if node.name() in _FEATURES:
            return not (_is_non_negative(values) or _is_parameter(values))
    return False


def _is_non_negative(node: Any, makers: frozenset[str] = _NON_NEGATIVE) -> bool:
    """Return whether the output of ``node`` is, or is a multiple of, the result of one of ``makers`` or an even power.

    Zero is the end of such a range, and codes restore both ends.
    """
    for _ in range(_FARTHEST):
        if node is None:
            break
        name = node.name()
        if name in makers:
            return True
        if name == "PowBackward0":
            return makers is _NON_NEGATIVE and node._saved_exponent % 2 == 0
        inputs = [behind for behind, _ in node.next_functions]
        if name == "MulBackward0" and inputs[0] is None:
            node = inputs[1]
        elif name in _MULTIPLES or name in _COPIES or name in _TRIANGLES or name in VIEWS or name == "WhereBackward0":
            node = inputs[0]
        else:
            break
    return False


def _is_mask(product: Any, operand: str) -> bool:
    """Return whether a factor without a gradient is boolean, or may hold zeros and ones.

    A number or a row of numbers is a scale, as the frozen weight of a norm is. The noise of a dropout, which the
    dropout fills in place, is no mask either: its zeros change places at each step.
    """
    stored = saved_form(product, operand)
    if isinstance(stored, Pending):
        stored = stored.stored
    if isinstance(stored, View):
        stored = stored.region
    if isinstance(stored, Region):
        return stored.dtype is torch.bool
    if not isinstance(stored, Kept):
        return False
    factor = stored.tensor
    if not factor.dtype.is_floating_point:
        return factor.numel() > 1
    few = factor.numel() < math.prod(product._input_metadata[0].shape)
    return (few or stored.version == 0) and sum(size > 1 for size in factor.shape) > 1
