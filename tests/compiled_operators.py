"""PyTorch's operators through compressed graphs, without code generation: ``python tests/compiled_operators.py``.

Gradients are compared with those of the same graph without compression, and the need of each operand with that in
``readers/table.py``: a graph may ask for more than eager code, never for less.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from unittest import mock

import torch
from compiled_backend import backend
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch_databases import operators

import pyactcomp
from pyactcomp.compiled import plans
from pyactcomp.compiled.graphs import GraphRecord
from pyactcomp.compiled.sharing import _view_chain
from pyactcomp.config import Config
from pyactcomp.engine.packing import FEWEST, Packing
from pyactcomp.readers.forms import CODES, ITSELF, RELATIVE

OPERATORS = {f"{op.name} {op.variant_test_name}".strip(): op for op in operators if torch.float32 in op.dtypes}
DRAWN = list(OPERATORS)
random.Random(1).shuffle(DRAWN)
BOUNDS = (0.02, 0.05)
"""Largest relative L2 error over all gradients of a sample in int8, and where the smallest results alone count.

Codes of a normal variable are off by 0.5 % of the deviation, and the smallest 30 % of its values have a fifth of that.
"""
ZERO = 1e-5
"""Gradients below this are rounding."""
LAXER = {
    "nn.functional.hardswish": "its comparisons are bits; between them the derivative is linear",
    "nn.functional.prelu": "its comparison is a bit",
    "nn.functional.layer_norm": "a weight made from data, of fewer elements than a group, takes 16 bits",
    "native_layer_norm": "as nn.functional.layer_norm",
    "nn.functional.group_norm": "codes where elements of one deviation fill a group; eager code asks it of one channel",
    "nn.functional.glu": "only the half inside of the sigmoid takes 16 bits",
    "cross": "a graph has its products and differences alone; those of nearly parallel vectors cancel",
    "linalg.cross": "as cross",
    "nn.functional.conv_transpose1d": "eager code asks of a product's operand that its rows are no shorter than 16",
}
"""Operators of which a graph may ask for less than eager code, and why."""
DATA = torch.full((1,), 1.5)
CONFIGS = (Config(min_bytes=0), Config(mode="lossless", min_bytes=0))


# Sizes of the databases' samples, whose own are mostly of fewer elements than a group.
SIZES = {"S": 12, "M": 16, "XS": 6}
SMALLEST = 0.3
"""Share of the results, the smallest ones, that alone count for a second loss."""


class Case(NamedTuple):
    """An operator's sample: leaves, a function of them and of data whose inputs are products, and weights of a loss.

    Without data nothing would be packed: results of parameters alone are not.
    """

    leaves: list[Tensor]
    loss: Callable[..., Tensor]
    weights: list[list[Tensor]]
    inputs: list[Tensor]
    """The operator's inputs that require grad, of the last call outside of a trace."""


@contextmanager
def _larger_samples() -> Iterator[None]:
    owners = [m for name, m in sys.modules.items() if name.startswith("torch.testing._internal.")]
    owners = [m for m in owners if isinstance(getattr(m, "S", None), int)]
    before = [{name: getattr(m, name) for name in SIZES if hasattr(m, name)} for m in owners]
    try:
        for module, sizes in zip(owners, before, strict=True):
            for name in sizes:
                setattr(module, name, SIZES[name])
        yield
    finally:
        for module, sizes in zip(owners, before, strict=True):
            for name, size in sizes.items():
                setattr(module, name, size)


def cases(name: str, dtype: torch.dtype, samples: int) -> Iterator[Case]:
    """Yield the largest samples of an operator that have a gradient."""
    op = OPERATORS[name]
    if not op.supports_autograd or dtype not in op.dtypes:
        return
    with _larger_samples():
        drawn = list(op.sample_inputs("cpu", dtype, requires_grad=True))
    for sample in sorted(drawn, key=_elements, reverse=True)[:samples]:
        case = None
        with suppress(Exception):  # sparse inputs, and others that torch cannot multiply
            case = _case(op, sample)
        if case is not None:
            yield case


def _elements(sample: Any) -> int:
    flat = tree_flatten((sample.input, sample.args, sample.kwargs))[0]
    return max((x.numel() for x in flat if isinstance(x, Tensor) and x.requires_grad), default=0)


def _case(op: Any, sample: Any) -> Case:
    flat, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    at = [k for k, x in enumerate(flat) if isinstance(x, Tensor) and x.requires_grad]
    seen: list[Tensor] = []

    def results(leaves: list[Tensor], data: Tensor) -> list[Tensor]:
        values = list(flat)
        for k, x in zip(at, leaves, strict=True):
            values[k] = x * (data if x.dim() else data.reshape(())).to(x.dtype)
        if not torch.compiler.is_compiling():
            seen[:] = [values[k] for k in at]
        first, args, kwargs = tree_unflatten(values, spec)
        outputs = [y for y in tree_flatten(op(first, *args, **kwargs))[0] if isinstance(y, Tensor)]
        outputs = [torch.view_as_real(y) if y.is_complex() else y for y in outputs]
        return [y for y in outputs if y.is_floating_point()]

    def loss(leaves: list[Tensor], data: Tensor, weights: list[Tensor]) -> Tensor:
        return sum((y * w).sum() for y, w in zip(results(leaves, data), weights, strict=True))

    leaves = [flat[k].detach().clone().requires_grad_() for k in at]
    torch.manual_seed(0)
    outputs = [y.detach() for y in results(leaves, DATA)]
    weights = [torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype) for y in outputs]
    return Case(leaves, loss, [weights, [w * _smallest(y) for y, w in zip(outputs, weights, strict=True)]], seen)


def _smallest(y: Tensor) -> Tensor:
    size = y.abs().float()
    return (size <= size.flatten().quantile(SMALLEST)).to(y.dtype) if 0 < y.numel() < 10**6 else torch.ones_like(y)


def gradients(case: Case, config: Config | None) -> list[list[Tensor | None]]:
    """Return the gradients of each loss by a graph; without a configuration by torch's own partition."""
    torch._dynamo.reset()
    records: list[GraphRecord] = []
    compiled = torch.compile(case.loss, backend=backend(config, records), fullgraph=True)
    found = []
    for weights in case.weights:
        torch.manual_seed(0)
        found.append(list(torch.autograd.grad(compiled(case.leaves, DATA, weights), case.leaves, allow_unused=True)))
    return found


def difference(case: Case, config: Config, expected: list[list[Tensor | None]]) -> str | None:
    """Return how the gradients by a compressed graph differ from the expected ones, or None."""
    for bound, got, exact in zip(BOUNDS, gradients(case, config), expected, strict=True):
        squares = [0.0, 0.0]
        for a, b in zip(got, exact, strict=True):
            if a is None or b is None:
                if a is not b:
                    return "a gradient is missing"
                continue
            finite = b.isfinite()
            a, b = a[finite], b[finite]
            if config.mode == "lossless" and not torch.equal(a, b):
                return "not bitwise the same"
            if not bool(a.isfinite().all()):
                return "non-finite where torch is not"
            squares[0] += float((a - b).abs().double().norm()) ** 2
            squares[1] += float(b.abs().double().norm()) ** 2
        error, size = (square**0.5 for square in squares)
        if config.mode == "int8" and error > bound * size + ZERO:
            return f"{error / size:.2%} off"
    return None


def laxer(case: Case) -> str | None:
    """Return an operand of which the graph needs less than the table of eager code, or None."""
    by_name: dict[str, int] = {}
    by_memory: dict[int, int] = {}

    def plan(node: Any, need: Any, *arguments: Any) -> Any:
        if need is not None:
            name = _view_chain(node)[0].name
            by_name[name] = max(by_name.get(name, 0), need.need)
        return original_plan(node, need, *arguments)

    def form_for(self: Packing, tensor: Tensor, *facts: Any) -> Any:
        form = original_form(self, tensor, *facts)
        memory = tensor.untyped_storage().data_ptr()
        by_memory[memory] = max(by_memory.get(memory, 0), form.need)
        return form

    class Eager(nn.Module):
        def forward(self, leaves: list[Tensor]) -> Tensor:
            return case.loss(leaves, DATA, case.weights[0])

    original_plan, original_form = plans._plan, Packing.form_for
    with mock.patch.object(plans, "_plan", plan):
        gradients(case, CONFIGS[0])
    with mock.patch.object(Packing, "form_for", form_for):
        torch.manual_seed(0)
        pyactcomp.compress(Eager(), min_bytes=0, fuse=False)(case.leaves)
    for number, x in enumerate(case.inputs):
        needed = by_name.get(f"mul_{number}" if number else "mul")
        eager = by_memory.get(x.untyped_storage().data_ptr())
        if needed is None or eager is None or needed < CODES:  # bits, of a comparison in the forward
            continue
        # Less than one group is stored in 16 bits.
        needed = max(needed, RELATIVE) if x.numel() < CONFIGS[0].group_size else needed
        needed = ITSELF.need if x.numel() < FEWEST else needed
        if needed < eager:
            return f"input {number}: {needed} in the graph, {eager} in eager code"
    return None


def failures(name: str, dtype: torch.dtype, samples: int = 1) -> list[str] | None:
    """Return what is wrong for an operator, or None if torch compiles no such step or it has no gradient."""
    found: list[str] | None = None
    for case in cases(name, dtype, samples):
        try:
            expected = gradients(case, None)
        except Exception:
            return found
        found = found or []
        problems = [(config.mode, difference(case, config, expected)) for config in CONFIGS]
        found += [f"{mode}: {problem}" for mode, problem in problems if problem is not None]
        problem = laxer(case) if dtype is torch.float32 and name not in LAXER else None
        found += [] if problem is None else [problem]
    return found


def main() -> None:
    """Run all operators; print each failure, and the place on a terminal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--only", metavar="NAME")
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument(
        "--part", type=int, nargs=2, default=(0, 1), metavar=("K", "N"), help="every Nth operator from K"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    begin, failed, run = time.monotonic(), 0, 0
    names = [arguments.only] if arguments.only else DRAWN[arguments.part[0] :: arguments.part[1]]
    for number, name in enumerate(names, 1):
        for dtype in (getattr(torch, each) for each in arguments.dtype):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = failures(name, dtype, arguments.samples)
            run += found is not None
            failed += bool(found)
            for problem in found or []:
                sys.stdout.write(f"{name} {dtype}: {problem}\n")
                sys.stdout.flush()
        if sys.stderr.isatty():
            sys.stderr.write(f"\r[{number}/{len(names)} {time.monotonic() - begin:.0f} s] {name:60.60}")
    sys.stdout.write(f"{run} runs of {len(names)} operators, {failed} failed\n")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
