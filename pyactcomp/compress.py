"""The calls that switch compression on and off."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch
from torch.nn import Module

from . import codec
from .config import Config
from .engine import Session
from .errors import PyactcompError
from .torch_private import constant_in_graphs

# Compressed roots of this process, to notice a submodule that is compressed already through its root.
_roots: WeakSet[Module] = WeakSet()


@constant_in_graphs
def _warn_of_traced_root() -> None:
    """Warn while torch.compile traces a compressed model: the graph decides itself what to save."""
    warnings.warn(
        "torch.compile traces a model that pyactcomp compresses, hooks included, so nothing in it is compressed. "
        "Leave the modules that hold most activations eager, or let torch.compile decide what to save.",
        stacklevel=2,
    )


class _OpenHooks:
    """Forward pre-hook of the root."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def __call__(self, module: Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self.session.open(module, active=module.training, caller=sys._getframe(1))
        elif module.training and torch.is_grad_enabled():
            _warn_of_traced_root()


class _CloseHooks:
    """Forward hook of the root; runs also where the forward raised."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def __call__(self, module: Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.session.close()


class _EnterSkipped:
    """Forward pre-hook of a skipped module."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def __call__(self, module: Module, args: Any) -> None:
        self.session.skip(1)


class _LeaveSkipped:
    """Forward hook of a skipped module."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def __call__(self, module: Module, args: Any, output: Any) -> None:
        self.session.skip(-1)


_HOOKS = (_OpenHooks, _CloseHooks, _EnterSkipped, _LeaveSkipped)


def _sessions(model: Module) -> Iterator[tuple[Module, Session]]:
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, _OpenHooks):
                yield module, hook.session


def session_of(model: Module) -> Session:
    """Return the session of a compressed model, or raise PyactcompError if it is not compressed."""
    if not isinstance(model, Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    for module, session in _sessions(model):
        if module is model:
            return session
    raise PyactcompError(f"this {type(model).__name__} is not compressed; call pyactcomp.compress on it first")


@contextlib.contextmanager
def paused(model: Module) -> Iterator[None]:
    """Switch the compression of a model, and of what is in it, off for a while."""
    sessions = [session for _, session in _sessions(model)]
    before = [session.paused for session in sessions]
    for session in sessions:
        session.paused = True
    try:
        yield
    finally:
        for session, value in zip(sessions, before, strict=True):
            session.paused = value


def _skipped_modules(model: Module, config: Config) -> list[Module]:
    named = dict(model.named_modules())
    skipped: list[Module] = []
    for item in config.skip:
        if isinstance(item, str):
            if item not in named:
                raise ValueError(f"skip names no module of this model: {item!r}; see model.named_modules()")
            skipped.append(named[item])
        else:
            found = [module for module in named.values() if isinstance(module, item)]
            if not found:
                raise ValueError(f"skip names a type of which the model has no module: {item.__name__}")
            skipped.extend(found)
    return list(dict.fromkeys(skipped))


def _check_implementation(model: Module, config: Config) -> None:
    """Raise now, rather than in the first forward, if a named implementation cannot work at all."""
    if config.impl != "auto":
        device = next((parameter.device for parameter in model.parameters()), None)
        if device is not None and device.type != "meta":
            codec.resolve(config.impl, device)


def compress(model: Module, **options: Any) -> Module:
    """Store what autograd saves in the forward of ``model`` in 8 bits.

    Parameters
    ----------
    model : Module
        Changed in place, by hooks on itself only. Use the outermost module that you call: whatever runs in its
        forward in training mode is covered, a loss computed outside is not (see :class:`compressed`).
    **options
        The fields of :class:`Config`: ``mode``, ``group_size``, ``rounding``, ``seed``, ``min_bytes``, ``skip``,
        ``impl``, ``keep_weight_copies``, ``on_conflict``.

    Returns
    -------
    Module
        ``model``.

    Raises
    ------
    TypeError, ValueError
        If the model is no Module or an option is unknown or has no such value. Nothing is changed then.
    PyactcompError
        If the model, a module in it or a model around it is compressed already, or ``impl`` cannot work.

    Notes
    -----
    Parameters, buffers, autocast's copies of parameters, integers and tensors smaller than ``min_bytes`` are
    never compressed; :func:`report` gives the reason for each tensor. In evaluation mode nothing is done.
    ``PYACTCOMP_DISABLE=1`` in the environment switches everything off.

    Examples
    --------
    >>> import torch, pyactcomp
    >>> model = pyactcomp.compress(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU()))
    >>> model(torch.randn(256, 512)).sum().backward()
    """
    if not isinstance(model, Module):
        raise TypeError(f"compress expects a torch.nn.Module, got {type(model).__name__}")
    config = Config(**options)
    if any(_sessions(model)):
        raise PyactcompError("this model, or a module in it, is compressed already; call pyactcomp.decompress first")
    for root in _roots:
        if any(module is model for module in root.modules()):
            raise PyactcompError("this module is part of a model that is compressed already; decompress that first")
    skipped = _skipped_modules(model, config)
    _check_implementation(model, config)
    session = Session(config)
    # First in and last out: whatever other hooks of the module do runs inside.
    model.register_forward_pre_hook(_OpenHooks(session), prepend=True)
    model.register_forward_hook(_CloseHooks(session), always_call=True)
    for module in skipped:
        module.register_forward_pre_hook(_EnterSkipped(session), prepend=True)
        module.register_forward_hook(_LeaveSkipped(session), always_call=True)
    _roots.add(model)
    return model


def decompress(model: Module) -> Module:
    """Undo :func:`compress`.

    Parameters
    ----------
    model : Module
        Compressed by :func:`compress`, or a copy of such a model.

    Returns
    -------
    Module
        ``model``, with no hook of ours left. Graphs that were recorded before keep working.

    Raises
    ------
    PyactcompError
        If it is not compressed.

    Examples
    --------
    >>> import torch, pyactcomp
    >>> model = pyactcomp.decompress(pyactcomp.compress(torch.nn.Linear(2, 2)))
    """
    session_of(model)
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, _HOOKS)]:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)
    _roots.discard(model)
    return model


class Compressed(contextlib.ContextDecorator):
    """Compresses what autograd saves inside a ``with`` block, a loss outside the model included.

    Parameters
    ----------
    model : Module, optional
        Tells which parameters and buffers must never be compressed and names them in errors. Without it, leaves
        that require grad are recognised, and frozen parameters by their type.
    **options
        The fields of :class:`Config`; ``skip`` needs ``model``.

    Raises
    ------
    HookConflictError
        On entering, if other saved-tensor hooks are active.

    Examples
    --------
    >>> import torch, pyactcomp
    >>> model = torch.nn.Linear(512, 512)
    >>> with pyactcomp.compressed(model) as c:
    ...     loss = model(torch.randn(256, 512)).log_softmax(1).mean()
    >>> loss.backward()
    >>> r = pyactcomp.report(c)
    >>> r.unique_bytes, r.stored_bytes       # log_softmax's result is packed, the input of the model kept as it is
    (1048576, 663552)
    """

    def __init__(self, model: Module | None = None, **options: Any) -> None:
        if model is not None and not isinstance(model, Module):
            raise TypeError(f"compressed expects a torch.nn.Module or nothing, got {type(model).__name__}")
        config = Config(**options)
        if config.skip and model is None:
            raise ValueError("skip names modules of a model: call compressed(model, skip=...)")
        self.model = model
        self.session = Session(config)
        self._skipped = _skipped_modules(model, config) if model is not None else []
        self._handles: list[Any] = []
        if model is not None:
            _check_implementation(model, config)

    def __enter__(self) -> Compressed:
        try:
            self.session.open(self.model)
        except PyactcompError:
            self.session.close()
            raise
        for module in self._skipped:
            self._handles.append(module.register_forward_pre_hook(_EnterSkipped(self.session), prepend=True))
            self._handles.append(module.register_forward_hook(_LeaveSkipped(self.session), always_call=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.session.close()


compressed = Compressed
