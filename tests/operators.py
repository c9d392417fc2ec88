"""Gradients of all of PyTorch's operators and modules with compressed saved tensors, against those of plain torch.

The entries and their inputs are PyTorch's own (``torch_databases``), and a few ``compositions``. Float inputs that
require grad are made results of other operators, which alone may be packed, in several layouts. ``python
tests/operators.py --help`` runs all samples; ``test_operators.py`` runs some of each entry.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
import torch_databases
from compositions import compositions
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import pyactcomp

MODES = ("lossless", "int8")
WIDE = "float64"
DTYPES = (torch.float32, torch.bfloat16)
LAYOUTS = ("plain", "transposed", "gaps", "cast")
FORMS = ("function", "method", "in place")
BOUND = 0.02
"""Largest relative L2 error over all gradients of a sample in int8."""
LISTED = {
    name: 0.12
    for name in (
        *("nn.functional.scaled_dot_product_attention", "torch.ops.aten._flash_attention_forward"),
        *("torch.ops.aten._efficient_attention_forward", "nn.MultiheadAttention", "nn.Transformer"),
        *("nn.TransformerEncoder", "nn.TransformerEncoderLayer", "nn.TransformerDecoderLayer", "cov"),
    )
}
"""Entries with a bound of their own.

The samples of attention have scores of several hundred, where probabilities are zero or one and the gradient is the
small difference of two numbers that are read from codes; those of the layers have four features; of ``cov``, gradients
that nearly cancel.
"""

SAME, CLOSE, ROUNDING = "bitwise the same", "within the bound", "the plain gradient is rounding"
UNREPEATABLE = "differs from run to run without compression"
SKIPPED = "skipped"
DIFFERENT, WRONG, NON_FINITE, RAISES = (
    "not bitwise the same",
    "over the bound",
    "non-finite where torch is not",
    "raises",
)
FAILURES = frozenset({DIFFERENT, WRONG, NON_FINITE, RAISES})

# Plain runs compared where a compressed one differs: reductions by atomics, and memory that nobody wrote.
_REPEATS = 3
# Elements of these dtypes are what a cast input is cast from.
_CAST_FROM = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32}


@dataclass(frozen=True)
class Row:
    """How one sample of an entry fared in one mode.

    Attributes
    ----------
    entry, form, dtype, layout, sample, mode : str or int
        What ran. The form of a module is ``module``.
    outcome : str
        One of the constants of this file.
    error : float
        Relative L2 error over all gradients together.
    packed : int
        Float tensors that were stored in fewer bytes an element than they have.
    note : str
        Why it was skipped, or what was raised.
    """

    entry: str
    form: str
    dtype: str
    layout: str
    sample: int
    mode: str
    outcome: str
    error: float = 0.0
    packed: int = 0
    note: str = ""

    def __str__(self) -> str:
        where = f"{self.entry} ({self.form}, {self.dtype}, {self.layout}, sample {self.sample}, {self.mode})"
        return f"{where}: {self.outcome}, error {self.error:.2%} {self.note}".rstrip()


class _NothingToCompareError(Exception):
    """A sample has no gradient in this form; the message says why."""


@dataclass
class Run:
    """The gradients of one run."""

    gradients: list[Tensor | None]
    packed: int = 0


Runner = Callable[[str | None], Run]
"""Runs a sample in a mode, plainly for None, or plainly in float64 for ``WIDE``."""


@dataclass
class _Inputs:
    """Makes the inputs of a sample anew for each run, and remembers the leaves."""

    layout: str
    wide: bool
    leaves: list[Tensor] = field(default_factory=list)

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        made = self._made(value)
        if not self.wide or not (made.is_floating_point() or made.is_complex()):
            return made
        return made.to(torch.complex128 if made.is_complex() else torch.float64)

    def _made(self, value: Tensor) -> Tensor:
        copy = value.detach().clone()
        if not value.requires_grad:
            return copy
        if self.layout == "cast":
            source = _CAST_FROM.get(copy.dtype)
            if source is None:
                raise _NothingToCompareError(f"nothing is cast to {copy.dtype}")
            leaf = copy.to(source).requires_grad_()
            self.leaves.append(leaf)
            return leaf.to(copy.dtype)
        leaf = copy.requires_grad_()
        self.leaves.append(leaf)
        return _laid_out(leaf * 1.0, self.layout) if leaf.layout is torch.strided else leaf * 1.0


def _laid_out(tensor: Tensor, layout: str) -> Tensor:
    if layout == "transposed":
        order = tuple(reversed(range(tensor.dim())))
        return tensor.permute(order).clone(memory_format=torch.contiguous_format).permute(order)
    if layout == "gaps":
        # The elements between have the values beside them: they leave the range of a group as it is.
        return torch.stack((tensor, tensor.detach()), dim=-1)[..., 0]
    return tensor


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def _gradients(outputs: Any, inputs: Sequence[Tensor], packed: int) -> Run:
    """Return the gradients for fixed random cotangents of all outputs that have a graph."""
    found = [each for each in tree_leaves(outputs) if isinstance(each, Tensor) and each.requires_grad]
    dense = [each if each.layout is torch.strided else each.to_dense() for each in found]
    if not dense:
        raise _NothingToCompareError("no result requires grad")
    if not inputs:
        raise _NothingToCompareError("no input requires grad")
    generator = torch.Generator().manual_seed(1)
    cotangents = [_drawn(each, generator) for each in dense]
    gradients = torch.autograd.grad(dense, inputs, cotangents, allow_unused=True)
    return Run([None if each is None else each.detach() for each in gradients], packed)


def _drawn(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return random numbers that are the same in each dtype, rounding aside."""
    dtype = torch.complex128 if like.is_complex() else torch.float64
    return torch.randn(like.shape, dtype=dtype, generator=generator).to(like)


def _packed(target: Any) -> int:
    return sum(each.kept is None and each.dtype != "bool" for each in pyactcomp.report(target).tensors)


def _operator_runner(sample: Any, function: Callable[..., Any], layout: str) -> Runner:
    def run(mode: str | None) -> Run:
        inputs = _Inputs(layout, mode == WIDE)
        _seed()
        first, args, kwargs = tree_map(inputs, (sample.input, sample.args, sample.kwargs))
        packed = 0
        if mode not in MODES:
            out = function(first, *args, **kwargs)
        else:
            with pyactcomp.compressed(mode=mode, min_bytes=1) as c:
                out = function(first, *args, **kwargs)
            packed = _packed(c)
        return _gradients(sample.output_process_fn_grad(out), inputs.leaves, packed)

    return run


def _module_runner(info: Any, sample: Any, dtype: torch.dtype, device: str, layout: str) -> Runner:
    made, given = sample.constructor_input, sample.forward_input

    def run(mode: str | None) -> Run:
        inputs = _Inputs(layout, mode == WIDE)
        _seed()
        module = info.module_cls(*made.args, **made.kwargs).to(device=device, dtype=dtype).train()
        args, kwargs = tree_map(inputs, (tuple(given.args), dict(given.kwargs)))
        if mode == WIDE:
            module = module.double()
        if mode in MODES:
            pyactcomp.compress(module, mode=mode, min_bytes=1)
        out = module(*args, **kwargs)
        packed = _packed(module) if mode in MODES else 0
        return _gradients(out, [*inputs.leaves, *module.parameters()], packed)

    return run


def _bits(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    as_integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[real.dtype.itemsize]
    return real.contiguous().masked_fill(real.isnan(), float("nan")).view(as_integers)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a.to_dense()), _bits(b.to_dense()))


def _all_same(a: Run, b: Run) -> bool:
    return len(a.gradients) == len(b.gradients) and all(map(_same, a.gradients, b.gradients))


def _flat(run: Run) -> Tensor:
    parts = [torch.zeros(0, dtype=torch.float64)]
    for gradient in run.gradients:
        if gradient is not None:
            dense = gradient.to_dense()
            real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
            parts.append(real.double().flatten().cpu())
    return torch.cat(parts)


def _ratio(difference: float, norm: float) -> float:
    if norm == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / norm


def _error(plain: Run, run: Run) -> tuple[float, bool]:
    """Return the relative L2 error where torch is finite, and whether the run is finite there."""
    expected, got = _flat(plain), _flat(run)
    finite = expected.isfinite()
    expected, got = expected[finite], got[finite]
    if not bool(got.isfinite().all()):
        return float("inf"), False
    difference, norm = float((got - expected).norm()), float(expected.norm())
    return _ratio(difference, norm), True


def _own_error(run: Runner, plain: Run) -> float:
    """Return how far the plain gradient is from that in float64; 0 where an operator does not have it."""
    try:
        return _error(plain, run(WIDE))[0]
    except Exception:  # not all operators mix with float64, or have it
        return 0.0


def judged(run: Runner, plain: Run, mode: str, bound: float = BOUND) -> tuple[str, float, int, str]:
    """Return outcome, error, packed and note of one mode."""
    try:
        got = run(mode)
    except Exception as error:
        return RAISES, float("inf"), 0, f"{type(error).__name__}: {error}"
    error, finite = _error(plain, got)
    if mode == "lossless":
        outcome = SAME if _all_same(plain, got) else DIFFERENT
    elif not finite:
        outcome = NON_FINITE
    else:
        outcome = CLOSE if error <= bound else WRONG
    note = ""
    if outcome == WRONG:
        # That of a constant, such as a norm of one element or a softmax over one: terms that cancel. The bound is one
        # on the error that is added, and has no meaning where torch's own is larger.
        own = error if math.isinf(error) else _own_error(run, plain)
        if own > BOUND:
            outcome, note = ROUNDING, f"torch's own error {own:.1%}"
    if outcome in FAILURES:
        again = [run(None) for _ in range(_REPEATS)]
        if not all(_all_same(plain, each) for each in again) and (
            mode == "lossless" or max(_error(plain, each)[0] for each in again) > BOUND
        ):
            outcome = UNREPEATABLE
    return outcome, error, got.packed, note


def _rows(
    entry: str, form: str, dtype: torch.dtype, layout: str, sample: int, run: Runner, modes: Sequence[str]
) -> Iterator[Row]:
    where = entry, form, str(dtype).removeprefix("torch."), layout, sample
    try:
        plain = run(None)
    except _NothingToCompareError as reason:
        plain, note = None, str(reason)
    except Exception as error:
        plain, note = None, f"torch refuses: {type(error).__name__}: {error}".partition("\n")[0]
    for mode in modes:
        if plain is None:
            yield Row(*where, mode, SKIPPED, note=note)
        else:
            yield Row(*where, mode, *judged(run, plain, mode, LISTED.get(entry, BOUND)))


def _spread(samples: Sequence[Any], most: int | None) -> list[tuple[int, Any]]:
    """Return at most so many samples with their numbers, evenly spread."""
    count = len(samples) if most is None else min(most, len(samples))
    return [(i * len(samples) // count, samples[i * len(samples) // count]) for i in range(count)]


def operator_rows(
    entry: Any,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    modes: Sequence[str] = MODES,
    forms: Sequence[str] = FORMS,
    layouts: Sequence[str] = LAYOUTS,
    rotate: bool = False,
    samples: int | None = None,
) -> Iterator[Row]:
    """Yield a row for each sample, form, layout and mode of an operator.

    Parameters
    ----------
    rotate : bool
        One layout for each sample, each time the next one, instead of all.
    samples : int, optional
        At most so many, spread over those that there are.
    """
    name = entry.full_name
    functions = {"function": entry.op, "method": entry.method_variant}
    if entry.supports_inplace_autograd:
        functions["in place"] = entry.inplace_variant
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _seed()
        drawn = list(entry.sample_inputs(device, dtype, requires_grad=True))
        for turn, (number, sample) in enumerate(_spread(drawn, samples)):
            for form in forms:
                function = functions.get(form)
                if function is None or (form == "in place" and sample.broadcasts_input):
                    continue
                for layout in (layouts[turn % len(layouts)],) if rotate else layouts:
                    yield from _rows(
                        name, form, dtype, layout, number, _operator_runner(sample, function, layout), modes
                    )


def module_rows(
    info: Any,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    modes: Sequence[str] = MODES,
    layouts: Sequence[str] = LAYOUTS,
    samples: int | None = None,
) -> Iterator[Row]:
    """Yield a row for each sample, layout and mode of a module in training mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _seed()
        drawn = info.module_inputs_func(info, device=device, dtype=dtype, requires_grad=True, training=True)
        for number, sample in _spread(list(drawn), samples):
            for layout in layouts:
                run = _module_runner(info, sample, dtype, device, layout)
                yield from _rows(info.name, "module", dtype, layout, number, run, modes)


def operators(dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Any]:
    """Return the operators, and compositions of them, that have a gradient in a dtype on a device."""
    kind = torch.device(device).type
    entries = [*torch_databases.operators, *compositions]
    return [each for each in entries if dtype in each.supported_backward_dtypes(kind)]


def modules() -> list[Any]:
    """Return the modules."""
    return list(torch_databases.modules)


def _sweep(options: argparse.Namespace) -> Iterator[Row]:
    only: str | None = options.only
    for dtype in (getattr(torch, name) for name in options.dtype):
        common = {"dtype": dtype, "device": options.device, "modes": options.mode, "samples": options.samples}
        subjects = [(each.full_name, operator_rows, each) for each in operators(dtype, options.device)]
        subjects += [(each.name, module_rows, each) for each in modules()]
        subjects = [each for each in subjects if only is None or each[0] == only]
        started = time.monotonic()
        for done, (name, rows, entry) in enumerate(subjects, 1):
            found = list(rows(entry, **common))
            failed = sum(row.outcome in FAILURES for row in found)
            if sys.stderr.isatty() or failed or done == len(subjects):
                seconds = time.monotonic() - started
                place = f"[{done}/{len(subjects)} {options.device} {dtype} {seconds:.0f} s]"
                sys.stderr.write(f"{place} {name}: {failed} of {len(found)} runs failed\n")
            yield from found


def _table(rows: Sequence[Row]) -> str:
    """Return the worst failure of each entry, and how often there was which outcome."""
    worst: dict[tuple[str, str, str, str], Row] = {}
    counts: Counter[tuple[str, str, str, str]] = Counter()
    for row in rows:
        if row.outcome in FAILURES:
            key = row.entry, row.dtype, row.mode, row.outcome
            counts[key] += 1
            if key not in worst or row.error > worst[key].error:
                worst[key] = row
    lines = [f"{counts[key]:6}  {row}" for key, row in sorted(worst.items())]
    outcomes = Counter((row.mode, row.outcome) for row in rows)
    lines += [f"{count:6}  {mode}: {outcome}" for (mode, outcome), count in sorted(outcomes.items())]
    reasons = Counter(row.note for row in rows if row.outcome == SKIPPED)
    lines += [f"{count:6}  skipped: {note}" for note, count in reasons.most_common()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all samples, print the failures and return whether there were any."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    parser.add_argument("--dtype", nargs="+", choices=names, default=names)
    parser.add_argument("--mode", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", metavar="NAME", help="one entry, such as addmm or nn.Linear")
    parser.add_argument("--samples", type=int, help="at most so many of each entry")
    parser.add_argument("--json", metavar="FILE", help="write all rows to this file")
    options = parser.parse_args(arguments)
    rows = list(_sweep(options))
    if options.json:
        with open(options.json, "w") as file:
            json.dump([asdict(row) for row in rows], file)
    sys.stdout.write(_table(rows) + "\n")
    return int(any(row.outcome in FAILURES for row in rows))


if __name__ == "__main__":
    sys.exit(main())
