"""``Codes``: how a function stores its saved tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ParamSpec, TypeVar

from .. import codec
from ..codec import Impl, Rounding
from ..codec import format as fmt
from ..errors import check_choice

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Codes:
    """How a function stores the tensors it saves for backward.

    Parameters
    ----------
    bits : {8, 4, 2, 16} or None
        Width of a code. None keeps tensors unpacked. 16 is for window attention alone, inside fused modules:
        16-bit tensors stay unpacked, wider ones become float16 times a power of two.
    group_size : {64, 128, 256}
        Number of consecutive elements with a common minimum and step.
    rounding : {"nearest", "stochastic"}, optional
        Default: "nearest" for 8 bits, "stochastic" for 4 and 2.
    seed : int, optional
        64-bit seed of stochastic rounding. By default each call takes the next seed of a sequence fixed across runs.
    impl : {"auto", "cuda", "triton", "cpu", "reference"}
        Implementation; all write the same bytes. A function raises ImplementationUnavailableError if a named
        implementation cannot serve the device, and never falls back to another one.

    Raises
    ------
    TypeError
        If ``seed`` is not an integer.
    ValueError
        If another option has a value not listed above.

    Examples
    --------
    >>> import torch
    >>> from pyactcomp.functional import Codes, gelu
    >>> x = torch.randn(1000, requires_grad=True)
    >>> y = gelu(x, codes=Codes(bits=4, seed=7))
    """

    bits: int | None = 8
    group_size: int = 64
    rounding: Rounding | None = None
    seed: int | None = None
    impl: Impl = "auto"

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("bits", self.bits, (None, *fmt.BITS, 16)),
            ("group_size", self.group_size, fmt.GROUP_SIZES),
            ("rounding", self.rounding, (None, *codec.ROUNDINGS)),
            ("impl", self.impl, codec.IMPLS),
        ):
            check_choice(name, value, allowed)
        if self.seed is not None and not isinstance(self.seed, int):
            raise TypeError(f"seed must be an integer, got {self.seed!r}")

    @property
    def stochastic(self) -> bool:
        """Whether rounding is stochastic."""
        if self.bits is None or self.bits == 16:
            return False
        return self.rounding == "stochastic" or (self.rounding is None and self.bits < 8)


INT8 = Codes()
"""The default: 8 bits, groups of 64, rounded to nearest."""

_FIELDS = frozenset(field.name for field in fields(Codes))


def one_option(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function: a field of :class:`Codes` given as a keyword raises TypeError with the right call."""
    parameters = inspect.signature(function).parameters
    removed = _FIELDS.difference(parameters)

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if removed.isdisjoint(kwargs):
            return function(*args, **kwargs)
        given = ", ".join(f"{name}={value!r}" for name, value in kwargs.items() if name in removed)
        advice = f"give codes=Codes({given})" if "codes" in parameters else "it stores no codes: leave them out"
        raise TypeError(f"{function.__name__}() takes no {given}; {advice}")

    return called
