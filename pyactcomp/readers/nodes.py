"""Walks over the autograd nodes behind a tensor, by the names of the nodes.

The observer's library has the walks of ``origin`` in C++.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

VIEWS = frozenset(
    f"{name}Backward0"
    for name in (
        "T",
        "Transpose",
        "View",
        "UnsafeView",
        "ReshapeAlias",
        "Permute",
        "Unsqueeze",
        "Squeeze",
        "Expand",
        "Alias",
        "Slice",
        "Select",
        "Split",
        "Unbind",
        "AsStrided",
    )
)
_LONGEST_WALK = 8
# Views with the elements in the same order.
_RESHAPES = frozenset(
    f"{name}Backward0" for name in ("View", "UnsafeView", "ReshapeAlias", "Alias", "Unsqueeze", "Squeeze")
)
CAST = "ToCopyBackward0"
EXPONENTIAL = "ExpBackward0"
SOFTMAX_PARTS = frozenset(
    (EXPONENTIAL, "SumBackward0", "SumBackward1", "GatherBackward0", "IndexBackward0", "DiagonalBackward0_copy")
)
"""Exponentials, their sums, and those chosen for a loss: the parts of a softmax written out."""


def producer(tensor: Tensor) -> tuple[str, Node | None]:
    """Return the name and the node of the operator behind ``tensor``, views aside. Do not keep the node."""
    base = tensor._base
    # Start at the base: a Python object for each view's node would live as long as the graph. A view in another dtype,
    # such as the real part, has a node of its own.
    node = (tensor if base is None or base.dtype is not tensor.dtype else base).grad_fn
    for _ in range(_LONGEST_WALK):
        if node is None:
            break
        name = node.name()
        if name not in VIEWS:
            return name, node
        node = node.next_functions[0][0]
    return "", None


def source(node: Any) -> tuple[Any, int]:
    """Return the producer of the first input of ``node``, reshapes aside, and the output's number; or None."""
    for _ in range(_LONGEST_WALK):
        node, number = node.next_functions[0]
        if node is None or node.name() not in _RESHAPES:
            return node, number
    return None, 0


# Log-probabilities, masked scores (-1e9, -inf) and exponentials: most elements of a group vanish beside the group's
# range. If the gradient of the largest elements is zero (an entropy multiplies masked log-probabilities by
# probabilities), only the errors of the small elements count.
WIDE = frozenset(
    f"{name}Backward0"
    for name in ("LogSoftmax", "Log", "MaskedFill", "Where", "Exp", "Expm1", "Reciprocal", "LogSigmoid")
)
# Those of the names above that make logarithms.
LOGS = frozenset(("LogSoftmaxBackward0", "LogBackward0"))
RANGE_KEPT = frozenset(
    f"{name}Backward{number}" for name in ("Clamp", "ClampMin", "ClampMax", "Sub", "Add", "Neg") for number in (0, 1)
) | {"ToCopyBackward0", *VIEWS}
_RANGE_WALK = 4


def spans_magnitudes(name: str, node: Any) -> bool:
    """Return whether the output of ``node``, named ``name``, may span orders of magnitude."""
    return keeps_range_of(WIDE, name, node)


def keeps_range_of(makers: Collection[str], name: str, node: Any) -> bool:
    """Return whether the output of ``node``, named ``name``, comes from a node whose name is in ``makers``.

    Follows the first input through range-preserving operators, products with a constant included.
    """
    for _ in range(_RANGE_WALK):
        if name in makers:
            return True
        if name not in RANGE_KEPT and (name != "MulBackward0" or node.next_functions[-1][0] is not None):
            return False
        node = node.next_functions[0][0]
        if node is None:
            return False
        name = node.name()
    return False


def cast_parameter(node: Node) -> Tensor | None:
    """Return the parameter read by a cast, or None if the cast reads another tensor."""
    leaf: Any = node.next_functions[0][0]
    # The type's name first: getattr on a node without `variable` costs as much as the rest of this function.
    variable = leaf.variable if type(leaf).__name__ == "AccumulateGrad" else None
    return variable if isinstance(variable, Parameter) else None
