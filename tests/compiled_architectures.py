"""Architectures through compressed graphs, without code generation: ``python tests/compiled_architectures.py``.

One training step of a tiny model, compiled: plain, lossless, int8, and with checkpointing plain and int8. Lossless
gradients are bitwise those of the plain graphs; int8 ones are within 2 % of them, or as close as bfloat16 by autocast.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch._dynamo.utils
from compiled_backend import REORDERED, as_inductor

import pyactcomp
from bench.breadth import KEY, PRELOAD
from bench.breadth_measure import MIN_BYTES, Gradients, _checkpointed, differing, error, gradients, quiet
from bench.breadth_models import LIBRARIES, Pair, Step, build
from bench.breadth_pool import Failed, results
from bench.breadth_report import LIMIT
from bench.rows import ROOT, read

LIMIT_S = 300.0
NOT_COMPILED = "not built, not compiled or not repeated without compression"


class Run(NamedTuple):
    """A compiled step: gradients, how many graphs there are, and the bytes that they store less than they would."""

    gradients: Gradients
    graphs: int
    saved: int


def compiled(step: Step, **options: Any) -> Run:
    """Compile and run a step."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    if options:
        pyactcomp.compress(step, min_bytes=MIN_BYTES, **options)
    try:
        step.model.compile(backend=as_inductor)
        found = gradients(step)
        report = pyactcomp.report(step) if options else None
    finally:
        step.model._compiled_call_impl = None
        if options:
            pyactcomp.decompress(step)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return Run(found, graphs, sum(graph.before - graph.after for graph in report.graphs) if report else 0)


def failures(pair: Pair) -> tuple[list[str], int]:
    """Return the failures of a pair, and the bytes that its graphs save; ValueError where there is no reference."""
    quiet()
    try:
        step = build(pair, 0.0)
        eager = gradients(step)
        plain, again = compiled(step), compiled(step)
    except Exception as problem:  # the library's or torch's own
        raise ValueError(NOT_COMPILED) from problem
    if differing(plain.gradients, again.gradients) or error(eager, plain.gradients) > LIMIT:
        raise ValueError(NOT_COMPILED)
    found, errors = [], {}
    lossless = compiled(step, mode="lossless")
    off = error(plain.gradients, lossless.gradients)
    # Where graphs end elsewhere, other operators are decomposed, which sum in another order.
    if off > REORDERED or (lossless.graphs == plain.graphs and differing(plain.gradients, lossless.gradients)):
        found.append(f"lossless error {off:.2g}, {plain.graphs} and {lossless.graphs} graphs")
    int8 = compiled(step, mode="int8")
    errors[""] = error(plain.gradients, int8.gradients)
    if _checkpointed(step):
        exact = None
        with suppress(Exception):  # a model whose checkpointing cannot be compiled
            exact = compiled(step)
        if exact is not None:
            errors[" with checkpointing"] = error(exact.gradients, compiled(step, mode="int8").gradients)
    if not all(off <= LIMIT for off in errors.values()):
        # Last: models keep what they computed under autocast, as rotary embeddings.
        noise = error(eager, gradients(step, autocast=True))
        found += [
            f"int8 error {off:.2%}{where}, bfloat16's is {noise:.2%}"
            for where, off in errors.items()
            if not off <= max(LIMIT, noise)
        ]
    return found, int8.saved


def check(pair: Pair) -> tuple[list[str], int] | str:
    """Return :func:`failures`, or torch's reason."""
    try:
        return failures(pair)
    except ValueError as problem:
        return str(problem)


def chosen(names: Sequence[str], count: int, seed: int) -> list[Pair]:
    """Return the named pairs, or ``count`` drawn ones of different architectures that the bench built."""
    known = read(ROOT / "bench" / "results" / "breadth.json")
    everything = [Pair(*(row[name] for name in KEY)) for row in known if row["status"] == "ok"]
    if names:
        return [pair for pair in everything if str(pair) in names]
    random.Random(seed).shuffle(everything)
    return list({(pair.library, pair.architecture): pair for pair in everything}.values())[:count]


def main(check: Callable[[Pair], Any] = check) -> None:
    """Check the named or drawn pairs, each in a process of its own; print each failure, and a count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="LIBRARY/ARCHITECTURE/HEAD")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    done = Counter[str]()
    preload = (*(module for library in LIBRARIES for module in PRELOAD[library]), "torch._inductor.decomposition")
    todo = chosen(arguments.names, arguments.count, arguments.seed)
    for pair, result in results(todo, check, limit_s=LIMIT_S, workers=arguments.workers, preload=preload):
        if isinstance(result, Failed):
            done[result.kind] += 1
            outcome = f"{result.kind}: {result.reason}"
        elif isinstance(result, str):
            done[result] += 1
            outcome = result
        else:
            found, saved = result
            done["checked"] += 1
            done["with fewer bytes"] += saved > 0
            done["failed"] += bool(found)
            outcome = "; ".join(found) or f"passed, {saved} bytes less"
        sys.stdout.write(f"{pair!s:60} {outcome}\n")
        sys.stdout.flush()
    sys.stdout.write(", ".join(f"{name}: {count}" for name, count in done.items()) + "\n")
    sys.exit(done["failed"] > 0)


if __name__ == "__main__":
    main()
