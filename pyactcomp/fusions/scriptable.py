"""TorchScript for compressed models: script an uncompressed twin, since TorchScript compiles no hooks."""

from __future__ import annotations

import warnings
from typing import Any
from weakref import ref

from torch.nn import Module

from ..engine.marks import FUSING, unmarked
from ..errors import PyactcompError
from .fusion import is_fused_class, original_of


class Scriptable:
    """The method of the root module called by torch.jit.script to get the module to compile."""

    NAME = "__prepare_scriptable__"

    def __init__(self, model: Module) -> None:
        # A weak reference, to avoid a cycle with the model.
        self._model = ref(model)

    def __reduce__(self) -> tuple[Any, ...]:
        return Scriptable, (self._model(),)

    def __call__(self) -> Module:
        """Return a twin of the model with the same parameters, without the hooks and classes of this package."""
        model = self._model()
        if model is None:
            raise PyactcompError("the model that this is a shallow copy of is gone; script a deep copy")
        warnings.warn(
            "torch.jit.script takes the model without pyactcomp: hooks cannot be scripted, and the scripted model "
            "stores what it would store without them.",
            stacklevel=2,
        )
        return self._twin_of(model, {})

    def _twin_of(self, module: Module, twins: dict[Module, Module]) -> Module:
        if module not in twins:
            cls = unmarked(type(module))
            cls = original_of(cls) if is_fused_class(cls) else cls
            twin = twins[module] = cls.__new__(cls)
            twin.__dict__.update(module.__dict__)
            for name in (FUSING.name, self.NAME):
                twin.__dict__.pop(name, None)
            for name in ("_forward_pre_hooks", "_forward_hooks"):
                hooks = getattr(module, name)
                twin.__dict__[name] = type(hooks)(
                    (k, h) for k, h in hooks.items() if not type(h).__module__.startswith("pyactcomp.")
                )
            children = module._modules.items()
            twin._modules = {name: None if child is None else self._twin_of(child, twins) for name, child in children}
        return twins[module]
