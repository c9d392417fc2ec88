"""Lossless hooks that compare what backward restores with what the forward saved: a check that ``verify`` makes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from ..compress import Compressed
from ..config import Config
from ..engine.frame import Frame
from ..engine.packing import Packing
from ..engine.policy import MADE_AGAIN, PLAIN, RECAST
from ..engine.record import Recorder, SavedTensor
from ..engine.saved import Region, Saved, Shapeless, View
from ..engine.session import Session
from ..errors import PyactcompError
from ..readers.forms import BITS
from ..torch_private import never_traced


class _Expected(NamedTuple):
    """A tensor that was saved, alive as plain autograd would hold it, and what was recorded about it."""

    tensor: Tensor
    record: SavedTensor


class CheckedFrame(Frame):
    """The hooks of one forward that hold what they replace as well, and compare when it is first unpacked."""

    __slots__ = ("_expected", "_saves")

    def __init__(self, packing: Packing, module: Module | None, recorder: Recorder) -> None:
        super().__init__(packing, module, recorder)
        self._saves = recorder.saved
        # By what is held instead, which several operators may share; while it is in here, its id is its own. To wrap it
        # would hide it from the recipes that compute from it.
        self._expected: dict[int, tuple[Saved, list[_Expected]]] = {}
        self._context = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    @never_traced
    def pack(self, tensor: Tensor) -> Saved:
        """Pack, and hold the tensor too where it is not held as it is."""
        saved = super().pack(tensor)
        if type(tensor) in PLAIN and not _values_are_not_read(saved):
            record = self._saves[-1]
            if record.kept is None or record.kept in MADE_AGAIN:
                expected = _Expected(tensor.detach(), record)
                self._expected.setdefault(id(saved), (saved, []))[1].append(expected)
        return saved

    @never_traced
    def unpack(self, saved: Saved) -> Tensor:
        """Restore, and raise PyactcompError where autograd would have used other values."""
        restored = saved.restore()
        # Taken out, so that memory shrinks during backward as it does without the check.
        _, expected = self._expected.pop(id(saved), (saved, ()))
        for tensor, record in expected:
            if not _same(restored, tensor):
                raise _edited(record)
        return restored


class CheckedSession(Session):
    """A session whose frames check, and record each time where they are."""

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckedSession, (self.config,)

    def _new_frame(self, module: Module | None) -> Frame:
        return CheckedFrame(self, module, Recorder(module))


class Checked(Compressed):
    """Compresses without loss and raises where what backward restores is not what plain autograd would have used.

    Without loss any difference is an edit that no version counter saw, however small; with codes it might be rounding.
    """

    def __init__(self, model: Module, config: Config) -> None:
        super().__init__(model, config)
        self.session = CheckedSession(config)


def _values_are_not_read(saved: Saved) -> bool:
    """Return whether a saved tensor is restored without its values: its shape, or the answer to a comparison."""
    shared = saved.region if isinstance(saved, View) else saved
    return isinstance(shared, Shapeless) or (isinstance(shared, Region) and shared.form.need == BITS)


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same elements; NaN is NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _edited(record: SavedTensor) -> PyactcompError:
    where = f"module {record.module!r}" if record.module else "the model's own forward or the loss"
    held = record.kept or "stored in a narrower form"
    if record.kept == RECAST:
        advice = "run backward before parameters are written to, or pass keep_weight_copies=True"
    else:
        advice = "write to it under torch.no_grad() instead, which counts the edit"
    if record.module:
        advice += f", or leave the module as it is with skip=[{record.module!r}]"
    return PyactcompError(
        f"a tensor of shape {list(record.shape)} and dtype {record.dtype} that {where} saved ({held}) came back in "
        "backward with other values than autograd would have used: it, or what it is made from, was probably written "
        f"to through .data, which no version counter sees; {advice}."
    )
