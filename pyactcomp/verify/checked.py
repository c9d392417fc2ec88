"""Hooks for ``verify``: compress without loss and compare each restored tensor with the saved tensor."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from ..compress import Compressed
from ..config import Config
from ..engine import saved as stored_forms
from ..engine.frame import Frame
from ..engine.packing import Packing
from ..engine.reasons import HOLDS_NOTHING, RECAST
from ..engine.record import Recorder, SavedTensor
from ..engine.saved import PLAIN, Saved
from ..engine.session import Session
from ..errors import PyactcompError
from ..readers.forms import BITS
from ..torch_private import never_traced
from .noise import is_narrow


class _Expected(NamedTuple):
    """A saved tensor, held as in plain autograd, and the tensor's record."""

    tensor: Tensor
    record: SavedTensor


class CheckedFrame(Frame):
    """The hooks of one forward; they also hold the saved tensors, and compare each at the first unpacking."""

    __slots__ = ("_expected", "_rounding", "_saves")

    def __init__(self, packing: Packing, module: Module | None, recorder: Recorder, rounding: set[torch.dtype]) -> None:
        self._rounding = rounding
        self._saves = recorder.saved
        # Saved tensors by the id of their stored form, which several operators may share. The entry holds the form, so
        # the id stays unique. A wrapper around the form would hide the form from recipes.
        self._expected: dict[int, tuple[Saved, list[_Expected]]] = {}
        super().__init__(packing, module, recorder)

    def pair(self) -> tuple[Any, Any]:
        """Return the hooks that compare."""
        return self.pack, self.unpack

    @never_traced
    def pack(self, tensor: Tensor) -> Saved:
        """Pack, and hold the tensor too unless the stored form already holds the tensor."""
        saved = self.hooks.pack(tensor)
        if is_narrow(tensor.dtype):
            self._rounding.add(tensor.dtype)
        if type(tensor) in PLAIN and not _values_are_not_read(saved):
            record = self._saves[-1]
            if record.kept is None or record.kept in HOLDS_NOTHING:
                expected = _Expected(tensor.detach(), record)
                self._expected.setdefault(id(saved), (saved, []))[1].append(expected)
        return saved

    @never_traced
    def unpack(self, saved: Saved) -> Tensor:
        """Restore, and raise PyactcompError if plain autograd would have used other values."""
        restored = saved.restore()
        # Remove the entry, so that backward frees memory as without the check.
        _, expected = self._expected.pop(id(saved), (saved, ()))
        for tensor, record in expected:
            if not _same_elements(restored, tensor):
                raise _edited(record)
        return restored


class CheckedSession(Session):
    """A session whose frames compare, and record every forward to name the module in errors.

    Attributes
    ----------
    rounding : set of torch.dtype
        The 16-bit dtypes of the tensors saved so far.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.rounding: set[torch.dtype] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckedSession, (self.config,)

    def _new_frame(self, module: Module | None) -> Frame:
        return CheckedFrame(self, module, Recorder(module), self.rounding)


class Checked(Compressed):
    """Compresses without loss, and raises if backward restores other values than plain autograd would have used.

    In lossless mode any difference is an edit unseen by version counters; with codes, rounding could explain it.
    """

    def __init__(self, model: Module, config: Config) -> None:
        super().__init__(model, config)
        self.session: CheckedSession = CheckedSession(config)


def _values_are_not_read(saved: Saved) -> bool:
    """Return whether a stored form holds no values: only the shape, or the outcome of a comparison."""
    shared = saved.region if isinstance(saved, stored_forms.View) else saved
    return isinstance(shared, stored_forms.Shapeless) or (
        isinstance(shared, stored_forms.Region) and shared.form.need == BITS
    )


def _same_elements(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same elements; NaN equals NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _edited(record: SavedTensor) -> PyactcompError:
    where = f"module {record.module!r}" if record.module else "the model's own forward or the loss"
    held = record.kept or "stored in a narrower form"
    if record.kept == RECAST:
        advice = "run backward before parameters are written to, or pass keep_weight_copies=True"
    else:
        advice = "write to the tensor under torch.no_grad() instead, so that the version counter sees the edit"
    if record.module:
        advice += f", or leave the module as it is with skip=[{record.module!r}]"
    return PyactcompError(
        f"a tensor of shape {list(record.shape)} and dtype {record.dtype} that {where} saved ({held}) came back in "
        "backward with other values than autograd would have used: the tensor, or its source, was probably written "
        f"to through .data, which no version counter sees; {advice}."
    )
