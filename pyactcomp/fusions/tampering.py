"""Detect hooks and replaced forwards, to decide whether a fused forward may bypass a module."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn import Module

from ..engine.marks import COMPILED
from ..engine.reruns import as_in_first_run
from ..torch_private import module_hooks_are_global
from .formulas import forward_of
from .fusion import Fused, is_fused_class, original_of

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OURS = __name__.split(".")[0]


def tampering_reason(module: Module) -> str | None:
    """Return why a module may not be bypassed, or may not return another result than its own; None if it may.

    A bypassed module runs no hooks, and hooks see the other result; this package's own do not count.
    """
    return replaced_reason(module) or _reason_of_hooks(module, _HOOKS)


def replaced_reason(module: Module) -> str | None:
    """Return why nothing may run in place of the module's ``forward``, or None if a forward with the same result may.

    Hooks run before and after whatever the forward is. But a backward hook of the old kind (not a full one) gets the
    gradients that the last autograd node computes, of its weights too.
    """
    if "forward" in module.__dict__ or _is_in_front(type(module)):
        return "its forward was replaced"
    if "parametrizations" in module._modules:
        return "it is parametrized"
    if module._compiled_call_impl is not None:
        return "it is compiled"
    cls: Any = original_of(type(module))
    if not _is_own(cls, cls.forward):
        return f"the forward of {cls.__name__} was replaced"
    return _reason_of_hooks(module, ("_backward_hooks",)) if module._is_full_backward_hook is False else None


def _reason_of_hooks(module: Module, kinds: tuple[str, ...]) -> str | None:
    hooks = (hook for kind in kinds for hook in getattr(module, kind).values() if _package(hook) != _OURS)
    hook = next(hooks, None)
    return None if hook is None else f"it has a hook: {getattr(hook, '__qualname__', type(hook).__qualname__)}"


def _is_in_front(cls: type[Module]) -> bool:
    """Return whether a class derived from a fused one, given to a module later, has a forward of its own."""
    for base in cls.__mro__ if issubclass(cls, Fused) else ():
        if is_fused_class(base) or COMPILED.get(base) is not None:
            return False
        if "forward" in vars(base):
            return True
    return False


def bypassable_as(module: object, *classes: type[Module]) -> bool:
    """Return whether a child is of one of ``classes``, fused or not, and may be bypassed (:func:`bypassable`)."""
    return isinstance(module, Module) and original_of(type(module)) in classes and bypassable(module)


def bypassable(module: Module) -> bool:
    """Return whether a module has no :func:`tampering_reason` and torch has no hooks for all modules.

    The rerun of a checkpointed function gets the answers of its first run: hooks may have been added or removed in
    between. False while torch.compile traces: fused forwards step aside there, and the test would break the graph.
    """
    return not torch.compiler.is_compiling() and as_in_first_run(_bypassable_now, module)


def _bypassable_now(module: Module) -> bool:
    return tampering_reason(module) is None and not module_hooks_are_global()


# Answers of `_is_own`, without holding classes that a function defines.
_own: WeakKeyDictionary[type, WeakKeyDictionary[Callable[..., Any], bool]] = WeakKeyDictionary()


def _is_own(cls: type, forward: Callable[..., Any]) -> bool:
    """Return whether ``forward`` is the function in the source of the class or of a base."""
    answers = _own.get(cls)
    if answers is None:
        answers = _own[cls] = WeakKeyDictionary()
    answer = answers.get(forward)
    if answer is None:
        answer = answers[forward] = _is_own_now(cls, forward)
    return answer


def _is_own_now(cls: type, forward: Callable[..., Any]) -> bool:
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    # A wrapper that a base class puts around the methods of subclasses belongs to the class.
    bases = {_file(base) for base in owner.__mro__[1:]} - {None}
    while _code_file(forward) in bases and hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    defined = forward_of(cls) if hasattr(forward, "__wrapped__") else None
    for _ in defined.decorator_list if defined is not None else ():
        # Not every decorator wraps, so counting cannot expose a wrapper added later: the package does.
        if hasattr(forward, "__wrapped__") and _package(forward) == _package(owner):
            forward = forward.__wrapped__
    return (
        forward.__module__ == owner.__module__
        and forward.__qualname__ == f"{owner.__qualname__}.forward"
        and _code_file(forward) == _file(owner)
    )


def _file(cls: type) -> str | None:
    return getattr(sys.modules.get(cls.__module__), "__file__", None)


def _code_file(function: Callable[..., Any]) -> str | None:
    code = getattr(function, "__code__", None)
    return code.co_filename if code is not None else None


def _package(thing: Any) -> str:
    """Return the top-level package of a class, a function, a bound method or an instance."""
    scope = getattr(thing, "__globals__", None)
    return str(thing.__module__ if scope is None else scope["__name__"]).split(".")[0]
