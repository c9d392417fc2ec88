"""Random programs through compressed graphs, without code generation: ``python tests/compiled_programs.py --seed 0``.

Each program runs compiled: plain, lossless and int8. Where int8 is off by more than 5 %, one more run rounds what int8
packs to bfloat16.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import types
from collections import Counter
from typing import Any
from unittest import mock

import programs
import programs_check
import torch
from compiled_backend import as_inductor
from programs_check import ALLOWED, TIMES_BFLOAT16, Outcome, all_same, relative_error, same_error

import pyactcomp
from pyactcomp.compiled import plans
from pyactcomp.readers.forms import BFLOAT16


def compiled(namespace: dict[str, Any], **options: Any) -> tuple[Outcome, int]:
    """Run a program compiled; return the outcome, and the bytes that graphs store as codes."""
    torch._dynamo.reset()
    models = []

    def model() -> Any:
        built = namespace["Model"]()
        if options:
            pyactcomp.compress(built, **options)
        models.append(built)
        built.compile(backend=as_inductor)
        return built

    outcome = programs_check.run({**namespace, "Model": model, "HOW": "compiled", "STEPS": 1})
    graphs = pyactcomp.report(models[0]).graphs if options and models else ()
    return outcome, sum(value.after for graph in graphs for value in graph.saved if value.form == "codes")


def failures(namespace: dict[str, Any]) -> tuple[list[str], int] | None:
    """Return what differs between plain and compressed graphs, and the bytes in codes; None where torch fails."""
    # A marked class has a frame of its own, so graphs break elsewhere: compare with graphs of the same frames.
    nothing = {"mode": "lossless", "min_bytes": 2**62}
    plain, _ = compiled(namespace, **nothing)
    again, _ = compiled(namespace, **nothing)
    if plain.error is not None or not all_same(again.gradients, plain.gradients):
        return None
    found = []
    lossless, _ = compiled(namespace, mode="lossless", min_bytes=1)
    if not same_error(lossless, plain):
        found.append(f"lossless raises {lossless.error}")
    elif not all_same(lossless.gradients, plain.gradients):
        found.append(f"lossless gradient, {relative_error(lossless, plain):.2%}")
    int8, codes = compiled(namespace, min_bytes=1)
    if not same_error(int8, plain):
        found.append(f"int8 raises {int8.error}")
        return found, codes
    pairs = list(zip(int8.gradients, plain.gradients, strict=True))
    if any(a is not None and b is not None and bool((b.isfinite() & ~a.isfinite()).any()) for a, b in pairs):
        found.append("int8 not finite")
    error = relative_error(int8, plain)
    if error > ALLOWED:
        with mock.patch.object(plans, "_code_plan", return_value=plans._halves_plan(BFLOAT16)):
            rounded, _ = compiled(namespace, min_bytes=1)
        of_rounding = relative_error(rounded, plain) if same_error(rounded, plain) else math.inf
        allowed = max(ALLOWED, TIMES_BFLOAT16 * of_rounding)
        if of_rounding < 1 and error > allowed:
            found.append(f"int8 error {error:.2%}, allowed {allowed:.2%}")
    return found, codes


def module_of(program: programs.Program) -> dict[str, Any]:
    """Return a program as a module: Dynamo imports the modules of the functions that it inlines."""
    module = types.ModuleType(f"program_{program.seed}")
    sys.modules[module.__name__] = module
    exec(compile(program.text(), f"<program {program.seed}>", "exec"), module.__dict__)
    return module.__dict__


def main() -> None:
    """Draw programs until their number or the time is reached; print each failure with its source."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=math.inf)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    begin, done = time.monotonic(), Counter[str]()
    for index in range(arguments.count):
        if time.monotonic() - begin > arguments.seconds:
            break
        program = programs.generate(arguments.seed * programs._SWEEP + index)
        done["programs"] += 1
        # While torch traces a view of an inference tensor it fails, and leaves its dispatch keys on.
        result = None if "inference_mode" in program.text() else failures(module_of(program))
        if result is None:
            done["not compiled, or not repeated, by torch"] += 1
            continue
        found, codes = result
        done["with codes"] += codes > 0
        for failure in found:
            done[failure.split(",")[0].split(" raises")[0]] += 1
            sys.stdout.write(f"--- {program.seed}: {failure}\n{program.text()}\n")
            sys.stdout.flush()
    sys.stdout.write(", ".join(f"{name}: {count}" for name, count in done.items()) + "\n")


if __name__ == "__main__":
    main()
