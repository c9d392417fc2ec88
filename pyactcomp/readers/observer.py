"""Finds the operator that saves a tensor: by ``_observer``, a library compiled for one torch release, or a fallback."""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .. import torch_private
from ..torch_private import extensions
from . import lookup
from .forms import ITSELF, Reading, Use, strictest
from .nodes import producer
from .rule import Maker, Partner
from .table import CHOOSING, DECIDING, DIVIDING, ELEMENTWISE, READERS

UNCLEAR, KEPT, CONSTANT, ORDINARY = range(4)
"""How much there is to decide about a saved tensor: look closely; keep it; keep it, unless a compiled graph saves it;
pack it, unless the model owns its memory or skips the module."""

Facts = tuple[Reading | None, Maker, Partner, str]


class Version(Protocol):
    """A tensor's version at the time of saving, and the tensor's version counter."""

    @property
    def current(self) -> int:
        """The version now."""

    @property
    def saved(self) -> int:
        """The version at the time of saving."""

    @property
    def moved(self) -> bool:
        """Whether the tensor was written to since."""


class Observer(Protocol):
    """Observes the operators running in this thread."""

    def start(self) -> None:
        """Observe this thread until the matching :meth:`stop`; calls nest."""

    def stop(self) -> None:
        """Undo one start of this thread."""

    def may_be_transformed(self) -> bool:
        """Return False only if operators are surely not transformed, recorded or replaced; a fast test."""

    def saving(self, tensor: Tensor, min_bytes: int, /) -> int:
        """Count a tensor saved by the running operator; return how much there is to decide about it."""

    def origin(self, tensor: Tensor) -> str:
        """Return the name of the node that made a tensor, views aside; empty if there is none."""

    def facts(self, tensor: Tensor) -> Facts:
        """Return the running operator's reading of the tensor counted last, the tensor's maker, partner and origin.

        The reading is None outside of any operator.
        """

    def layout_key(self, tensor: Tensor) -> Hashable:
        """Return a key that is equal for tensors of equal layout, dtype and device."""

    def bare(self, tensor: Tensor) -> Tensor:
        """Return a tensor detached from the graph, with the same memory and version counter."""

    def buffer(self, tensor: Tensor, nbytes: int, /) -> Tensor:
        """Return uninitialised bytes on the device of ``tensor``."""

    def empty_as(self, like: Tensor, beside: Tensor, /) -> Tensor:
        """Return an uninitialised tensor with the layout and dtype of ``like`` on the device of ``beside``."""

    def version(self, tensor: Tensor) -> Version:
        """Return a tensor's version and version counter, without holding the tensor."""

    def progress(self) -> tuple[int, int, int]:
        """Return this thread's counts of calls, of deciding calls, and of deciding calls before the running call."""

    def take_divisor(self) -> int:
        """Return the elements of the largest divisor in this thread since the last call of this method."""

    def contradiction(self, need: int) -> str | None:
        """Return the name of the node running in backward if the table says that the node needs more than ``need``."""

    def asked(self) -> tuple[bool, ...] | None:
        """Return of each input of the running node whether this backward computes its gradient; None if of all."""


# The newest release of torch with which the tests were passed; pyproject.toml ends there too.
NEWEST_TESTED = (2, 14)


@functools.cache
def prepare() -> None:
    """Compile the library if it is missing, and warn of what makes this process weaker; the first call alone acts."""
    if os.environ.get("PYACTCOMP_DISABLE") == "1":
        return
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) > NEWEST_TESTED:
        warnings.warn(
            f"torch {torch.__version__} is newer than those that pyactcomp is tested with: run pyactcomp doctor, which "
            f"tests the names of torch in use, or pip install 'torch<{NEWEST_TESTED[0]}.{NEWEST_TESTED[1] + 1}'",
            stacklevel=3,
        )
    library, missing = extensions.load_or_build("_observer", lambda: extensions.build("_observer"))
    observer.cache_clear()  # what was compiled now serves what asked before, too
    if library is None:
        warnings.warn(
            f"pyactcomp stores more than it needs to: {missing}. More tensors stay exact: torch's "
            "TransformerEncoderLayer stores 2.2 times the bytes",
            stacklevel=3,
        )


@functools.cache
def observer() -> Observer:
    """Return the library, or the fallback if the library is not built for this torch."""
    library, _ = extensions.load("_observer")
    if library is None:
        return WithoutLibrary()
    tables = lookup.of_operator, lookup.of_function, lookup.weakest_need, lookup.kind_of
    library.configure(*tables, DECIDING, CHOOSING, DIVIDING, tuple(Maker), tuple(Partner))
    lookup.on_change.append(library.forget)
    return library


def transformed() -> bool:
    """Return whether a transform (functorch, forward AD, tracing) is active; saved tensors are then kept."""
    return observer().may_be_transformed() and torch_private.transformed()


def being_traced() -> bool:
    """Return whether make_fx records operators."""
    return observer().may_be_transformed() and torch_private.being_traced()


# Functions composed of matrix products or convolutions: all operands are read alike.
_PRODUCTS = frozenset(
    (
        *("linear", "matmul", "einsum", "bilinear", "tensordot", "chain_matmul", "inner", "outer", "kron"),
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    )
)
_ALIASES = {
    "layer_norm": "native_layer_norm",
    "group_norm": "native_group_norm",
    "batch_norm": "native_batch_norm",
    "softmax": "_softmax",
    "log_softmax": "_log_softmax",
    "true_divide": "div",
    "multiply": "mul",
}
# An operand with this many times fewer elements than another is a statistic, as in the library (`kFewer`).
FEWER = 8
_PRODUCT = Reading.of("a product", "operand", Use.MATRIX, "the derivative multiplies the incoming gradient by it")


@functools.lru_cache(maxsize=1024)
def _of_name(name: str) -> tuple[Reading, Reading, Reading] | None:
    """Return a torch function's readings of the first argument, of any argument, and of any saved tensor."""
    if name in _PRODUCTS:
        return _PRODUCT, _PRODUCT, _PRODUCT
    name = _ALIASES.get(name, name)
    found = READERS.get(name)
    if found is None or any(key.startswith(f"{name}.") for key in READERS):
        return None
    exact = found.get("", Reading(f"aten::{name}", "another operand", ITSELF, "backward is not known to need less"))
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    tensors = [a.name for schema in schemas for a in schema.arguments if "Tensor" in str(a.type) and not a.is_out]
    if not tensors:
        return exact, exact, exact
    arguments = [found.get(each, exact) for each in tensors]
    return arguments[0], strictest(arguments), strictest([*arguments, found.get("result", exact)])


def _is_statistic(tensor: Tensor, arguments: Iterable[Any]) -> bool:
    """Return whether each element of a tensor is broadcast over many elements of another operand."""
    distinct = math.prod(size for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step)
    return distinct * FEWER <= max((each.numel() for each in arguments if isinstance(each, Tensor)), default=0)


class _Calls(TorchFunctionMode):
    """Records the torch functions called from Python."""

    def __init__(self, calls: list[tuple[str, tuple[Any, ...]]], count: Callable[[str], None]) -> None:
        super().__init__()
        self._calls, self._count = calls, count

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        kwargs = kwargs or {}
        self._count(name)
        self._calls.append((name, (*args, *kwargs.values())))
        try:
            return func(*args, **kwargs)
        finally:
            self._calls.pop()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.modes: list[_Calls] = []
        self.serial = self.decisions = 0


_CASTS = ("long", "int", "short", "char", "byte", "bool")
_CHOOSING = ("norm", "vector_norm", "matrix_norm", "cdist", "pdist", "grid_sample")
_DECIDING = frozenset((*(name.removeprefix("aten::") for name in DECIDING), *_CASTS, *_CHOOSING))


class _Probe:
    """Holds an empty tensor with the version counter of another tensor."""

    __slots__ = ("_empty", "saved")

    def __init__(self, tensor: Tensor) -> None:
        self._empty = tensor.detach()
        self._empty.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.saved = tensor._version

    @property
    def current(self) -> int:
        """The version now."""
        return self._empty._version

    @property
    def moved(self) -> bool:
        """Whether the tensor was written to since."""
        return self._empty._version != self.saved


class WithoutLibrary:
    """The fallback: sees torch functions called from Python, but no operators inside, so more tensors stay exact."""

    def __init__(self) -> None:
        self._thread = _Thread()

    def start(self) -> None:
        """Observe this thread until the matching :meth:`stop`; calls nest."""
        thread = self._thread
        mode = _Calls(thread.calls, self._count)
        thread.modes.append(mode)
        mode.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Undo one start of this thread."""
        if self._thread.modes:
            self._thread.modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _count(self, name: str) -> None:
        self._thread.serial += 1
        if name in _DECIDING:
            self._thread.decisions += 1

    def may_be_transformed(self) -> bool:
        """Return True: the fallback has no fast test."""
        return True

    def saving(self, tensor: Tensor, min_bytes: int, /) -> int:
        """Return UNCLEAR; the fallback counts no positions, and has no fast test."""
        return UNCLEAR

    def origin(self, tensor: Tensor) -> str:
        """Return the name of the node that made a tensor, views aside; empty if there is none."""
        return producer(tensor)[0]

    def facts(self, tensor: Tensor) -> Facts:
        """Return the running function's reading of a saved tensor, and its origin; maker and partner stay unknown.

        A Python function may run any product inside.
        """
        return self._reader(tensor), Maker.OTHER, Partner.OTHER, producer(tensor)[0]

    def layout_key(self, tensor: Tensor) -> Hashable:
        """Return a key that is equal for tensors of equal layout, dtype and device."""
        return tensor.size(), tensor.stride(), tensor.dtype, tensor.device

    def bare(self, tensor: Tensor) -> Tensor:
        """Return a tensor detached from the graph, with the same memory and version counter."""
        return tensor.detach()

    def buffer(self, tensor: Tensor, nbytes: int, /) -> Tensor:
        """Return uninitialised bytes on the device of ``tensor``."""
        return torch.empty(nbytes, dtype=torch.uint8, device=tensor.device)

    def empty_as(self, like: Tensor, beside: Tensor, /) -> Tensor:
        """Return an uninitialised tensor with the layout and dtype of ``like`` on the device of ``beside``."""
        return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=beside.device)

    def version(self, tensor: Tensor) -> Version:
        """Return a tensor's version and version counter, without holding the tensor."""
        return _Probe(tensor)

    def _reader(self, tensor: Tensor) -> Reading | None:
        """Return the running function's reading of a saved tensor; None outside of any function."""
        calls = self._thread.calls
        if not calls:
            return None
        name, arguments = calls[-1]
        found = _of_name(name)
        if found is None:
            return Reading(f"torch.{name}", "any operand", ITSELF, "without the observer, it may run any operator")
        if _ALIASES.get(name, name) in ELEMENTWISE and _is_statistic(tensor, arguments):
            return Reading(
                f"torch.{name}", "an operand", ITSELF, "one number for many elements: a statistic or a scale"
            )
        first, argument, anything = found
        places = [place for place, given in enumerate(arguments) if given is tensor]
        if not places:
            return anything
        return first if places == [0] else argument

    def progress(self) -> tuple[int, int, int]:
        """Return this thread's counts of calls, of deciding calls, and of deciding calls before the running call."""
        thread = self._thread
        # Without the last count, a block inside one Python call counts as deciding if any call has decided before.
        return thread.serial, thread.decisions, 0

    def asked(self) -> None:
        """Return None: the fallback does not tell which gradients a backward computes."""

    def take_divisor(self) -> int:
        """Return the largest number: a Python function may divide inside."""
        return sys.maxsize

    def contradiction(self, need: int) -> str | None:
        """Return the name of the node running in backward if the table says that the node needs more than ``need``."""
        node = torch_private.running_node()
        if node is None or _weakest(node.name()) <= need:
            return None
        return node.name()


_weakest = functools.lru_cache(maxsize=1024)(lookup.weakest_need)
lookup.on_change.append(_weakest.cache_clear)
lookup.on_change.append(_of_name.cache_clear)
