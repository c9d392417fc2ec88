"""How an autograd function saves a tensor for backward: unpacked, or in codes.

Longer than 400 lines: what every fused function asks in forward and in backward, in one place.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from .. import codec
from ..codec import Impl, Packed
from ..codec import format as fmt
from ..codec.kernels import plain as plain_forms
from ..codec.layouts import arranged, contiguous_layout, elementwise_layout, layout_of
from ..codec.seeds import calls, second_of
from ..engine import saved
from ..engine.recompute import mark_as_packed, withdraw
from ..engine.record import is_recording
from ..engine.saved import PLAIN
from ..errors import PyactcompError
from ..readers.observer import being_traced, observer, transformed
from ..torch_private import (
    dispatch_mode_active,
    forward_ad_active,
    function_mode_active,
    function_modes,
    graph_is_retained,
    inside_functorch,
    is_batch,
    saves_are_dropped,
    under_checkpoint,
)
from ..torch_private.distributed import default_group, waited
from .codes import Codes

Restore = Callable[[Tensor], Tensor]
Backward = Callable[..., tuple[Tensor | None, ...]]

_SCALED = plain_forms.bind("scaled", None, by_triton=False)
"""Operators of torch, which leave nodes in a traced graph."""
_PACKED_AS_IT_IS = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.bool})
"""The dtypes that the codec's kernels read; a float64 is cast before."""

KERNEL_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""The dtypes that fused kernels read."""


class Recomputed:
    """A tensor recomputed once per backward: first for the next layer's matrix product, then for the gradients."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self._tensor: Tensor | None = None

    def peek(self) -> Tensor:
        """Return the tensor and hold on to it for the gradients, which are computed next."""
        if self._tensor is None:
            self._tensor = self._compute().detach()
        return self._tensor

    def take(self) -> Tensor:
        """Return the tensor and drop the reference."""
        tensor, self._tensor = self.peek(), None
        return tensor


@dataclass(frozen=True, eq=False)
class Saving(Codes):
    """The :class:`Codes` of one call: the seed is set, and ``bits`` is not 16. Equal options are one object."""

    seed: int = 0

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits == 16:
            raise ValueError("bits must be one of 8, 4, 2 and None, got 16, which only window_attention takes")

    @functools.cached_property
    def stochastic(self) -> bool:
        """Whether rounding is stochastic."""
        return super().stochastic

    @functools.cached_property
    def keys(self) -> tuple[int, int]:
        """The two keys of stochastic rounding; zeros for rounding to nearest."""
        return fmt.random_keys(self.seed) if self.stochastic else (0, 0)

    def second(self) -> Saving:
        """Return the options for the second tensor of a call, with another seed."""
        return replace(self, seed=second_of(self.seed)) if self.stochastic else self

    def pack(self, x: Tensor) -> tuple[Tensor, Restore]:
        """Return what to save for backward, codes or with ``bits=None`` the tensor itself, and what restores ``x``."""
        if self.bits is None:
            return x, same
        return self._pack_bits(x, self.bits)

    def pack_rows(self, x: Tensor, length: int) -> tuple[Tensor, Restore]:
        """Return the same as :meth:`pack`, with groups within rows of ``x`` (rows shorter than a group share groups).

        Groups are consecutive elements in memory. A norm divides each row by the row's own deviation: in a group across
        rows the largest row sets the step, and the codes of the smallest row are off by as much. Rows of ``length``
        elements are padded to whole groups with their last element, which widens no group.
        """
        if self.bits is None:
            return self.pack(x)
        layout = layout_of(x)
        missing = -length % self.group_size if self.group_size < length < x.numel() else 0
        if not missing:
            if x.is_contiguous() or not layout.dense:
                return self.pack(x)
            kept, restore = self.pack(x.contiguous())
            return mark_as_packed(kept, x), lambda buffer: arranged(restore(buffer), layout)
        rows = x.reshape(-1, length)
        kept, restore = self.pack(torch.cat([rows, rows[:, -1:].expand(-1, missing)], 1))
        return mark_as_packed(kept, x), lambda buffer: arranged(
            restore(buffer)[:, :length].reshape(layout.shape),
            layout if layout.dense else contiguous_layout(layout.shape),
        )

    def copy_as_bytes(self, x: Tensor) -> tuple[Tensor, Restore]:
        """Return a copy of ``x`` as bytes, and a function from the bytes to ``x``. Hooks keep bytes unpacked."""
        copy = x.detach().clone(memory_format=torch.contiguous_format)
        dtype, shape = x.dtype, x.shape
        return mark_as_packed(copy.view(-1).view(torch.uint8), x), lambda buffer: buffer.view(dtype).view(shape)

    def pack_half(self, x: Tensor) -> tuple[Tensor, Restore]:
        """Return ``x`` in 16 bits, and a function from them to a contiguous ``x``.

        A 16-bit ``x`` stays unpacked, a wider one becomes float16 times a power of two, as saved-tensor hooks store
        queries and keys of attention.
        """
        if x.itemsize <= 2:
            return x, same
        dtype, shape, device = x.dtype, x.shape, x.device
        plain = _traced() or type(x) not in PLAIN
        kernel = _SCALED if plain else codec.bind_form(self.impl, "scaled", dtype, device)
        buffer = torch.empty(kernel.packed_nbytes(x.numel()), dtype=torch.uint8, device=device)
        if not saves_are_dropped():
            kernel.encode(x.contiguous(), buffer, 0)

        def restore(buffer: Tensor) -> Tensor:
            out = torch.empty(shape, dtype=dtype, device=device)
            (kernel if type(buffer) is Tensor and not _traced() else _SCALED).decode(buffer, out)
            return out

        return mark_as_packed(buffer, x), restore

    def pack_mask(self, mask: Tensor) -> tuple[Tensor, Restore]:
        """Return a boolean tensor packed to one bit per element, and a function from the bits to the tensor."""
        return self._pack_bits(mask, 1)

    def _pack_bits(self, x: Tensor, bits: int) -> tuple[Tensor, Restore]:
        """Pack ``x`` to ``bits`` bits an element, by the kernel itself where no graph needs the operator around it."""
        traced = _traced()  # sizes may be symbols then, of which there is no layout
        layout = layout_of(x) if not traced and type(x) in PLAIN and x.dtype in _PACKED_AS_IT_IS else None
        if layout is None or not layout.dense:
            width = bits if bits != 1 else 8  # booleans ignore it
            packed = codec.quantize(
                x, bits=width, group_size=self.group_size, rounding=self.rounding, seed=self.seed, impl=self.impl
            )
            form = packed.shape, packed.stride, packed.dtype, packed.bits, packed.group_size, self.impl
            return mark_as_packed(packed.buffer, x), _new_restorer(*form) if traced else _restorer(*form)
        dtype, device, group_size = x.dtype, x.device, self.group_size
        buffer = torch.empty(fmt.packed_nbytes(x.numel(), bits, group_size), dtype=torch.uint8, device=device)
        if not saves_are_dropped():
            stochastic = bits != 1 and self.stochastic
            kernel = codec.bind(self.impl, dtype, bits, group_size, stochastic, False, device)
            kernel.encode(x, buffer, self.seed)
        return mark_as_packed(buffer, x), _restorer(layout.shape, layout.stride, dtype, bits, group_size, self.impl)

    def restorer(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Restore:
        """Return a function from the codes of a contiguous tensor, also those that a kernel wrote, to the tensor."""
        assert self.bits is not None
        layout = contiguous_layout(torch.Size(shape))
        return _restorer(layout.shape, layout.stride, dtype, self.bits, self.group_size, self.impl)

    def runs_on(self, device: torch.device) -> bool:
        """Return whether Triton kernels run on a device; raise if ``impl="triton"`` cannot serve it."""
        return (self.impl == "triton" or (device.type == "cuda" and self.impl == "auto")) and _triton_serves(
            self.impl, device
        )

    def fuses(self, x: Tensor) -> bool:
        """Return whether a fused Triton kernel can pack ``x``."""
        return self.bits is not None and self.runs_kernels(x)

    def runs_kernels(self, x: Tensor) -> bool:
        """Return whether to run Triton kernels on ``x``; raise if ``impl="triton"`` cannot serve the device.

        Tensor subclasses are refused: the output of a tensor-parallel Linear has no memory until an operator waits for
        the communication.
        """
        return (
            (self.impl == "triton" or (x.is_cuda and self.impl == "auto"))
            and type(x) in PLAIN
            and x.dtype in KERNEL_DTYPES
            and x.numel() > 0
            and not _replaced()
            and not is_batch(x)
            and _triton_serves(self.impl, x.device)
        )


# A layer passes the same options on every call: check them once.
_saving = functools.lru_cache(maxsize=256)(Saving)


def saving(codes: Codes) -> Saving:
    """Return the options of one call. Stochastic rounding without a seed takes the next seed of the sequence."""
    if type(codes) is Saving:
        return codes
    if not isinstance(codes, Codes):
        raise TypeError(f"codes must be a pyactcomp.functional.Codes, got {codes!r}")
    seed = codes.seed
    if seed is None:
        # A traced graph would hold the drawn seed as a constant.
        seed = calls.next() if codes.stochastic and not _traced() else 0
    return _saving(codes.bits, codes.group_size, codes.rounding, seed, codes.impl)


def kernels_of(impl: Impl) -> Saving:
    """Return the options of a call without codes; its ``runs_kernels`` chooses between Triton and torch."""
    return _saving(None, 64, None, 0, impl)


@functools.lru_cache(maxsize=64)
def _triton_serves(impl: Impl, device: torch.device) -> bool:
    if impl == "triton":
        codec.resolve(impl, device)
    return codec.unavailable_reason("triton", device) is None


def _traced() -> bool:
    """Return whether a graph is being recorded: sizes may be symbols, and a direct kernel call leaves no node."""
    if torch.compiler.is_compiling():
        return True
    return observer().may_be_transformed() and (dispatch_mode_active() or being_traced() or inside_functorch())


def _replaced() -> bool:
    """Return whether a direct kernel call would be missing from a trace, or get tensors without memory."""
    return observer().may_be_transformed() and (inside_functorch() or being_traced())


def _new_restorer(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, bits: int, group_size: int, impl: Impl
) -> Restore:
    return lambda buffer: codec.dequantize(Packed(buffer, shape, stride, dtype, bits, group_size), impl=impl)


# Shapes and dtypes repeat from step to step: share one closure for each.
@functools.lru_cache(maxsize=1024)
def _restorer(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, bits: int, group_size: int, impl: Impl
) -> Restore:
    nbytes = fmt.packed_nbytes(math.prod(shape), bits, group_size)
    checked = _new_restorer(shape, stride, dtype, bits, group_size, impl)

    def restore(buffer: Tensor) -> Tensor:
        # A hook of the user may have put another buffer in the place of the packed one.
        sound = type(buffer) is Tensor and buffer.dtype is torch.uint8 and buffer.numel() == nbytes
        if not sound or dtype not in _PACKED_AS_IT_IS or _traced() or not buffer.is_contiguous():
            return checked(buffer)
        out = torch.empty_strided(shape, stride, dtype=dtype, device=buffer.device)
        codec.bind(impl, dtype, bits, group_size, False, False, buffer.device).decode(buffer, out)
        return out

    return restore


def same(x: Tensor) -> Tensor:
    """Return ``x``, saved unpacked."""
    return x


def begin(ctx: Any, *read: Tensor | None) -> None:
    """Begin a ``forward``, for a ``backward`` decorated with :func:`differentiable_once`.

    Backward then returns None where no gradient comes in. ``read`` are the tensors saved by torch's own function but
    not by this one: backward raises autograd's error if one of them was written to. Under torch.utils.checkpoint the
    check is left out, as checkpoint does not check recomputed tensors.
    """
    ctx.set_materialize_grads(False)
    if read and not under_checkpoint() and not transformed():
        ctx.read = [(saved.Versioned(t), t.size()) for t in read if t is not None and type(t) in PLAIN]


@saved.for_library
def circumstances() -> tuple[bool, bool, bool]:
    """Return whether a function checks what it reads for writes, drops what it saves, and is recorded by a report."""
    return not under_checkpoint() and not transformed(), saves_are_dropped(), is_recording()


@saved.for_library
def refuse_second_derivative() -> None:
    """Raise the error of a ``backward`` that autograd records."""
    raise PyactcompError(
        "backward with create_graph=True went through a function of pyactcomp.functional, which can be differentiated "
        "only once; use the function of torch.nn.functional there, or compress the model with fuse=False"
    )


@saved.for_library
def arranged_as_torch(grad_x: Tensor, grad: Tensor) -> Tensor:
    """Return a gradient in the layout of torch's elementwise operator; it has the layout of the operand."""
    return arranged(grad_x, elementwise_layout(layout_of(grad), layout_of(grad_x)))


saved.for_library(waited)
saved.NAMES["DEFAULT_GROUP"] = default_group


def differentiable_once(backward: Backward) -> Backward:
    """Decorate a ``backward`` without a derivative, whose ``forward`` calls :func:`begin`.

    With ``torch.autograd.function.once_differentiable``, gradients have no graph where the incoming gradient has
    none, and a second derivative silently lacks a term; this decorator raises.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        compiling = torch.compiler.is_compiling()
        if not compiling:
            withdraw(ctx)
            if grads[0] is None and all(grad is None for grad in grads):
                return (None,) * len(ctx.needs_input_grad)
            for version, shape in getattr(ctx, "read", ()):
                version.check(shape)
            # A gradient that a collective still computes is a wrapper without memory, and kernels read memory.
            if type(grads[0]) is not Tensor or len(grads) > 1:
                grads = tuple([grad if grad is None or type(grad) is Tensor else waited(grad) for grad in grads])
        if torch.is_grad_enabled():
            refuse_second_derivative()
        asked = None if compiling else observer().asked()
        return backward(ctx, *grads) if asked is None else _gradients_asked_for(backward, ctx, grads, asked)

    return checked


def wanted(ctx: Any) -> tuple[bool, ...]:
    """Return of each argument of ``forward`` whether the running ``backward`` is asked for its gradient.

    A ``backward`` that computes its gradients one by one leaves out the others. What it returns of the others all the
    same, as a kernel computes them together, is kept for the backward that will ask for it, if it is small.
    """
    answers: tuple[bool, ...] = getattr(ctx, "wanted", ctx.needs_input_grad)
    return answers


class _UnclaimedGradients:
    """Small gradients that a backward computed without being asked, and the incoming gradients they belong to."""

    def __init__(self, incoming: tuple[Tensor | None, ...], computed: tuple[Tensor | None, ...]) -> None:
        self._incoming = [None if grad is None else (ref(grad.untyped_storage()), _view_of(grad)) for grad in incoming]
        self.computed = computed

    def serves(self, incoming: tuple[Tensor | None, ...], asked: tuple[bool, ...]) -> bool:
        """Return whether they belong to ``incoming`` (the same memory, unchanged) and are all that is asked for."""
        known = all(grad is not None for grad, want in zip(self.computed, asked, strict=True) if want)
        return known and all(
            grad is None
            if of is None
            else grad is not None and of[0]() is grad.untyped_storage() and of[1] == _view_of(grad)
            for of, grad in zip(self._incoming, incoming, strict=True)
        )


def _view_of(grad: Tensor) -> tuple[object, ...]:
    return grad.data_ptr(), grad._version, grad.dtype, grad.size(), grad.stride()


# An unclaimed gradient is kept if the incoming one has this many times its elements: gradients of weights and biases
# are far below, and one of an input, as large as the incoming one, would stay until a backward that may never come.
_TIMES_SMALLER = 8


def _gradients_asked_for(
    backward: Backward, ctx: Any, grads: tuple[Tensor | None, ...], asked: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Return the gradients that this backward is asked for, from an earlier one if that has computed them too."""
    answers = iter([answer for answer, (node, _) in zip(asked, ctx.next_functions, strict=True) if node is not None])
    wants = tuple([need and next(answers) for need in ctx.needs_input_grad])
    unclaimed, ctx.unclaimed = getattr(ctx, "unclaimed", None), None
    if unclaimed is not None and unclaimed.serves(grads, wants):
        computed = unclaimed.computed
    else:
        ctx.wanted = wants
        computed = backward(ctx, *grads)
        del ctx.wanted
        most = max(0 if grad is None else grad.numel() for grad in grads) // _TIMES_SMALLER
        if graph_is_retained() and all(grad is None or type(grad) is Tensor for grad in grads):
            ctx.unclaimed = _UnclaimedGradients(
                grads,
                tuple(
                    None if want or g is None or g.numel() > most else g
                    for g, want in zip(computed, wants, strict=True)
                ),
            )
    return tuple([grad if want else None for grad, want in zip(computed, wants, strict=True)])


def recorded(*tensors: Tensor | None) -> bool:
    """Return whether backward will want a gradient of one of the tensors.

    Forward-mode AD is left to torch, and so are function modes, which see the calls of torch's functions and may
    replace them, and graphs that torch.compile traces: what these save is decided for the whole graph. So are tensors
    made under inference mode, which only some of torch's operators take in a graph.
    """
    if (
        not torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or forward_ad_active()
        or (function_modes() and function_mode_active())
    ):
        return False
    wanted = False
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.is_inference():
            return False
        wanted = wanted or tensor.requires_grad
    return wanted


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to accumulate sums over ``dtype`` in: float32, or float64 for float64."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def check_float_tensor(name: str, x: Tensor | None) -> None:
    """Raise TypeError unless ``x`` is a floating-point tensor."""
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} must be a floating-point torch.Tensor, got {got}")


def check_dtype(function: str, dtype: torch.dtype | None) -> None:
    """Raise TypeError unless an optional dtype of ``function`` is a floating-point one."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"{function} expects a floating-point dtype, got {dtype!r}")
