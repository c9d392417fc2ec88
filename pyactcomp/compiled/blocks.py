"""Compiles the blocks that repeat in a model, each by itself; equal blocks share their graphs."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any, cast
from weakref import WeakSet

import torch
from torch.fx import Proxy
from torch.nn import Module
from torch.nn.parameter import is_lazy

from ..engine.classes import takes_class
from ..engine.reruns import repeat_modes
from ..torch_private import constant_in_graphs, dispatch_mode_active, transformed

# A line on the standard error, unless the program configures logging; before that much, nobody wonders.
_log = logging.getLogger("pyactcomp")
_PATIENCE_S = 2.0

_NOTHING = nullcontext()

Forward = Callable[..., Any]
Pays = Callable[[Module, tuple[Any, ...]], bool]


def repeating_blocks(model: Module, skipped: Collection[Module] = ()) -> dict[Module, str]:
    """Return the outermost blocks that repeat, each with the name that equal blocks share.

    Parameters
    ----------
    model : Module
    skipped : collection of Module
        Left out, with all that they contain.

    Returns
    -------
    dict of Module to str
        Modules side by side in one parent, with children of their own, of one class and with the same names, shapes and
        dtypes of parameters and buffers. Collections in the parent, however nested, stand for what they hold. Modules
        that are attributes of the parent, as two encoders, are no blocks if they hold collections of blocks.
    """
    listed, attributes = _outermost(model, {module for outer in skipped for module in outer.modules()})
    return listed | attributes


def _outermost(model: Module, skipped: set[Module]) -> tuple[dict[Module, str], dict[Module, str]]:
    """Return the blocks in collections, and those that are attributes."""
    held, own = side_by_side(model)
    names = {module: _name(module) for module in (*held, *own) if _is_block(module)}
    counts = Counter(names.values())
    listed: dict[Module, str] = {}
    attributes: dict[Module, str] = {}
    for module in (*held, *own):
        if module in skipped:
            continue
        repeats = counts[names.get(module, "")] > 1
        if repeats and module in held:
            listed[module] = names[module]
            continue
        inner = _outermost(module, skipped)
        if repeats and not inner[0]:
            attributes[module] = names[module]
        else:
            listed |= inner[0]
            attributes |= inner[1]
    return listed, attributes


def blocks_of(model: Module) -> list[Module]:
    """Return the modules that repeat: with children of their own, and side by side with another of their class."""
    found: dict[Module, None] = {}
    for parent in model.modules():
        if has_forward(parent) or parent is model:
            modules = [module for group in side_by_side(parent) for module in group]
            classes = Counter(map(type, modules))
            alike = (m for m in modules if classes[type(m)] > 1 and next(m.children(), None) is not None)
            found |= dict.fromkeys(alike)
    return list(found)


def side_by_side(parent: Module) -> tuple[dict[Module, None], dict[Module, None]]:
    """Return the modules that a parent calls: those in its collections, and those that are attributes of its own.

    A module without a forward, as a list or a dict of modules, stands for what it holds.
    """
    held: dict[Module, None] = {}
    own: dict[Module, None] = {}
    for child in parent.children():
        if not has_forward(child):
            held |= dict.fromkeys(called(child))
        elif isinstance(parent, Sized):
            held[child] = None
        else:
            own[child] = None
    return held, own


def called(module: Module) -> Iterator[Module]:
    """Yield a module, and for a collection, which nothing calls, the modules that it holds instead."""
    if has_forward(module):
        yield module
    else:
        for child in module.children():
            yield from called(child)


def has_forward(module: Module) -> bool:
    """Return whether a module can be called; a ``ModuleList`` and its like only hold others."""
    # The class of a module of TorchScript has no forward that can be read.
    return getattr(type(module), "forward", None) is not Module.forward or "forward" in module.__dict__


def _is_block(module: Module) -> bool:
    # A forward of the instance would pass by the class's.
    return "forward" not in module.__dict__ and takes_class(module) and next(module.children(), None) is not None


def _name(block: Module) -> str:
    """Return the class of a block with a digest of its structure."""
    tensors = [*block.named_parameters(remove_duplicate=False), *block.named_buffers(remove_duplicate=False)]
    structure = [(name, None if is_lazy(t) else tuple(t.shape), str(t.dtype)) for name, t in tensors]
    cls = type(block)
    digest = hashlib.sha256(repr((cls.__module__, cls.__qualname__, structure)).encode()).hexdigest()
    return f"{cls.__name__}_{digest[:8]}"


class CompiledForward:
    """The forward of equal blocks: compiled at the first call, and eager where torch.compile cannot.

    Parameters
    ----------
    forward : function
        Takes the block first.
    cls : str
        Name of the class, for messages.
    name : str
        As from :func:`repeating_blocks`. Dynamo keeps graphs, their number and the sizes that changed by the code of a
        function, so each structure has code of its own under a name of its own.
    pays : callable or None
        Tells from the block and the arguments whether a call gains by compilation; None where all calls do.
    """

    def __init__(self, forward: Forward, cls: str, name: str, pays: Pays | None = None) -> None:
        self._eager, self._cls, self._name, self._pays = forward, cls, name, pays
        self._compiled: Forward | None = None
        self._refused: set[tuple[bool, bool]] = set()
        self._traced: WeakSet[Module] = WeakSet()
        self._traces = self._limit = 0

    def __call__(self, block: Module, /, *args: Any, **kwargs: Any) -> Any:
        """Run the block, compiled or not."""
        # One mode alone may have a construct that cannot be compiled, as evaluation a cache of keys and values.
        mode = block.training, torch.is_grad_enabled()
        gains = self._pays is None or self._pays(block, args)
        if not gains or mode in self._refused or _must_be_eager(args, kwargs):
            return self._eager(block, *args, **kwargs)
        repeat_modes(block)
        traces = self._traces
        try:
            with self._around(block):
                return (self._compiled or self._compile())(block, *args, **kwargs)
        except Exception as error:
            from ..torch_private.dynamo import is_refusal

            if not is_refusal(error):
                raise
            problem = error
        finally:
            if self._traces != traces:
                self._traced.add(block)
        # An error of the block's own is raised here, as without compilation.
        output = self._eager(block, *args, **kwargs)
        self._refused.add(mode)
        warnings.warn(f"{self._cls} runs uncompiled: {_reason(problem)}", stacklevel=3)
        return output

    def _around(self, block: Module) -> AbstractContextManager[object]:
        """Tell of a first compilation; allow each block the graphs that Dynamo allows a function.

        Blocks that differ in a number have graphs of their own.
        """
        if self._compiled is None:
            return _announced(self._cls)
        if self._traces < self._limit:
            return _NOTHING
        from ..torch_private.dynamo import raised_recompile_limit

        return raised_recompile_limit(self._limit * len({*self._traced, block}))

    def _compile(self) -> Forward:
        from ..torch_private.dynamo import recompile_limit

        self._limit = recompile_limit()
        # Dynamo would compile the pieces between graph breaks, which keep what they save: eager code keeps less.
        self._compiled = torch.compile(_renamed(self._traceable(), self._name), fullgraph=True)
        return self._compiled

    def _traceable(self) -> FunctionType:
        eager = self._eager

        @constant_in_graphs
        def count() -> None:
            self._traces += 1

        def forward(block: Module, /, *args: Any, **kwargs: Any) -> Any:
            count()
            return eager(block, *args, **kwargs)

        return cast("FunctionType", forward)


def _must_be_eager(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether all is switched off, or the call is traced or watched by others than torch.compile."""
    if os.environ.get("PYACTCOMP_DISABLE") == "1" or transformed() or dispatch_mode_active():
        return True
    # Not a generator, which takes a microsecond more.
    return any([isinstance(value, Proxy) for value in (*args, *kwargs.values())])


def _renamed(function: FunctionType, name: str) -> Forward:
    code = function.__code__.replace(co_name=name)
    return FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


@contextmanager
def _announced(name: str) -> Iterator[None]:
    """Say that a first call compiles, if this takes long."""
    message = "pyactcomp: torch.compile compiles %s, once for all equal blocks; the first step waits"
    timer = threading.Timer(_PATIENCE_S, _log.warning, (message, name))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _reason(problem: Exception) -> str:
    """Return the first lines of an error of the compiler, which go on for pages."""
    lines = [line.strip() for line in str(problem.__cause__ or problem).splitlines() if line.strip()]
    return f"{type(problem).__name__}: {' '.join(lines[:2])}"


def compiled_forward(forward: Forward, cls: str, name: str, pays: Pays | None = None) -> Forward:
    """Return a forward that compiles itself, as :class:`CompiledForward` does."""
    run = CompiledForward(forward, cls, name, pays)

    @functools.wraps(forward)
    def compiled(self: Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # inside a graph around the block
            return forward(self, *args, **kwargs)
        return run(self, *args, **kwargs)

    compiled.__module__ = __name__
    return compiled


def reason_unavailable() -> str | None:
    """Return why this release of torch compiles no blocks, or None."""
    from ..torch_private import dynamo, partitions

    return dynamo.missing() or partitions.missing()
