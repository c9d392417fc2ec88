# How a training program runs, and how its gradients under pyactcomp are compared with those of plain torch. A program
# is a namespace with SEED, HOW ("compress", "compressed(model)" or "compressed()"), OPTIONS, STEPS, Model, inputs and
# backward. The text of this file stands at the end of every script that a failure prints.
import contextlib
import sys
import warnings
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor

import pyactcomp
from pyactcomp.codec import format as fmt
from pyactcomp.engine import packing
from pyactcomp.engine.marks import FUSING
from pyactcomp.engine.rare import ModifiedError

# Errors of int8 gradients, over all of them together: a program passes if its error is below ALLOWED, or below
# TIMES_BFLOAT16 times the error that rounding the same tensors to bfloat16 gives. A step of 8-bit codes is the range of
# a group of 64 normal numbers, five deviations, over 255; one of bfloat16 is 2 to 4 thousandths of each number.
ALLOWED, TIMES_BFLOAT16 = 0.05, 8
# Further runs of plain torch before a failure counts. Some operators of torch read memory that nobody wrote, or choose
# among equal numbers, and give the same twice in a quarter of the cases.
_REPEATS = 8


@dataclass
class Outcome:
    """What one run gave: ``error`` is the phase and the type of an exception."""

    error: tuple[str, type[BaseException], str] | None = None
    losses: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    fused: bool = False


class Rounding:
    """A kernel that holds bfloat16 numbers beside the buffer for codes, by the buffer's address.

    Numbers that are bfloat16 already lose their last bit.
    """

    def __init__(self) -> None:
        self.held: dict[int, Tensor] = {}

    def packed_nbytes(self, numel: int) -> int:
        return fmt.packed_nbytes(numel, 8, 64)

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        numbers = source.detach().as_strided((source.numel(),), (1,))
        rounded = numbers.to(torch.bfloat16)
        if numbers.dtype is torch.bfloat16:
            rounded = (rounded.view(torch.int16) & ~1).view(torch.bfloat16)
        self.held[out.data_ptr()] = rounded

    def decode(self, packed: Tensor, out: Tensor) -> None:
        out.as_strided((out.numel(),), (1,)).copy_(self.held[packed.data_ptr()])


@contextlib.contextmanager
def rounding_to_bfloat16():
    """Round what int8 would pack to bfloat16; booleans are packed as ever."""
    kernel_of, rounding = packing.Packing._new_kernel, Rounding()

    def kernel(self, dtype, *where):
        return kernel_of(self, dtype, *where) if dtype is torch.bool else rounding

    with mock.patch.object(packing.Packing, "_new_kernel", kernel):
        yield


def run(program, hooks=contextlib.nullcontext, **options) -> Outcome:
    """Run a program, under pyactcomp if there are options, else with each forward under ``hooks()``."""
    out, phase, how = Outcome(), "setup", program["HOW"]
    torch.manual_seed(program["SEED"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model, inputs = program["Model"](), program["inputs"]()
            leaves = [x for x in inputs if x.requires_grad] + list(model.parameters())
            if options and how == "compress":
                pyactcomp.compress(model, **options)
                out.fused = any(FUSING.get(module) is not None for module in model.modules())
            elif options:
                context = pyactcomp.compressed(model if how == "compressed(model)" else None, **options)
                hooks = lambda: context  # noqa: E731 - one context for all forwards
            phase = "forward"
            for _ in range(program["STEPS"]):
                with hooks():
                    losses = model(*inputs)
            out.losses = [torch.as_tensor(loss).detach().clone() for loss in losses]
            phase = "backward"
            given = program["backward"](model, losses, leaves)
            found = [leaf.grad for leaf in leaves] if given is None else given
            out.gradients = [None if g is None else g.detach().clone() for g in found]
        except Exception as error:  # whichever: the other runs must raise the same
            out.error = phase, type(error), str(error)
    return out


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two tensors have the same bits, any NaN for another."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    equal = (a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()
    return bool(equal.all())


def all_same(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    return len(found) == len(expected) and all(map(same_bits, found, expected))


def same_error(found: Outcome, expected: Outcome) -> bool:
    """Return whether one raises where the other does, what an ``except`` for the other's exception catches."""
    if found.error is None or expected.error is None:
        return found.error is expected.error
    return found.error[0] == expected.error[0] and issubclass(found.error[1], expected.error[1])


def difference(mode: str, found: Outcome, expected: Outcome) -> tuple[str, str]:
    """Return the kind and the detail of exceptions that differ."""
    ours, theirs = (
        "nothing" if outcome.error is None else f"{outcome.error[1].__name__} in {outcome.error[0]}"
        for outcome in (found, expected)
    )
    return f"{mode} raises {ours}, torch {theirs}", f"{found.error or expected.error}"


def repeats(a: Outcome, b: Outcome) -> bool:
    return same_error(a, b) and all_same(a.losses, b.losses) and all_same(a.gradients, b.gradients)


def relative_error(found: Outcome, expected: Outcome) -> float:
    """Return the relative L2 error over all gradients, where both runs' and the expected ones are finite."""
    difference = norm = 0.0
    for a, b in zip(found.gradients, expected.gradients, strict=True):
        if a is not None and b is not None:
            a, b = a.double(), b.double()
            there = a.isfinite() & b.isfinite()
            difference += float((a - b)[there].square().sum())
            norm += float(b[there].square().sum())
    # Where the true gradient is zero no error is relative to it.
    return (difference / norm) ** 0.5 if norm > 0 else 0.0


def is_partial(program, found: Outcome, plain: Outcome) -> bool:
    """Return whether only ours raises that a tensor was edited, and torch does too where all gradients are asked for.

    A tensor that is computed again from an edited one is lost, though torch, which stored it, needs the edited one for
    other gradients alone.
    """
    if plain.error is not None or found.error is None or not issubclass(found.error[1], ModifiedError):
        return False

    def backward(model, losses, leaves):
        sum(losses).backward()

    whole = run({**program, "backward": backward})
    return whole.error is not None and whole.error[0] == "backward"


def is_of_hooks(program, found: Outcome) -> bool:
    """Return whether torch raises the same under saved-tensor hooks that change nothing.

    Torch saves a view with a stale graph, or made under inference_mode, only without hooks.
    """

    def identity():
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)

    return found.error is not None and same_error(found, run(program, identity))


def _lossless_failure(program, plain: Outcome) -> tuple[str, str] | None:
    found = run(program, **program["OPTIONS"], mode="lossless", min_bytes=1)
    if not same_error(found, plain):
        known = is_partial(program, found, plain) or is_of_hooks(program, found)
        return None if known else difference("lossless", found, plain)
    if not all_same(found.losses, plain.losses):
        return "lossless loss", f"{found.losses}, plain torch: {plain.losses}"
    if not all_same(found.gradients, plain.gradients):
        return "lossless gradient", f"relative error {relative_error(found, plain):.3g}"
    return None


def _int8_failure(program, plain: Outcome) -> tuple[str, str] | None:
    options = program["OPTIONS"] | {"mode": "int8", "min_bytes": 1}
    found = run(program, **options)
    if not same_error(found, plain):
        known = is_partial(program, found, plain) or is_of_hooks(program, found)
        return None if known else difference("int8", found, plain)
    if not found.fused and not all_same(found.losses, plain.losses):
        return "int8 loss", f"{found.losses}, plain torch: {plain.losses}"
    for a, b in zip(found.gradients, plain.gradients, strict=True):
        if (a is None) != (b is None):
            return "int8 gradient", f"{a}, plain torch: {b}"
        if a is not None and bool((b.isfinite() & ~a.isfinite()).any()):
            return "int8 not finite", f"in a gradient of shape {tuple(a.shape)}"
    error = relative_error(found, plain)
    if error > ALLOWED:
        with rounding_to_bfloat16():
            rounded = run(program, **options, **({"fuse": False} if program["HOW"] == "compress" else {}))
        of_rounding = relative_error(rounded, plain)
        allowed = max(ALLOWED, TIMES_BFLOAT16 * of_rounding)
        # Where bfloat16 leaves nothing of the true gradient, that is zero but for rounding.
        if of_rounding < 1 and error > allowed:
            return "int8 error", f"{error:.3%}, allowed {allowed:.3%}"
    return None


_CHECKS = {"lossless": _lossless_failure, "int8": _int8_failure}


def check(program, modes=tuple(_CHECKS)) -> list[tuple[str, str]] | None:
    """Return the failures of a program, each its kind and its detail; None if plain torch does not repeat itself.

    A kind begins with the mode.
    """
    plain = run(program)
    if not repeats(plain, run(program)):
        return None
    failures = [failure for mode in modes if (failure := _CHECKS[mode](program, plain)) is not None]
    if failures and not all(repeats(plain, run(program)) for _ in range(_REPEATS)):
        return None
    return failures


def main(program) -> None:
    """Check a script's program: its exit code is 1 where it fails."""
    torch.set_num_threads(1)
    failures = check(program)
    text = "plain torch does not repeat itself" if failures is None else "\n".join(map(": ".join, failures))
    sys.stdout.write((text or "as plain torch") + "\n")
    sys.exit(bool(failures))
