"""Public names that moved, found at the old place for one release with a warning, and those that were removed."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

# Old place -> module of today -> names.
_MOVED: dict[str, dict[str, tuple[str, ...]]] = {
    "pyactcomp": {
        "climb": ("BatchSize",),
        "codec": ("Packed", "dequantize", "ops", "quantize"),
        "config": ("Config",),
        "errors": ("ImplementationUnavailableError",),
        "estimate": ("Estimate",),
        "live": ("Memory", "Watch"),
        "report": ("Report",),
        "verify": ("Verification",),
    },
    "pyactcomp.allocator": {
        "allocator.observe": ("PressureHandle", "Scope"),
        "allocator.pausing": ("Paused", "Resumed"),
        "snapshots": ("explain", "read_snapshot", "replay", "tune"),
    },
    "pyactcomp.functional": {
        "functional.activations.gelu.new_gelu": ("new_gelu",),
        "functional.codes": ("INT8",),
        "functional.convolutional.batch_norm": ("batch_norm",),
        "functional.convolutional.max_pool": ("max_pool2d",),
        "functional.norms.add_rms_norm": ("add_rms_norm",),
        "functional.norms.layer_norm": ("add_layer_norm",),
        "functional.windows.residual_add": ("residual_add",),
        "functional.windows.window_attention": ("window_attention",),
    },
}

# Functions as slow as torch's own under compress, by package.
_REMOVED = {"pyactcomp.functional": ("linear", "relu", "softmax")}


def moved(package: str, name: str) -> Any:
    """Return what ``package.name`` was, with a DeprecationWarning; the ``__getattr__`` of a package calls this.

    Raises
    ------
    AttributeError
        If the package never had the name, or has it no more: then the error says what to write.
    """
    for module, names in _MOVED.get(package, {}).items():
        if name in names:
            warnings.warn(
                f"{package}.{name} moved, and the next release has it no more at the old place: write "
                f"`from pyactcomp.{module} import {name}`",
                DeprecationWarning,
                stacklevel=3,
            )
            return getattr(importlib.import_module(f"pyactcomp.{module}"), name)
    if name in _REMOVED.get(package, ()):
        instead = f"write torch.nn.functional.{name}, and pyactcomp.compress packs what it saves"
        raise AttributeError(f"{package}.{name} was removed: {instead}")
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
