"""Read from the source code of a method whether it computes a result and does nothing else.

Such a method may run on a copy of the module with other parameters, to find out what it computes.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import textwrap
import types
from typing import Any

from torch.nn import Module

_BUILTINS = ("float", "int", "bool", "len", "tuple", "list", "isinstance", "hasattr", "min", "max", "abs", "type")
# What a branch may ask of a tensor: nothing that depends on the values.
_ABOUT = ("dtype", "device", "shape", "ndim", "is_cuda", "itemsize", "dim", "size", "numel", "is_floating_point")
_STATEMENTS = (ast.Assign, ast.AnnAssign, ast.Return, ast.If, ast.With, ast.Expr, ast.Pass)
_EXPRESSIONS = (
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Call, ast.Attribute, ast.Subscript, ast.Slice),
    *(ast.Name, ast.Constant, ast.Tuple, ast.List, ast.Starred, ast.keyword, ast.JoinedStr),
)
_TORCH = ("torch", "torch.nn", "torch.nn.functional", "torch.linalg", "math")
# Random numbers, global settings, and values that leave the device.
_EXCLUDED = (
    "rand",
    "set_",
    "manual",
    "seed",
    "save",
    "load",
    "item",
    "tolist",
    "numpy",
    "backward",
    "register",
    "retain",
)


class _Impure(Exception):
    pass


@functools.lru_cache(maxsize=1024)
def is_pure(function: Any, cls: Any) -> bool:
    """Return whether a method of ``cls`` computes its result from its argument and attributes, and does nothing else.

    It assigns to local variables alone, branches on no values, writes to no tensor, draws no random numbers, and calls
    functions of torch, and methods and functions of the same kind.

    Examples
    --------
    >>> import torch
    >>> from pyactcomp.fusions.purity import is_pure
    >>> is_pure(torch.nn.LayerNorm.forward, torch.nn.LayerNorm)
    True
    >>> is_pure(torch.nn.MultiheadAttention.forward, torch.nn.MultiheadAttention)
    False
    """
    try:
        _check(function, cls, ())
    except (_Impure, OSError, TypeError, SyntaxError):
        return False
    return True


def constants(function: types.FunctionType) -> list[float]:
    """Return the floating-point constants of a function, defaults of its arguments included."""
    known = function.__code__.co_consts, function.__defaults__ or ()
    return [value for values in known for value in values if type(value) is float]


def _check(function: Any, cls: type[Module], callers: tuple[Any, ...]) -> None:
    if not isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__") or function in callers:
        raise _Impure
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    if not isinstance(tree, ast.FunctionDef) or any(not _is_static(each) for each in tree.decorator_list):
        raise _Impure
    checker = _Checker(function, cls, (*callers, function))
    for statement in tree.body:
        checker.statement(statement)


def _root(node: ast.expr) -> str | None:
    """Return the name at the beginning of a chain of attributes and elements."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _is_static(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Name) and decorator.id == "staticmethod"


class _Checker:
    """Checks the body of one function; raises if it does anything but compute."""

    def __init__(self, function: types.FunctionType, cls: type[Module], callers: tuple[Any, ...]) -> None:
        self._function, self._cls, self._callers = function, cls, callers

    def statement(self, node: ast.stmt) -> None:
        """Check a statement."""
        if not isinstance(node, _STATEMENTS):
            raise _Impure
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._local(target)
                self._expression(value)
            case ast.AnnAssign(target=target, value=value):
                self._local(target)
                if value is not None:
                    self._expression(value)
            case ast.If(test=test, body=body, orelse=orelse):
                self._test(test)
                for each in (*body, *orelse):
                    self.statement(each)
            case ast.With(items=items, body=body):
                for item in items:
                    if item.optional_vars is not None:
                        raise _Impure
                    self._expression(item.context_expr)
                for each in body:
                    self.statement(each)
            case ast.Return(value=ast.expr() as value) | ast.Expr(value=value):
                self._expression(value)

    def _local(self, target: ast.expr) -> None:
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        if not all(isinstance(name, ast.Name) for name in names):
            raise _Impure

    def _test(self, node: ast.AST) -> None:
        """Check the test of a branch."""
        match node:
            case ast.Attribute(value=ast.Name("self")) | ast.Attribute(attr="dtype" | "device" | "shape" | "ndim"):
                return
            case ast.Call(func=ast.Attribute(attr=name)) if name in _ABOUT:
                return
            case ast.Name(id=name) if self._global(name) is None:
                raise _Impure  # a local variable, perhaps a tensor
        for part in ast.iter_child_nodes(node):
            self._test(part)
        if isinstance(node, ast.expr):
            self._expression(node)

    def _expression(self, node: ast.AST) -> None:
        if isinstance(node, (ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context)):
            return
        if not isinstance(node, _EXPRESSIONS):
            raise _Impure
        match node:
            case ast.IfExp(test=test):
                self._test(test)
            case ast.Call(func=func):
                self._call(func)
            case ast.Attribute(attr="data" | "grad" | "training" | "__dict__") | ast.keyword(arg="out"):
                raise _Impure
        for part in ast.iter_child_nodes(node):
            self._expression(part)

    def _call(self, func: ast.expr) -> None:
        match func:
            case ast.Name(id=name):
                called = self._global(name)
                if name != "super" and called is not getattr(builtins, name, _Impure):
                    self._called(called)
                elif name != "super" and name not in _BUILTINS:
                    raise _Impure
            case ast.Attribute(value=ast.Name("self"), attr=name):
                self._called(inspect.getattr_static(self._cls, name, None))
            case ast.Attribute(value=ast.Call(func=ast.Name("super"), args=[]), attr=name):
                self._called(self._inherited(name))
            case ast.Attribute(value=value, attr=name):
                module, root = self._module(value), _root(value)
                foreign = module is not None and module.__name__ not in _TORCH
                # A method of a global object may do anything.
                if module is None and root is not None and root not in self._function.__code__.co_varnames:
                    raise _Impure
                if foreign or name.endswith("_") or name.startswith(_EXCLUDED):
                    raise _Impure
            case _:
                raise _Impure

    def _called(self, called: Any) -> None:
        called = called.__func__ if isinstance(called, staticmethod) else called
        name = getattr(called, "__name__", "_")
        of_torch = (getattr(called, "__module__", None) or "").split(".")[0] in ("torch", "math")
        if not of_torch:
            _check(called, self._cls, self._callers)
        elif name.endswith("_") or name.startswith(_EXCLUDED):
            raise _Impure

    def _inherited(self, name: str) -> Any:
        """Return the method of a base class that ``super()`` finds."""
        owner = self._function.__qualname__.rpartition(".")[0]
        bases = self._cls.__mro__
        own = next((i for i, base in enumerate(bases) if base.__qualname__ == owner), len(bases))
        found = (vars(base)[name] for base in bases[own + 1 :] if name in vars(base))
        return next(found, None)

    def _global(self, name: str) -> Any:
        scope = self._function.__globals__
        return scope.get(name, getattr(builtins, name, None))

    def _module(self, node: ast.expr) -> types.ModuleType | None:
        """Return the module named by an expression such as ``torch.linalg``."""
        match node:
            case ast.Name(id=name):
                found = self._global(name)
            case ast.Attribute(value=value, attr=name):
                found = getattr(self._module(value), name, None)
            case _:
                found = None
        return found if isinstance(found, types.ModuleType) else None
