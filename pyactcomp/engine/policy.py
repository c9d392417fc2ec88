"""Which saved tensors may be compressed: decided from metadata and ownership, never from values."""

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
OTHER_LAYOUT = "copy of a parameter that was written to or lies otherwise in memory, kept"
RECAST = "autocast copy of a parameter, cast again in backward"
# Additive attention masks, log-sum-exps, rotary tables, copies of frozen weights, the model's inputs: few, often alive
# anyway, and not forgiving. An error of half a step is small beside a group's range, and that of a mask is the dtype's.
NO_GRAD = "does not require grad: a mask, a statistic, a constant or an input, kept exact"
REDONE = "computed again in backward from what is stored"
SAME_CAST = "another cast of the same tensor is stored"
SHAPE_ALONE = "backward reads its shape alone"
SHARPENED = "a factor of a product that is divided by, or of which a log or a root is taken: stored in 16 bits"
HELD = "kept as it is for another reader of the same memory"
LOSSLESS = "lossless: stored as it is"
OVERLAPPING = "elements overlap in memory"
NEGATIVE_VIEW = "lazy negation"

# Reasons under which nothing is held for a tensor but the means to make it again.
MADE_AGAIN = frozenset({RECAST, REDONE, SAME_CAST, SHAPE_ALONE})
# Reasons under which saving a tensor costs no memory, with or without compression.
ALIVE_ANYWAY = frozenset({PARAMETER, LEAF})

CARRIER: dict[torch.dtype, torch.dtype] = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float16,
    torch.float64: torch.float32,
    torch.bool: torch.bool,
}
"""Dtypes that are packed, and the dtype they are packed from."""

_STRIDED = torch.strided
PLAIN = (Tensor, Parameter)
"""What is packed as it is; of other kinds of tensors only a DTensor's local one."""

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
# Views that keep the order of the elements.
_RESHAPES = frozenset(
    f"{name}Backward0" for name in ("View", "UnsafeView", "ReshapeAlias", "Alias", "Unsqueeze", "Squeeze")
)
CAST = "ToCopyBackward0"


def producer(tensor: Tensor) -> tuple[str, Node | None]:
    """Return the node that computed ``tensor``, or what it is a view of, with its name. The node must not be kept."""
    base = tensor._base
    # From the base at once: a Python object for each node of a view would live as long as the graph. A view in another
    # dtype, such as the real part, is its own node's.
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
    """Return the node that made what ``node`` reads first, and the number of its output, reshapes aside; or None."""
    for _ in range(_LONGEST_WALK):
        node, number = node.next_functions[0]
        if node is None or node.name() not in _RESHAPES:
            return node, number
    return None, 0


# Log-probabilities, masked scores (-1e9, -inf) and exponentials: a group of them has a range beside which most of its
# elements vanish. Where the gradient is zero for the largest, as it is where an entropy multiplies masked
# log-probabilities by probabilities, the error of the others is all that counts.
_WIDE = frozenset(
    f"{name}Backward0"
    for name in ("LogSoftmax", "Log", "MaskedFill", "Where", "Exp", "Expm1", "Reciprocal", "LogSigmoid")
)
_RANGE_KEPT = frozenset(
    f"{name}Backward{number}" for name in ("Clamp", "ClampMin", "ClampMax", "Sub", "Add", "Neg") for number in (0, 1)
) | {"ToCopyBackward0", *_VIEWS}
_RANGE_WALK = 4


def spans_magnitudes(name: str, node: Any) -> bool:
    """Return whether what a node, of a known name, made may span orders of magnitude, by the operators behind it.

    Products with a constant are passed.
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
    """Return the parameter that a cast reads, or None if it reads something else."""
    leaf: Any = node.next_functions[0][0]
    # To ask another kind of node for its variable costs as much as the rest of this.
    variable = leaf.variable if type(leaf).__name__ == "AccumulateGrad" else None
    return variable if isinstance(variable, Parameter) else None


def local_tensor(tensor: Tensor) -> Tensor:
    """Return a DTensor's local tensor, and any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def owned_tensors(module: torch.nn.Module) -> Iterator[Tensor]:
    """Yield the local tensors of all parameters and buffers, every forward anew: what a model owns may change.

    Those that a lazy module has yet to make have no memory.
    """
    # Module.modules() takes twice the time, for names that are not wanted.
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
    """Return where a tensor's storage is; 0 for a subclass around other tensors, which has no memory of its own."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


class Policy:
    """Decides for one forward, from what the model owns then.

    Parameters
    ----------
    module : Module or None
        Whose parameters and buffers are never compressed.
    min_bytes : int
        Smaller tensors are kept.
    """

    __slots__ = ("_min_bytes", "_module", "_owned", "exact")

    def __init__(self, module: torch.nn.Module | None, min_bytes: int) -> None:
        # Why nothing is packed in the modules whose forward is running, innermost last.
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
        # FSDP frees a parameter's memory, which others get then.
        return owner is not None and address != 0 and _address(owner) == address

    def reason_to_keep(self, tensor: Tensor, saved: Tensor, would_copy: bool = True) -> str | None:
        """Return why a plain tensor is not to be packed, or None.

        Parameters
        ----------
        tensor : Tensor
        saved : Tensor
            The DTensor around it, or itself.
        would_copy : bool
            Whether it would be stored as a copy. Where it is kept as it is in any case, it is of no interest, and takes
            a look at the whole model, that its memory is a parameter's or buffer's.
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
