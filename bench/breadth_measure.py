"""One training step of one pair: plain, lossless and int8, and how far apart their gradients are."""

from __future__ import annotations

import contextlib
import io
import math
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import pyactcomp
from pyactcomp.errors import PyactcompError
from pyactcomp.report import Report

from .breadth_models import Pair, Step, build
from .breadth_pool import first_line
from .rows import Row

MIN_BYTES = 4096
"""Tiny models save tiny tensors; what is smaller is kept."""
DROPOUT = 0.1
SEED = 3
NOT_BUILT = "not built"
CHECKPOINTING_MOVES = 1e-4
"""More than sums in another order: a model whose gradients move so far computes something else when checkpointed."""
Gradients = dict[str, Tensor]
Value = TypeVar("Value")


@contextlib.contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Put buffers back: a step must find what the one before found."""
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def gradients(step: Step, *, autocast: bool = False) -> Gradients:
    """Return the gradients of one step, by parameter, from the same seeds every time."""
    import numpy

    step.zero_grad(set_to_none=True)
    torch.manual_seed(SEED)
    numpy.random.seed(SEED)
    random.seed(SEED)
    with _buffers_kept(step):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = step()
        loss.backward()
    found = {name: p.grad for name, p in step.named_parameters() if p.grad is not None}
    step.zero_grad(set_to_none=True)
    return found


def _bits(tensor: Tensor) -> Tensor:
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return plain.detach().contiguous().view(torch.uint8) if plain.dim() else plain.detach().reshape(1).view(torch.uint8)


def differing(reference: Gradients, other: Gradients) -> int:
    """Return how many parameters have gradients that are not the same, bit by bit."""
    names = reference.keys() | other.keys()
    missing = len(names) - len(reference.keys() & other.keys())
    both = reference.keys() & other.keys()
    return missing + sum(not torch.equal(_bits(reference[name]), _bits(other[name])) for name in both)


def error(reference: Gradients, other: Gradients) -> float:
    """Return the relative L2 error over all gradients together; infinite where one is missing or not finite."""
    if reference.keys() != other.keys():
        return math.inf
    squared_difference = squared_norm = 0.0
    for name, exact in reference.items():
        squared_difference += float((other[name].double() - exact.double()).square().sum())
        squared_norm += float(exact.double().square().sum())
    found = math.sqrt(squared_difference / squared_norm)
    return found if math.isfinite(found) else math.inf


def _checkpointed(step: Step) -> bool:
    """Switch gradient checkpointing on; return whether the model has it."""
    model: Any = step.model
    if getattr(model, "supports_gradient_checkpointing", False):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return True
    if getattr(model, "_supports_gradient_checkpointing", False):
        model.enable_gradient_checkpointing()
        return True
    return False


def _checkpointed_gradients(step: Step, reference: Gradients, problems: _Problems) -> Gradients | None:
    """Switch gradient checkpointing on; return the gradients of a plain step, None where the model has none.

    Some models give other gradients with checkpointing: theirs are compared with.
    """
    if not _checkpointed(step):
        return None
    found = gradients(step)
    moved = error(reference, found)
    if moved > CHECKPOINTING_MOVES:
        problems["checkpoint"] = f"the model's own checkpointing moves the gradients by {moved:.2g}"
    return found


def _compressed(step: Step, **options: Any) -> tuple[Gradients, Report]:
    pyactcomp.compress(step, min_bytes=MIN_BYTES, **options)
    try:
        return gradients(step), pyactcomp.report(step)
    finally:
        pyactcomp.decompress(step)


def _takes_head(step: Step) -> bool:
    if not step.own_loss:  # a fused head gives no logits to take another loss of
        return False
    try:
        pyactcomp.compress(step, min_bytes=MIN_BYTES, fuse_head=True)
    except (PyactcompError, ValueError):
        return False
    pyactcomp.decompress(step)
    return True


def kept(report: Report) -> list[list[Any]]:
    """Return the reasons for which most bytes are held uncompressed, in few words, with the bytes."""
    found: Counter[str] = Counter()
    for line in report.kept:
        if line.stored_bytes:
            found[line.name.split(":")[0].split(",")[0]] += line.stored_bytes
    return [[name, count] for name, count in found.most_common(3)]


def rounded(value: float) -> float | str:
    """Return a number of four digits as JSON can have it."""
    return float(f"{value:.4g}") if math.isfinite(value) else "inf"


class _Problems(dict[str, str]):
    """What went wrong beside the figures, by figure."""

    def value(self, name: str, function: Callable[[], Value], failed: Value) -> Value:
        """Return what a function gives, and ``failed`` where it raises, whose reason is noted."""
        try:
            return function()
        except Exception as problem:  # whatever a step raises is its result
            self[name] = first_line(problem)
            return failed


def _lossless(step: Step, reference: Gradients, name: str, problems: _Problems) -> float | None:
    if differing(reference, gradients(step)):
        problems[name] = "plain torch does not repeat itself bit by bit"
        return None
    return problems.value(name, lambda: differing(reference, _compressed(step, mode="lossless")[0]), len(reference))


def measure_steps(step: Step, with_dropout: Callable[[], Step]) -> Row:
    """Return the figures of a pair from its step without dropout, and one that builds it with dropout."""
    reference = gradients(step)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in reference.values()))
    if not 0 < norm < math.inf:
        raise ValueError(f"the norm of torch's own gradients is {norm}")
    problems = _Problems()
    row: Row = {"parameters": sum(p.numel() for p in step.parameters()), "tensors": len(reference)}
    row["lossless"] = _lossless(step, reference, "lossless", problems)

    def int8() -> float:
        found, report = _compressed(step)
        row["ratio"] = rounded(report.stored_bytes / report.unique_bytes) if report.unique_bytes else None
        row["kept"] = kept(report)
        return error(reference, found)

    row["int8"] = problems.value("int8", int8, math.inf)
    row["noise"] = problems.value("noise", lambda: error(reference, gradients(step, autocast=True)), None)
    row["int8_head"] = None
    if _takes_head(step):
        head = problems.value("int8_head", lambda: error(reference, _compressed(step, fuse_head=True)[0]), math.inf)
        row["int8_head"] = head
    row["int8_ckpt"] = None
    # Whether a model has checkpointing that works at all is its own matter and torch's.
    exact = problems.value("checkpoint", lambda: _checkpointed_gradients(step, reference, problems), None)
    if exact is not None:
        row["int8_ckpt"] = problems.value("int8_ckpt", lambda: error(exact, _compressed(step)[0]), math.inf)
    row["lossless_dropout"] = None
    try:
        dropped = with_dropout()
        of_dropped = gradients(dropped)
    except Exception as problem:  # some models refuse dropout
        problems["lossless_dropout"] = first_line(problem)
    else:
        row["lossless_dropout"] = _lossless(dropped, of_dropped, "lossless_dropout", problems)
    for name in ("int8", "noise", "int8_head", "int8_ckpt"):
        row[name] = None if row[name] is None else rounded(row[name])
    if problems:
        row["problems"] = dict(problems)
    return row


def quiet() -> None:
    """Let libraries download nothing and say nothing."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for library in ("transformers", "diffusers"):
        with contextlib.suppress(ImportError):
            __import__(library).logging.set_verbosity_error()


def measure(pair: Pair) -> Row:
    """Return the figures of a pair with their status: "ok", or "not built" with the reason."""
    begin = time.monotonic()
    quiet()
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            step = build(pair, 0.0)
            gradients(step)
        except Exception as problem:  # what does not build is a row with the library's reason
            return {"status": NOT_BUILT, "reason": first_line(problem)}
        row = {"status": "ok", **measure_steps(step, lambda: build(pair, DROPOUT))}
    return {**row, "seconds": round(time.monotonic() - begin, 1)}
