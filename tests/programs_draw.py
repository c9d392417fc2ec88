"""Draws the statements of a training program: each runs at once, so that the next knows what there is to work with."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from programs_functions import FUNCTIONS
from programs_rows import ACTIVATIONS, EDITS, FRESH, MODULES, ROWS, SILENT_EDITS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

NAME = re.compile(r"\b(?:self\.)?[tpxmf]\d+\b")
LARGEST, SMALLEST = 4096, 2
# Beyond this a tensor is scaled down, so that products of several stay finite and no gradient drowns the others.
_LARGE = 20.0
_TRIES = 12
# Of what torch makes of an edit that its version check forbids, or that would be nothing but NaN, a part stays in.
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

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self._draw = draw

    def __missing__(self, name: str) -> str:
        self[name] = value = str(getattr(self._draw, name)())
        return value


class Draw:
    """Statements so far, and the tensors that they made.

    Methods without a verb are the names in rows.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.setup: list[Statement] = []
        self.inputs: list[Statement] = []
        self.scope: list[Statement] = []
        self.live: list[str] = []
        self.used: set[str] = set()
        self._owner = nn.Module()
        self._env = {"torch": torch, "nn": nn, "F": F, "checkpoint": checkpoint, "self": self._owner}
        self._made = 0
        self._depth = 0
        self._names = _Names(self)
        self._current = torch.empty(0)
        self._dim = 0
        for source in FUNCTIONS.values():
            exec(source, self._env)
        floats = [torch.float32] * 12 + [torch.bfloat16, torch.float16, torch.float64]
        self.dtype = rng.choice(floats)
        self._sizes = rng.choice([2, 3, 4, 5]), rng.choice([4, 6, 8]), rng.choice([4, 8, 12, 16, 32])
        if rng.random() < 0.1:
            self._sizes = 8, 16, 32
        for _ in range(rng.randint(1, 3)):
            self._add_input()

    # What a program is made of

    def _add_input(self) -> None:
        rng, (b, t, d) = self.rng, self._sizes
        shape = rng.choice([(b * t, d), (b, t, d), (b, t, d), (b * t, d), (b, 4, 4, 4), (b, d), (t * d,)])
        how = "" if self.dtype is torch.float32 or rng.random() < 0.15 else f", dtype={self.dtype}"
        grad = ".requires_grad_()" if not self.inputs or rng.random() < 0.8 else ""
        name = f"x{len(self.inputs)}"
        self._run(Statement("input", f"{name} = torch.randn({', '.join(map(str, shape))}{how}){grad}"), self.inputs)
        self.live.append(name)

    def grow(self, count: int) -> None:
        """Add so many statements."""
        for _ in range(count):
            self._attempt(self._any)

    def add_losses(self) -> int:
        """Add what sums tensors up to one or two losses; returns how many."""
        rng = self.rng
        losses = 2 if rng.random() < 0.25 else 1
        ends = [name for name in self.live if name not in self.used][-6:]
        for name in dict.fromkeys([*ends, *rng.sample(self.live, min(len(self.live), 2))]):
            numel = self._tensor(name).numel()
            term = rng.choice(
                [
                    "{t}.square().mean()",
                    "{t}.mean()",
                    "{t}.sum() * 0.1",
                    "{t}.abs().mean()",
                    "({t}.flatten() * torch.linspace(-1, 1, {numel})).sum()",
                    "{t}.sin().sum()",
                ]
            ).format(t=name, numel=numel)
            number = rng.randrange(losses)
            text = f"losses[{number}] = losses[{number}] + {self.c()} * {term}"
            self.scope.append(Statement("loss", text))
        return losses

    def backward(self, losses: int) -> tuple[Statement, ...]:
        """Return what comes after the forward."""
        rng = self.rng
        gradients = "return torch.autograd.grad(losses[0], leaves{}, allow_unused=True)"
        kinds = ["losses[0].backward()"] * 6 + [gradients.format(part) for part in ("", "[::2]", "[-1:]", "[:1]")]
        kinds.append("losses[0].backward(retain_graph=True)\nlosses[0].backward()")
        if losses == 2:
            kinds = ["sum(losses).backward()", "losses[1].backward()\nlosses[0].backward()", *kinds[-5:]]
            kinds.append("losses[1].backward(retain_graph=True)\nlosses[0].backward()")
        late = "with torch.no_grad():\n    leaves[-1].mul_(1.1)"
        edit = (Statement("late edit", late),) if rng.random() < 0.04 else ()
        return (*edit, Statement("backward", rng.choice(kinds)))

    # Statements

    def _attempt(self, add: Callable[[], None]) -> None:
        """Add what runs, or nothing."""
        for _ in range(_TRIES):
            scope, setup, live, made = len(self.scope), len(self.setup), list(self.live), self._made
            try:
                add()
                return
            except Exception:  # whatever torch has against it
                del self.scope[scope:], self.setup[setup:]
                self.live, self._made = live, made

    def _any(self) -> None:
        rng = self.rng
        if rng.random() < 0.08 and self._depth < 2:
            rng.choice([self._add_checkpoint, self._add_checkpoint, self._add_autocast, self._add_no_grad])()
            return
        kinds = [*ROWS, "edit", "silent edit", "module"]
        weights = [weight for weight, _ in ROWS.values()] + [1.6, 0.5, 2.0]
        kind = rng.choices(kinds, weights)[0]
        if kind == "edit":
            self._add_edit(rng.choice(EDITS))
        elif kind == "silent edit":
            self._add_silent_edit(rng.choice(SILENT_EDITS))
        elif kind == "module":
            self._add_module(*rng.choice(MODULES))
        else:
            row = rng.choice(ROWS[kind][1])
            self._assign(f"{kind}: {row}", self._fill(row))

    def _fill(self, row: str) -> str:
        self._names = _Names(self)
        return row.format_map(self._names)

    def _run(self, statement: Statement, where: list[Statement]) -> None:
        source = statement.text()
        exec(source, self._env)
        where.append(statement)
        target, _, rest = source.partition(" = ")
        self.used.update(NAME.findall(rest or target))

    def _new(self) -> str:
        self._made += 1
        return f"t{self._made}"

    def _tensor(self, name: str) -> Tensor:
        return eval(name, self._env)

    def _assign(self, kind: str, expression: str) -> str:
        """Add an assignment; what it makes lives, scaled down where it is large."""
        name = self._new()
        self._run(Statement(kind, f"{name} = {expression}"), self.scope)
        made = self._env[name]
        if isinstance(made, (tuple, list)):
            self.scope.pop()
            names = [name, *(self._new() for _ in made[1:])]
            self._run(Statement(kind, f"{', '.join(names)} = {expression}"), self.scope)
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
        if not largest < float("inf") and self.rng.random() > _LET_GO:
            raise ValueError("not finite")
        if name not in self.live:
            self.live.append(name)
        if largest > _LARGE and self.rng.random() > _LET_GO:
            how = "torch.tanh({0})" if self.rng.random() < 0.2 else f"{{0}} * {1 / largest:.2g}"
            self.live.remove(name)
            self._assign("scale", how.format(name))

    def _add_edit(self, row: str) -> None:
        text = self._fill(row)
        self._run(Statement(f"edit: {row}", text), self.scope)
        self._tame(self._names["f"])

    def _add_silent_edit(self, row: str) -> None:
        text = self._fill(row)
        self._run(Statement(f"silent edit: {row}", f"with torch.no_grad():\n    {text}"), self.scope)

    def _add_module(self, call: str, maker: str) -> None:
        call = self._fill(call)
        made = maker.format_map(self._names)
        cast = "" if self._current.dtype is torch.float32 else f".to({self._current.dtype})"
        self._run(Statement("setup", f"{self._names['module']} = {made}{cast}"), self.setup)
        self._assign(f"module: {maker}", call)

    @contextlib.contextmanager
    def _block(self) -> Iterator[list[Statement]]:
        outer, self.scope = self.scope, []
        self._depth += 1
        try:
            yield self.scope
        finally:
            self.scope = outer
            self._depth -= 1

    def _add_with(self, kind: str, head: str, context: contextlib.AbstractContextManager[object]) -> None:
        with self._block() as body, context:
            self.grow(self.rng.randint(1, 4))
        if not body:
            raise ValueError("empty")
        self.scope.append(Statement(kind, head, tuple(body)))

    def _add_autocast(self) -> None:
        head = 'torch.autocast("cpu", torch.bfloat16)'
        self._add_with("autocast", f"with {head}:", eval(head))

    def _add_no_grad(self) -> None:
        head = self.rng.choice(["no_grad", "no_grad", "inference_mode"])
        self._add_with(head, f"with torch.{head}():", getattr(torch, head)())

    def _add_checkpoint(self) -> None:
        rng, outer = self.rng, self.live
        arguments = rng.sample(outer, min(len(outer), rng.randint(1, 3)))
        function = f"f{self._made}"
        self.live = list(arguments)
        with self._block() as body:
            self.grow(rng.randint(1, 5))
        made = [name for name in self.live if name not in arguments]
        result = rng.choice(made[-2:])
        self.live = outer
        reentrant = rng.random() < 0.3
        call = f"checkpoint({function}, {', '.join(arguments)}, use_reentrant={reentrant})"
        head = f"def {function}({', '.join(arguments)}):"
        self._run(
            Statement(f"checkpoint({reentrant})", head, tuple(body), f"    return {result}\n{result} = {call}"),
            self.scope,
        )
        self._tame(result)

    # The names in rows

    def _pick(self, suits: Callable[[Tensor], bool], rank: int | None = None) -> str:
        names = [n for n in self.live if suits(t := self._tensor(n)) and t.dim() > 0 and t.numel() >= SMALLEST]
        if names:
            # What was made last, and what nothing reads yet.
            weights = [1 + i + 4 * (name not in self.used) for i, name in enumerate(names)]
            name = self.rng.choices(names, weights)[0]
        else:
            shape = _SHAPES[rank or 2]
            size = torch.Size(shape).numel()
            source = max(self.live, key=lambda each: self._tensor(each).numel())
            repeat = "" if self._tensor(source).numel() >= size else f".repeat({size})"
            name = self._assign("reshape", f"{source}.reshape(-1){repeat}[:{size}].reshape{shape}")
        return self._refer_to(name)

    def _refer_to(self, name: str) -> str:
        self._current = self._tensor(name)
        self._dim = self.rng.randrange(max(self._current.dim(), 1))
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
        if self.rng.random() < 0.75:
            row = self.rng.choice(FRESH)
            outer, self._names = self._names, _Names(self)
            name = self._assign("fresh", row.format_map(self._names))
            self._names = outer
            return self._refer_to(name)
        return self.x()

    def _parameter(self, *shape: int, scale: float = 1.0) -> str:
        """Return a parameter of a shape, an old one or a new one."""
        known = [s.head.split(" = ")[0] for s in self.setup if s.kind == "parameter"]
        known = [name for name in known if tuple(self._tensor(name).shape) == shape]
        if known and self.rng.random() < 0.5:
            return self.rng.choice(known)
        name = f"self.p{len(self.setup)}"
        text = f"{name} = nn.Parameter(torch.randn({', '.join(map(str, shape))}) * {scale:.2g})"
        self._run(Statement("parameter", text), self.setup)
        return name

    def _in_dtype(self, parameter: str) -> str:
        same = self._current.dtype is torch.float32
        return parameter if same else f"{parameter}.to({self._current.dtype})"

    def p(self) -> str:
        shape = self.rng.choice([(self._sizes[2],), (self._sizes[1], self._sizes[2]), (8, 8), (4, 2, 3, 3)])
        return self._refer_to(self._parameter(*shape))

    def _beside(self) -> str:
        """Return a tensor of the shape of the current one."""
        rng, current = self.rng, self._current
        names = [n for n in self.live if n != self._text and self._tensor(n).shape == current.shape]
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
        row = "{0}" if self.rng.random() < 0.03 else self.rng.choice(rows)
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
        if self.rng.random() < 0.5:
            return f"({self._beside()} > 0)"
        return f"(torch.arange({self._current.numel()}) % 3 == 0).view({self.shape()})"

    def cells(self) -> str:
        return f"(torch.arange({self._current.numel()}) * 5 % {self.n()}).view({self.shape()})"

    def labels(self) -> str:
        return f"((torch.arange({self.rows()}) * 3 + 1) % {self.classes()})"

    def _indices(self, size: int) -> str:
        return f"torch.tensor({[self.rng.randrange(size) for _ in range(self.rng.randint(2, 5))]})"

    def i(self) -> str:
        return self._indices(self.n())

    def i0(self) -> str:
        return self._indices(self._current.shape[0])

    def i1(self) -> str:
        return self._indices(self._current.shape[1])

    def d(self) -> int:
        return self._dim

    def other(self) -> int:
        return self.rng.randrange(self._current.dim())

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
        return tuple(self.rng.sample(range(self._current.dim()), self._current.dim()))

    def k(self) -> int:
        return self.rng.randint(1, min(self.n(), 4))

    def start(self) -> int:
        return self.rng.randint(0, self.n() - 4) if self.n() > 4 else 0

    def at(self) -> int:
        return self.rng.randrange(self.n())

    def out(self) -> int:
        return self.rng.choice([4, 8, 12])

    def bit(self) -> int:
        return self.rng.randrange(2)

    def c(self) -> float:
        return self.rng.choice([0.3, 0.5, 0.7, 0.9, 1.1, 1.3, 2.0])

    def q(self) -> float:
        return self.rng.choice([0.1, 0.3, 0.5])

    def e(self) -> float:
        return self.rng.choice([2, 3, 4, 1, 0, 2.5, 0.5, 1.5, -1])

    def order(self) -> str:
        return self.rng.choice(["1", "2", "3", "1.5", "torch.inf", "-torch.inf", "4"])

    def reduce(self) -> str:
        return self.rng.choice(["sum", "prod", "mean", "amax", "amin"])

    def module(self) -> str:
        return f"self.m{len(self.setup)}"

    def function(self) -> str:
        return self.rng.choice(list(FUNCTIONS))

    def activation(self) -> str:
        return self.rng.choice(ACTIVATIONS)
