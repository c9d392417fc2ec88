"""Recipes: how backward recomputes an output from what its operator keeps."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

import torch
from torch import Tensor

from ..codec.layouts import arranged, layout_of
from ..readers.forms import AS_CODES
from .saved import Kept, ModifiedError, Recent, Region, Shared, Versioned, check_reader, check_version

Compute = Callable[[torch.dtype], Tensor]

_NOT_HELD = (
    "An output of it was not kept but was to be computed again from it: write out of place, hold on to that output "
    "until backward, or name the module in skip."
)


class Recipe:
    """How to compute an output again.

    Parameters
    ----------
    out : Tensor
        The output. It must be dense and own its storage.
    compute : callable, optional
        From a dtype (that of ``out``, or one that autocast would cast it to) to a tensor with the values and shape of
        ``out``, in any layout. It must hold what the operator keeps for backward, never ``out`` or the graph. Without
        it the output is stored, but casts of it once.
    operands : tuple of Tensor
        Tensors that ``compute`` reads as they are, such as a weight: written to since, they raise autograd's error.
    depth : int
        Recipes that ``compute`` rests on, itself included.
    casts : bool
        Whether autocast's casts of the output are computed again too.
    exact : bool
        Whether ``compute`` gives the output bit by bit.
    """

    __slots__ = (
        "_compute",
        "_copies",
        "_operands",
        "_out",
        "_redone",
        "_versions",
        "casts",
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
        compute: Compute | None,
        operands: tuple[Tensor, ...] = (),
        depth: int = 1,
        casts: bool = True,
        exact: bool = False,
    ) -> None:
        self._compute = compute
        self._operands = operands
        self._out = ref(out)
        self._versions = tuple(operand._version for operand in operands)
        self._redone: ref[Redone] | None = None
        self._copies: dict[tuple[object, ...], ref[Kept | Region]] | None = None
        self.depth = depth
        self.casts = casts and self.computes
        self.exact = exact
        self.dtype = out.dtype
        self.layout = layout_of(out)
        self.storage = ref(out.untyped_storage())
        self.version = out._version

    @property
    def copies(self) -> dict[tuple[object, ...], ref[Kept | Region]]:
        """Stored casts of the output, or of parts of it, by dtype, offset and layout."""
        if self._copies is None:
            self._copies = {}
        return self._copies

    @property
    def computes(self) -> bool:
        """Whether the output can be computed again."""
        return self._compute is not None

    def serves(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` holds, provably, what is computed again: its storage was not written to since."""
        return self.storage() is tensor.untyped_storage() and tensor._version == self.version

    def compute(self, dtype: torch.dtype) -> Tensor:
        """Compute the output again, in its layout, or raise autograd's error if an operand was written to.

        Views of the output are taken by their strides, and operators behind it sum in the order of memory. Torch, which
        saved the output, does not read the operands: while it is alive and unchanged, it is taken after such an error.
        """
        assert self._compute is not None
        try:
            for operand, version in zip(self._operands, self._versions, strict=True):
                check_version(operand, version)
            again = self._compute(dtype)
        except ModifiedError as error:
            out = self._out()
            if out is None or out._version != self.version:
                raise ModifiedError(f"{error} {_NOT_HELD}") from None
            again = out.detach().to(dtype)
        return arranged(again, self.layout)

    def redone(self, out: Tensor, dtype: torch.dtype, stream: int, recent: Recent) -> Redone:
        """Return the stored form of ``out`` in a dtype, the same one for operators in a row that save it in that."""
        redone = None if self._redone is None else self._redone()
        if redone is not None and redone.dtype is dtype and redone.stream == stream:
            redone.uses += 1
            return redone
        redone = Redone(self, out, dtype, stream, recent)
        self._redone = ref(redone)
        return redone


class Redone(Shared):
    """A saved tensor that is computed again from a recipe: its output, or in another dtype what casts make of that."""

    __slots__ = ("_saved", "dtype", "recipe")

    def __init__(self, recipe: Recipe, out: Tensor, dtype: torch.dtype, stream: int, recent: Recent) -> None:
        super().__init__(recipe.layout, out.get_device(), stream, recent)
        self.recipe = recipe
        self.dtype = dtype
        # Each cast has a version of its own, and none is the output's.
        self._saved = Versioned(out) if dtype is recipe.dtype else None

    def restore(self) -> Tensor:
        """Return the output, unless it was written to."""
        if self._saved is not None:
            self._saved.check(self.layout.shape)
        if not self.recipe.exact:
            check_reader(AS_CODES, self.layout.shape)
        return super().restore()

    def _make(self) -> Tensor:
        return self.recipe.compute(self.dtype)
