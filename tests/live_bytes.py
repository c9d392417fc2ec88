"""Count the bytes of tensors that are alive at once, on any device: the peak of a piece of code, without a GPU."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Sums the bytes of the storages that operators make and that are alive after an operator.

    Attributes
    ----------
    peak : int
        The largest sum.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        out = function(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            storage = each.untyped_storage() if isinstance(each, Tensor) else None
            if storage is not None and storage._cdata not in given and storage._cdata not in self._alive():
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.nbytes)
        return out

    def _alive(self) -> dict[int, tuple[StorageWeakRef, int]]:
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        return self._made

    @property
    def nbytes(self) -> int:
        """The bytes alive now."""
        return sum(nbytes for _, nbytes in self._alive().values())
