"""Random training programs, run plain and under pyactcomp: ``python tests/programs.py --seed 0 --count 1000``.

A program is drawn from a seed: inputs and parameters, statements over the tensors that live, losses and a backward,
all as Python source. One that fails is made smaller while it fails in the same way, and printed as a script.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import programs_check
import torch
from programs_draw import Draw
from programs_scope import NAME, Statement
from programs_statements import FUNCTIONS

Namespace = dict[str, Any]
Failure = tuple[str, str]

MODES = ("lossless", "int8")
# Seeds of different sweeps do not meet before this many programs.
_SWEEP = 10_000_000
# Programs that one process runs: torch keeps the classes of autograd functions, and with them what a program defines.
_PROCESS = 2_000
_ATTEMPTS = 6
# Parts of the programs that raise in plain torch, or whose gradients are not finite or zero, that are not drawn again.
_RAISING, _DEGENERATE = 0.5, 0.1
_EDITS_OF_PARAMETERS = {"late edit", "silent edit: {p}.add_(0.1)"}
# Runs of a failing program while it is made smaller.
_MOST_CHECKS = 300

_TEXT = '''"""Program {seed}."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

SEED = {seed}
HOW = "{how}"
OPTIONS = {options}
STEPS = {steps}
{functions}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
{setup}

    def forward({arguments}):
        losses = {losses}
{forward}
        return losses


def inputs():
{inputs}
    return [{names}]


def backward(model, losses, leaves):
{backward}
'''


@dataclass(frozen=True)
class Program:
    """One program."""

    seed: int
    how: str
    options: dict[str, Any]
    steps: int
    losses: int
    setup: tuple[Statement, ...]
    inputs: tuple[Statement, ...]
    forward: tuple[Statement, ...]
    backward: tuple[Statement, ...]

    def text(self) -> str:
        """Return its source."""
        names = [statement.head.split(" = ")[0] for statement in self.inputs]
        forward = _indented(self.forward, 8)
        functions = "\n".join(source for name, source in FUNCTIONS.items() if f"{name}." in forward)
        return _TEXT.format(
            seed=self.seed,
            how=self.how,
            options=self.options,
            steps=self.steps,
            functions=functions and f"\n{functions}",
            setup=_indented(self.setup, 8),
            arguments=", ".join(["self", *names]),
            losses=[0.0] * self.losses,
            forward=forward,
            inputs=_indented(self.inputs, 4),
            names=", ".join(names),
            backward=_indented(self.backward, 4),
        )

    def namespace(self) -> Namespace:
        """Return what its source defines."""
        found: Namespace = {"__name__": "program"}
        exec(compile(self.text(), f"<program {self.seed}>", "exec"), found)
        return found

    def script(self) -> str:
        """Return a script that runs it and compares, which needs no more than torch and pyactcomp."""
        return f"{self.text()}\n\n{Path(programs_check.__file__).read_text()}\n\nmain(globals())\n"

    def kinds(self) -> list[str]:
        """Return the kinds of its statements, those in blocks too."""
        return [each.kind for part in (self.setup, self.inputs, self.forward, self.backward) for each in _all(part)]


def _indented(statements: Sequence[Statement], spaces: int) -> str:
    return "\n".join(" " * spaces + line for statement in statements for line in statement.lines())


def _all(statements: Sequence[Statement]) -> Iterator[Statement]:
    for statement in statements:
        yield statement
        yield from _all(statement.body)


def generate(seed: int) -> Program:
    """Draw a program; most that raise in plain torch, or have no finite gradients, are drawn again."""
    for attempt in range(_ATTEMPTS):
        rng = random.Random(f"{seed}/{attempt}")
        program = _draw(seed, rng)
        plain = programs_check.run(program.namespace())
        if plain.error is not None:
            keep = rng.random() < _RAISING
        else:
            found = [g for g in plain.gradients if g is not None]
            sound = bool(found) and all(bool(g.isfinite().all()) for g in found) and any(bool(g.any()) for g in found)
            keep = sound or rng.random() < _DEGENERATE
        if keep:
            break
    return program


def _draw(seed: int, rng: random.Random) -> Program:
    # Drawing runs what it draws.
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draw = Draw(rng)
        draw.grow(rng.randint(3, 25))
    losses = draw.add_losses()
    how = rng.choice(["compress", "compress", "compressed(model)", "compressed()"])
    options: dict[str, Any] = {}
    if rng.random() < 0.1:
        options["rounding"] = "stochastic"
    if rng.random() < 0.1:
        options["group_size"] = rng.choice([128, 256])
    steps = 2 if rng.random() < 0.1 else 1
    program = Program(seed, how, options, steps, losses, *draw.parts(), draw.backward(losses))
    # Parameters that change between a cast of them and its backward need it.
    if rng.random() < 0.1 or _EDITS_OF_PARAMETERS & set(program.kinds()):
        options["keep_weight_copies"] = True
    return program


def check(program: Program, modes: Sequence[str] = MODES) -> list[Failure] | None:
    """Return its failures, or None if plain torch does not repeat itself."""
    return programs_check.check(program.namespace(), modes)


def shrink(program: Program, kind: str) -> Program:
    """Return a smaller program with a failure of the same kind."""
    left, mode = _MOST_CHECKS, kind.partition(" ")[0]

    def fails(candidate: Program) -> bool:
        nonlocal left
        left -= 1
        try:
            return any(failure[0] == kind for failure in check(candidate, [mode]) or ())
        except SyntaxError:  # two arguments of one name
            return False

    smaller = True
    while smaller and left > 0:
        smaller, position = False, 0
        while left > 0 and (candidate := next(itertools.islice(_smaller(program), position, None), None)) is not None:
            if candidate != program and fails(candidate):
                # The next one in order is where this one was.
                program, smaller = candidate, True
            else:
                position += 1
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Yield programs with one thing less."""
    yield replace(program, options={})
    yield replace(program, steps=1)
    yield replace(program, how="compressed()")
    for losses in ("losses[0]", "sum(losses)"):
        yield replace(program, backward=(Statement("backward", f"{losses}.backward()"),))
    for statement in program.forward:
        if statement.kind == "loss":
            yield _only(program, statement)
    for start, end in _halves(len(program.forward)):
        yield _without(program, program.forward[start:end])
    for part in ("forward", "setup", "inputs"):
        for statement in reversed(list(_all(getattr(program, part)))):
            yield _without(program, (statement,))
    for statement in reversed(list(_all(program.forward))):
        if statement.body:
            yield _with(program, statement, statement.body)
        made, _, value = statement.head.partition(" = ")
        if NAME.fullmatch(made) and not statement.body:
            for name in dict.fromkeys(NAME.findall(value)):
                yield _renamed(_with(program, statement, ()), made, name)


def _only(program: Program, loss: Statement) -> Program:
    """Return a program with one term of its losses and what that needs."""
    needed = set(NAME.findall(loss.head))
    kept = []
    for statement in reversed(program.forward):
        if statement is loss or (statement.kind != "loss" and needed & _written(statement)):
            kept.append(statement)
            needed.update(NAME.findall(statement.text()))
    parts = {
        part: tuple(each for each in getattr(program, part) if needed & _written(each)) for part in ("setup", "inputs")
    }
    return replace(program, forward=tuple(reversed(kept)), **parts)


def _written(statement: Statement) -> set[str]:
    """Return what a statement makes, or else what it writes to."""
    edited = NAME.findall(statement.head)[:1] if not statement.body else []
    return {*(_made(statement) or edited), *(name for each in statement.body for name in _written(each))}


def _with(program: Program, old: Statement, new: Sequence[Statement]) -> Program:
    """Return a program with other statements in place of one."""
    return replace(program, forward=_mapped(program.forward, lambda each: new if each is old else (each,)))


def _renamed(program: Program, old: str, new: str) -> Program:
    """Return a program that reads one tensor where it read another."""

    def rename(text: str) -> str:
        return NAME.sub(lambda name: new if name[0] == old else name[0], text)

    def renamed(statement: Statement) -> Statement:
        body = tuple(map(renamed, statement.body))
        return replace(statement, head=rename(statement.head), body=body, tail=rename(statement.tail))

    return replace(program, forward=tuple(map(renamed, program.forward)))


def _halves(count: int) -> Iterator[tuple[int, int]]:
    size = count // 2
    while size > 1:
        for start in range(0, count, size):
            yield start, start + size
        size //= 2


def _mapped(
    statements: Sequence[Statement], change: Callable[[Statement], Sequence[Statement]]
) -> tuple[Statement, ...]:
    found: list[Statement] = []
    for statement in statements:
        for each in change(statement):
            if each is not statement or not each.body:
                found.append(each)
            elif (body := _mapped(each.body, change)) or each.tail:
                found.append(replace(each, body=body))
    return tuple(found)


def _without(program: Program, dropped: Sequence[Statement]) -> Program:
    """Return a program without statements and without what reads what they make."""
    gone = {id(each) for each in _all(dropped)}
    missing = {name for each in _all(dropped) for name in _made(each)}

    def keep(statement: Statement) -> Sequence[Statement]:
        if id(statement) in gone or missing & set(NAME.findall(statement.head + statement.tail)):
            missing.update(_made(statement))
            return ()
        return (statement,)

    parts = {part: _mapped(getattr(program, part), keep) for part in ("setup", "inputs", "forward")}
    return replace(program, **parts)


def _made(statement: Statement) -> list[str]:
    target, _, value = (statement.tail or statement.head).strip().rpartition("\n")[-1].partition(" = ")
    return NAME.findall(target) if value else []


@dataclass
class Sweep:
    """What came out of many programs."""

    programs: int = 0
    skipped: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    failing: list[tuple[Program, Failure]] = field(default_factory=list)

    def add(self, program: Program, modes: Sequence[str] = MODES) -> list[Failure]:
        """Check one program, and note what comes out; returns its failures."""
        failures = check(program, modes)
        self.programs += 1
        if failures is None:
            self.skipped += 1
            return []
        self.failures.update(kind for kind, _ in failures)
        self.failing += [(program, failure) for failure in failures]
        return failures

    def join(self, other: Sweep) -> None:
        """Add the outcome of other programs."""
        self.programs += other.programs
        self.skipped += other.skipped
        self.failures.update(other.failures)
        self.failing += other.failing

    def __str__(self) -> str:
        kinds = "".join(f", {kind}: {count}" for kind, count in sorted(self.failures.items()))
        return f"{self.programs} programs, {self.skipped} that plain torch does not repeat{kinds or ', no failure'}"


def seed_of(sweep: int, number: int) -> int:
    """Return the seed of a program of a sweep."""
    return sweep * _SWEEP + number


def failure_text(program: Program, failure: Failure) -> str:
    """Return what is printed of a failure: its kind, and the smallest script that was found.

    A failure that depends on more than the program, as on addresses, may not repeat: then the whole program is printed.
    """
    kind, detail = failure
    small = shrink(program, kind)
    again = dict(check(small) or ()).get(kind)
    if again is None:
        small, again = program, f"{detail} (once; not when run again)"
    detail = again
    rows = sorted({each.kind for each in _all(small.forward)} - {"loss"})
    return f"# {kind}: {detail}\n# {' | '.join(rows)}\n{small.script()}"


@dataclass(frozen=True)
class Part:
    """Programs of a sweep for one process, by number."""

    seed: int
    numbers: range
    modes: Sequence[str]


def _begin() -> None:
    torch.set_num_threads(1)
    # A crash of torch itself names its program: it is the name of a file.
    faulthandler.enable()


def run_part(part: Part) -> tuple[Sweep, list[tuple[str, int, str]]]:
    """Run programs; return the outcome, and the kind, the number and the script of each failure."""
    sweep, texts = Sweep(), []
    for number in part.numbers:
        program = generate(seed_of(part.seed, number))
        texts += [(failure[0], number, failure_text(program, failure)) for failure in sweep.add(program, part.modes)]
    return sweep, texts


def _publish(text: str, kind: str, number: int, folder: Path | None) -> None:
    if folder is None:
        sys.stdout.write(f"{text}\n")
        return
    folder.mkdir(parents=True, exist_ok=True)
    name = "_".join(re.findall(r"\w+", kind))
    (folder / f"{name}_{number}.py").write_text(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sweep; the exit code is 1 where a program fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the sweep")
    parser.add_argument("--count", type=int, default=1000, help="programs")
    parser.add_argument("--start", type=int, default=0, help="number of the first program")
    parser.add_argument("--workers", type=int, default=1, help="processes at a time")
    parser.add_argument("--scripts", type=Path, help="directory to write the scripts of failures to, not to stdout")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    options = parser.parse_args(arguments)
    end = options.start + options.count
    size = min(_PROCESS, -(-options.count // options.workers))
    starts = range(options.start, end, size)
    parts = [Part(options.seed, range(start, min(start + size, end)), options.modes) for start in starts]
    sweep = Sweep()
    with ExitStack() as stack:
        run: Any = map
        if len(parts) > 1:
            run = stack.enter_context(get_context("spawn").Pool(options.workers, _begin, maxtasksperchild=1)).imap
        for found, texts in run(run_part, parts):
            sweep.join(found)
            for kind, number, text in texts:
                _publish(text, kind, number, options.scripts)
            sys.stderr.write(f"at program {options.start + sweep.programs}: {sweep}\n")
    sys.stdout.write(f"{sweep}\n")
    return int(bool(sweep.failing))


if __name__ == "__main__":
    _begin()
    sys.exit(main())
