"""Looks up a saved tensor's reader in the table of readers, and registers new readers."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FrameType
from typing import Literal, get_args

import torch

from ..errors import check_choice
from ..torch_private import functions
from . import rule
from .forms import AS_CODES, AS_SHAPE, BFLOAT16, BITS, ITSELF, SHAPE, Comparison, Form, Reading, Use, strictest
from .rule import FUNCTION_KINDS, Kind
from .table import ELEMENTWISE, FUNCTION_READERS, FUNCTIONS, NAMESPACES, READERS

Derivative = Literal["shape", "sign", "linear", "smooth", "relative", "exact"]
Row = tuple[tuple[Reading, ...] | None, Reading, Reading, Reading | None, bool]

_FORMS: dict[str, Form] = {
    "shape": AS_SHAPE,
    "sign": Form("1 bit", BITS, Comparison("above", 0.0, float("inf"), 1.0, -1.0)),
    "linear": AS_CODES,
    "smooth": AS_CODES,
    "relative": BFLOAT16,
    "exact": ITSELF,
}

CHECKPOINT = Reading.of(
    "torch.utils.checkpoint", "input", Use.INPUT, "the block reruns from it; exact if values decide the block's path"
)
CHECKPOINTED = Reading.of("torch.utils.checkpoint", "input", Use.INPUT, "the block, already run once, reruns from it")
# Our functions save codes where codes are enough, so any float among their saved tensors must stay exact.
_OURS = Reading("pyactcomp.functional", "saved", ITSELF, "the function saves codes wherever codes are enough")
OUTSIDE = Reading("outside of any operator", "saved", ITSELF, "", known=False)

on_change: list[Callable[[], None]] = []
"""Callbacks to run after a change of the table."""

_registered: dict[str, dict[str, Reading]] = {}
_registered_functions: dict[type, dict[int, Reading]] = {}
# Registered layers: classes of functions, names of operators.
_layers: set[object] = set()


def registered_operators() -> str:
    """Return what is registered of operators, as part of a key of torch's caches of graphs."""
    layers = sorted(each for each in _layers if isinstance(each, str))
    return repr((sorted(_registered.items()), layers))


def _find(name: str, overload: str) -> tuple[Mapping[str, Reading] | None, bool]:
    """Return an operator's readings, None if unknown, and whether the operator writes to the first argument."""
    namespace, _, base = name.partition("::")
    in_place = base.endswith("_") and not base.endswith("__")
    for candidate in (base, base[:-1]) if in_place else (base,):
        for key in (f"{candidate}.{overload}", candidate):
            found = _registered.get(f"{namespace}::{key}")
            if found is None and namespace == "aten":
                found = READERS.get(key)
            if found is not None:
                return found, in_place
    return None, in_place


def _unknown(name: str) -> Reading:
    namespace, _, base = name.partition("::")
    if namespace == "pyactcomp":
        return _OURS
    if namespace in NAMESPACES:
        return Reading(
            name, "any operand", ITSELF, f"{NAMESPACES[namespace]} have not been tried, so operands are kept exact"
        )
    if namespace == "aten" and ("_backward" in base or base.startswith("_foreach_")):
        return Reading(name, "any operand", ITSELF, "saved for a second derivative, or for several tensors at once")
    return Reading(name, "any operand", ITSELF, "", known=False)


def of_operator(name: str, overload: str) -> Row:
    """Return the row of an operator.

    The row holds the readings of the arguments, of a result, of a tensor that may be either and of a statistic, and
    whether scalar arguments decide. None for the arguments means all exact; the statistic is None unless the operator
    is elementwise.
    """
    found, in_place = _find(name, overload)
    if found is None:
        unknown = _unknown(name)
        return None, unknown, unknown, None, False
    exact = found.get("", Reading(name, "another operand", ITSELF, "backward is not known to need less"))
    names = [argument.name for argument in torch._C._get_schema(name, overload).arguments]
    result = found.get("result", exact)
    arguments = [found.get(argument, exact) for argument in names]
    if in_place and arguments:
        # The saved tensor is the result, or a copy of the argument from before the write.
        written = found.get("result", found.get(names[0], exact))
        result = arguments[0] = strictest((written, found.get(names[0], written)))
    if all(reading.form is ITSELF and reading.by_scalars is None for reading in (*arguments, result)):
        known = next(iter(found.values()), exact)
        return None, known, known, None, False
    statistic = None
    if name.partition("::")[2].rstrip("_") in ELEMENTWISE:
        statistic = Reading(name, "an operand", ITSELF, "one number for many elements: a statistic or a scale")
    by_scalars = any(reading.by_scalars is not None for reading in (*arguments, result))
    return tuple(arguments), result, strictest((*found.values(), exact)), statistic, by_scalars


_APPLY = functions.code_of_apply()
_FRAMES = 8
# Modules whose frames stand between a saved tensor's hook and the call of an autograd function's apply.
_HOOKS = ("pyactcomp.engine.", "pyactcomp.readers.", "pyactcomp.verify.")
# The callers of our own autograd functions.
_OWN = ("pyactcomp.functional.", "pyactcomp.fusions.")


def _calling_function() -> tuple[type | None, CodeType | None, str]:
    """Return the autograd function whose ``apply`` runs the hook, if a frame tells, else the code that called it.

    The last value is the name of the caller's module.
    """
    frame = sys._getframe(1)
    caller: FrameType | None = None
    for _ in range(_FRAMES):
        if frame is None:
            break
        if frame.f_code is _APPLY:
            cls: type = frame.f_locals["cls"]
            return cls, None, ""
        if caller is None and not frame.f_globals.get("__name__", "").startswith(_HOOKS):
            caller = frame
            if _APPLY is None:
                break
        frame = frame.f_back  # type: ignore[assignment]
    return (None, None, "") if caller is None else (None, caller.f_code, caller.f_globals.get("__name__", ""))


def of_function(name: str, position: int) -> Reading:
    """Return the reading of the tensor at a position of a Python autograd function's ``save_for_backward``.

    Where no frame tells the class, all classes with the name may be it, and the strictest reading serves.
    """
    cls, _, caller = _calling_function()
    if cls is not None:
        return _of_class(cls, position)
    if caller.startswith(_OWN):
        return _OURS
    readings = [_of_class(each, position) for each in functions.functions_named(name)]
    # Options for unknown readers serve only if every class is unknown.
    return strictest(sorted(readings, key=lambda reading: not reading.known)) if readings else OUTSIDE


def of_no_operator() -> Reading:
    """Return the reading of a tensor saved outside of any operator, for example by torch.utils.checkpoint."""
    cls, code, caller = _calling_function()
    if cls is not None:
        return _of_class(cls, None)
    if code is None or not caller.startswith((*_OWN, "torch.utils.checkpoint")):
        return OUTSIDE
    if caller.startswith(_OWN):
        return _OURS
    # Reentrant checkpointing's function is called from `checkpoint` itself.
    return CHECKPOINTED if code.co_name == "checkpoint" else CHECKPOINT


def kind_of_operator(name: str) -> Kind:
    """Return what an operator does, by its name with the namespace."""
    namespace, _, base = name.partition("::")
    if name in _layers:
        return Kind.LAYER
    return rule.KINDS.get(base.lstrip("_"), Kind.OTHER) if namespace == "aten" else Kind.OTHER


def kind_of(node: str | type) -> Kind:
    """Return what the operator of an autograd node does: by the node's name, or its class if written in Python."""
    if isinstance(node, str):
        return rule.kind_of_node(node)
    cls = functions.class_of_node(node)
    if cls is None:
        return Kind.OTHER
    library = cls.__name__.partition("GeneratedBackwardFor_")[2]
    if cls in _layers or (library and _registered_for(library, _layers) is not None):
        return Kind.LAYER
    return FUNCTION_KINDS.get(f"{cls.__module__}.{cls.__qualname__}", Kind.OTHER)


def _of_class(cls: type, position: int | None) -> Reading:
    name = f"{cls.__module__}.{cls.__qualname__}"
    known = _registered_functions.get(cls) or FUNCTION_READERS.get(name)
    if known is not None:
        if position is None:
            return strictest(known.values())
        return known.get(position, Reading(name, f"saved {position}", ITSELF, "registered without this position"))
    if cls.__module__ == "torch.utils.checkpoint":
        # Reentrant checkpointing saves the inputs after the block has run, the other kind before.
        return CHECKPOINTED if cls is torch.utils.checkpoint.CheckpointFunction else CHECKPOINT
    if cls.__module__.startswith("pyactcomp."):
        return _OURS
    if cls.__name__.startswith("GeneratedBackwardFor_"):
        return _of_library(cls.__name__.partition("GeneratedBackwardFor_")[2])
    if name in FUNCTIONS:
        return Reading(name, "saved", ITSELF, f"{FUNCTIONS[name]} has not been tried, so it is kept exact")
    return Reading(name, "saved", ITSELF, "", known=False)


def _of_library(mangled: str) -> Reading:
    """Return the one reading for all saved tensors of a torch.library operator, whose author chooses the tensors."""
    operator = _registered_for(mangled, _registered)
    if operator is not None:
        return strictest(_registered[operator].values())
    return Reading(f"torch.library's {mangled}", "saved", ITSELF, "", known=False)


def _registered_for(mangled: str, operators: Iterable[object]) -> str | None:
    """Return the registered operator whose autograd class is named ``mangled``, or None."""
    for operator in operators:
        if isinstance(operator, str):
            namespace, _, base = operator.partition("::")
            if mangled.startswith(f"{namespace}_{base.replace('.', '_')}"):
                return operator
    return None


_NODE = re.compile(r"(\w+?)Backward\d*")


def weakest_need(node: str) -> int:
    """Return the least need among a node's saved tensors, by the node's name; 0 (shape) if unknown."""
    match = _NODE.fullmatch(node)
    if match is None:
        return SHAPE
    wanted = match[1].lower()
    needs = [
        BITS if reading.by_scalars is not None else reading.need
        for operator, readings in READERS.items()
        if operator.partition(".")[0].replace("_", "") == wanted
        for reading in readings.values()
    ]
    registered = any(name.partition("::")[2].partition(".")[0].replace("_", "") == wanted for name in _registered)
    return SHAPE if registered or not needs else min(needs)


def register_reader(
    reader: str | type[torch.autograd.Function],
    operands: Mapping[int, Derivative] | None = None,
    /,
    **named: Derivative | Literal["layer"],
) -> None:
    """Register how exactly backward needs an operator's saved tensors. Tensors without a row are kept exact.

    Parameters
    ----------
    reader : str or subclass of torch.autograd.Function
        An operator as ``"namespace::name"`` or ``"namespace::name.overload"``, or the class of an autograd function.
    operands : mapping of int to str, for a function
        Exactness by position among the tensors given to ``save_for_backward``, not counting None.
    **named : for an operator
        Exactness by argument name; ``result`` names a saved tensor that shares memory with no argument. For an operator
        with ``torch.library.register_autograd``, the strictest of the given values applies to every saved tensor.
        For a function or such an operator, ``result="layer"`` says that its results are those of a layer, which
        following products may store in 8 bits: values of one range, as of a norm, a projection or an attention.

        - ``"linear"``: the gradient is multiplied by the tensor. Stored in 8 bits.
        - ``"smooth"``: the derivative is a smooth bounded function of the tensor. Stored in 8 bits.
        - ``"relative"``: the tensor is a divisor or the argument of a log. Stored in bfloat16.
        - ``"sign"``: backward reads only whether ``x > 0``. Stored in one bit, restored as 1 or -1.
        - ``"shape"``: backward reads no values. Nothing is stored.
        - ``"exact"``: anything else. Stored as it is.

    Raises
    ------
    TypeError
        If the reader is neither an operator's name nor a function's class, or if an operator's operands are given by
        position or a function's by name.
    ValueError
        If torch has no such operator, the operator has no such argument, an argument is not a tensor, or an exactness
        is unknown.

    Examples
    --------
    >>> import torch, pyactcomp
    >>> class Scale(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x, s):
    ...         ctx.save_for_backward(x, s)
    ...         return x * s
    ...     @staticmethod
    ...     def backward(ctx, grad):
    ...         x, s = ctx.saved_tensors
    ...         return grad * s, (grad * x).sum()
    >>> pyactcomp.register_reader(Scale, {0: "linear", 1: "exact"}, result="layer")
    """
    layer = named.get("result") == "layer"
    if layer:
        del named["result"]
    if isinstance(reader, str):
        if operands is not None:
            raise TypeError(f"operands of the operator {reader!r} go by name: register_reader({reader!r}, x='linear')")
        checked = _checked_operator(reader, named, layer)
        _registered[reader] = checked
    elif isinstance(reader, type) and issubclass(reader, torch.autograd.Function):
        if named or (not operands and not layer):
            raise TypeError(
                f"operands of {reader.__name__} go by position: register_reader({reader.__name__}, {{0: 'linear'}})"
            )
        _registered_functions[reader] = _checked_function(reader, operands or {})
    else:
        raise TypeError(f"reader must be 'namespace::operator' or an autograd function's class, got {reader!r}")
    (_layers.add if layer else _layers.discard)(reader)
    for changed in on_change:
        changed()


def _reading(operator: str, operand: str, exactness: str) -> Reading:
    check_choice(f"the exactness of {operand}", exactness, get_args(Derivative))
    return Reading(operator, operand, _FORMS[exactness], f"registered as {exactness}")


def _checked_function(cls: type, operands: Mapping[int, Derivative]) -> dict[int, Reading]:
    name = f"{cls.__module__}.{cls.__qualname__}"
    for position in operands:
        if not isinstance(position, int) or position < 0:
            raise ValueError(
                f"a position among the tensors that {cls.__name__} saves must be an integer from 0, got {position!r}"
            )
    return {position: _reading(name, f"saved {position}", exactness) for position, exactness in operands.items()}


def _checked_operator(operator: str, named: Mapping[str, str], layer: bool) -> dict[str, Reading]:
    namespace, found, rest = operator.partition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base, None) if found and base else None
    if packet is None:
        raise ValueError(
            f"torch has no operator {operator!r}: import the package that defines it first, and write "
            "'namespace::name' as in 'aten::mul'"
        )
    overloads = [overload] if overload else packet.overloads()
    if overload and overload not in packet.overloads():
        raise ValueError(f"{base!r} has no overload {overload!r}; known: {', '.join(packet.overloads())}")
    if layer and namespace == "aten":
        raise ValueError(f"result='layer' is for operators of torch.library and autograd functions, not {operator!r}")
    if not named and not layer:
        raise ValueError(f"name an operand of {operator!r}, as in register_reader({operator!r}, x='linear')")
    every = [a for o in overloads for a in getattr(packet, o)._schema.arguments]
    # Some arguments are a tensor in one overload and a number in another.
    arguments = {a.name: any(b.name == a.name and "Tensor" in str(b.type) for b in every) for a in every}
    for operand in named:
        if operand != "result" and not arguments.get(operand):
            tensors = [name for name, is_tensor in arguments.items() if is_tensor]
            wrong = "is no tensor" if operand in arguments else "is not there"
            raise ValueError(f"argument {operand!r} of {operator!r} {wrong}; known: {', '.join((*tensors, 'result'))}")
    return {operand: _reading(operator, operand, exactness) for operand, exactness in named.items()}
