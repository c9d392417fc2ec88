"""Decides whether a saved tensor may be compressed: from metadata and ownership, never from values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

PARAMETER = "parameter or buffer, alive anyway"
LEAF = "leaf that requires grad, alive anyway"
SMALL = "smaller than min_bytes"
SKIPPED = "inside a skipped module"
NESTED = "nested tensor, kept exact"
OTHER_LAYOUT = "copy of a parameter, written to or in another memory layout, kept"
RECAST = "autocast copy of a parameter, cast again in backward"
# Additive attention masks, log-sum-exps, rotary tables, copies of frozen weights, the model's inputs: few, often alive
# anyway, and sensitive to errors. Half a step is small beside a group's range, but a mask's range is the dtype's.
NO_GRAD = "does not require grad: a mask, a statistic, a constant or an input, kept exact"
RECOMPUTED = "recomputed in backward from stored tensors"
SAME_CAST = "another cast of the same tensor is stored"
SHAPE_ALONE = "backward reads only the shape"
SHARPENED = "a factor of a product that is then a divisor or the argument of a log or a root: stored in 16 bits"
HELD = "kept as it is for another reader of the same memory"
LOSSLESS = "lossless: stored as it is"
OVERLAPPING = "elements overlap in memory"
NEGATIVE_VIEW = "lazy negation"

# Reasons under which no memory is held for a tensor: backward recomputes the tensor or reads another stored one.
HOLDS_NOTHING = frozenset({RECAST, RECOMPUTED, SAME_CAST, SHAPE_ALONE})
# Reasons under which a saved tensor costs no memory even without compression.
ALIVE_ANYWAY = frozenset({PARAMETER, LEAF})

CARRIER: dict[torch.dtype, torch.dtype] = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float16,
    torch.float64: torch.float32,
    torch.bool: torch.bool,
}
"""The dtypes to pack, each with the dtype read by the kernel."""

_STRIDED = torch.strided
PLAIN = (Tensor, Parameter)
"""Tensor types to pack directly; of other types, only a DTensor's local tensor is packed."""

_VIEWS = frozenset(
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
        if name not in _VIEWS:
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
_WIDE = frozenset(
    f"{name}Backward0"
    for name in ("LogSoftmax", "Log", "MaskedFill", "Where", "Exp", "Expm1", "Reciprocal", "LogSigmoid")
)
_RANGE_KEPT = frozenset(
    f"{name}Backward{number}" for name in ("Clamp", "ClampMin", "ClampMax", "Sub", "Add", "Neg") for number in (0, 1)
) | {"ToCopyBackward0", *_VIEWS}
_RANGE_WALK = 4


def spans_magnitudes(name: str, node: Any) -> bool:
    """Return whether the output of ``node``, named ``name``, may span orders of magnitude.

    Follows the first input through range-preserving operators, products with a constant included.
    """
    for _ in range(_RANGE_WALK):
        if name in _WIDE:
            return True
        if name not in _RANGE_KEPT and (name != "MulBackward0" or node.next_functions[-1][0] is not None):
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


def local_tensor(tensor: Tensor) -> Tensor:
    """Return a DTensor's local tensor, or any other tensor unchanged."""
    return getattr(tensor, "_local_tensor", tensor)


def owned_tensors(module: torch.nn.Module) -> Iterator[Tensor]:
    """Yield the local tensors of all parameters and buffers; called in each forward, since both may change.

    Skips uninitialised parameters of lazy modules: they have no memory.
    """
    # Module.modules() takes twice the time: it builds names too.
    left, seen = [module], {module}
    while left:
        child = left.pop()
        for tensors in (child._parameters, child._buffers):
            for tensor in tensors.values():
                if tensor is not None and not is_lazy(tensor):
                    yield tensor if type(tensor) in PLAIN else local_tensor(tensor)
        for inner in child._modules.values():
            if inner is not None and inner not in seen:
                seen.add(inner)
                left.append(inner)


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; 0 for a wrapper subclass without memory of its own."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


class Policy:
    """Decides for one forward whether a saved tensor may be compressed.

    Parameters
    ----------
    module : Module or None
        The module whose parameters and buffers are never compressed.
    min_bytes : int
        Smaller tensors are kept.
    """

    __slots__ = ("_min_bytes", "_module", "_owned", "exact")

    def __init__(self, module: torch.nn.Module | None, min_bytes: int) -> None:
        # Reasons of the skipped modules whose forward is running, innermost last.
        self.exact: list[str] = []
        self._min_bytes = min_bytes
        self._module = module
        self._owned: dict[int, Tensor] | None = None

    def _owns(self, address: int) -> bool:
        """Return whether the module owns the storage at an address."""
        if self._owned is None:
            tensors = owned_tensors(self._module) if self._module is not None else ()
            self._owned = {_address(each): each for each in tensors if each.layout is _STRIDED}
        owner = self._owned.get(address)
        # FSDP frees a parameter's memory, and another tensor may get the address.
        return owner is not None and address != 0 and _address(owner) == address

    def reason_to_keep(self, tensor: Tensor, saved: Tensor, would_copy: bool = True) -> str | None:
        """Return the reason to keep a plain tensor unpacked, or None if it may be packed.

        Parameters
        ----------
        tensor : Tensor
        saved : Tensor
            The DTensor around ``tensor``, or ``tensor``.
        would_copy : bool
            Whether packing would copy the tensor. If not, skip the search for an owning parameter or buffer: a walk
            over the whole model would change nothing.
        """
        if tensor.layout is not _STRIDED:
            return f"layout {tensor.layout}"
        if tensor.is_nested:
            return NESTED
        if would_copy:
            address = tensor.untyped_storage().data_ptr()
            if (self._owned is None or address in self._owned) and self._owns(address):
                return PARAMETER
        base = saved._base
        owner = saved if base is None else base
        if type(owner) is not Tensor and isinstance(owner, Parameter):
            return PARAMETER
        needs_grad = saved.requires_grad
        if needs_grad and owner.is_leaf and owner.requires_grad:
            return LEAF
        if self.exact:
            return self.exact[-1]
        if tensor.dtype not in CARRIER:
            return f"dtype {tensor.dtype}"
        if tensor.nbytes < self._min_bytes:
            return SMALL
        if not needs_grad and tensor.dtype is not torch.bool:
            return NO_GRAD
        if tensor.is_neg():
            return NEGATIVE_VIEW
        return None
