"""Loads ``_observer``, the library for one torch release: it finds the operator that saves a tensor, and packs.

Without the library nothing is compressed: :func:`observer` raises, and names the command that builds it.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import torch_private
from ..errors import ImplementationUnavailableError
from ..torch_private import extensions
from . import lookup
from .forms import Reading
from .rule import Maker, Partner
from .table import CHOOSING, DECIDING, DIVIDING

Facts = tuple[Reading | None, Maker, Partner, str]


class Observer(Protocol):
    """Observes the operators running in this thread, and packs what they save."""

    def start(self) -> None:
        """Observe this thread until the matching :meth:`stop`; calls nest."""

    def stop(self) -> None:
        """Undo one start of this thread."""

    def may_be_transformed(self) -> bool:
        """Return False only if operators are surely not transformed, recorded or replaced; a fast test."""

    def note_save(self) -> None:
        """Count a tensor saved by the running operator."""

    def facts(self, tensor: Tensor) -> Facts:
        """Return the running operator's reading of the tensor counted last, the tensor's maker, partner and origin.

        The reading is None outside of any operator.
        """

    def bare(self, tensor: Tensor) -> Tensor:
        """Return a tensor detached from the graph, with the same memory and version counter."""

    def buffer(self, tensor: Tensor, nbytes: int, /) -> Tensor:
        """Return uninitialised bytes on the device of ``tensor``."""

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return uninitialised memory with the layout and dtype of a dense tensor, which no callback observes."""

    def progress(self) -> tuple[int, int, int]:
        """Return this thread's counts of calls, of deciding calls, and of deciding calls before the running call."""

    def take_divisor(self) -> int:
        """Return the elements of the largest divisor in this thread since the last call of this method."""

    def asked(self) -> tuple[bool, ...] | None:
        """Return of each input of the running node whether this backward computes its gradient; None if of all."""

    def unpack(self, saved: Any) -> Tensor:
        """Restore a saved tensor: the unpack hook."""

    def is_ordinary(self) -> bool:
        """Return whether gradients are recorded, and nothing transforms, disables or may rerun the running function.

        If not, Python asks more closely.
        """

    def takes(self, x: object, min_bytes: int, constant: bool, /) -> bool:
        """Return whether a fused call may take a tensor, which needs a gradient unless ``constant`` ones serve too."""

    def dropout(self, x: Tensor, p: float, /) -> Tensor | None:
        """Return the dropout of a tensor of the CPU, None where 1 / (1 - p) is infinite; saves a mask of booleans."""

    def ordinary_codes(self, module: object, x: object, constant: bool, /) -> Any:
        """Return the codes of a fused module's call on ``x``, or None where something unusual may surround the call.

        Of a call that :func:`~pyactcomp.fusions.fusion.codes_for` would let through, at no call of Python. If None,
        Python asks more closely.
        """

    def BatchNorm(
        self,
        planner: Callable[..., object],
        runs_on: Callable[[torch.device], bool],
        restore: Callable[..., Tensor],
        channels: int,
        element_size: int,
        tiling: tuple[int, int, int],
        keys: tuple[int, int, int, int],
        stochastic: bool,
        /,
    ) -> object:
        """Return the kernels of a batch norm: a :class:`~pyactcomp.functional.convolutional.launch.BatchNormKernels`.

        ``planner`` and ``runs_on`` are as in :meth:`Gelu`; ``restore`` maps codes of a sum, its layout and a dtype to a
        tensor. ``tiling`` has the groups of channels, the blocks of channels, and the rows of a tile.
        """

    def Gelu(
        self, planner: Callable[..., object], runs_on: Callable[[torch.device], bool], keys: tuple[int, int], /
    ) -> object:
        """Return the kernels of GELU: a :class:`~pyactcomp.functional.activations.gelu.launch.GeluKernels`.

        ``planner`` maps a kernel's name, the number of elements, the kernel's flags, whether it writes no codes and a
        device to a :class:`~pyactcomp.functional.launch.Plan`; ``runs_on`` tells whether the kernels serve a device.
        """

    def Norm(
        self,
        planner: Callable[..., object],
        runs_on: Callable[[torch.device], bool],
        shape: tuple[int, ...],
        centred: bool,
        eps: float,
        keys: tuple[int, int],
        copied: torch.dtype | None,
        serves: bool,
        /,
    ) -> object:
        """Return the kernels of a norm: a :class:`~pyactcomp.functional.norms.launch.NormKernels`.

        ``planner`` and ``runs_on`` are as in :meth:`Gelu`; ``serves`` tells whether the kernels serve such rows.
        """

    def counts(self) -> tuple[int, int, int]:
        """Return the stored forms and recipes alive, the regions decoded and the recipes run so far in this process."""

    def stored_forms(self) -> list[Any]:
        """Return the stored forms alive, of classes of the library: Python's garbage collector does not know them."""

    def note_offering(self, function: type) -> bool:
        """Note that results of an autograd function may be recomputed, given the class of its nodes."""

    def is_offering(self, function: type) -> bool:
        """Return whether results of an autograd function may be recomputed."""

    def recipe_of(self, tensor: Tensor) -> Any:
        """Return the recipe for a tensor, or for the source of the cast that made the tensor; None without one."""

    def offer_norm(self, out: Tensor, may_be_freed: bool, /) -> None:
        """Offer a recipe for the output of an operator that normalises; others may free its parameters."""

    def offer_exact_layer_norm(
        self, out: Tensor, eps: float, weight: Tensor | None, bias: Tensor | None, may_be_freed: bool, /
    ) -> None:
        """Offer a recipe to the bit for the output of a layer norm."""

    def send(self, tensors: list[Tensor], tape: object, /) -> list[Tensor]:
        """Put copies of tensors on a tape, unless it is None; return a handle for each, which owns the copy."""

    def take(self, handle: Tensor, /) -> Tensor:
        """Return the tensor that a handle stands for, to be read by work queued on the current stream from here on."""

    def configure_engine(self, names: dict[str, object]) -> None:
        """Set what the library asks by name."""

    def __getattr__(self, name: str) -> Any:
        """Return one of the classes that ``engine.saved`` describes."""


# An operand with this many times fewer elements than another is a statistic, as in the library (`kFewer`).
FEWER = 8
# The newest release of torch with which the tests were passed; pyproject.toml ends there too.
NEWEST_TESTED = (2, 14)


@functools.cache
def prepare() -> None:
    """Compile the library if it is missing, and warn of what makes this process weaker; the first call alone acts.

    Raises
    ------
    ImplementationUnavailableError
        If the library is missing and cannot be compiled here.
    """
    if os.environ.get("PYACTCOMP_DISABLE") == "1":
        return
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) > NEWEST_TESTED:
        warnings.warn(
            f"torch {torch.__version__} is newer than those that pyactcomp is tested with: run pyactcomp doctor, which "
            f"tests the names of torch in use, or pip install 'torch<{NEWEST_TESTED[0]}.{NEWEST_TESTED[1] + 1}'",
            stacklevel=3,
        )
    observer()


@functools.cache
def observer() -> Observer:
    """Return the library, compiled first if need be.

    Raises
    ------
    ImplementationUnavailableError
        If the library is missing and cannot be compiled here.
    """
    library, missing = extensions.load_or_build("_observer", lambda: extensions.build("_observer"))
    if library is None:
        duration = extensions.LIBRARIES["_observer"].duration
        raise ImplementationUnavailableError(
            f"pyactcomp cannot compress here: {missing}. Compiling takes about {duration}"
        )
    look_ups: tuple[Callable[..., Any], ...] = (
        lookup.of_operator,
        lookup.of_function,
        lookup.weakest_need,
        lookup.kind_of,
    )
    # Tensors are saved also where torch.compile looks at each new frame.
    untraced = [torch_private.never_traced(each) for each in look_ups]
    library.configure(*untraced, DECIDING, CHOOSING, DIVIDING, tuple(Maker), tuple(Partner))
    lookup.on_change.append(library.forget)
    return library


def transformed() -> bool:
    """Return whether a transform (functorch, forward AD, tracing) is active; saved tensors are then kept."""
    return observer().may_be_transformed() and torch_private.transformed()


def being_traced() -> bool:
    """Return whether make_fx records operators."""
    return observer().may_be_transformed() and torch_private.being_traced()
