"""Records the saved tensors of one forward, for the report: sizes, reasons and modules."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from ..torch_private import SavedTensorHooks, never_traced, top_saved_tensor_hooks
from ..torch_private.distributed import local_tensor
from . import reasons
from .marks import Packs, compiles_itself


@dataclass(frozen=True)
class SavedTensor:
    """One tensor saved by autograd.

    Attributes
    ----------
    module : str
        Qualified name of the innermost module whose forward was running; empty for the root.
    shape : tuple of int or str
        Sizes; a dynamic size of a compiled graph by its symbol.
    dtype : str
    saved_bytes : int
        Bytes of the elements.
    unique_bytes : int
        Bytes of the storage, unless counted for an earlier tensor: plain autograd would have held them.
    stored_bytes : int
        Bytes held instead; 0 if the bytes of an earlier tensor or of the owner serve.
    kept : str or None
        Why the tensor was not compressed; None if it was.
    unknown_reader : str or None
        The operator or function that saved the tensor, if kept because the table of readers has no row.
    where : {"device", "host"}
        Where the stored bytes wait for backward: with ``offload`` most go to the host during the forward.
    """

    module: str
    shape: tuple[int | str, ...]
    dtype: str
    saved_bytes: int
    unique_bytes: int
    stored_bytes: int
    kept: str | None
    unknown_reader: str | None = None
    where: str = "device"

    @property
    def restored_bytes(self) -> int:
        """Bytes allocated in backward to restore the tensor; 0 for a kept tensor."""
        return self.saved_bytes if self.kept is None or self.kept in reasons.HOLDS_NOTHING else 0


def of_graph(module: str, values: Iterable[Any]) -> list[SavedTensor]:
    """Return the records of what a run of a compiled graph saves: each a :class:`.compiled.graphs.SavedValue`."""
    return [
        SavedTensor(
            module,
            value.shape,
            str(value.dtype).removeprefix("torch."),
            value.before,
            value.before,
            value.after,
            value.reason if value.form == "kept" else None,
            where=value.where,
        )
        for value in values
    ]


def name_of_hooks(hooks: SavedTensorHooks) -> str:
    """Return the name of the function that packs."""
    return f"{hooks[0].__module__}.{getattr(hooks[0], '__qualname__', type(hooks[0]).__name__)}"


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors inside a tensor, elements and indices; mostly the tensor alone."""
    if hasattr(tensor, "__tensor_flatten__"):
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return [part for each in inner if isinstance(each, Tensor) for part in dense_parts(each)]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def _nbytes(tensor: Tensor) -> int:
    return tensor.nbytes if tensor.layout is torch.strided else sum(part.nbytes for part in dense_parts(tensor))


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape; for a nested tensor the shape of the values, since its own shape may hold no plain numbers."""
    return tuple(tensor.values().shape if tensor.is_nested else tensor.shape)


def is_compiled(module: Module) -> bool:
    """Return whether a module was compiled in place, or is the wrapper that ``torch.compile`` returns."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def _eager_children(module: Module, prefix: str) -> Iterator[tuple[str, Module]]:
    """Yield named submodules that run eagerly: a hook inside a compiled module would be traced, and retraced."""
    if is_compiled(module):
        return
    for name, child in module.named_children():
        if isinstance(child, torch.jit.ScriptModule):
            continue
        if child._compiled_call_impl is None:
            yield prefix + name, child
        if not compiles_itself(child):
            yield from _eager_children(child, f"{prefix}{name}.")


_recording = threading.local()


def is_recording() -> bool:
    """Return whether a forward of this thread is being recorded for a report.

    Not for code that torch.compile traces: the access of a thread-local breaks graphs.
    """
    return getattr(_recording, "forwards", 0) > 0


# Imported only once something was compiled.
_AOT_AUTOGRAD = "torch._functorch.aot_autograd"


class Recorder:
    """Collects the saved tensors of one forward; tracks the running module by temporary hooks.

    Attributes
    ----------
    saved : list of SavedTensor
    gradient_bytes : dict
        Bytes of the gradients of each module's own parameters.
    is_dry : bool
        Whether a tensor without memory was saved: the forward was a dry run, on fake tensors or the meta device.
    hooks_inside : str or None
        Name of other saved-tensor hooks under which a module of the model ran.
    """

    def __init__(self, root: Module | None) -> None:
        self.saved: list[SavedTensor] = []
        self.gradient_bytes: dict[str, int] = {}
        self.is_dry = False
        self.hooks_inside: str | None = None
        self._run: object = None
        self._leaves = False
        self._opened = 0
        self._modules = [""]
        self._storages: dict[int, ref[torch.UntypedStorage]] = {}
        self._handles = []
        self._tracked = [] if root is None else [("", root), *_eager_children(root, "")]
        for name, module in self._tracked[1:]:

            def enter(_module: Module, _args: object, name: str = name) -> None:
                self.enter(name)

            def leave(_module: Module, _args: object, _output: object) -> None:
                self.leave()

            self._handles.append(module.register_forward_pre_hook(enter))
            self._handles.append(module.register_forward_hook(leave, always_call=True))

    @property
    def module(self) -> str:
        """Name of the running module."""
        return self._modules[-1]

    def enter(self, name: str) -> None:
        """Assign the following tensors to a module."""
        self._modules.append(name)
        if torch.compiler.is_compiling():
            return
        top = top_saved_tensor_hooks()
        if top is None or top[0].__module__ == "torch.utils.checkpoint":
            return
        if getattr(getattr(top[0], "__self__", None), "recorder", None) is not self:
            self.hooks_inside = name_of_hooks(top)

    def leave(self) -> None:
        """Assign the following tensors to the enclosing module."""
        if len(self._modules) > 1:
            self._modules.pop()

    def _count_gradients(self, name: str, module: Module) -> None:
        """Record the bytes of the gradients of a module's own parameters."""
        own = (p for p in module._parameters.values() if p is not None and p.requires_grad and not is_lazy(p))
        self.gradient_bytes[name] = sum(p.numel() * p.itemsize for p in own)

    def open(self) -> None:
        """Make :func:`is_recording` true in this thread; calls nest."""
        self._opened += 1
        _recording.forwards = getattr(_recording, "forwards", 0) + 1

    def close(self) -> None:
        """Undo one :meth:`open`; the last removes the hooks and the references to modules and storages."""
        _recording.forwards -= 1
        self._opened -= 1
        if self._opened:
            return
        # Count now: a lazy module has no parameters before the first forward.
        for name, module in self._tracked:
            self._count_gradients(name, module)
        self._tracked.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._storages.clear()
        self._run = None

    @never_traced
    def note_place(self, leaves: int) -> None:
        """Record whether the stored bytes of the next tensor leave the device."""
        self._leaves = bool(leaves)

    @never_traced
    def add(self, tensor: Tensor, kept: str | None, packed: int = 0, unknown: str | None = None) -> None:
        """Record a saved tensor: kept for a reason, or packed in ``packed`` bytes of its own.

        ``unknown`` names the reader of a tensor kept because the table has no row for the reader. Of what a compressed
        graph saves, the record of the graph counts: the tensors themselves are codes.
        """
        if _AOT_AUTOGRAD in sys.modules and self._add_run() and kept not in reasons.ALIVE_ANYWAY:
            return
        unique = 0 if kept in reasons.ALIVE_ANYWAY else self._unique_bytes(tensor)
        stored = packed if kept is None or kept in reasons.HOLDS_NOTHING else unique
        self._append(_shape(tensor), tensor.dtype, _nbytes(tensor), unique, stored, kept, unknown)

    def _add_run(self) -> bool:
        """Return whether a run of a compressed graph saves the tensor; record what the graph saves, once a run."""
        from ..torch_private.partitions import running_graph

        found: tuple[Any, Any] = running_graph() or (None, None)
        run, note = found
        if note is not None and run is not self._run:
            self._run = run
            self.saved += of_graph(self.module, note.record.saved)
        return note is not None

    def add_codes(self, packs: Packs, packed: int) -> None:
        """Record codes saved by an autograd function, as the packed tensor."""
        storage = None if packs.storage is None else packs.storage()
        unique = packs.nbytes if storage is None else self._unique_storage_bytes(storage)
        self._append(packs.shape, packs.dtype, packs.nbytes, unique, packed, None)

    def _append(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        saved: int,
        unique: int,
        stored: int,
        kept: str | None,
        unknown: str | None = None,
    ) -> None:
        name = str(dtype).removeprefix("torch.")
        where = "host" if self._leaves and stored else "device"
        self._leaves = False
        self.saved.append(SavedTensor(self.module, shape, name, saved, unique, stored, kept, unknown, where))

    def _unique_bytes(self, tensor: Tensor) -> int:
        return sum(self._unique_part_bytes(part) for part in dense_parts(local_tensor(tensor)))

    def _unique_part_bytes(self, part: Tensor) -> int:
        try:
            return self._unique_storage_bytes(part.untyped_storage())
        except RuntimeError:  # a subclass without an accessible storage
            return part.nbytes

    def _unique_storage_bytes(self, storage: torch.UntypedStorage) -> int:
        if storage.device.type == "meta":
            self.is_dry = True
            return storage.nbytes()
        known = self._storages.get(storage.data_ptr())
        if known is not None and known() is storage:
            return 0
        self._storages[storage.data_ptr()] = ref(storage)
        return storage.nbytes()
