"""Read the formula of a function from the source code.

Model families define the same small module many times under different names. Comparing formulas, not names, tells
a family apart whose norm adds one to the weight.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch.nn import Module


@functools.cache
def _definitions(module: str) -> dict[str, ast.FunctionDef]:
    """Return the functions and methods defined in the file of a loaded module, by qualified name."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):
        return {}
    found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}": part for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


def definition(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """Return the syntax tree of a function; None if the source is missing or a wrapper's from another file."""
    code = getattr(function, "__code__", None)
    if code is None or code.co_filename != getattr(sys.modules.get(function.__module__), "__file__", None):
        return None
    return _definitions(function.__module__).get(function.__qualname__)


def forward_of(cls: type[Module]) -> ast.FunctionDef | None:
    """Return the syntax tree of the ``forward`` in the source of a class, even if ``forward`` was replaced since."""
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    return _definitions(owner.__module__).get(f"{owner.__qualname__}.forward")


class _Inline(ast.NodeTransformer):
    """Replaces local variables by the assigned expressions."""

    def __init__(self, values: dict[str, ast.expr]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._values.get(node.id, node)


@functools.cache
def formula(function: ast.FunctionDef | None) -> str | None:
    """Return the returned expression in terms of the parameters; None unless the body only assigns and returns.

    Examples
    --------
    >>> import torch
    >>> from pyactcomp.fusions.formulas import formula, forward_of
    >>> formula(forward_of(torch.nn.SiLU))
    'F.silu(input, inplace=self.inplace)'
    """
    values: dict[str, ast.expr] = {}
    for statement in copy.deepcopy(function.body) if function is not None else ():
        match statement:
            case ast.Expr(value=ast.Constant()):  # the docstring
                continue
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values[name] = _Inline(dict(values)).visit(value)
            case ast.Return(value=ast.expr() as value):
                return ast.unparse(_Inline(values).visit(value))
            case _:
                return None
    return None


@functools.cache
def attributes_read(method: ast.FunctionDef | None) -> tuple[str, ...] | None:
    """Return the attributes that a method reads from ``self``, once a read; None if it uses ``self`` in another way."""
    read: list[str] = []
    names: list[str] = []
    for node in ast.walk(method) if method is not None else ():
        match node:
            case ast.Attribute(value=ast.Name("self"), attr=attribute, ctx=ast.Load()):
                read.append(attribute)
            case ast.Name(id=name):
                names.append(name)
    return tuple(read) if names.count("self") == len(read) and "super" not in names else None


@functools.cache
def calls_in_turn(method: ast.FunctionDef | None) -> Mapping[str, str]:
    """Return the children whose output one other child takes, and nothing else can: {child: the one called next}.

    The method is ``x = self.child(x)`` and ``x = self.next(x)`` in direct succession, calls neither once more, and
    reads attributes of ``self`` only.
    """
    read = attributes_read(method) or ()
    found: dict[str, str] = {}
    for node in ast.walk(method) if method is not None else ():
        body = getattr(node, "body", None)
        for statement, following in itertools.pairwise(body if isinstance(body, list) else ()):
            first, second = _variable_and_child(statement), _variable_and_child(following)
            if first and second and first[0] == second[0] and read.count(first[1]) == read.count(second[1]) == 1:
                found[first[1]] = second[1]
    return found


def _variable_and_child(statement: ast.stmt) -> tuple[str, str] | None:
    """Return the variable and the child of a statement ``x = self.child(x)``."""
    match statement:
        case ast.Assign(
            targets=[ast.Name(id=target)], value=ast.Call(func=called, args=[ast.Name(id=name)], keywords=[])
        ):
            match called:
                case ast.Attribute(value=ast.Name("self"), attr=child) if name == target:
                    return name, child
    return None


@functools.cache
def children_after(method: ast.FunctionDef | None, first: ast.FunctionDef | None) -> tuple[str, ...]:
    """Return the children that a method calls in turn on what another method returns; none if it does anything else.

    ``method`` has the statements of ``first``, with other names and checks of its argument, gives the result to one
    child, that one's to the next, and returns the last.
    """
    *expected, last = _statements(first)
    body = _statements(method)
    own, rest, returned = body[: len(expected) + 1], body[len(expected) + 1 : -1], body[-1:]
    steps = [step[1] for step in map(_variable_and_child, rest) if step is not None]
    match last, own[-1:], returned:
        case ast.Return(ast.expr() as value), [ast.Assign([ast.Name("input")], result)], [
            ast.Return(ast.Name("input"))
        ]:
            pairs = zip([*expected, value], [*own[:-1], result], strict=True)
            same = all(ast.dump(a) == ast.dump(b) for a, b in pairs)
            return tuple(steps) if same and len(steps) == len(rest) else ()
    return ()


def _statements(method: ast.FunctionDef | None) -> list[ast.stmt]:
    """Return the statements of a method, its argument under the name ``input``, without texts and leading checks."""
    if method is None or not method.args.args:
        return [ast.Pass()]
    method = copy.deepcopy(method)
    for node in ast.walk(method):
        if isinstance(node, ast.Name) and node.id == method.args.args[-1].arg:
            node.id = "input"
        inside = getattr(node, "body", None)
        if isinstance(inside, list):
            inside[:] = [each for each in inside if not _is_text(each)]
    return list(itertools.dropwhile(_is_check, method.body))


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_check(statement: ast.stmt) -> bool:
    """Return whether a statement calls torch's check of the dimensions, or reads attributes of the argument alone."""
    match statement:
        case ast.Expr(ast.Call(ast.Attribute(ast.Name("self"), "_check_input_dim"))):
            return True
        case ast.Expr(ast.Call(func=called, args=args, keywords=[])):
            inside = [node for each in args for node in ast.walk(each)]
            read = [node.value for node in inside if isinstance(node, ast.Attribute)]
            names = (node for node in (*ast.walk(called), *inside) if isinstance(node, ast.Name))
            return all(name in read for name in names if name.id in ("input", "self"))
    return False


@functools.cache
def children_fed(method: ast.FunctionDef | None) -> frozenset[str]:
    """Return the children called with the first argument of a method; none if the argument is used elsewhere too.

    Reading the argument's shape, size or device does not count as a use.

    Examples
    --------
    >>> import torch
    >>> from pyactcomp.fusions.formulas import children_fed, definition
    >>> children_fed(definition(torch.nn.TransformerEncoderLayer._ff_block))
    frozenset({'linear1'})
    """
    if method is None or len(method.args.args) < 2:
        return frozenset()
    uses = _Uses(method.args.args[1].arg)
    uses.follow(method.body)
    return frozenset(uses.children) if uses.known else frozenset()


class _Uses:
    """Collects the children called with the initial value of a name, until the name is assigned to."""

    def __init__(self, name: str) -> None:
        self.known = True
        self.children: set[str] = set()
        self._name = name

    def follow(self, statements: list[ast.stmt]) -> bool:
        """Visit statements in order until every path has assigned to the name; return whether every path has."""
        return any(self._assigns(statement) for statement in statements)

    def _assigns(self, statement: ast.stmt) -> bool:
        if isinstance(statement, ast.If):
            self._read(statement.test)
            branches = self.follow(statement.body), self.follow(statement.orelse)
            return all(branches)
        self._read(statement)
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)]):
                return name == self._name
            case _:
                return False

    def _read(self, node: ast.AST) -> None:
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name("self"), attr=child), args=[ast.Name(id=name)], keywords=[]
            ) if name == self._name:
                self.children.add(child)
            case ast.Attribute(value=ast.Name(id=name), attr="shape" | "size" | "device") if name == self._name:
                return
            case ast.Name(id=name, ctx=ast.Load()) if name == self._name:
                self.known = False
            case _:
                for part in ast.iter_child_nodes(node):
                    self._read(part)
