"""Decides whether a saved tensor may be compressed: from metadata and ownership, never from values."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from ..codec.layouts import layout_of
from ..torch_private.distributed import local_tensor

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
# A view with gaps is packed with its whole base, unless the base is more than this many times larger: then gathering
# the view's elements is cheaper.
_LARGEST_BASE = 4
PLAIN = (Tensor, Parameter)
"""Tensor types to pack directly; of other types, only a DTensor's local tensor is packed."""


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

    __slots__ = ("_min_bytes", "_module", "_owned", "skipping")

    def __init__(self, module: torch.nn.Module | None, min_bytes: int) -> None:
        # Skipped modules whose forward is running.
        self.skipping = 0
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

    def reason_of_model(self, tensor: Tensor, would_copy: bool) -> str | None:
        """Return the reason to keep a tensor that is otherwise to pack: the model owns or skips it; or None.

        ``would_copy`` as in :meth:`reason_to_keep`.
        """
        if would_copy:
            address = tensor.untyped_storage().data_ptr()
            if (self._owned is None or address in self._owned) and self._owns(address):
                return PARAMETER
        return SKIPPED if self.skipping else None

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
        if self.skipping:
            return SKIPPED
        if tensor.dtype not in CARRIER:
            return f"dtype {tensor.dtype}"
        if tensor.nbytes < self._min_bytes:
            return SMALL
        if not needs_grad and tensor.dtype is not torch.bool:
            return NO_GRAD
        if tensor.is_neg():
            return NEGATIVE_VIEW
        return None


def shared_by_siblings(base: Tensor, view: Tensor) -> bool:
    """Return whether to pack the base of a view with gaps, as q, k and v of one projection share a base."""
    return (
        type(base) in PLAIN
        and base.dtype is view.dtype
        and base.untyped_storage() is view.untyped_storage()
        and base.numel() <= _LARGEST_BASE * view.numel()
        and layout_of(base).dense
    )
