"""Optimizers by name: PyTorch's, and AdamW with its state in 8 bits, whose memory is arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..errors import PyactcompError

_BLOCK = 256  # elements that share a scale, as in bitsandbytes
_SMALLEST = 4096  # tensors below stay in float32 there

_NAMES = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "rmsprop": "RMSprop", "adagrad": "Adagrad"}
_NAMES |= {"nadam": "NAdam", "radam": "RAdam", "adamax": "Adamax", "adafactor": "Adafactor", "lion": ""}
del _NAMES["lion"]
FORMS = ("fused", "foreach")


class AdamW8bit(torch.optim.Optimizer):
    """The memory of an AdamW whose two moments take 8 bits and a scale for each 256 elements."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Create the state of parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or self.state[parameter]:
                    continue
                if parameter.numel() < _SMALLEST:
                    made = [torch.empty_like(parameter, dtype=torch.float32) for _ in range(2)]
                else:
                    made = [torch.empty_like(parameter, dtype=torch.uint8) for _ in range(2)]
                    scales = -(-parameter.numel() // _BLOCK)
                    made += [parameter.new_empty(scales, dtype=torch.float32) for _ in range(2)]
                self.state[parameter].update({str(index): each for index, each in enumerate(made)})


def maker(name: str) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """Return the function of parameters that makes an optimizer.

    Parameters
    ----------
    name : str
        ``adamw``, ``adam``, ``sgd`` (with momentum), ``rmsprop``, ... as in :mod:`torch.optim`; with ``:fused`` or
        ``:foreach`` in that form; ``adamw8bit``.

    Raises
    ------
    PyactcompError
        For another name.
    """
    base, _, form = name.lower().partition(":")
    if base == "adamw8bit" and not form:
        return AdamW8bit
    if base not in _NAMES or (form and form not in FORMS):
        raise PyactcompError(
            f"optimizer is one of adamw8bit, {', '.join(_NAMES)}, the latter also with :fused or :foreach; got {name!r}"
        )
    kind = getattr(torch.optim, _NAMES[base])
    options: dict[str, Any] = {
        "lr": 1e-3,
        **({"momentum": 0.9} if base == "sgd" else {}),
        **({form: True} if form else {}),
    }
    try:
        kind([nn.Parameter(torch.zeros(1, device="cpu"))], **options)
    except TypeError:
        raise PyactcompError(f"torch's {_NAMES[base]} has no form {form!r}") from None
    return lambda parameters: kind(parameters, **options)
