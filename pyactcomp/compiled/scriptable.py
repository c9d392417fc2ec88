"""TorchScript for compressed models: script an uncompressed twin, since TorchScript compiles no hooks."""

from __future__ import annotations

import warnings

from torch.nn import Module

from ..engine.classes import InFront, own_class
from ..engine.marks import FUSING


class Scriptable(InFront):
    """Base of the mixin that marks modules: torch.jit.script asks them for the module to compile."""

    def __prepare_scriptable__(self) -> Module:
        """Return a twin of the model with the same parameters, without the hooks and classes of this package."""
        warnings.warn(
            "torch.jit.script takes the model without pyactcomp: hooks cannot be scripted, and the scripted model "
            "stores what it would store without them.",
            stacklevel=2,
        )
        return _twin_of(self, {})


def _twin_of(module: Module, twins: dict[Module, Module]) -> Module:
    if module not in twins:
        cls = own_class(type(module))
        twin = twins[module] = cls.__new__(cls)
        twin.__dict__.update(module.__dict__)
        twin.__dict__.pop(FUSING.name, None)
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = getattr(module, name)
            twin.__dict__[name] = type(hooks)(
                (k, h) for k, h in hooks.items() if not type(h).__module__.startswith("pyactcomp.")
            )
        children = module._modules.items()
        twin._modules = {name: None if child is None else _twin_of(child, twins) for name, child in children}
    return twins[module]
