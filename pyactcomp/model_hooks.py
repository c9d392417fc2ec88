"""The hooks of a compressed model: on its root, on skipped and offloaded modules, and on norms."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import LayerNorm, Module, RMSNorm
from torch.utils.hooks import RemovableHandle

from .compiled import marks
from .engine.frame import Frame
from .engine.recompute import offer_exact_layer_norm, offer_norm
from .engine.session import Session
from .errors import PyactcompError
from .fusions.fusion import is_fused_class
from .fusions.replaced import calls_are_replaced
from .fusions.tampering import tampering_reason


class _Hook:
    """Base of the hooks below: each acts on a session."""

    def __init__(self, session: Session) -> None:
        self.session = session


class _OpenHooks(_Hook):
    """Forward pre-hook of the root."""

    def __call__(self, module: Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if torch.is_grad_enabled():
            self.session.stop_watching()
        if self._will_close(module):
            if "torch._dynamo" in sys.modules and module.training and not self.session.paused:
                marks.mark_compiled(module)
            self.session.open(module, active=module.training, caller=sys._getframe(1))

    @staticmethod
    def _will_close(module: Module) -> bool:
        """Return whether the hook that closes is still there: tools clear a module's forward hooks alone."""
        for hook in module._forward_hooks.values():
            if type(hook) is _CloseHooks:
                return True
        warnings.warn(
            f"nothing of this {type(module).__name__} is compressed any more: its forward hooks were cleared. Call "
            "pyactcomp.decompress and pyactcomp.compress on it",
            stacklevel=3,
        )
        return False


class _CloseHooks(_Hook):
    """Forward hook of the root; also runs if the forward raised."""

    def __call__(self, module: Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            failed = output is None and sys.exc_info()[0] is not None
            self.session.close(completed=not failed)


class _OnFrame(_Hook):
    """Hook before or after a skipped or offloaded module: calls a method of the open frame."""

    def __init__(self, session: Session, method: Callable[[Frame], None]) -> None:
        super().__init__(session)
        self.method = method

    def __call__(self, module: Module, args: Any, output: Any = None) -> None:
        frame = None if torch.compiler.is_compiling() else self.session.frame()
        if frame is not None:
            self.method(frame)


class _OfferNorm(_Hook):
    """Forward hook of a norm: offers a recipe for the output."""

    def __call__(self, module: Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self.session.frame() is None or type(output) is not torch.Tensor:
            return
        if not self.session.lossless:
            offer_norm(output)
        # A replaced function may have normalised by another weight or eps.
        elif type(module) is LayerNorm and tampering_reason(module) is None and not calls_are_replaced(module):
            offer_exact_layer_norm(output, module)


def sessions(model: Module) -> Iterator[tuple[Module, Session]]:
    """Yield each module of a model that was compressed, and its session."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, _OpenHooks):
                yield module, hook.session


def session_of(model: Module) -> Session:
    """Return the session of a compressed model, or raise PyactcompError if the model is not compressed."""
    if not isinstance(model, Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    for module, session in sessions(model):
        if module is model:
            return session
    raise PyactcompError(f"this {type(model).__name__} is not compressed; call pyactcomp.compress on it first")


def add_hooks(model: Module, session: Session) -> None:
    """Register the hooks of the root, first in and last out, so that the module's other hooks run inside."""
    model.register_forward_pre_hook(_OpenHooks(session), prepend=True)
    model.register_forward_hook(_CloseHooks(session), always_call=True)


def _applies_gains(module: Module) -> bool:
    """Return whether a module is a norm of rows, or may be one that a program wrote: it owns vectors alone."""
    if type(module).__module__.startswith("torch.nn."):
        return isinstance(module, (LayerNorm, RMSNorm))
    if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
        return False
    own = [each for each in module._parameters.values() if each is not None]
    return bool(own) and not module._modules and all(each.dim() == 1 for each in own)


def offer_norms(session: Session, model: Module) -> list[RemovableHandle]:
    """Register the hooks on the modules that end in a gain and are not fused."""
    norms = (m for m in model.modules() if _applies_gains(m) and not is_fused_class(type(m)))
    return [module.register_forward_hook(_OfferNorm(session)) for module in norms]


def keep_exact(session: Session, modules: list[Module]) -> list[RemovableHandle]:
    """Register the hooks on skipped modules."""
    return _around(session, modules, Frame.enter_exact, Frame.leave_exact)


def offload_alone(session: Session, modules: list[Module]) -> list[RemovableHandle]:
    """Register the hooks on the modules whose stored bytes leave the device, where those of others stay."""
    return _around(session, modules, Frame.enter_offloaded, Frame.leave_offloaded)


def _around(
    session: Session, modules: list[Module], enter: Callable[[Frame], None], leave: Callable[[Frame], None]
) -> list[RemovableHandle]:
    before, after = _OnFrame(session, enter), _OnFrame(session, leave)
    handles: list[RemovableHandle] = []
    for module in modules:
        handles.append(module.register_forward_pre_hook(before, prepend=True))
        handles.append(_with_common_key(module, module.register_forward_hook(after, always_call=True)))
    return handles


def _with_common_key(module: Module, last: RemovableHandle) -> RemovableHandle:
    """Give the last forward hook a key that other modules have too: Dynamo guards keys, and equal blocks share a graph.

    Torch's own keys are positive, and no two modules have one in common.
    """
    hooks, always = module._forward_hooks, module._forward_hooks_always_called
    key = min(0, *hooks) - 1
    hooks[key], always[key] = hooks.pop(last.id), always.pop(last.id)
    last.id = key
    return last


def remove_hooks(model: Module) -> None:
    """Remove the hooks of a model and of all its modules."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, _Hook)]:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)
