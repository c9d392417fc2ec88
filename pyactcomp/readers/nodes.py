"""Walks over the autograd nodes behind a tensor, by the names of the nodes.

The observer's library has the walks of ``origin`` in C++.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter


def _backward(names: str) -> frozenset[str]:
    """Return the names of the nodes of operators."""
    return frozenset(f"{name}Backward0" for name in names.split())


VIEWS = _backward(
    "T Transpose View UnsafeView ReshapeAlias Permute Unsqueeze Squeeze Expand Alias Slice Select Split Unbind "
    "AsStrided"
)
_LONGEST_WALK = 8
# Views with the elements in the same order.
_RESHAPES = _backward("View UnsafeView ReshapeAlias Alias Unsqueeze Squeeze")
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


def unviewed(node: Node | None, passed: Collection[str] = VIEWS) -> Node | None:
    """Return the first node, from ``node`` on, whose name is not in ``passed``."""
    while node is not None and node.name() in passed:
        node = node.next_functions[0][0]
    return node


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
GROWING = _backward("Exp Exp2 Expm1 Sinh Cosh Cumprod Reciprocal")
LOGS = _backward("LogSoftmax Log Log2 Log10 Logsumexp Logcumsumexp Logaddexp Digamma Lgamma")
WIDE = GROWING | LOGS | _backward("MaskedFill Where IndexFill LogSigmoid Logit Tan Erfinv")
WIDE |= {"ScatterBackward1", "ScatterBackward3"}  # these two write a number
RANGE_KEPT = VIEWS | _backward(
    "Add Sub Rsub Neg Clamp ClampMin ClampMax Maximum Minimum NanToNum Cumsum ToCopy Clone Copy Cat Stack Repeat Flip "
    "Roll Tril Triu Index IndexSelect Gather MaskedSelect Diagonal Unfold ConstantPadNd IndexPut IndexCopy Scatter "
    "MaskedScatter"
)
RANGE_KEPT |= {"SubBackward1", "RsubBackward1", "ClampBackward1", "ClampMinBackward1", "ClampMaxBackward1"}
RANGE_KEPT |= {"SplitWithSizesBackward0", "SqueezeBackward1", "SqueezeBackward2", "torch::autograd::CopySlices"}
NARROW, DIFFERENCE, SPANNING, SCALED_RANGE = range(4)
"""The range of a value: moderate; that of a difference, of which only small elements may get a gradient (the nearest
point's); orders of magnitude; orders of magnitude, by an exponential."""
# Twelve nodes reach the mask behind normalised, viewed and transposed scores. The walk must end: a residual stream
# leads back to the first constant of the model, as positions are.
_RANGE_WALK = 12
# Farther back lie the constants added to a residual stream: the inputs of all checkpointed blocks would be exact.
_MASK_WALK = 3
# Of a difference: ((d.abs() + 1e-6) ** 1.5).sum(-1) / 2.
_MULTIPLES = 6
# Zero, and without a gradient, at the elements beyond a margin; a difference from a number counts below these alone.
HINGES = _backward("Relu ClampMin Hardtanh Softplus") | {"ClampBackward1"}
MARGINS = frozenset(("RsubBackward0", "RsubBackward1"))
# A residual is as small as its difference. A learnt precision multiplies the smallest by the largest numbers.
RESIDUALS = _backward("Pow Abs Log1P LinalgVectorNorm") | {"SumBackward1", "MeanBackward1"}
_SCALINGS = _backward("Mul Div")
LOSSES = _backward("MseLoss L1Loss SmoothL1Loss HuberLoss BinaryCrossEntropy BinaryCrossEntropyWithLogits")


def range_of(name: str, node: Any, walk: int = _RANGE_WALK, makers: Collection[str] = WIDE) -> int:
    """Return the range of the output of ``node``, named ``name``.

    Follows all inputs through operators that keep the range, products and quotients, as far as ``walk`` nodes. A
    constant tensor on the way may hold any number, such as the -1e9 of a mask added to scores. Without the library, a
    number counts as such a tensor: the nodes of both look alike.

    Parameters
    ----------
    makers : collection of str
        Names of the nodes whose results span orders of magnitude; if not ``WIDE``, constants do not count.
    """
    found = DIFFERENCE if makers is WIDE and _is_difference(name, node) else NARROW
    waiting = deque([(name, node, False, False)] if node is not None else ())
    for _ in range(walk):
        if not waiting:
            break
        name, node, is_factor, is_quotient = waiting.popleft()
        if name in makers:
            # A sum of exponentials divides a softmax back to moderate numbers.
            if name in GROWING and (is_factor or not is_quotient):
                return SCALED_RANGE
            found = SPANNING
            continue
        inputs = [behind for behind, _ in node.next_functions]
        if name == "MulBackward0":
            is_factor = is_factor or None not in inputs
        elif name == "DivBackward0":
            is_quotient = True
            if inputs[0] is None and makers is WIDE:
                found = SPANNING
        elif name not in RANGE_KEPT:
            continue
        elif None in inputs and makers is WIDE:
            found = SPANNING
        waiting.extend((behind.name(), behind, is_factor, is_quotient) for behind in inputs if behind is not None)
    return found


def _is_difference(name: str, node: Any) -> bool:
    """Return whether the output of ``node`` is a difference, the multiple of one by a constant, or a hinge of either.

    Below a hinge, a number or constant tensor less the operand counts too (``relu(1 - x)``), and a sum with a constant
    where the hinge has no upper bound: ``relu6(x + 3)`` is a gate. Residuals count, powers and losses of differences.
    """
    hinged = one_sided = residual = False
    for _ in range(_MULTIPLES):
        if node is None or name == "SubBackward0":
            break
        inputs = [behind for behind, _ in node.next_functions]
        if name in LOSSES:
            return True
        if name in RESIDUALS or (residual and name == "AddBackward0" and None in inputs):
            residual = True
        elif name in HINGES:
            hinged, one_sided = True, name != "HardtanhBackward0" and getattr(node, "_saved_max", None) is None
        elif hinged and (name in MARGINS or (one_sided and name == "AddBackward0" and None in inputs)):
            return True
        elif residual and name in _SCALINGS:
            # A residual times a precision, in either order.
            inputs = [each for each in inputs if each is not None and _is_residual(each.name())] or inputs
        elif name != "NegBackward0" and (name not in _SCALINGS or inputs[-1] is not None):
            return False
        node = inputs[0]
        name = "" if node is None else node.name()
    return name == "SubBackward0"


def _is_residual(name: str) -> bool:
    return name == "SubBackward0" or name in RESIDUALS or name in LOSSES


def was_masked(tensor: Tensor) -> bool:
    """Return whether a tensor spans orders of magnitude by the last operators behind it, as a bias plus a mask does."""
    return range_of(*producer(tensor), walk=_MASK_WALK) >= SPANNING


def is_logarithm(tensor: Tensor) -> bool:
    """Return whether a tensor is, or comes in its range from, a logarithm."""
    return range_of(*producer(tensor), makers=LOGS) != NARROW


def cast_parameter(node: Node) -> Tensor | None:
    """Return the parameter read by a cast, or None if the cast reads another tensor."""
    leaf: Any = node.next_functions[0][0]
    # The type's name first: getattr on a node without `variable` costs as much as the rest of this function.
    variable = leaf.variable if type(leaf).__name__ == "AccumulateGrad" else None
    return variable if isinstance(variable, Parameter) else None
