"""Training steps that survive running out of memory: the same step runs again, in a way that needs less."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, distributed
from torch.amp.grad_scaler import GradScaler
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .failures import attempt, give_back, gpu_in_use
from .rungs import Rung, make_rungs
from .state import Buffers, Gradients, HasState, Others, RandomState

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

T = TypeVar("T")

_log = logging.getLogger("pyactcomp")


@dataclass(frozen=True)
class Climb:
    """A rung that was left because memory ran out in a step, on this process or on another (``failure`` is None)."""

    step: int  #: from 0
    rung: str
    failure: str | None


class Ladder:
    """Runs training steps, and climbs where memory runs out: the same step again, on a rung that needs less memory.

    After an out-of-memory error in forward or backward everything that the failed step held is freed, the generators,
    the buffers and the GradScaler are put back, and the step runs again one rung up. The ladder stays there for the
    steps that follow. No rung is tried twice.

    Parameters
    ----------
    model : Module
        A model without sharded parameters. Of a DistributedDataParallel the module inside is used.
    optimizer : Optimizer
    rungs : sequence of str or Rung
        In order, of "keep" (as the model is), "lossless", "int8", "int8+checkpoint", "half", "quarter", "eighth" (the
        batch in parts, whose gradients add up to the whole batch's), and rungs of your own.
    blocks : sequence of Module
        The blocks that "int8+checkpoint" checkpoints; needed unless the model can enable checkpointing by itself, as
        those of transformers and diffusers do.
    scaler : GradScaler, optional
        Scales losses and gradients, as usual.
    others : iterable
        What else the forward changes and has ``state_dict``, to put back too.
    weight : callable, optional
        Takes a part of a batch and returns its weight in the loss: for a mean over tokens, their number. None: the
        number of rows.
    before_step : callable, optional
        Called with the whole batch's unscaled gradients in place, before the optimizer; for clipping.
    snapshot : path, optional
        A folder. On a GPU, each failure writes what the allocator holds into it, for ``pyactcomp explain``.

    Attributes
    ----------
    rung : Rung
        The current one.
    climbs : list of Climb
        What happened so far.
    left_out : list of str
        Rungs that do not serve this model, and why.

    Raises
    ------
    TypeError, ValueError
        For a wrong argument, and for sharded parameters.

    Notes
    -----
    With several processes all climb together: after backward and before gradients are reduced, they agree on whether
    one has failed, and the host waits for the answer. So gradients are reduced after backward and not during it.

    Examples
    --------
    >>> import torch, pyactcomp
    >>> model = torch.nn.Linear(64, 64)
    >>> ladder = pyactcomp.Ladder(model, torch.optim.AdamW(model.parameters()), rungs=("keep", "int8", "half"))
    >>> loss = ladder.step(torch.randn(8, 64), lambda model, batch: model(batch).square().mean())
    >>> ladder.rung.name, ladder.climbs
    ('keep', [])
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        rungs: Sequence[str | Rung] = ("keep", "int8", "int8+checkpoint", "half", "quarter", "eighth"),
        *,
        blocks: Sequence[Module] = (),
        scaler: GradScaler | None = None,
        others: Iterable[HasState] = (),
        weight: Callable[[Any], float] | None = None,
        before_step: Callable[[], object] | None = None,
        snapshot: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(model, Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        if any(hasattr(parameter, "placements") for parameter in self.model.parameters()):
            raise ValueError("the model's parameters are sharded, and a rank cannot repeat a step alone: use no ladder")
        self.optimizer = optimizer
        self._rungs, self.left_out = make_rungs(rungs, self.model, blocks)
        if not self._rungs:
            raise ValueError(f"rungs must name at least one that serves this model, got {rungs!r}: {self.left_out}")
        self._at = 0
        self._rungs[0].climb(self.model)
        self.climbs: list[Climb] = []
        self.steps = 0
        # Whether the optimizer changes weights by operations that torch counts; kernels and ``.data`` are not counted.
        self._counts_versions = False
        self._scaler = scaler
        self._others = [*others, *([] if scaler is None else [scaler])]
        self._weight = weight
        self._before_step = before_step
        self._snapshot = None if snapshot is None else Path(snapshot)
        if self._snapshot is not None:
            self._snapshot.mkdir(parents=True, exist_ok=True)

    @property
    def rung(self) -> Rung:
        """The rung that the next step begins on."""
        return self._rungs[self._at]

    def step(self, batch: Any, loss: Callable[[Module, Any], Tensor]) -> Tensor:
        """Train one step: forward, backward, the optimizer, and gradients set to None.

        Parameters
        ----------
        batch : object
            Tensors, and dicts, lists and tuples of them. Tensors with as many rows as the first one are split.
        loss : callable
            Takes the model and a batch, and returns the mean loss, a scalar.

        Returns
        -------
        Tensor
            The loss of the whole batch in this process, detached.

        Raises
        ------
        torch.OutOfMemoryError
            If the last rung needs too much too, or the optimizer itself. Nothing has been trained by this step, unless
            the message says so.
        """
        value, needed = self._attempts(
            functools.partial(self._gradients, batch, loss), lambda: self.optimizer.zero_grad(set_to_none=True)
        )
        self._reduce(needed)
        self._update()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return value

    def gradients(self, run: Callable[[], T]) -> T:
        """Run forward and backward of a loop that steps the optimizer itself, and climb where memory runs out in them.

        Gradients of earlier micro-batches are put back before ``run`` is called again; until then they have a copy on
        the host.

        Parameters
        ----------
        run : callable
            Computes a loss and adds to the gradients. Called again after each climb, so all else that it changes must
            be among ``others``.

        Returns
        -------
        object
            What ``run`` returned.

        Raises
        ------
        torch.OutOfMemoryError
            If the last rung needs too much too. The gradients are those from before.
        ValueError
            With several processes, since a loop of one's own reduces gradients during backward, and with rungs that
            split the batch.
        """
        if _processes() > 1:
            raise ValueError("with several processes a rank cannot repeat its backward alone: use Ladder.step")
        split = [rung.name for rung in self._rungs if rung.parts > 1]
        if split:
            raise ValueError(f"a loop of your own takes its batches whole: leave {', '.join(split)} out of rungs")
        value, _ = self._attempts(run, Gradients(self.model).put_back)
        self.steps += 1
        return value

    def _attempts(self, run: Callable[[], T], put_gradients_back: Callable[[], object]) -> tuple[T, list[bool]]:
        """Climb until a function runs; return its result, and which parameters have a gradient in any process."""
        saved = (Buffers(self.model), Others(self._others), RandomState())
        while True:
            outcome = attempt(run, self._describe)
            failed, needed = self._agreed(outcome.failure is not None)
            if not failed:
                return cast("T", outcome.value), needed
            put_gradients_back()
            for each in saved:
                each.put_back()
            give_back()
            self._climb(outcome.failure)

    def _gradients(self, batch: Any, loss: Callable[[Module, Any], Tensor]) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        parts = _split(batch, self.rung.parts)
        weights = [float(self._weight(part)) if self._weight else _rows(part) for part in parts]
        total: Tensor | None = None
        for part, weight in zip(parts, weights, strict=True):
            value = loss(self.model, part)
            if len(parts) > 1:
                value = value * (weight / sum(weights))
            (value if self._scaler is None else self._scaler.scale(value)).backward()  # type: ignore[no-untyped-call]
            total = value.detach() if total is None else total + value.detach()
        assert total is not None
        return total

    def _describe(self, error: BaseException) -> None:
        """Log what is alive; write the snapshot."""
        parts = {
            "weights": sum(_bytes(p) for p in self.model.parameters()),
            "gradients": sum(_bytes(p.grad) for p in self.model.parameters()),
            "optimizer": sum(_bytes(v) for state in self.optimizer.state.values() for v in state.values()),
        }
        if gpu_in_use():
            parts["activations and others"] = torch.cuda.memory_allocated() - sum(parts.values())
        listed = ", ".join(f"{name} {size / (1 << 20):,.1f} MiB" for name, size in parts.items())
        lines = str(error).splitlines()
        written = ""
        if self._snapshot is not None and gpu_in_use():
            path = self._snapshot / f"step{self.steps}-{self.rung.name}-{os.getpid()}.pickle"
            torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
            written = f"; pyactcomp explain {path}"
        _log.warning("out of memory in step %d on rung %s: %s", self.steps, self.rung.name, lines[0] if lines else "")
        _log.warning("alive there: %s%s", listed, written)

    def _climb(self, failure: str | None) -> None:
        self.climbs.append(Climb(self.steps, self.rung.name, failure))
        if self._at + 1 == len(self._rungs):
            tried = ", ".join(rung.name for rung in self._rungs)
            others = f"; left out: {'; '.join(self.left_out)}" if self.left_out else ""
            raise torch.OutOfMemoryError(
                f"step {self.steps} runs out of memory on the last rung too (rungs: {tried}{others}): give it a "
                f"smaller batch. {failure or 'Another process failed.'}"
            )
        self._at += 1
        self.rung.climb(self.model)
        _log.warning("the step runs again on rung %s (%d of %d)", self.rung.name, self._at + 1, len(self._rungs))

    def _agreed(self, failed: bool) -> tuple[bool, list[bool]]:
        """Return whether any process failed, and which parameters have a gradient in any."""
        flags = [failed, *(p.grad is not None for p in self.model.parameters())]
        if _processes() > 1:
            device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
            reduced = torch.tensor(flags, dtype=torch.int32, device=device)
            distributed.all_reduce(reduced, distributed.ReduceOp.MAX)
            flags = [bool(flag) for flag in reduced.tolist()]
        return flags[0], flags[1:]

    def _reduce(self, needed: Sequence[bool]) -> None:
        """Average the gradients over the processes."""
        count = _processes()
        if count == 1:
            return
        for parameter, has_gradient in zip(self.model.parameters(), needed, strict=True):
            if has_gradient:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                distributed.all_reduce(parameter.grad)
                parameter.grad /= count

    def _update(self) -> None:
        scaler = self._scaler
        if self._before_step is not None:
            if scaler is not None:
                scaler.unscale_(self.optimizer)
            self._before_step()
        run = self.optimizer.step if scaler is None else functools.partial(scaler.step, self.optimizer)
        before, known = self._versions(), {p: set(state) for p, state in self.optimizer.state.items()}
        sums = None if self._counts_versions else self._sums()
        failure = attempt(run).failure
        after = self._versions()
        if failure is None:
            trained = (p for p in self.model.parameters() if p.grad is not None)
            self._counts_versions = all(after[id(p)] != before[id(p)] for p in trained)
        else:
            if any(after.get(tensor) != version for tensor, version in before.items()) or (
                sums is not None and sums != self._sums()
            ):
                raise torch.OutOfMemoryError(
                    f"the optimizer ran out of memory after it had begun to change the weights of step {self.steps}: "
                    f"load a checkpoint, and take an optimizer that needs less. {failure}"
                )
            # The activations are gone by now, so a rung up needs no less. What the failed steps left in the cache does.
            for parameter in list(self.optimizer.state):
                state = self.optimizer.state[parameter]
                for key in [key for key in state if key not in known.get(parameter, ())]:
                    del state[key]
                if parameter not in known:
                    del self.optimizer.state[parameter]
            give_back()
            run()
        if scaler is not None:
            scaler.update()

    def _sums(self) -> list[int]:
        """Return the sum of each parameter's bits, taken as integers."""
        return [
            int(p.detach().view(integers).sum(dtype=torch.int64))
            for p in self.model.parameters()
            if (integers := _INTEGERS.get(p.element_size())) is not None
        ]

    def _versions(self) -> dict[int, int]:
        states = [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        return {id(tensor): tensor._version for tensor in (*self.model.parameters(), *states)}


def _processes() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _bytes(value: object) -> int:
    return value.untyped_storage().nbytes() if isinstance(value, Tensor) else 0


def _rows(batch: Any) -> int:
    """Return the rows of the first tensor in a batch."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else 0
    inside = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    return next((rows for each in inside if (rows := _rows(each))), 0)


def _split(batch: Any, parts: int) -> list[Any]:
    """Return the parts of a batch, as equal as they can be."""
    rows = _rows(batch)
    if parts == 1 or rows < 2:
        return [batch]
    cuts = [rows * part // parts for part in range(parts + 1)]
    return [_cut(batch, rows, begin, end) for begin, end in pairwise(cuts) if begin < end]


def _cut(batch: Any, rows: int, begin: int, end: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[begin:end] if batch.dim() and batch.shape[0] == rows else batch
    if isinstance(batch, dict):
        return {key: _cut(each, rows, begin, end) for key, each in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)([_cut(each, rows, begin, end) for each in batch])
    return batch
