"""Autograd functions that store what they need for backward in codes, by themselves.

They need no hooks: use them where a model is written, or in place of the functions of
:mod:`torch.nn.functional` that they are named for. Where Triton serves the device, ``layer_norm`` and ``gelu``
write the codes in the pass that computes their output, and read them in the pass that computes the gradient.
"""

from __future__ import annotations

from ._gelu import gelu
from ._layer_norm import layer_norm
from ._linear import linear

__all__ = ["gelu", "layer_norm", "linear"]
