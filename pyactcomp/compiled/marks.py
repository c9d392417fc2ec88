"""How a compressed module is recognised while torch.compile traces: by a class that Dynamo guards."""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Collection, Iterator
from inspect import Parameter
from types import FunctionType
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch.nn import Linear, Module

from ..config import Config
from ..engine.classes import InFront, class_in_front, give_class, takes_class, unmarked
from ..engine.marks import COMPILED, compiled_mark
from ..engine.session import close_interrupted
from ..torch_private import backend_being_traced, constant_in_graphs, tracing_context
from .blocks import blocks_of, compiled_forward, repeating_blocks
from .context import Graphs, Mark, set_traced_mark, traced_mark
from .projections import pays, unaligned_projections

# How a function hands on a parameter of its own; one without an entry by position.
_PASSED: dict[Any, str] = {
    Parameter.VAR_POSITIONAL: "*{0}",
    Parameter.KEYWORD_ONLY: "{0}={0}",
    Parameter.VAR_KEYWORD: "**{0}",
}
# A model compressed again by the same configuration finds its compiled graphs again.
_graphs: WeakKeyDictionary[Module, dict[Config, Graphs]] = WeakKeyDictionary()


def reason_unserved(config: Config) -> str | None:
    """Return the option that keeps graphs as they are, or None."""
    if config.rounding == "stochastic":
        return "rounding='stochastic': graphs round to nearest"
    if config.impl != "auto":
        return f"impl={config.impl!r}: the compiler generates the code of a graph"
    return None


def ineffective(config: Config) -> Iterator[str]:
    """Yield the options that hold outside of graphs alone."""
    if config.keep_weight_copies:
        yield "keep_weight_copies=True: the partitioner decides whether backward casts a parameter again"
    if config.unknown == "int8":
        yield "unknown='int8': a graph keeps the tensors of operators outside the table"


def _tell(mark: Mark) -> None:
    """Hand the mark of a class to the partitioner of the graph being traced; the outermost module's counts."""
    # An exported program has no backward; and another thread may trace, for which torch has one flag.
    if (
        tracing_context() is None
        or torch.compiler.is_exporting()
        or traced_mark() is not None
        or not torch.is_grad_enabled()
        or os.environ.get("PYACTCOMP_DISABLE") == "1"
    ):
        return
    reason = reason_unserved(mark.graphs.config)
    backend = backend_being_traced()
    # A function may go on to Inductor.
    if reason is None and backend is not None and backend != "inductor":
        reason = f"backend {backend!r} does not partition by Inductor; use backend='inductor'"
    if reason is None:
        from .partitioner import install  # imports the whole compiler

        reason = install()
    if reason is not None:
        mark.graphs.warned = True
        warnings.warn(f"torch.compile's graph of {mark.name} keeps the tensors that it saves: {reason}", stacklevel=2)
    elif not mark.skipped:
        set_traced_mark(mark)
        for option in ineffective(mark.graphs.config):
            warnings.warn(f"torch.compile's graph of {mark.name} has no use for {option}", stacklevel=2)


class Marked(InFront):
    """The mixin of the classes given to compressed modules; each class has a ``forward`` of its own."""


def _class_of(cls: type[Module], graphs: Graphs, skipped: bool, compiled: str = "") -> type[Module]:
    key = cls, skipped, compiled
    if key not in graphs.classes:
        graphs.classes[key] = _marked(cls, Mark(graphs, cls.__name__, skipped, compiled))
    return graphs.classes[key]


def _marked(cls: type[Module], mark: Mark) -> type[Module]:
    @constant_in_graphs
    def tell() -> None:
        _tell(mark)

    def run(self: Module, *args: Any, **kwargs: Any) -> Any:
        # A lazy module that has just become another class; or ``decompress`` came after a bound method was compiled.
        if not isinstance(self, marked):
            return cls.forward(self, *args, **kwargs)
        if torch.compiler.is_compiling() and self.training:
            tell()
        # Not cls.forward: Dynamo calls no method of a class that torch._dynamo.allow_in_graph took.
        if torch.compiler.is_compiling():
            return cast("Any", super(marked, self)).forward(*args, **kwargs)
        try:
            return cast("Any", super(marked, self)).forward(*args, **kwargs)
        except BaseException as error:
            if not isinstance(error, Exception):  # after an Exception torch runs the forward hooks
                close_interrupted(self)
            raise

    forward = functools.wraps(cls.forward)(_with_parameters_of(cls, run))
    # Dynamo imports the module of a function: the module of the names that the function reads.
    forward.__module__ = __name__
    # What compiles itself is a block or a projection; only a projection is a Linear, as a block has children.
    gains = pays if issubclass(cls, Linear) else None
    called = compiled_forward(forward, cls.__name__, mark.compiled, gains) if mark.compiled else forward
    body = {"forward": called, COMPILED.name: mark}
    marked = class_in_front(cls, Marked, _class_of, (mark.graphs, mark.skipped, mark.compiled), body)
    return marked


def _with_parameters_of(cls: type[Module], run: Callable[..., Any]) -> FunctionType:
    """Return a function that calls another, with code of its own and the parameters of a class's forward.

    Dynamo guards the parameters of a frame: ``*args, **kwargs`` takes a graph for each way to pass the same arguments.
    Dynamo's limit of graphs holds for a code object: all compressed models of a process would share the limit.
    """
    forward = inspect.getattr_static(cls, "forward")
    # Another callable, as a partial or a static method, has no parameters that a frame of the module would have.
    model = forward if isinstance(forward, FunctionType) else cast("FunctionType", run)
    defaults = model.__defaults__, model.__kwdefaults__
    # Not of the function itself: a decorator may give it the signature of another one.
    bare = FunctionType(model.__code__, {}, "forward", defaults[0], model.__closure__)
    bare.__kwdefaults__ = defaults[1]
    parameters = [
        p if p.default is p.empty else p.replace(default=None) for p in inspect.signature(bare).parameters.values()
    ]
    passed = ", ".join(_PASSED.get(p.kind, "{0}").format(p.name) for p in parameters)
    function = f"def forward{inspect.Signature(parameters)}: return _pyactcomp_run({passed})"
    made: dict[str, Any] = {}
    exec(f"def make(_pyactcomp_run):\n {function}\n return forward", globals(), made)
    made_forward: FunctionType = made["make"](run)
    made_forward.__defaults__, made_forward.__kwdefaults__ = defaults
    return made_forward


def unwrapped(module: Module) -> Iterator[Module]:
    """Yield a module and, inside wrappers such as DDP, the modules that a graph of their own may begin with."""
    while True:
        module = cast("Module", getattr(module, "_orig_mod", module))
        yield module
        children = list(module.children())
        if len(children) != 1 or next(children[0].children(), None) is None:
            return
        module = children[0]


def mark(model: Module, config: Config, skipped: Collection[Module] = ()) -> Graphs:
    """Mark the root, the modules that repeat and the modules compiled in place; and the skipped ones as such.

    With ``compile_blocks`` the marked blocks compile themselves, and so do the projections that gain by it.
    """
    unmark(model)
    graphs = _graphs.setdefault(model, {}).setdefault(config, Graphs(config))
    exempt = {module for outer in skipped for module in outer.modules()}
    to_compile = repeating_blocks(model, exempt) if config.compile_blocks else {}
    if to_compile:
        inside = {module for block in to_compile for module in block.modules()}
        to_compile |= unaligned_projections(model, exempt | inside)
    for module in dict.fromkeys([*unwrapped(model), *blocks_of(model), *_compiled(model), *to_compile, *skipped]):
        _mark(module, graphs, module in exempt, to_compile.get(module, ""))
    return graphs


def mark_compiled(model: Module) -> None:
    """Mark the modules of a marked model that were compiled since :func:`mark`."""
    graphs = graphs_of(model)
    later = [] if graphs is None else [m for m in _compiled(model) if compiled_mark(type(m)) is None]
    if graphs is not None and later:
        marks = ((module, compiled_mark(type(module))) for module in model.modules())
        exempt = {inner for outer, mark in marks if mark is not None and mark.skipped for inner in outer.modules()}
        for module in later:
            _mark(module, graphs, module in exempt)


def _mark(module: Module, graphs: Graphs, skipped: bool, compiled: str = "") -> None:
    if takes_class(module):
        give_class(module, _class_of(type(module), graphs, skipped, compiled))


def _compiled(model: Module) -> list[Module]:
    """Return the modules compiled in place, and those inside the wrappers that torch.compile returns."""
    # Module.modules() takes twice the time: it builds names too.
    left, seen, found = [model], {model}, []
    while left:
        module = left.pop()
        if module._compiled_call_impl is not None:
            found.append(module)
        wrapped = module._modules["_orig_mod"] if "_orig_mod" in module._modules else None  # no get in TorchScript's
        if wrapped is not None:
            found.append(wrapped)
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                left.append(child)
    return found


def pause(model: Module) -> None:
    """Have graphs keep what they save: unmark all modules but the blocks that compile themselves."""
    for module in model.modules():
        mark: Mark | None = COMPILED.get(type(module))
        cls = unmarked(type(module))
        if mark is not None and mark.compiled:
            cls = _class_of(cls, mark.graphs, True, mark.compiled)
        give_class(module, cls)


def unmark(model: Module) -> None:
    """Give the modules their classes back; Dynamo then finds the graphs compiled before :func:`mark`."""
    for module in model.modules():
        give_class(module, unmarked(type(module)))


def graphs_of(model: Module) -> Graphs | None:
    """Return the graphs of a compressed model."""
    root = getattr(model, "_orig_mod", model)
    mark: Mark | None = compiled_mark(type(root))
    return None if mark is None else mark.graphs
