"""Autograd functions that store what they need for backward in codes, by themselves.

They need no hooks: use them where a model is written, or in place of the functions of
:mod:`torch.nn.functional` that they are named for. Where Triton serves the device, they write the codes in the pass
that computes their output, and read them in the pass that computes the gradient. Under
:func:`pyactcomp.compress` the operator that saves such an output keeps no copy of it: it is computed again from the
codes, and a float that such a function saves stays as it is.

:class:`Codes` says how a function stores tensors: ``functional.gelu(x, codes=Codes(bits=4))``; ``Codes(bits=None)``
stores them as they are. A function is differentiable once unless it says otherwise: backward with
``create_graph=True`` raises PyactcompError.
"""

from __future__ import annotations

from importlib.util import find_spec

from .activations import gelu, new_gelu, silu_mul
from .attention import rope, softmax
from .codes import INT8, Codes
from .head import linear_cross_entropy
from .linear import linear
from .masks import dropout, relu
from .norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm

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

# The rooms of one family of models each, which can be removed from the tree.
if find_spec(f"{__name__}.convolutional") is not None:
    from .convolutional import batch_norm, max_pool2d

    __all__ += ["batch_norm", "max_pool2d"]

if find_spec(f"{__name__}.windows") is not None:
    from .windows import residual_add, window_attention

    __all__ += ["residual_add", "window_attention"]
