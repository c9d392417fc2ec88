"""The loss head of language models in chunks, for any model that projects hidden states and then takes the loss.

While the fused model runs its own class's forward, the Linear of its output embeddings returns, in place of logits, a
tensor that knows how to compute them. The model's loss function casts and flattens that, shifts labels, divides by
``num_items_in_batch``, ..., as it is written, until ``torch.nn.functional.cross_entropy`` takes the loss: that is when
hidden states and weight go to :func:`linear_cross_entropy`. Whatever else is done with the logits gets them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import Module, Parameter
from torch.nn import functional as F

from ..codec import Impl
from ..errors import PyactcompError
from ..functional import linear_cross_entropy
from .base import fusing
from .fusion import Fused, form_of, linear_dtype, original_of
from .untouched import plain, untouched

# Settings of transformers' models that change logits before the loss, which then needs them all.
_BETWEEN = (
    "final_logit_softcapping",
    "logits_soft_cap",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "unpadded_vocab_size",
)


class _Standing(torch.autograd.Function):
    """Ties the empty tensor that stands for logits to what they depend on, so that no use of it goes unnoticed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise PyactcompError(
            "a function that Python cannot look into, such as an autograd function, took logits that fuse_head=True "
            "leaves uncomputed; compress this model with fuse_head=False"
        )


class _Projection:
    """A Linear's product, computed at most once; from then on its logits are ordinary tensors."""

    def __init__(self, rows: Tensor, weight: Tensor, bias: Tensor | None, impl: Impl) -> None:
        self.rows, self.weight, self.bias, self.impl = rows, weight, bias, impl
        device = rows.device.type
        self._autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        self.is_cast = False
        self._logits: Tensor | None = None
        self._wide: Tensor | None = None

    @property
    def computed(self) -> bool:
        return self._logits is not None

    @property
    def autocast(self) -> torch.autocast:
        """The state of autocast that the Linear ran in."""
        enabled, dtype = self._autocast
        return torch.autocast(self.rows.device.type, dtype=dtype, enabled=enabled)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits."""
        enabled, dtype = self._autocast
        return dtype if enabled and self.rows.dtype is not torch.float64 else self.rows.dtype

    def compute(self, wide: bool) -> Tensor:
        """Return the logits, or their float32 cast, which is a tensor of its own from now on, as in eager code."""
        if self._logits is None:
            with self.autocast:
                self._logits = F.linear(self.rows, self.weight, self.bias)
            if self.is_cast:
                self._wide = self._logits.float()
        result = self._wide if wide else self._logits
        assert result is not None
        return result


class Logits(Tensor):
    """Logits that are not computed until something needs them.

    It holds no elements itself, so that code which does not ask Python finds an empty tensor, never a wrong one.
    """

    projection: _Projection
    rows: Tensor
    """The input of the projection, of the shape of the logits but for the last dimension."""
    wide: bool
    """Whether logits are to be cast to float32."""

    @staticmethod
    def of(projection: _Projection, rows: Tensor, wide: bool = False) -> Logits:
        """Return the logits of a projection for rows of another shape."""
        standing: Tensor = _Standing.apply(rows, projection.weight)  # type: ignore[no-untyped-call]
        logits = standing.as_subclass(Logits)
        logits.projection, logits.rows, logits.wide = projection, rows, wide
        projection.is_cast |= wide
        return logits

    @property
    def full_shape(self) -> torch.Size:
        """Their shape."""
        return torch.Size((*self.rows.shape[:-1], self.projection.weight.shape[0]))

    def computed(self) -> Tensor:
        """Compute them, once: what is written to them is there when the loss asks."""
        return self.projection.compute(self.wide).view(self.full_shape)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do what keeps them uncomputed, else compute them first."""
        kwargs = kwargs or {}
        uncomputed = _UNCOMPUTED.get(func)
        result = NotImplemented
        if uncomputed is not None and args and isinstance(args[0], Logits):
            if not args[0].projection.computed or func in _ABOUT:
                result = uncomputed(*args, **kwargs)
        if result is not NotImplemented:
            return result
        return func(*_computed(args), **_computed(kwargs))


def _computed(value: Any) -> Any:
    """Return arguments with their logits computed."""
    if isinstance(value, Logits):
        return value.computed()
    if type(value) in (tuple, list):
        return type(value)(map(_computed, value))
    return {name: _computed(part) for name, part in value.items()} if type(value) is dict else value


def _wide(logits: Logits, memory_format: Any = None) -> Any:
    # Wider logits would lose digits by the cast that the loss then does not have.
    if logits.rows.dtype is torch.float64 or memory_format is not None:
        return NotImplemented
    return Logits.of(logits.projection, logits.rows, wide=True)


def _same(logits: Logits, memory_format: Any = torch.contiguous_format) -> Any:
    return logits if memory_format is torch.contiguous_format else NotImplemented


def _view(logits: Logits, *shape: Any) -> Any:
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    if len(sizes) < 2 or sizes[-1] != logits.projection.weight.shape[0]:
        return NotImplemented
    rows = logits.rows.reshape(*sizes[:-1], logits.rows.shape[-1])
    return Logits.of(logits.projection, rows, logits.wide)


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
    ):
        return NotImplemented
    of = logits.projection
    with of.autocast:
        loss = linear_cross_entropy(
            logits.rows,
            of.weight,
            target,
            of.bias,
            ignore_index=ignore_index,
            reduction=cast(Any, reduction),
            impl=of.impl,
        )
    # Outside autocast torch's loss has the dtype of the logits.
    under_autocast = torch.is_autocast_enabled(loss.device.type)
    return loss if logits.wide or under_autocast else loss.to(of.dtype)


_UNCOMPUTED: dict[Callable[..., Any], Callable[..., Any]] = {
    Tensor.float: _wide,
    Tensor.contiguous: _same,
    Tensor.view: _view,
    Tensor.reshape: _view,
    Tensor.size: _size,
    Tensor.dim: lambda logits: logits.rows.dim(),
    Tensor.shape.__get__: lambda logits: logits.full_shape,  # type: ignore[attr-defined]
    Tensor.device.__get__: lambda logits: logits.rows.device,
    Tensor.is_cuda.__get__: lambda logits: logits.rows.is_cuda,  # type: ignore[attr-defined]
    Tensor.dtype.__get__: lambda logits: torch.float32 if logits.wide else logits.projection.dtype,  # type: ignore[attr-defined]
    F.cross_entropy: _cross_entropy,
}
# What is asked about logits, and has the same answer once they are computed.
_ABOUT = frozenset(
    {
        Tensor.size,
        Tensor.dim,
        *(getattr(Tensor, name).__get__ for name in ("shape", "device", "is_cuda", "dtype")),
    }
)


@contextmanager
def _projecting_later(head: nn.Linear, impl: Impl) -> Iterator[None]:
    # On the instance, so that it is as it was the moment the model is done.
    def forward(input: Tensor) -> Tensor:
        under_autocast = linear_dtype(input) is not None
        one_dtype = under_autocast or all(t is None or t.dtype is input.dtype for t in (head.weight, head.bias))
        if not one_dtype or input.shape[-1:] != head.weight.shape[1:] or input.device != head.weight.device:
            return F.linear(input, head.weight, head.bias)
        return Logits.of(_Projection(input, head.weight, head.bias, impl), input)

    head.__dict__["forward"] = forward
    try:
        yield
    finally:
        del head.__dict__["forward"]


class Head(Fused):
    """A model with output embeddings whose ``forward`` takes ``labels``: the loss in chunks, and no logits.

    That is in training, with ``labels`` given by name and nothing hooked to the head; else it runs as its own class
    does.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        original: Any = cls.__bases__[1]

        # Frameworks read the names of its parameters to know what a model takes.
        @functools.wraps(original.forward)
        def forward(self: Module, *args: Any, **kwargs: Any) -> Any:
            codes = fusing(self) if kwargs.get("labels") is not None else None
            head = _head_of(self)
            if codes is None or not plain(head, nn.Linear) or type(head.weight) is not Parameter:
                return original.forward(self, *args, **kwargs)
            with _projecting_later(head, codes.impl):
                return _without_logits(original.forward(self, *args, **kwargs))

        cls.forward = forward


def _without_logits(output: Any) -> Any:
    """Leave out of a tuple or a mapping what was never computed."""
    if isinstance(output, dict):
        return type(output)(**{name: part for name, part in output.items() if not isinstance(part, Logits)})
    if type(output) is tuple:
        return tuple(part for part in output if not isinstance(part, Logits))
    return _computed(output)


def _head_of(model: Module) -> Any:
    return cast(Any, model).get_output_embeddings()


def fused_head_class(module: Module) -> type[Module] | None:
    """Return the class that takes the loss of ``module`` in chunks, or None where it has no such head."""
    return form_of(Head, original_of(type(module))) if unsupported_head(module) is None else None


def unsupported_head(module: Module) -> str | None:
    """Return why the loss of ``module`` cannot be taken in chunks, or None if it can."""
    name = original_of(type(module)).__name__
    if not callable(getattr(module, "get_output_embeddings", None)):
        return f"{name} has no get_output_embeddings"
    if "labels" not in inspect.signature(module.forward).parameters:
        return f"the forward of {name} takes no labels"
    head = _head_of(module)
    if not isinstance(head, Module):
        return f"{name} has no output embeddings"
    if not plain(head, nn.Linear):
        return f"the output embeddings of {name} are {type(head).__name__}: {untouched(head) or 'expected nn.Linear'}"
    config = getattr(module, "config", None)
    for setting in _BETWEEN:
        if getattr(config, setting, None) is not None:
            return f"{name} changes its logits before the loss ({setting})"
    return None
