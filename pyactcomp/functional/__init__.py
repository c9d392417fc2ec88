"""Autograd functions that store what they need for backward in codes, by themselves.

They need no hooks: use them where a model is written, or in place of the functions of
:mod:`torch.nn.functional` that they are named for. Where Triton serves the device, they write the codes in the pass
that computes their output, and read them in the pass that computes the gradient. Under
:func:`pyactcomp.compress` the operator that saves such an output keeps no copy of it: it is computed again from the
codes, and a float that such a function saves stays as it is. ``bits=None`` keeps exact tensors everywhere.
"""

from __future__ import annotations

from ._add_rms_norm import add_rms_norm
from ._batch_norm import batch_norm
from ._dropout import dropout
from ._gelu import gelu
from ._layer_norm import add_layer_norm, layer_norm
from ._linear import linear
from ._linear_cross_entropy import linear_cross_entropy
from ._max_pool import max_pool2d
from ._new_gelu import new_gelu
from ._relu import relu
from ._residual_add import residual_add
from ._rms_norm import rms_norm
from ._rope import rope
from ._silu_mul import silu_mul
from ._softmax import softmax
from ._window_attention import window_attention

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "batch_norm",
    "dropout",
    "gelu",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "max_pool2d",
    "new_gelu",
    "relu",
    "residual_add",
    "rms_norm",
    "rope",
    "silu_mul",
    "softmax",
    "window_attention",
]
