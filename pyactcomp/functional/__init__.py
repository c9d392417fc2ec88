"""Autograd functions that store what they need for backward in codes, by themselves.

They need no hooks: use them where a model is written, or in place of the functions of
:mod:`torch.nn.functional` that they are named for. Where Triton serves the device, they write the codes in the pass
that computes their output, and read them in the pass that computes the gradient. Under
:func:`pyactcomp.compress` the operator that saves such an output keeps no copy of it: it is computed again from the
codes, and a float that such a function saves stays as it is.

:class:`Codes` says how a function stores tensors: ``functional.gelu(x, codes=Codes(bits=4))``; ``Codes(bits=None)``
stores them as they are. A function is differentiable once unless it says otherwise: backward with
``create_graph=True`` raises PyactcompError. Arguments that are no floating-point tensors raise TypeError, and shapes
that do not match ValueError.
"""

from __future__ import annotations

from importlib.util import find_spec

from .activations.gelu import gelu
from .activations.new_gelu import new_gelu
from .activations.silu_mul import silu_mul
from .attention.rope import rope
from .attention.softmax import softmax
from .codes import INT8, Codes
from .head.linear_cross_entropy import linear_cross_entropy
from .linear import linear
from .masks.dropout import dropout
from .masks.relu import relu
from .norms.add_rms_norm import add_rms_norm
from .norms.layer_norm import add_layer_norm, layer_norm
from .norms.rms_norm import rms_norm

__all__ = [
    "INT8",
    "Codes",
    "add_layer_norm",
    "add_rms_norm",
    "dropout",
    "gelu",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "new_gelu",
    "relu",
    "rms_norm",
    "rope",
    "silu_mul",
    "softmax",
]


def _has(room: str) -> bool:
    """Return whether a folder is there, with more in it than what Python has cached."""
    spec = find_spec(f"{__name__}.{room}")
    return spec is not None and spec.origin is not None


# Each serves one family of models alone, and can be removed from the tree.
if _has("convolutional"):
    from .convolutional.batch_norm import batch_norm
    from .convolutional.max_pool import max_pool2d

    __all__ += ["batch_norm", "max_pool2d"]

if _has("windows"):
    from .windows.residual_add import residual_add
    from .windows.window_attention import window_attention

    __all__ += ["residual_add", "window_attention"]
