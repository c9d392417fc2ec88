"""Attention of Hugging Face transformers: cast the input once, fuse the rotary embedding."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ....functional import Codes, rope
from ...formulas import definition, formula
from ...fusion import Fused
from ...products import cast_once
from ...state import active_codes

_ROTATE = "apply_rotary_pos_emb"
_ROTARY = (
    "(q * cos.unsqueeze(unsqueeze_dim) + rotate_half(q) * sin.unsqueeze(unsqueeze_dim), "
    "k * cos.unsqueeze(unsqueeze_dim) + rotate_half(k) * sin.unsqueeze(unsqueeze_dim))"
)
_ROTATE_HALF = "torch.cat((-x[..., x.shape[-1] // 2:], x[..., :x.shape[-1] // 2]), dim=-1)"


class Projections(Fused):
    """A module with several Linears on one input, such as attention; may apply rotary embeddings.

    Under autocast each Linear would cast the input separately, and the gradients would be added in float32. One cast
    moves fewer bytes, but the result is not the same to the bit.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward on the cast input, with the fused rotary embedding."""
        codes = active_codes(self)
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
    """Return whether a function calls a rotary embedding with Llama's formula."""
    if not isinstance(forward, types.FunctionType) or _ROTATE not in forward.__code__.co_names:
        return False
    rotate: Any = forward.__globals__.get(_ROTATE)
    return (
        isinstance(rotate, types.FunctionType)
        and formula(definition(rotate)) == _ROTARY
        and formula(definition(rotate.__globals__["rotate_half"])) == _ROTATE_HALF
    )


class _Globals(dict[str, Any]):
    """The live globals of a function with one name replaced."""

    def __init__(self, of: dict[str, Any], **changed: Any) -> None:
        super().__init__(changed)
        self._of = of

    def __missing__(self, name: str) -> Any:
        return self._of[name]


def _with_rope(forward: types.FunctionType, codes: Codes) -> types.FunctionType:
    """Return a copy of a forward that calls the fused rotary embedding."""
    rotate = functools.partial(_rotated, forward.__globals__[_ROTATE], codes)
    scope = _Globals(forward.__globals__, **{_ROTATE: rotate})
    copy = types.FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _rotated(
    original: Callable[..., Any], codes: Codes, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> Any:
    """Rotate queries and keys, in the dtype of the module's own: an attention function of the user's may read them."""
    fits = unsqueeze_dim in (1, 2) and cos.shape == sin.shape
    for x in (q, k):
        fits = fits and type(x) is type(cos) is type(sin) is Tensor and x.dim() == 4 and cos.dim() == 3
        fits = fits and x.shape[3] % 2 == 0 and x.shape[3] == cos.shape[2] and cos.shape[0] in (1, x.shape[0])
        fits = fits and x.shape[3 - unsqueeze_dim] == cos.shape[1]
    if not fits:
        return original(q, k, cos, sin, unsqueeze_dim)
    return rope(q, k, cos, sin, unsqueeze_dim, contiguous_grad=codes.bits is None, impl=codes.impl)
