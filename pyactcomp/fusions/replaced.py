"""Detect functions that a program replaced: a module's own forward runs them, a fused one does not."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch.nn import Module
from torch.nn import functional as F

from ..engine.marks import FORM
from ..engine.saved import NAMES, for_library
from ..torch_private import function_mode_active, function_modes

_NAMES = (
    "batch_norm",
    "cross_entropy",
    "dropout",
    "gelu",
    "layer_norm",
    "linear",
    "max_pool2d",
    "relu",
    "rms_norm",
    "scaled_dot_product_attention",
    "silu",
    "softmax",
)
"""The functions that fused modules stand for."""

# One call in C reads them all, in less time than a look-up by module.
_functions = attrgetter(*_NAMES)
_OF_IMPORT = _functions(F)


def calls_are_replaced(module: Module) -> bool:
    """Return whether a torch function mode is active, or a function that the module's forward may call was replaced.

    That is one of :mod:`torch.nn.functional`, or the forward of the module's own class. A parametrization counts too:
    it computes a parameter at each read, and a fused forward may read it more often than the module's own.

    A mode may replace any function: to simulate quantisation, or to count. A fused class says in ``stands_for`` which
    functions of :mod:`torch.nn.functional` it stands for; DeepSpeed's ZeRO-3 replaces ``linear``, which no norm calls.
    """
    own = getattr(type(module), FORM.name, None)
    return (
        bool(function_modes() and function_mode_active())
        or _function_is_replaced(module)
        or (own is not None and (own[0].forward is not own[1] or "parametrizations" in module._modules))
    )


def _function_is_replaced(module: Module) -> bool:
    now = _functions(F)
    if now == _OF_IMPORT:
        return False
    return any(
        of_import is not other
        for name, of_import, other in zip(_NAMES, _OF_IMPORT, now, strict=True)
        if name in _named_by(type(module))
    )


def _named_by(cls: type) -> tuple[str, ...]:
    return getattr(cls, "stands_for", None) or _NAMES


@for_library
def stood_for(cls: type) -> tuple[dict[str, Any], type, Any]:
    """Return what a fused class stands for: functions by name, and the module's own class with its forward."""
    named, (own, forward) = _named_by(cls), getattr(cls, FORM.name)
    return {name: each for name, each in zip(_NAMES, _OF_IMPORT, strict=True) if name in named}, own, forward


NAMES["FUNCTIONAL"] = vars(F)
