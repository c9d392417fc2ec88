"""Attention of Hugging Face transformers: its input cast once, its rotary embedding fused."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ....functional import Codes, rope
from ...base import fusing
from ...formulas import definition, formula
from ...fusion import Fused, autocast_dtype
from ...products import cast_once

_ROTATE = "apply_rotary_pos_emb"
_ROTARY = (
    "(q * cos.unsqueeze(unsqueeze_dim) + rotate_half(q) * sin.unsqueeze(unsqueeze_dim), "
    "k * cos.unsqueeze(unsqueeze_dim) + rotate_half(k) * sin.unsqueeze(unsqueeze_dim))"
)
_ROTATE_HALF = "torch.cat((-x[..., x.shape[-1] // 2:], x[..., :x.shape[-1] // 2]), dim=-1)"


class Projections(Fused):
    """A module whose input goes to several Linears, such as attention, and which may apply rotary embeddings.

    Under autocast each Linear would cast the input for itself, and their gradients would be added in float32: it is
    cast once, which moves less but is not the same to the bit.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward on the cast input, with the fused rotary embedding."""
        codes = fusing(self)
        if codes is None:
            return super().forward(*args, **kwargs)
        own: Any = super().forward
        function = own.__func__
        if codes.bits is not None:
            name = function.__code__.co_varnames[1]
            if args:
                args = cast_once(self, args[0]), *args[1:]
            elif name in kwargs:
                kwargs[name] = cast_once(self, kwargs[name])
        return (_with_rope(function, codes) if rotates(function) else function)(self, *args, **kwargs)


def rotates(forward: Callable[..., Any]) -> bool:
    """Return whether a function calls the rotary embedding as Llama computes it."""
    if not isinstance(forward, types.FunctionType) or _ROTATE not in forward.__code__.co_names:
        return False
    rotate: Any = forward.__globals__.get(_ROTATE)
    return (
        isinstance(rotate, types.FunctionType)
        and formula(definition(rotate)) == _ROTARY
        and formula(definition(rotate.__globals__["rotate_half"])) == _ROTATE_HALF
    )


class _Globals(dict[str, Any]):
    """The globals of a function as they are at each call, but for one name."""

    def __init__(self, of: dict[str, Any], **changed: Any) -> None:
        super().__init__(changed)
        self._of = of

    def __missing__(self, name: str) -> Any:
        return self._of[name]


def _with_rope(forward: types.FunctionType, codes: Codes) -> types.FunctionType:
    """Return the same function, with the fused rotary embedding for its module's where that serves."""
    rotate = functools.partial(_rotated, forward.__globals__[_ROTATE], codes)
    scope = _Globals(forward.__globals__, **{_ROTATE: rotate})
    copy = types.FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _rotated(
    original: Callable[..., Any], codes: Codes, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> Any:
    """Rotate queries and keys, in the dtype that autocast casts them to before attention unless all is to be exact."""
    fits = unsqueeze_dim in (1, 2) and cos.shape == sin.shape
    for x in (q, k):
        fits = fits and type(x) is type(cos) is type(sin) is Tensor and x.dim() == 4 and cos.dim() == 3
        fits = fits and x.shape[3] % 2 == 0 and x.shape[3] == cos.shape[2] and cos.shape[0] in (1, x.shape[0])
        fits = fits and x.shape[3 - unsqueeze_dim] == cos.shape[1]
    if not fits:
        return original(q, k, cos, sin, unsqueeze_dim)
    dtype = autocast_dtype(cos) if codes.bits is not None else None
    return rope(q, k, cos, sin, unsqueeze_dim, dtype=dtype, contiguous_grad=codes.bits is None, impl=codes.impl)
