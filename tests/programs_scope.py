"""The tensors that live in a training program while it is drawn, and what the names in rows stand for."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from programs_statements import ACTIVATIONS, FRESH, FUNCTIONS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

NAME = re.compile(r"\b(?:self\.)?[tpxmf]\d+\b")
LARGEST, SMALLEST = 4096, 2
# Beyond this a tensor is scaled down, so that products of several stay finite and no gradient drowns the others.
_LARGE = 20.0
# The part of tensors that are not finite, or large, that lives as it is.
_LET_GO = 0.05

# Shapes that a row may ask for where no tensor of their rank lives.
_SHAPES = {1: (16,), 2: (4, 8), 3: (2, 4, 8), 4: (2, 2, 4, 4)}


@dataclass(frozen=True)
class Statement:
    """Lines of source; of a block the lines before and after its body."""

    kind: str
    head: str
    body: tuple[Statement, ...] = ()
    tail: str = ""

    def lines(self) -> list[str]:
        """Return its source."""
        inner = ["    " + line for statement in self.body for line in statement.lines()]
        return [*self.head.splitlines(), *inner, *self.tail.splitlines()]

    def text(self) -> str:
        """Return its source as one string."""
        return "\n".join(self.lines())


class _Names(dict[str, str]):
    """What stands for the names in a row: drawn where they first appear, and then the same."""

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self._scope = scope

    def __missing__(self, name: str) -> str:
        self[name] = value = str(getattr(self._scope, name)())
        return value


class Scope:
    """Statements so far, and the tensors that they made.

    Each statement runs when it is added, so that the next knows what there is to work with. Public methods are the
    names in rows.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._setup: list[Statement] = []
        self._statements: list[Statement] = []
        self._live: list[str] = []
        self._used: set[str] = set()
        self._env = {"torch": torch, "nn": nn, "F": F, "checkpoint": checkpoint, "self": nn.Module()}
        self._made = 0
        self._names = _Names(self)
        self._current = torch.empty(0)
        self._text = ""
        self._dim = 0
        for source in FUNCTIONS.values():
            exec(source, self._env)
        self._sizes = rng.choice([2, 3, 4, 5]), rng.choice([4, 6, 8]), rng.choice([4, 8, 12, 16, 32])
        if rng.random() < 0.1:
            self._sizes = 8, 16, 32

    def _fill(self, row: str) -> str:
        self._names = _Names(self)
        return row.format_map(self._names)

    def _run(self, statement: Statement, where: list[Statement]) -> None:
        source = statement.text()
        exec(source, self._env)
        where.append(statement)
        target, _, rest = source.partition(" = ")
        self._used.update(NAME.findall(rest or target))

    def _new(self) -> str:
        self._made += 1
        return f"t{self._made}"

    def _tensor(self, name: str) -> Tensor:
        return eval(name, self._env)

    def _assign(self, kind: str, expression: str) -> str:
        """Add an assignment; what it makes lives, scaled down where it is large."""
        name = self._new()
        self._run(Statement(kind, f"{name} = {expression}"), self._statements)
        made = self._env[name]
        if isinstance(made, (tuple, list)):
            self._statements.pop()
            names = [name, *(self._new() for _ in made[1:])]
            self._run(Statement(kind, f"{', '.join(names)} = {expression}"), self._statements)
        else:
            names = [name]
        floats = [each for each in names if self._env[each].is_floating_point()]
        for each in floats:
            if not 1 <= self._env[each].numel() <= LARGEST:
                raise ValueError("too small or too large")
            self._tame(each)
        return floats[-1]

    def _tame(self, name: str) -> None:
        """Let a tensor live, or what scales it down."""
        tensor = self._tensor(name).detach()
        largest = float(tensor.abs().max())
        if not largest < float("inf") and self._rng.random() > _LET_GO:
            raise ValueError("not finite")
        if name not in self._live:
            self._live.append(name)
        if largest > _LARGE and self._rng.random() > _LET_GO:
            how = "torch.tanh({0})" if self._rng.random() < 0.2 else f"{{0}} * {1 / largest:.2g}"
            self._live.remove(name)
            self._assign("scale", how.format(name))

    # The names in rows

    def _pick(self, suits: Callable[[Tensor], bool], rank: int | None = None) -> str:
        names = [n for n in self._live if suits(t := self._tensor(n)) and t.dim() > 0 and t.numel() >= SMALLEST]
        if names:
            # What was made last, and what nothing reads yet.
            weights = [1 + i + 4 * (name not in self._used) for i, name in enumerate(names)]
            name = self._rng.choices(names, weights)[0]
        else:
            shape = _SHAPES[rank or 2]
            size = torch.Size(shape).numel()
            source = max(self._live, key=lambda each: self._tensor(each).numel())
            repeat = "" if self._tensor(source).numel() >= size else f".repeat({size})"
            name = self._assign("reshape", f"{source}.reshape(-1){repeat}[:{size}].reshape{shape}")
        return self._refer_to(name)

    def _refer_to(self, name: str) -> str:
        self._current = self._tensor(name)
        self._dim = self._rng.randrange(max(self._current.dim(), 1))
        self._text = name
        return name

    def x(self) -> str:
        return self._pick(lambda t: t.dim() >= 1)

    def m(self) -> str:
        return self._pick(lambda t: t.dim() >= 2, 2)

    def v1(self) -> str:
        return self._pick(lambda t: t.dim() == 1, 1)

    def v2(self) -> str:
        return self._pick(lambda t: t.dim() == 2, 2)

    def v3(self) -> str:
        return self._pick(lambda t: t.dim() == 3, 3)

    def v4(self) -> str:
        return self._pick(lambda t: t.dim() == 4, 4)

    def f(self) -> str:
        if self._rng.random() < 0.75:
            row = self._rng.choice(FRESH)
            outer, self._names = self._names, _Names(self)
            name = self._assign("fresh", row.format_map(self._names))
            self._names = outer
            return self._refer_to(name)
        return self.x()

    def _parameter(self, *shape: int, scale: float = 1.0) -> str:
        """Return a parameter of a shape, an old one or a new one."""
        known = [s.head.split(" = ")[0] for s in self._setup if s.kind == "parameter"]
        known = [name for name in known if tuple(self._tensor(name).shape) == shape]
        if known and self._rng.random() < 0.5:
            return self._rng.choice(known)
        name = f"self.p{len(self._setup)}"
        text = f"{name} = nn.Parameter(torch.randn({', '.join(map(str, shape))}) * {scale:.2g})"
        self._run(Statement("parameter", text), self._setup)
        return name

    def _in_dtype(self, parameter: str) -> str:
        same = self._current.dtype is torch.float32
        return parameter if same else f"{parameter}.to({self._current.dtype})"

    def p(self) -> str:
        shape = self._rng.choice([(self._sizes[2],), (self._sizes[1], self._sizes[2]), (8, 8), (4, 2, 3, 3)])
        return self._refer_to(self._parameter(*shape))

    def _beside(self) -> str:
        """Return a tensor of the shape of the current one."""
        rng, current = self._rng, self._current
        names = [n for n in self._live if n != self._text and self._tensor(n).shape == current.shape]
        if names and rng.random() < 0.6:
            name = rng.choice(names)
            other = self._tensor(name).dtype
            return name if other is current.dtype or rng.random() < 0.1 else f"{name}.to({current.dtype})"
        rows = [
            "{0}.roll(1, -1)",
            "{0}.flip(0)",
            "{0}.detach().cos()",
            "({0} * {1})",
            "{0}.sin()",
            "{0}",
            "({0} - {1})",
        ]
        if rng.random() < 0.1:
            rows = ["{0}[:1]", "{0}.mean(-1, keepdim=True)"]
        return rng.choice(rows).format(self._text, self.c())

    y = z = _beside

    def pos(self) -> str:
        rows = ["(F.softplus({0}) + 0.1)", "({0}.abs() + 0.1)", "({0}.square() + 0.05)", "{0}.sigmoid()", "{0}.exp()"]
        row = "{0}" if self._rng.random() < 0.03 else self._rng.choice(rows)
        return row.format(self._beside())

    def w(self) -> str:
        return self._in_dtype(self._parameter(self._current.shape[-1]))

    w2 = w

    def wm(self) -> str:
        last = self._current.shape[-1]
        return self._in_dtype(self._parameter(last, int(self._names["out"]), scale=last**-0.5))

    def wk(self) -> str:
        return self._in_dtype(self._parameter(int(self._names["out"])))

    def kernel(self) -> str:
        return self._in_dtype(self._parameter(4, self._current.shape[1], 3, 3, scale=0.2))

    def kernel1(self) -> str:
        return self._in_dtype(self._parameter(4, self._current.shape[1], 2, scale=0.4))

    def mask(self) -> str:
        if self._rng.random() < 0.5:
            return f"({self._beside()} > 0)"
        return f"(torch.arange({self._current.numel()}) % 3 == 0).view({self.shape()})"

    def cells(self) -> str:
        return f"(torch.arange({self._current.numel()}) * 5 % {self.n()}).view({self.shape()})"

    def labels(self) -> str:
        return f"((torch.arange({self.rows()}) * 3 + 1) % {self.classes()})"

    def _indices(self, size: int) -> str:
        return f"torch.tensor({[self._rng.randrange(size) for _ in range(self._rng.randint(2, 5))]})"

    def i(self) -> str:
        return self._indices(self.n())

    def i0(self) -> str:
        return self._indices(self._current.shape[0])

    def i1(self) -> str:
        return self._indices(self._current.shape[1])

    def d(self) -> int:
        return self._dim

    def other(self) -> int:
        return self._rng.randrange(self._current.dim())

    def n(self) -> int:
        return int(self._current.shape[self._dim])

    def last(self) -> int:
        return int(self._current.shape[-1])

    classes = last

    def rows(self) -> int:
        return int(self._current.shape[-2])

    def channels(self) -> int:
        return int(self._current.shape[1])

    def rank(self) -> int:
        return self._current.dim()

    def shape(self) -> tuple[int, ...]:
        return tuple(self._current.shape)

    def permutation(self) -> tuple[int, ...]:
        return tuple(self._rng.sample(range(self._current.dim()), self._current.dim()))

    def k(self) -> int:
        return self._rng.randint(1, min(self.n(), 4))

    def start(self) -> int:
        return self._rng.randint(0, self.n() - 4) if self.n() > 4 else 0

    def at(self) -> int:
        return self._rng.randrange(self.n())

    def out(self) -> int:
        return self._rng.choice([4, 8, 12])

    def bit(self) -> int:
        return self._rng.randrange(2)

    def c(self) -> float:
        return self._rng.choice([0.3, 0.5, 0.7, 0.9, 1.1, 1.3, 2.0])

    def q(self) -> float:
        return self._rng.choice([0.1, 0.3, 0.5])

    def e(self) -> float:
        return self._rng.choice([2, 3, 4, 1, 0, 2.5, 0.5, 1.5, -1])

    def order(self) -> str:
        return self._rng.choice(["1", "2", "3", "1.5", "torch.inf", "-torch.inf", "4"])

    def reduce(self) -> str:
        return self._rng.choice(["sum", "prod", "mean", "amax", "amin"])

    def module(self) -> str:
        return f"self.m{len(self._setup)}"

    def function(self) -> str:
        return self._rng.choice(list(FUNCTIONS))

    def activation(self) -> str:
        return self._rng.choice(ACTIVATIONS)
