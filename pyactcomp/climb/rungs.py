"""The rungs of a ladder: each makes the same training need less memory than the rung before."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.nn import BatchNorm1d, BatchNorm2d, BatchNorm3d, Module, SyncBatchNorm

from ..checkpoint import checkpoint, use_checkpoint
from ..compress import compress, decompress
from ..errors import PyactcompError, check_choice

_BATCH_NORMS = (BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm)
# Methods that switch checkpointing on: of transformers, newer and older, and of diffusers.
_ENABLE = ("activation_checkpointing_enable", "gradient_checkpointing_enable", "enable_gradient_checkpointing")


@dataclass(frozen=True)
class Rung:
    """A way to train with less memory.

    Attributes
    ----------
    name
        For messages.
    climb
        Changes the model; called once, after the rungs before.
    parts
        Into how many micro-batches a batch is split.
    """

    name: str
    climb: Callable[[Module], object] = lambda model: None
    parts: int = 1


def make_rungs(names: Sequence[str | Rung], model: Module, blocks: Sequence[Module]) -> tuple[list[Rung], list[str]]:
    """Return the rungs that serve a model, lowest first, and why each of the others does not."""
    rungs: list[Rung] = []
    left_out: list[str] = []
    for name in names:
        if isinstance(name, Rung):
            rungs.append(name)
            continue
        check_choice("rungs", name, RUNGS)
        made = _RUNGS[name](model, blocks)
        if isinstance(made, Rung):
            rungs.append(made)
        else:
            left_out.append(f"{name}: {made}")
    return rungs, left_out


def _compressing(name: str, mode: str) -> Rung:
    def climb(model: Module) -> None:
        with contextlib.suppress(PyactcompError):  # not compressed yet
            decompress(model)
        compress(model, mode=mode)  # type: ignore[arg-type]

    return Rung(name, climb)


def _checkpointing(model: Module, blocks: Sequence[Module]) -> Rung | str:
    enable = next((getattr(model, name) for name in _ENABLE if hasattr(model, name)), None)
    if not blocks and enable is None:
        return "the model cannot enable checkpointing by itself: give the blocks to checkpoint as blocks="

    def climb(model: Module) -> None:
        _compressing("int8", "int8").climb(model)
        for block in blocks:
            block.forward = functools.partial(checkpoint, block.forward)
        if not blocks and enable is not None:
            enable()
            use_checkpoint(model)

    return Rung("int8+checkpoint", climb)


def _splitting(name: str, parts: int, model: Module) -> Rung | str:
    if any(isinstance(module, _BATCH_NORMS) for module in model.modules()):
        return "batch norms compute with the statistics of the whole batch, which its parts do not have"
    return Rung(name, parts=parts)


_RUNGS: dict[str, Callable[[Module, Sequence[Module]], Rung | str]] = {
    "keep": lambda model, blocks: Rung("keep"),
    "lossless": lambda model, blocks: _compressing("lossless", "lossless"),
    "int8": lambda model, blocks: _compressing("int8", "int8"),
    "int8+checkpoint": _checkpointing,
    "half": lambda model, blocks: _splitting("half", 2, model),
    "quarter": lambda model, blocks: _splitting("quarter", 4, model),
    "eighth": lambda model, blocks: _splitting("eighth", 8, model),
}
RUNGS = tuple(_RUNGS)
