"""Layer norm and the root mean square norm, also of a sum with a residual."""

from __future__ import annotations

from .add_rms_norm import add_rms_norm
from .layer_norm import add_layer_norm, layer_norm
from .rms_norm import rms_norm

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"]
