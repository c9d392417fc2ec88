"""``norm_by``: the norm of a module that writes it out."""

from __future__ import annotations

from torch import Tensor

from ..codes import Codes
from ..saving import saving
from .layer_norm import layer_norm_unchecked
from .own_forward import OwnForward
from .rms_norm import rms_norm_unchecked


def norm_by(
    own: OwnForward, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, centred: bool, codes: Codes
) -> Tensor:
    """Normalise rows as a program's own code does, and save ``x`` for backward in codes.

    Gradients are those of :func:`.layer_norm` if ``centred``, and of :func:`.rms_norm` otherwise, without a bias. What
    is written to ``x`` later does not matter: the program's own operators may not have saved it.

    Parameters
    ----------
    own : OwnForward
    x : Tensor, [..., features], floating point
    weight, bias : Tensor, [features], or None
    eps : float
    centred : bool
    codes : Codes

    Returns
    -------
    Tensor, the shape of ``x``
    """
    how = saving(codes)
    if centred:
        return layer_norm_unchecked(x, None, weight, bias, None, x.shape[-1:], eps, x.dtype, how, own=own)
    return rms_norm_unchecked(x, weight, eps, None, False, how, own)
