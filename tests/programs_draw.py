"""Draws the statements of a training program."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator

import torch
from programs_rows import ROWS
from programs_scope import Scope, Statement
from programs_statements import EDITS, MODULES, SILENT_EDITS

_TRIES = 12


class Draw(Scope):
    """The parts of a program: modules and parameters, inputs, statements, losses and a backward."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._inputs: list[Statement] = []
        self._depth = 0
        self._dtype = rng.choice([torch.float32] * 12 + [torch.bfloat16, torch.float16, torch.float64])
        for _ in range(rng.randint(1, 3)):
            self._add_input()

    def parts(self) -> tuple[tuple[Statement, ...], ...]:
        """Return what is set up, the inputs and the statements of the forward."""
        return tuple(self._setup), tuple(self._inputs), tuple(self._statements)

    def _add_input(self) -> None:
        rng, (b, t, d) = self._rng, self._sizes
        shape = rng.choice([(b * t, d), (b, t, d), (b, t, d), (b * t, d), (b, 4, 4, 4), (b, d), (t * d,)])
        how = "" if self._dtype is torch.float32 or rng.random() < 0.15 else f", dtype={self._dtype}"
        grad = ".requires_grad_()" if not self._inputs or rng.random() < 0.8 else ""
        name = f"x{len(self._inputs)}"
        self._run(Statement("input", f"{name} = torch.randn({', '.join(map(str, shape))}{how}){grad}"), self._inputs)
        self._live.append(name)

    def grow(self, count: int) -> None:
        """Add so many statements."""
        for _ in range(count):
            self._attempt(self._any)

    def add_losses(self) -> int:
        """Add what sums tensors up to one or two losses; returns how many."""
        rng = self._rng
        losses = 2 if rng.random() < 0.25 else 1
        ends = [name for name in self._live if name not in self._used][-6:]
        for name in dict.fromkeys([*ends, *rng.sample(self._live, min(len(self._live), 2))]):
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
            self._statements.append(Statement("loss", text))
        return losses

    def backward(self, losses: int) -> tuple[Statement, ...]:
        """Return what comes after the forward."""
        rng = self._rng
        gradients = "return torch.autograd.grad(losses[0], leaves{}, allow_unused=True)"
        kinds = ["losses[0].backward()"] * 6 + [gradients.format(part) for part in ("", "[::2]", "[-1:]", "[:1]")]
        kinds.append("losses[0].backward(retain_graph=True)\nlosses[0].backward()")
        if losses == 2:
            kinds = ["sum(losses).backward()", "losses[1].backward()\nlosses[0].backward()", *kinds[-5:]]
            kinds.append("losses[1].backward(retain_graph=True)\nlosses[0].backward()")
        late = "with torch.no_grad():\n    leaves[-1].mul_(1.1)"
        edit = (Statement("late edit", late),) if rng.random() < 0.04 else ()
        return (*edit, Statement("backward", rng.choice(kinds)))

    def _attempt(self, add: Callable[[], None]) -> None:
        """Add what runs, or nothing."""
        for _ in range(_TRIES):
            scope, setup, live, made = len(self._statements), len(self._setup), list(self._live), self._made
            try:
                add()
                return
            except Exception:  # whatever torch has against it
                del self._statements[scope:], self._setup[setup:]
                self._live, self._made = live, made

    def _any(self) -> None:
        rng = self._rng
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

    def _add_edit(self, row: str) -> None:
        text = self._fill(row)
        self._run(Statement(f"edit: {row}", text), self._statements)
        self._tame(self._names["f"])

    def _add_silent_edit(self, row: str) -> None:
        text = self._fill(row)
        self._run(Statement(f"silent edit: {row}", f"with torch.no_grad():\n    {text}"), self._statements)

    def _add_module(self, call: str, maker: str) -> None:
        call = self._fill(call)
        made = maker.format_map(self._names)
        cast = "" if self._current.dtype is torch.float32 else f".to({self._current.dtype})"
        self._run(Statement("setup", f"{self._names['module']} = {made}{cast}"), self._setup)
        self._assign(f"module: {maker}", call)

    @contextlib.contextmanager
    def _block(self) -> Iterator[list[Statement]]:
        outer, self._statements = self._statements, []
        self._depth += 1
        try:
            yield self._statements
        finally:
            self._statements = outer
            self._depth -= 1

    def _add_with(self, kind: str, head: str, context: contextlib.AbstractContextManager[object]) -> None:
        with self._block() as body, context:
            self.grow(self._rng.randint(1, 4))
        if not body:
            raise ValueError("empty")
        self._statements.append(Statement(kind, head, tuple(body)))

    def _add_autocast(self) -> None:
        head = 'torch.autocast("cpu", torch.bfloat16)'
        self._add_with("autocast", f"with {head}:", eval(head))

    def _add_no_grad(self) -> None:
        head = self._rng.choice(["no_grad", "no_grad", "inference_mode"])
        self._add_with(head, f"with torch.{head}():", getattr(torch, head)())

    def _add_checkpoint(self) -> None:
        rng, outer = self._rng, self._live
        arguments = rng.sample(outer, min(len(outer), rng.randint(1, 3)))
        function = f"f{self._made}"
        self._live = list(arguments)
        with self._block() as body:
            self.grow(rng.randint(1, 5))
        made = [name for name in self._live if name not in arguments]
        result = rng.choice(made[-2:])
        self._live = outer
        reentrant = rng.random() < 0.3
        call = f"checkpoint({function}, {', '.join(arguments)}, use_reentrant={reentrant})"
        head = f"def {function}({', '.join(arguments)}):"
        self._run(
            Statement(f"checkpoint({reentrant})", head, tuple(body), f"    return {result}\n{result} = {call}"),
            self._statements,
        )
        self._tame(result)
