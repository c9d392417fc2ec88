"""Logits that are computed when an operator first needs them, and never where a loss takes them in chunks.

The output embeddings return :class:`Logits`. The model's loss function casts, flattens and shifts them as written, and
the model may cap them (``cap * tanh(logits / cap)``), until ``torch.nn.functional.cross_entropy`` receives them and
calls :func:`linear_cross_entropy` with the hidden states and the weight. Any other operator computes the logits first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..codec import Impl
from ..errors import PyactcompError
from ..functional import linear_cross_entropy
from .fusion import linear_dtype


class _Standing(torch.autograd.Function):
    """Links an empty stand-in for logits to the graph; backward raises, so no use of the stand-in goes unnoticed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise PyactcompError(
            "a function that Python cannot look into, such as an autograd function, took logits that fuse_head=True "
            "leaves uncomputed; compress this model with fuse_head=False"
        )


@dataclass
class Call:
    """What became of the logits of one call of a head."""

    taken: bool = False
    """Whether a cross-entropy took them in chunks."""
    reader: str | None = None
    """The function that needed all of them."""


_Step = tuple[Any, ...]
"""A function of logits and, for the first and the last of a cap, its number."""
_CAPPING = (torch.div, torch.tanh, torch.mul)


class Projection:
    """The product of a Linear, computed at most once; from then on the logits are ordinary tensors."""

    def __init__(
        self,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        impl: Impl,
        chunk: int | None = None,
        steps: tuple[_Step, ...] = (),
        call: Call | None = None,
    ) -> None:
        self.rows, self.weight, self.bias, self.impl, self.chunk = rows, weight, bias, impl, chunk
        self.steps = steps
        self.call = Call() if call is None else call
        device = rows.device.type
        self._autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        self.is_cast = False
        self._logits: Tensor | None = None
        self._wide: Tensor | None = None

    @property
    def softcap(self) -> float | None:
        """The cap of the logits, once all three functions of a cap are there."""
        return self.steps[-1][1] if len(_steps(self)) == len(_CAPPING) else None

    def then(self, logits: Logits, function: Callable[..., Tensor], *number: float) -> Logits | None:
        """Return logits with a function more, if that is the next one of a cap."""
        done = _steps(self)
        if len(done) == len(_CAPPING) or function is not _CAPPING[len(done)]:
            return None
        if number and (not 0 < number[0] < math.inf or (done and number[0] != done[0][1])):
            return None
        # The product is computed anew if need be: what is written to the logits later does not reach this function.
        cast: tuple[_Step, ...] = ((Tensor.float,),) if logits.wide and (Tensor.float,) not in self.steps else ()
        steps = (*self.steps, *cast, (function, *number))
        with self.autocast:
            later = Projection(self.rows, self.weight, self.bias, self.impl, self.chunk, steps, self.call)
        return Logits.of(later, logits.rows, logits.wide)

    @property
    def computed(self) -> bool:
        """Whether the product is there."""
        return self._logits is not None

    @property
    def autocast(self) -> torch.autocast:
        """The autocast state of the Linear's call."""
        enabled, dtype = self._autocast
        return torch.autocast(self.rows.device.type, dtype=dtype, enabled=enabled)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits."""
        enabled, dtype = self._autocast
        return dtype if enabled and self.rows.dtype is not torch.float64 else self.rows.dtype

    def compute(self, wide: bool) -> Tensor:
        """Return the logits or, if ``wide``, their float32 cast: two tensors, as in eager code."""
        if self._logits is None:
            with self.autocast:
                self._logits = F.linear(self.rows, self.weight, self.bias)
            for step, *number in self.steps:
                self._logits = step(self._logits, *number)
            if self.is_cast:
                self._wide = self._logits.float()
        result = self._wide if wide else self._logits
        assert result is not None
        return result


class Logits(Tensor):
    """Logits, computed when an operator first needs them.

    The tensor itself is empty: code that bypasses ``__torch_function__`` finds no elements, never wrong ones.
    """

    projection: Projection
    rows: Tensor
    """Input of the projection; all dimensions but the last are those of the logits."""
    wide: bool
    """Whether to cast the logits to float32."""

    @staticmethod
    def of(projection: Projection, rows: Tensor, wide: bool = False) -> Logits:
        """Return lazy logits of a projection for ``rows``, the projection's input in any shape."""
        standing: Tensor = _Standing.apply(rows, projection.weight)  # type: ignore[no-untyped-call]
        logits = standing.as_subclass(Logits)
        logits.projection, logits.rows, logits.wide = projection, rows, wide
        projection.is_cast |= wide
        return logits

    @property
    def full_shape(self) -> torch.Size:
        """Shape of the computed logits."""
        return torch.Size((*self.rows.shape[:-1], self.projection.weight.shape[0]))

    def computed(self) -> Tensor:
        """Return the computed logits, the same memory on every call: in-place writes reach the loss."""
        return self.projection.compute(self.wide).view(self.full_shape)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` lazily if a lazy form is known, else on computed logits."""
        kwargs = kwargs or {}
        uncomputed = _UNCOMPUTED.get(func)
        result = NotImplemented
        if uncomputed is not None and args and isinstance(args[0], Logits):
            if not args[0].projection.computed or func in _ABOUT:
                result = uncomputed(*args, **kwargs)
        if result is not NotImplemented:
            return result
        for each in args:
            if isinstance(each, Logits):
                each.projection.call.reader = getattr(func, "__name__", str(func))
        return func(*computed(args), **computed(kwargs))


def _steps(projection: Projection) -> list[_Step]:
    """Return the functions of a cap that the logits have gone through, without a cast."""
    return [step for step in projection.steps if step[0] is not Tensor.float]


def _next(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return the lazy form of one function of a cap."""

    def later(logits: Logits, *numbers: Any, **options: Any) -> Any:
        expected = 0 if function is torch.tanh else 1
        plain = all(type(number) in (int, float) for number in numbers)
        if options or not plain or len(numbers) != expected:
            return NotImplemented
        result = logits.projection.then(logits, function, *numbers)
        return NotImplemented if result is None else result

    return later


def computed(value: Any) -> Any:
    """Return arguments with computed tensors in place of lazy logits."""
    if isinstance(value, Logits):
        return value.computed()
    if type(value) in (tuple, list):
        return type(value)(map(computed, value))
    return {name: computed(part) for name, part in value.items()} if type(value) is dict else value


def _wide(logits: Logits, memory_format: Any = None) -> Any:
    # The cast to float32 would lose digits of float64 logits.
    if logits.rows.dtype is torch.float64 or memory_format is not None:
        return NotImplemented
    return Logits.of(logits.projection, logits.rows, wide=True)


def _contiguous(logits: Logits, memory_format: Any = torch.contiguous_format) -> Any:
    return logits if memory_format is torch.contiguous_format else NotImplemented


def _view(logits: Logits, *shape: Any) -> Any:
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    if len(sizes) < 2 or sizes[-1] != logits.projection.weight.shape[0]:
        return NotImplemented
    rows = logits.rows.reshape(*sizes[:-1], logits.rows.shape[-1])
    return Logits.of(logits.projection, rows, logits.wide)


def _flatten(logits: Logits, start_dim: int = 0, end_dim: int = -1) -> Any:
    sizes = logits.full_shape
    start, end = start_dim % len(sizes), end_dim % len(sizes)
    if start > end or end == len(sizes) - 1:
        return NotImplemented
    return _view(logits, *sizes[:start], math.prod(sizes[start : end + 1]), *sizes[end + 1 :])


def _size(logits: Logits, dim: int | None = None) -> Any:
    return logits.full_shape if dim is None else logits.full_shape[dim]


def _cross_entropy(
    logits: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if (
        logits.rows.dim() != 2
        or target.dim() != 1
        or target.dtype is not torch.int64
        or target.device != logits.rows.device
        or reduction not in ("mean", "sum")
        or any(option is not None for option in (weight, size_average, reduce))
        or label_smoothing
        or (logits.projection.steps and logits.projection.softcap is None)
    ):
        return NotImplemented
    of = logits.projection
    of.call.taken = True
    with of.autocast:
        loss = linear_cross_entropy(
            logits.rows,
            of.weight,
            target,
            of.bias,
            ignore_index=ignore_index,
            reduction=cast(Any, reduction),
            softcap=of.softcap,
            chunk=of.chunk,
            impl=of.impl,
        )
    # Outside autocast torch's loss has the dtype of the logits.
    under_autocast = torch.is_autocast_enabled(loss.device.type)
    return loss if logits.wide or under_autocast else loss.to(of.dtype)


_UNCOMPUTED: dict[Callable[..., Any], Callable[..., Any]] = {
    Tensor.float: _wide,
    Tensor.contiguous: _contiguous,
    Tensor.view: _view,
    Tensor.reshape: _view,
    Tensor.flatten: _flatten,
    Tensor.size: _size,
    Tensor.dim: lambda logits: logits.rows.dim(),
    Tensor.shape.__get__: lambda logits: logits.full_shape,  # type: ignore[attr-defined]
    Tensor.device.__get__: lambda logits: logits.rows.device,
    Tensor.is_cuda.__get__: lambda logits: logits.rows.is_cuda,  # type: ignore[attr-defined]
    Tensor.dtype.__get__: lambda logits: torch.float32 if logits.wide else logits.projection.dtype,  # type: ignore[attr-defined]
    F.cross_entropy: _cross_entropy,
    **{each: _next(torch.div) for each in (torch.div, Tensor.div, Tensor.__truediv__)},
    **{each: _next(torch.tanh) for each in (torch.tanh, Tensor.tanh)},
    **{each: _next(torch.mul) for each in (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)},
}
# Queries about metadata: the answer is the same before and after the logits are computed.
_ABOUT = frozenset(
    {
        Tensor.size,
        Tensor.dim,
        *(getattr(Tensor, name).__get__ for name in ("shape", "device", "is_cuda", "dtype")),
    }
)


@contextmanager
def projecting_later(head: nn.Linear, impl: Impl, chunk: int | None = None) -> Iterator[Call]:
    """Make a Linear return lazy logits, and say what became of them."""
    call = Call()

    # Set on the instance: deleting the attribute restores the Linear after the model's forward.
    def forward(input: Tensor) -> Tensor:
        under_autocast = linear_dtype(input) is not None
        one_dtype = under_autocast or all(t is None or t.dtype is input.dtype for t in (head.weight, head.bias))
        if not one_dtype or input.shape[-1:] != head.weight.shape[1:] or input.device != head.weight.device:
            return F.linear(input, head.weight, head.bias)
        return Logits.of(Projection(input, head.weight, head.bias, impl, chunk, call=call), input)

    head.__dict__["forward"] = forward
    try:
        yield call
    finally:
        del head.__dict__["forward"]
