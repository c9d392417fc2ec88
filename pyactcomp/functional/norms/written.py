"""``norm_by``: the norm of a module that writes it out."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from ..codes import Codes
from ..masks.noise import QUIET
from ..saving import saving
from .layer_norm import _LayerNorm
from .own import Own
from .rms_norm import _RmsNorm


def norm_by(
    own: Own, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, centred: bool, codes: Codes
) -> Tensor:
    """Normalise rows as a program's own code does, and save ``x`` for backward in codes.

    Gradients are those of :func:`.layer_norm` if ``centred``, and of :func:`.rms_norm` otherwise, without a bias. What
    is written to ``x`` later does not matter: the program's own operators may not have saved it.

    Parameters
    ----------
    own : Own
    x : Tensor, [..., features], floating point
    weight, bias : Tensor, [features], or None
    eps : float
    centred : bool
    codes : Codes

    Returns
    -------
    Tensor, the shape of ``x``
    """
    how, shape = saving(codes), tuple(x.shape[-1:])
    out = (
        _LayerNorm.apply(x, None, weight, bias, None, shape, eps, x.dtype, how, QUIET, own)  # type: ignore[no-untyped-call]
        if centred
        else _RmsNorm.apply(x, weight, eps, None, False, how, own)  # type: ignore[no-untyped-call]
    )
    return cast(Tensor, out)
