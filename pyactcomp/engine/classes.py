"""The classes that ``compress`` gives to modules: fused ones, and those that torch.compile recognises."""

from __future__ import annotations

import copyreg
import functools
from abc import ABCMeta
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch.nn import Module

from ..errors import PyactcompError
from .marks import COMPILED, GIVEN, SEALED


class Given(NamedTuple):
    """What a given class is made of: a mixin before the module's class. ``make(own, *arguments)`` returns it."""

    own: type[Module]
    mixin: type[InFront]
    make: Callable[..., type[Module]]
    arguments: tuple[Any, ...]


def given_of(cls: type) -> Given:
    """Return what a given class is made of."""
    given: Given | None = GIVEN.get(cls)
    assert given is not None  # asked of given classes alone
    return given


class InFront(Module):
    """Base of the mixins: a ``forward`` of theirs runs first, and ``super().forward`` is the module's own."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Leave out an ``__init_subclass__`` of the user's, which registers classes or takes keywords."""
        given = GIVEN.get(cls)
        if given is None or _wraps_forwards(given.own):
            super().__init_subclass__(**options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the module as its own class does, and what the given class is made of."""
        reduced = cast("Any", super().__reduce_ex__(max(protocol, 2)))
        cls = type(self)
        if GIVEN.get(cls) is None or isinstance(reduced, str):  # a class that another library derived from a given one
            return reduced
        own, parts = _parts(cls)
        make, *arguments = (own if each is cls else each for each in (reduced[0], *reduced[1]))
        # A module that its class builds anew, without a state, has no hooks of ours.
        parts = parts if any(reduced[2:]) else []
        return (_rebuilt, (make, tuple(arguments), parts), *reduced[2:])

    def __prepare_scriptable__(self) -> Module:
        """Refuse torch.jit.script, which asks modules for the module to compile."""
        raise PyactcompError(
            f"torch.jit.script compiles no hooks, and this {type(self).__name__} is compressed: call "
            "pyactcomp.decompress on the model first, and pyactcomp.compress again on the model, not on the script"
        )


def _wraps_forwards(own: type[Module]) -> bool:
    """Return whether a class has a forward made by ``__init_subclass__`` of a base.

    Such a base wraps the forward of each subclass, ours too: in transformers the outermost wrapper alone checkpoints.
    """
    code = getattr(own.forward, "__code__", None)
    functions = (getattr(vars(base).get("__init_subclass__"), "__func__", None) for base in own.__mro__)
    return any(code in function.__code__.co_consts for function in functions if function is not None)


def _parts(cls: type[Module]) -> tuple[type[Module], list[tuple[Callable[..., type[Module]], tuple[Any, ...]]]]:
    """Return the module's own class and how each class that this package put before it is made, innermost first."""
    parts: list[tuple[Callable[..., type[Module]], tuple[Any, ...]]] = []
    while (given := GIVEN.get(cls)) is not None:
        parts.insert(0, (given.make, given.arguments))
        cls = given.own
    return cls, parts


def unmarked(cls: type[Module]) -> type[Module]:
    """Return the class of a module without the class put before it for torch.compile."""
    return given_of(cls).own if COMPILED.get(cls) is not None else cls


def own_class(cls: type[Module]) -> type[Module]:
    """Return the module's own class, without the classes that this package put before it."""
    return _parts(cls)[0]


def _made(own: type[Module], parts: list[tuple[Callable[..., type[Module]], tuple[Any, ...]]]) -> type[Module]:
    for make, arguments in parts:
        own = make(own, *arguments)
    return own


def _rebuilt(make: Callable[..., Module], arguments: tuple[Any, ...], parts: list[Any]) -> Module:
    module = make(*arguments)
    give_class(module, _made(type(module), parts))
    return module


class GivenClass(type):
    """Metaclass of the given classes: they answer for the module's own class where torch.nn.utils.parametrize asks.

    Parametrizations are properties of the class that a module has, and removing the last one gives the module the first
    base of the class.
    """

    @property
    def __bases__(cls) -> tuple[type, ...]:  # type: ignore[override]
        """The bases of the module's own class."""
        bases: tuple[type, ...] = type.__dict__["__bases__"].__get__(_answering(cls))
        return bases

    def __setattr__(cls, name: str, value: Any) -> None:
        """Set a new attribute of the module's own class; a method is replaced in the given class alone."""
        own = _answering(cls)
        _set(cls, name, value) if own is cls or hasattr(cls, name) else setattr(own, name, value)

    def __delattr__(cls, name: str) -> None:
        """Delete an attribute of the class, or else of the module's own."""
        own = _answering(cls)
        type.__delattr__(cls, name) if own is cls or name in vars(cls) else delattr(own, name)


_set = type.__setattr__


def _answering(cls: type) -> type:
    """Return the module's own class, as ``own_class`` does; a class that is being made answers for itself."""
    while cls.__dict__.get(SEALED.name):
        cls = given_of(cls).own
    return cls


class _Turned(GivenClass):
    """Metaclass where the own class has another layout than a Module: its first base is an interface, or a Generic.

    Python gives an object another class of the same layout alone, and the first base decides the layout. So the own
    class is the base, and the mixin comes first in the order of look-ups. Such a class is slower to look up in.
    """

    def mro(cls) -> list[type]:
        given = GIVEN.get(cls)
        if given is None:  # a class that the program derives
            return super().mro()
        return [cls, *(base for base in given.mixin.__mro__ if base not in given.own.__mro__), *given.own.__mro__]


def class_in_front(
    own: type[Module],
    mixin: type[InFront],
    make: Callable[..., type[Module]],
    arguments: tuple[Any, ...],
    body: dict[str, Any],
) -> type[Module]:
    """Return a class with a mixin before a module's class, under its name and module.

    Frameworks look classes up by name: for wrapping in FSDP, for initialisation, in checkpoints. torch.fx looks into
    all modules but those of classes in torch.nn.

    Parameters
    ----------
    own : type
        The module's class so far: its own, or one that this function made.
    mixin : type
    make, arguments
        ``make(own, *arguments)`` returns the class, also in another process.
    body : dict
        Attributes of the class.
    """
    turned = not _laid_out_as_module(own)
    metaclass = _metaclass(cast("type[type]", type(own)), turned)
    space = {
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
        GIVEN.name: Given(own, mixin, make, arguments),
        **body,
    }
    # Not by calling the metaclass: one of the user's may refuse derived classes, or keep them.
    new = ABCMeta.__new__ if issubclass(metaclass, ABCMeta) else type.__new__
    cls = cast("type[Module]", new(metaclass, own.__name__, (own,) if turned else (mixin, own), space))
    _set(cls, SEALED.name, True)
    return cls


def _laid_out_as_module(cls: type) -> bool:
    """Return whether ``Module`` is the first base, or the first base of it, and so on."""
    base: type | None = cls
    while base is not None and base is not Module:
        base = base.__base__
    return base is Module


@functools.cache
def _metaclass(own: type[type], turned: bool) -> type[GivenClass]:
    ours = _Turned if turned else GivenClass
    if issubclass(own, ours):  # that of a fused class
        return own
    metaclass = ours if issubclass(ours, own) else cast("type[GivenClass]", type("Given", (ours, own), {}))
    copyreg.pickle(metaclass, _pickled_class)  # type: ignore[arg-type]
    return metaclass


def _pickled_class(cls: type[Module]) -> Any:
    """Pickle a given class as what it is made of: no module has it as an attribute."""
    if GIVEN.get(cls) is None:
        return cls.__qualname__
    return _made, _parts(cls)


def give_class(module: Module, cls: type[Module]) -> None:
    """Give a module another class. An assignment of its own class would take a traced module's forward away."""
    if type(module) is not cls:
        # Past a __setattr__ of the module's own, which may refuse, and a __class__, which may be a property.
        object.__dict__["__class__"].__set__(module, cls)


def takes_class(module: Module) -> bool:
    """Return whether a module can be given a class.

    TorchScript's and torch.fx's modules have a class for each, and their methods write to the class of the module.
    """
    return not isinstance(module, (torch.jit.ScriptModule, torch.fx.GraphModule))
