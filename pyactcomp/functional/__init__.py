"""Autograd functions that save packed tensors: 8-bit codes of their inputs, or one bit or byte per element.

Call them in a model's code in place of the :mod:`torch.nn.functional` functions of the same names. No hooks are
needed. On devices where Triton runs, one kernel computes the output and writes the codes, and one kernel reads the
codes and computes the gradient. Under :func:`pyactcomp.compress`, an operator saving the output of such a function
stores no second copy: backward recomputes the output from the codes. Floating-point tensors saved by these functions
are not packed again.

:class:`Codes` sets the storage: ``functional.gelu(x, codes=Codes(bits=4))``; ``Codes(bits=None)`` keeps tensors
unpacked. Unless a function's page says otherwise, the function is differentiable once (backward with
``create_graph=True`` raises PyactcompError), raises TypeError for arguments other than floating-point tensors and
ValueError for shapes without a match.
"""

from __future__ import annotations

from typing import Any

from ..moved import moved
from .activations.gated.gated_mlp import gated_mlp
from .activations.gated.projection import Projection
from .activations.gated.silu_mul import silu_mul
from .activations.gelu.gelu import gelu
from .attention.rope import rope
from .codes import Codes
from .head.linear_cross_entropy import linear_cross_entropy
from .masks.dropout import dropout
from .norms.layer_norm import layer_norm
from .norms.rms_norm import rms_norm

__all__ = [
    "Codes",
    "Projection",
    "dropout",
    "gated_mlp",
    "gelu",
    "layer_norm",
    "linear_cross_entropy",
    "rms_norm",
    "rope",
    "silu_mul",
]


def __getattr__(name: str) -> Any:
    return moved(__name__, name)
