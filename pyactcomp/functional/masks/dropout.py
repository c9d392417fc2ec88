"""``dropout``: saves a boolean per element on the CPU too, where torch saves floats."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import dropout as dropout_of_torch

from ...engine.saved import PLAIN
from ...readers.observer import observer, transformed
from ..codes import one_option
from ..saving import check_float_tensor, recorded


def check_probability(p: float) -> None:
    """Raise ValueError unless ``p`` is a probability."""
    if not 0 <= p <= 1:
        raise ValueError(f"p must be from 0 to 1, got {p!r}")


@one_option
def dropout(x: Tensor, p: float = 0.5) -> Tensor:
    """Zero elements of ``x`` with probability ``p``, scale the others by 1 / (1 - p), and save a mask.

    The mask is a boolean for each element, one bit under :func:`pyactcomp.compress`. On a GPU this is torch's own
    function.

    Parameters
    ----------
    x : Tensor, any shape, floating point
    p : float
        Probability of zeroing an element, from 0 to 1.

    Returns
    -------
    Tensor, the shape and dtype of ``x``
        Equal to :func:`torch.nn.functional.dropout` in training to the bit, from the same state of torch's generator;
        so are the gradients. Differentiable any number of times.

    Raises
    ------
    ValueError
        If ``p`` is not from 0 to 1.

    Examples
    --------
    >>> import torch
    >>> from pyactcomp import functional
    >>> x = torch.ones(1000, requires_grad=True)
    >>> out = functional.dropout(x, 0.25)
    >>> out.sum().backward()
    >>> torch.equal(x.grad, out)
    True
    """
    check_float_tensor("x", x)
    check_probability(p)
    return dropout_unchecked(x, p)


def dropout_unchecked(x: Tensor, p: float) -> Tensor:
    """Return :func:`dropout` of arguments that are known to be right."""
    plain = x.is_cpu and type(x) in PLAIN and 0 < p < 1 and x.numel() > 0
    if plain and recorded(x) and not transformed():
        out = observer().dropout(x, p)
        # Where 1 / (1 - p) is no number of the dtype, a product with it would not drop.
        if out is not None:
            return out
    return dropout_of_torch(x, p)
