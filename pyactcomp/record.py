"""What autograd saved in one forward, tensor by tensor and module by module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module

from . import policy
from .saved import Region


@dataclass(frozen=True)
class SavedTensor:
    """One tensor that autograd asked to save.

    Attributes
    ----------
    module : str
        Qualified name of the innermost module whose forward was running; empty for the root.
    shape : tuple of int
    dtype : str
    saved_bytes : int
        Its elements' bytes.
    unique_bytes : int
        Bytes of its storage not counted for an earlier tensor: what autograd alone would have held for it.
    stored_bytes : int
        Bytes held for it instead; 0 where an earlier tensor's or its owner's serve.
    kept : str or None
        Why it was not compressed; None where it was.
    """

    module: str
    shape: tuple[int, ...]
    dtype: str
    saved_bytes: int
    unique_bytes: int
    stored_bytes: int
    kept: str | None


def _nbytes(tensor: Tensor) -> int:
    if tensor.layout is torch.strided:
        return tensor.nbytes
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    rows_first = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    parts = (
        (tensor.crow_indices(), tensor.col_indices()) if rows_first else (tensor.ccol_indices(), tensor.row_indices())
    )
    return sum(part.nbytes for part in (*parts, tensor.values()))


def _eager_children(module: Module, prefix: str) -> Iterator[tuple[str, Module]]:
    """Yield named submodules that run in Python: a hook inside a compiled one would be traced, and traced again."""
    if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
        return
    for name, child in module.named_children():
        if isinstance(child, torch.jit.ScriptModule):
            continue
        if child._compiled_call_impl is None:
            yield prefix + name, child
        yield from _eager_children(child, f"{prefix}{name}.")


class Recorder:
    """Collects the saved tensors of one forward; tracks modules by hooks that it removes again."""

    def __init__(self, root: Module | None) -> None:
        self.saved: list[SavedTensor] = []
        self._modules = [""]
        self._storages: dict[int, ref[torch.UntypedStorage]] = {}
        self._handles = []
        for name, module in _eager_children(root, "") if root is not None else ():

            def enter(_module: Module, _args: object, name: str = name) -> None:
                self._modules.append(name)

            def leave(_module: Module, _args: object, _output: object) -> None:
                if len(self._modules) > 1:
                    self._modules.pop()

            self._handles.append(module.register_forward_pre_hook(enter))
            self._handles.append(module.register_forward_hook(leave, always_call=True))

    def close(self) -> None:
        """Remove the hooks and the references to storages; the records stay."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._storages.clear()

    def add(self, tensor: Tensor, kept: str | None, region: Region | None) -> None:
        """Record a saved tensor, kept for a reason or packed; ``region`` is given where it was packed anew."""
        unique = 0 if kept in policy.ALIVE_ANYWAY else self._unique_bytes(tensor)
        if region is not None:
            stored = region.nbytes
        else:
            stored = 0 if kept is None or kept == policy.RECAST else unique
        self.saved.append(
            SavedTensor(
                module=self._modules[-1],
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                saved_bytes=_nbytes(tensor),
                unique_bytes=unique,
                stored_bytes=stored,
                kept=kept,
            )
        )

    def _unique_bytes(self, tensor: Tensor) -> int:
        tensor = policy.local_tensor(tensor)
        if tensor.layout is not torch.strided:
            return _nbytes(tensor)
        storage = tensor.untyped_storage()
        known = self._storages.get(storage.data_ptr())
        if known is not None and known() is storage:
            return 0
        self._storages[storage.data_ptr()] = ref(storage)
        return storage.nbytes()
