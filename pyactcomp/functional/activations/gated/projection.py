"""A matrix product of ``gated_mlp``: what a caller gives, and its results and gradients, a tile of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ...saving import wide
from ...tiles import add_product


class Projection(NamedTuple):
    """A matrix product of :func:`gated_mlp`: ``x @ weight.T + bias + scale * (x @ a.T) @ b.T``.

    Parameters
    ----------
    weight : Tensor, [out, in]
    bias : Tensor, [out], optional
    a : Tensor, [rank, in], optional
        With ``b``, the factors of a low-rank addition to the weight, as in LoRA.
    b : Tensor, [out, rank], optional
    scale : float
        Factor of the low-rank addition.
    """

    weight: Tensor
    bias: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0


TENSORS = 4
"""The tensors of a projection."""
FACTORS = 2
"""The index of the first low-rank factor among them."""


class Product:
    """A projection in the dtype of the products: results, gradients and sums of gradients, a tile at a time."""

    def __init__(self, tensors: Sequence[Tensor | None], scale: float, dtype: torch.dtype) -> None:
        self._tensors = [None if t is None else t.detach().to(dtype) for t in tensors]
        self._scale = scale
        self._sums: list[Tensor | None] = [None] * TENSORS

    def of(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the result for rows of the input."""
        weight, bias, a, b = self._tensors
        assert weight is not None
        out = rows.new_empty((len(rows), len(weight))) if out is None else out
        if bias is None:
            torch.mm(rows, weight.t(), out=out)
        else:
            torch.addmm(bias, rows, weight.t(), out=out)
        return out if a is None or b is None else out.addmm_(rows @ a.t(), b.t(), alpha=self._scale)

    def begin_sums(self, needs: Sequence[bool]) -> None:
        """Begin with zeros for each gradient that is needed."""
        for index, (tensor, need) in enumerate(zip(self._tensors, needs, strict=True)):
            if tensor is not None and need:
                self._sums[index] = tensor.new_zeros(tensor.shape, dtype=wide(tensor.dtype))

    @property
    def sums(self) -> bool:
        """Whether a gradient is needed."""
        return any(total is not None for total in self._sums)

    def add(self, rows: Tensor | None, grad: Tensor) -> None:
        """Add a tile's part to the gradients; ``rows`` of the input are not read for a bias alone."""
        of_weight, of_bias, of_a, of_b = self._sums
        _, _, a, b = self._tensors
        if of_bias is not None:
            of_bias += grad.sum(0, dtype=of_bias.dtype)
        if of_weight is not None:
            add_product(of_weight, grad, cast(Tensor, rows))
        if of_a is not None and b is not None:
            add_product(of_a, grad @ b, cast(Tensor, rows))
        if of_b is not None and a is not None:
            add_product(of_b, grad, cast(Tensor, rows) @ a.t())

    def back(self, grad: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
        """Write the gradient of the rows to ``out``, or add it."""
        weight, _, a, b = self._tensors
        assert weight is not None
        if add:
            out.addmm_(grad, weight)
        else:
            torch.mm(grad, weight, out=out)
        return out if a is None or b is None else out.addmm_(grad @ b, a, alpha=self._scale)

    def gradients(self, dtypes: Sequence[torch.dtype | None]) -> Iterator[Tensor | None]:
        """Yield the sums in the dtypes of the parameters, each freed when the next one is asked for."""
        for index, dtype in enumerate(dtypes):
            total, self._sums[index] = self._sums[index], None
            if total is not None and index >= FACTORS:
                total *= self._scale
            yield None if total is None or dtype is None else total.to(dtype)
