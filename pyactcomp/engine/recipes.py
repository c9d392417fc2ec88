"""Recipes: how backward recomputes an operator's output from the operator's saved operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ..codec.layouts import arranged, layout_of
from ..torch_private import never_traced
from . import saved
from .rare import ModifiedError, check_version
from .saved import LeafMemory

Compute = Callable[[torch.dtype], Tensor]

_NOT_HELD = (
    "pyactcomp recomputes an output from this tensor instead of storing the output: write out of place, hold on to "
    "that output until backward, or name the module in skip."
)


class Recipe:
    """How backward recomputes an output.

    Parameters
    ----------
    out : Tensor
        The output. Must be dense and the owner of the storage.
    compute : callable, optional
        Maps a dtype (the dtype of ``out``, or the target of an autocast cast), and the ``forms``, to a tensor with the
        values and shape of ``out``, in any layout. Must never hold ``out`` or the graph. Without ``compute`` the output
        is stored, but its equal casts only once.
    operands : tuple of Tensor
        Tensors read unpacked by ``compute``, such as a weight: a write before backward raises autograd's error.
    depth : int
        Length of the longest chain of recipes, this one included: 1 if no operand is recomputed.
    casts : bool
        Whether autocast's casts of the output are recomputed too.
    exact : bool
        Whether ``compute`` gives the output bit by bit.
    forms : tuple of stored forms
        The forms of the operator's saved operands. Their node holds them until its backward has run, and a saved output
        holds them by :meth:`forms`. The recipe holds only those that no node holds: a program may hold the output, and
        with it the node, for long.
    """

    __slots__ = (
        "_casts",
        "_compute",
        "_copies",
        "_forms",
        "_held",
        "_operands",
        "_out",
        "_stored",
        "_versions",
        "depth",
        "dtype",
        "exact",
        "layout",
        "storage",
        "version",
    )

    def __init__(
        self,
        out: Tensor,
        compute: Callable[..., Tensor] | None,
        operands: tuple[Tensor, ...] = (),
        depth: int = 1,
        casts: bool = True,
        exact: bool = False,
        forms: tuple[Any, ...] = (),
    ) -> None:
        self._compute = compute
        self._forms = tuple(map(ref, forms))
        self._held = tuple([form for form in forms if isinstance(form, LeafMemory)]) if forms else ()
        self._operands = operands
        self._out = ref(out)
        self._versions = tuple([operand._version for operand in operands])
        self._stored: ref[saved.FromRecipe] | None = None
        self._copies: dict[tuple[object, ...], ref[saved.Kept | saved.Region]] | None = None
        self.depth = depth
        self._casts = casts
        self.exact = exact
        self.dtype = out.dtype
        self.layout = layout_of(out)
        self.storage = ref(out.untyped_storage())
        self.version = out._version

    @property
    def copies(self) -> dict[tuple[object, ...], ref[saved.Kept | saved.Region]]:
        """Stored casts of the output or of its views, by dtype, offset and layout."""
        if self._copies is None:
            self._copies = {}
        return self._copies

    @property
    def computes(self) -> bool:
        """Whether the recipe can recompute the output: not once backward has freed a form."""
        return self._compute is not None and (not self._forms or None not in self.forms())

    @property
    def casts(self) -> bool:
        """Whether the recipe can recompute casts of the output."""
        return self._casts and self.computes

    def forms(self) -> tuple[object, ...]:
        """Return the stored forms to hold as long as :meth:`compute` may be called; None for each freed one."""
        return tuple([form() for form in self._forms]) if self._forms else ()

    def serves(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` still equals the recomputed output: same storage, and no write since."""
        return self.storage() is tensor.untyped_storage() and tensor._version == self.version

    @never_traced
    def compute(self, dtype: torch.dtype) -> Tensor:
        """Recompute the output in the original layout, or raise autograd's error if an operand was written to.

        The layout matters: views of the output use its strides, and following operators sum in memory order. Plain
        torch would read the saved output, not the operands: if an operand was written to but the output is alive and
        unchanged, use the output.
        """
        assert self._compute is not None
        try:
            for operand, version in zip(self._operands, self._versions, strict=True):
                check_version(operand, version)
            recomputed = self._compute(dtype, *self.forms())
        except ModifiedError as error:
            out = self.output()
            if out is None:
                raise ModifiedError(f"{error} {_NOT_HELD}") from None
            recomputed = out.to(dtype)
        return arranged(recomputed, self.layout)

    def output_held(self) -> Tensor | None:
        """Return the output itself while it is alive."""
        return self._out()

    def output(self) -> Tensor | None:
        """Return the output, detached, while it is alive and was not written to."""
        out = self._out()
        return out.detach() if out is not None and out._version == self.version else None

    def stored(self, out: Tensor, dtype: torch.dtype, stream: int, sharing: saved.Sharing) -> saved.FromRecipe:
        """Return the stored form of ``out`` in a dtype; consecutive savers of the same dtype share one."""
        stored = None if self._stored is None else self._stored()
        if stored is not None and stored.dtype is dtype and stored.stream == stream:
            stored.uses += 1
            return stored
        # Casts have version counters of their own; `Same` around the form checks them.
        own = out if dtype is self.dtype else None
        stored = saved.FromRecipe(self, self.forms(), self.layout, dtype, out.get_device(), stream, sharing, own)
        self._stored = ref(stored)
        return stored
