"""The forms in which saved tensors are stored, and the exactness needed by their readers.

A reader is the operator that saves a tensor in forward and reads it in backward.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..torch_private import never_traced

# Needs, ordered by strictness. The bits of a comparison serve only the same comparison, see `Form.serves`.
SHAPE, BITS, CODES, RELATIVE, EXACT = range(5)


@dataclass(frozen=True)
class Comparison:
    """A comparison with one or two bounds, and two values with either outcome.

    Attributes
    ----------
    relation : {"above", "below", "not below", "between", "within", "not outside"}
        ``x > low``; ``x < high``; ``not x <= low``; ``low < x < high``; ``low <= x <= high``; ``not (x <= low or x >=
        high)``. The relations differ where x is NaN, as torch's derivatives do.
    low, high : float
    yes, no : float
        Restored value of an element if the comparison is true, and if it is false.
    """

    relation: Literal["above", "below", "not below", "between", "within", "not outside"]
    low: float
    high: float
    yes: float
    no: float

    @functools.lru_cache(maxsize=256)  # noqa: B019 - few distinct comparisons, and equal ones share an entry
    def is_exact_in(self, dtype: torch.dtype) -> bool:
        """Return whether all operators compare with equal bounds in a dtype: for 16 bits, some round the bounds."""
        bounds = [self.low, self.high]
        return dtype.itemsize > 2 or torch.tensor(bounds, dtype=dtype).tolist() == bounds

    def __call__(self, x: Tensor) -> Tensor:
        """Return a boolean tensor: where the comparison is true."""
        if self.relation == "above":
            return x > self.low
        if self.relation == "below":
            return x < self.high
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
        The strictest need served by the form.
    comparison : Comparison or None
        The comparison of a form of one bit an element.
    """

    name: str
    need: int
    comparison: Comparison | None = None

    @never_traced
    def serves(self, wanted: Form) -> bool:
        """Return whether a tensor stored in this form also serves a reader of the form ``wanted``."""
        if wanted.need in (SHAPE, BITS) or self.need == BITS:
            return wanted.need == SHAPE or self == wanted
        if self.need == wanted.need:
            # PROBABILITY and EXPONENTIAL are as precise as bfloat16, and more so near one.
            return wanted in (self, AS_CODES) or (self in (PROBABILITY, EXPONENTIAL) and wanted is BFLOAT16)
        # What saturates serves only its own reader.
        return self.need > wanted.need and self not in (LOG, LOG_PROBABILITY)


AS_SHAPE = Form("shape", SHAPE)
AS_CODES = Form("codes", CODES)
GAINED = Form("bfloat16, or codes of what a gain multiplies", CODES)
POSITIVE = Form("codes that keep positive elements positive", CODES)
BFLOAT16 = Form("bfloat16", RELATIVE)
SCALED = Form("float16 times a power of two", RELATIVE)
LOG = Form("saturating float16", RELATIVE)
LOG_PROBABILITY = Form("16-bit logit of the probability", RELATIVE)
PROBABILITY = Form("16-bit logit", RELATIVE)
EXPONENTIAL = Form("bfloat16 distance from zero or one", RELATIVE)
STANDARDIZED = Form("codes of the values less their mean, over their deviation", RELATIVE)
ARTANH = Form("float16 inverse hyperbolic tangent", RELATIVE)
ITSELF = Form("as it is", EXACT)


class Use(enum.Enum):
    """What the derivative does with an operand whose form depends on more than the operator: see ``rule.form``."""

    MATRIX = "a product that sums multiplies the gradient by it"
    FACTOR = "an elementwise product multiplies the gradient by it"
    SQUARE = "a low power, a variance or a length of it: it is a factor of its own product"
    ROWS = "the deviation of each row divides"
    CHANNELS = "the deviation of each channel divides"
    HEADS = "sums over a head are subtracted"
    INPUT = "a block reruns from it"


@dataclass(frozen=True)
class Reading:
    """How one operator reads one operand.

    Attributes
    ----------
    operator, operand : str
        Names; the operator's with the namespace.
    form : Form
        The cheapest form exact enough for the reader; of a ``use``, the cheapest that ``rule.form`` may give.
    why : str
        The reason, for reports.
    known : bool
        Whether the table has a row for the operand, from torch's derivatives or :func:`register_reader`.
    by_scalars : callable, optional
        Maps the scalar arguments of a call, by position, to form or use and reason.
    use : Use, optional
        What the derivative does, where that alone does not decide the form.
    """

    operator: str
    operand: str
    form: Form
    why: str
    known: bool = True
    by_scalars: Callable[[Mapping[int, object]], tuple[Form | Use, str]] | None = None
    use: Use | None = None

    @classmethod
    def of(cls, operator: str, operand: str, how: Form | Use, why: str) -> Reading:
        """Return the reading of an operand in a form, or by a use."""
        if isinstance(how, Use):
            return cls(operator, operand, AS_CODES, why, use=how)
        return cls(operator, operand, how, why)

    @property
    def need(self) -> int:
        """Exactness needed of the values."""
        return self.form.need

    @property
    def reason(self) -> str:
        """Reason not to store the operand in fewer bits."""
        if not self.known:
            return f"{self.operator}: not in the table of readers, kept exact"
        return f"{self.operator}({self.operand}): {self.why}"

    @never_traced
    def given(self, scalars: Mapping[int, object]) -> Reading:
        """Return the reading for a call with the given scalar arguments, by position."""
        if self.by_scalars is None:
            return self
        return Reading.of(self.operator, self.operand, *self.by_scalars(scalars))


def strictest(readings: Iterable[Reading]) -> Reading:
    """Return the first strictest reading if its form serves all readings, otherwise an exact reading."""
    kinds = list(readings)
    # All forms of codes serve where codes do.
    first = max(kinds, key=lambda reading: (reading.need, reading.form is not AS_CODES))
    if all(first.form.serves(reading.form) for reading in kinds):
        return first
    return Reading(first.operator, first.operand, ITSELF, "one of several operands with different needs")
