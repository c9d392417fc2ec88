"""Sends a model with its batch to the child process: without the elements of tensors, which phantoms lack."""

from __future__ import annotations

import importlib.util
import io
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from ..errors import PyactcompError


class _Memory:
    """The memory that tensors share, by its size; in the child process a phantom's."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.whole: Tensor | None = None

    def tensor(self, dtype: torch.dtype, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
        """Return a tensor in this memory."""
        if self.whole is None:
            self.whole = torch.empty(self.nbytes // dtype.itemsize, dtype=dtype, device="cuda")
        return self.whole.view(dtype).as_strided(size, stride, offset).data


def _tensor(memory: _Memory, layout: tuple[Any, ...], requires_grad: bool, parameter: bool) -> Tensor:
    made = memory.tensor(*layout)
    return Parameter(made, requires_grad) if parameter else made.requires_grad_(requires_grad)


class _Pickler(pickle.Pickler):
    """Pickles tensors as their shapes; those that share memory share it afterwards."""

    def __init__(self, file: io.BytesIO) -> None:
        from ..torch_private.phantom import storage_key  # imports torch's fake tensors, and so Triton

        super().__init__(file)
        self._key = storage_key
        # With a tensor of each memory, so that no other memory gets the same key meanwhile.
        self._memories: dict[int, tuple[_Memory, Tensor]] = {}

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        if value.layout is not torch.strided or type(value) not in (Tensor, Parameter):
            raise pickle.PicklingError(f"a tensor of class {type(value).__name__} and layout {value.layout}")
        memory, _ = self._memories.setdefault(self._key(value), (_Memory(value.untyped_storage().nbytes()), value))
        layout = value.dtype, value.storage_offset(), tuple(value.shape), tuple(value.stride())
        return _tensor, (memory, layout, value.requires_grad, isinstance(value, Parameter))


def send(model: Module, batch: Any, loss: Callable[..., Any] | None) -> bytes:
    """Return a model, its batch and the function that gives the loss, to be received by a child process.

    Raises
    ------
    PyactcompError
        If another process cannot build one of them.
    """
    file = io.BytesIO()
    try:
        _Pickler(file).dump((model, batch, loss))
    except Exception as error:
        raise PyactcompError(
            f"this {type(model).__name__} cannot be sent to another process ({error}): define its classes and the "
            "function loss at the top of a module, or give a function that builds the model, as for pyactcomp.estimate"
        ) from None
    main = getattr(sys.modules["__main__"], "__file__", None)
    return pickle.dumps((None if main is None else str(Path(main).resolve()), file.getvalue()))


def receive(sent: bytes) -> tuple[Module, Any, Callable[..., Any] | None]:
    """Return what :func:`send` was given, on phantom tensors.

    The program that sent it is imported under another name, if its classes are needed.
    """
    main, pickled = pickle.loads(sent)
    if main is not None and b"__main__" in pickled:
        spec = importlib.util.spec_from_file_location("__mp_main__", main)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["__main__"] = sys.modules["__mp_main__"] = module
        spec.loader.exec_module(module)
    model, batch, loss = pickle.loads(pickled)
    return model, batch, loss
