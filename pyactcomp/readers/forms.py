"""How exactly a saved tensor must be stored for its reader, the operator that saves it, and in what form."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

# Needs, ordered by strictness. A comparison's bits are no coarser form of the values, see `strictest`.
SHAPE, BITS, CODES, RELATIVE, EXACT = range(5)


@dataclass(frozen=True)
class Comparison:
    """A question about each element, and two values that answer it as the elements themselves would.

    Attributes
    ----------
    relation : {"above", "not below", "between", "within", "not outside"}
        ``x > low``; ``not x <= low``; ``low < x < high``; ``low <= x <= high``; ``not (x <= low or x >= high)``. They
        differ where x is NaN, as the derivatives do.
    low, high : float
    yes, no : float
        The value that an element comes back as.
    """

    relation: Literal["above", "not below", "between", "within", "not outside"]
    low: float
    high: float
    yes: float
    no: float

    @functools.lru_cache(maxsize=256)  # noqa: B019 - of few comparisons, each made anew for every call
    def is_exact_in(self, dtype: torch.dtype) -> bool:
        """Return whether operators compare with the same bounds in a dtype; some round them to 16 bits, some do not."""
        bounds = [self.low, self.high]
        return dtype.itemsize > 2 or torch.tensor(bounds, dtype=dtype).tolist() == bounds

    def __call__(self, x: Tensor) -> Tensor:
        """Return where the answer is yes."""
        if self.relation == "above":
            return x > self.low
        if self.relation == "not below":
            return (x <= self.low).logical_not_()
        if self.relation == "between":
            return (x > self.low).logical_and_(x < self.high)
        if self.relation == "within":
            return (x >= self.low).logical_and_(x <= self.high)
        return (x <= self.low).logical_or_(x >= self.high).logical_not_()


class Form(NamedTuple):
    """How a tensor is stored.

    Attributes
    ----------
    name : str
    need : int
        The strictest need that it serves, of readers of values.
    comparison : Comparison or None
        Of one bit an element: the question that the bit answers.
    """

    name: str
    need: int
    comparison: Comparison | None = None

    def serves(self, wanted: Form) -> bool:
        """Return whether a tensor that is stored like this is as exact as in another form."""
        if wanted.need in (SHAPE, BITS) or self.need == BITS:
            return wanted.need == SHAPE or self == wanted
        if self.need == wanted.need:
            return wanted in (self, AS_CODES)
        # Saturated log-probabilities are good for their own reader alone.
        return self.need > wanted.need and self is not LOG


AS_SHAPE = Form("shape", SHAPE)
AS_CODES = Form("8 bits", CODES)
POSITIVE = Form("8 bits that keep positive elements positive", CODES)
FACTOR = Form("8 bits unless it spans orders of magnitude", CODES)
ROWS = Form("8 bits where no group spans rows", CODES)
CHANNELS = Form("8 bits where no group spans channels", CODES)
VECTORS = Form("8 bits where no group spans vectors", CODES)
BFLOAT16 = Form("bfloat16", RELATIVE)
SCALED = Form("float16 times a power of two", RELATIVE)
LOG = Form("saturating float16", RELATIVE)
LOGIT = Form("float16 logit", RELATIVE)
ARTANH = Form("float16 inverse hyperbolic tangent", RELATIVE)
ITSELF = Form("as it is", EXACT)


@dataclass(frozen=True)
class Reading:
    """How one operator reads one operand.

    Attributes
    ----------
    operator, operand : str
        Names, the operator's with its namespace.
    form : Form
        The cheapest form that is exact enough.
    why : str
    known : bool
        Whether the table, or a call of :func:`register_reader`, has it.
    """

    operator: str
    operand: str
    form: Form
    why: str
    known: bool = True
    by_scalars: Callable[[Mapping[int, object]], tuple[Form, str]] | None = None

    @property
    def need(self) -> int:
        """How exact the values must be."""
        return self.form.need

    @property
    def reason(self) -> str:
        """Why the operand is not stored in fewer bits."""
        if not self.known:
            return f"{self.operator}: not in the table of readers, so it is kept exact"
        return f"{self.operator}({self.operand}): {self.why}"

    def given(self, scalars: Mapping[int, object]) -> Reading:
        """Return the reading for a call with these scalar arguments, by their positions."""
        if self.by_scalars is None:
            return self
        form, why = self.by_scalars(scalars)
        return Reading(self.operator, self.operand, form, why)


def strictest(readings: Iterable[Reading]) -> Reading:
    """Return the reading that serves all, or an exact reading where none does."""
    kinds = list(readings)
    first = max(kinds, key=lambda reading: reading.need)
    if all(first.form.serves(reading.form) for reading in kinds):
        return first
    return Reading(first.operator, first.operand, ITSELF, "several operands may be meant, which need different forms")
