"""Three steps of training on phantom tensors, recorded. Runs in the child process."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint import checkpoint_blocks
from ..compress import compress
from ..config import Mode
from ..engine import offloading
from ..errors import PyactcompError
from ..layout import Layout, repeating
from ..torch_private import phantom as private
from .operators import Operators
from .optimizers import maker
from .programs import Build
from .result import BlockRun, Question, Recorded

STEPS = 3
#: Labels of memory that no module asked for.
PHASES = ("backward", "weights and batch", "optimizer")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def record(
    native: Any,
    build: Build,
    question: Question,
    mode: str | Layout,
    reads: Callable[[], int],
    operators: Operators | None = None,
) -> Recorded:
    """Build the model, run the steps in a mode, and return the allocator's events with marks.

    ``operators``, which a mode can do without, time the blocks of a layout, and tell whether convolutions ran.

    Raises
    ------
    PyactcompError
        If the mode does not suit the model, or the model cannot run without values.
    """
    labels = _Labels(native)
    marks: dict[str, int] = {}
    parts: dict[str, int] = {}

    def mark(name: str) -> None:
        marks[name] = native.count()
        parts[name] = native.live()

    dtype = None if question.dtype is None else DTYPES[question.dtype]
    assert question.batch is not None
    with labels.phase("weights and batch"):
        program = build(question.batch, question.seq, dtype)
        model = program.model.train()
        _apply(mode, model)
        optimizer = maker(question.optimizer)([each for each in model.parameters() if each.requires_grad])
    mark("built")
    enabled = question.autocast is not None
    region = torch.autocast("cuda", DTYPES[question.autocast or "bfloat16"], enabled=enabled)
    gradients: tuple[int, ...] = ()
    blocks = None
    if isinstance(mode, Layout):
        assert operators is not None
        blocks = _Blocks(native, operators, model)
    with labels.named(model, blocks):
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=True)
            mark(f"zeroed{step}")
            if blocks is not None:
                blocks.begin()
            with region:
                loss = program.loss()
            mark(f"forward{step}")
            loss.backward()  # type: ignore[no-untyped-call]
            mark(f"backward{step}")
            parts["gradients"] = _bytes(each.grad for each in model.parameters() if each.grad is not None)
            gradients = tuple(each.grad.data_ptr() for each in model.parameters() if each.grad is not None)
            with labels.phase("optimizer"):
                optimizer.step()
            del loss
            mark(f"step{step}")
    state = (each for values in optimizer.state.values() for each in values.values() if isinstance(each, Tensor))
    parts["weights"] = _bytes([*model.parameters(), *model.buffers()])
    parts["inputs"] = _bytes(program.inputs)
    parts["optimizer"] = _bytes(state)
    parts["pinned"] = offloading.pinned_bytes()
    convolves = operators is not None and operators.convolves
    return Recorded(
        batch=question.batch,
        seq=program.seq,
        parts=parts,
        columns=native.columns(),
        marks=marks,
        labels=tuple(labels.names),
        gradients=gradients,
        notes=_notes(reads(), convolves),
        convolves=convolves,
        blocks=() if blocks is None else blocks.runs(),
    )


def _notes(reads: int, convolves: bool) -> tuple[str, ...]:
    notes = []
    if reads:
        notes.append(
            f"the program read {reads} values on the host in {STEPS} steps; numbers were taken to be 0, answers true "
            "unless it raised then"
        )
    if convolves:
        notes.append("cuDNN's workspaces for float32, groups and transposed convolutions are not counted")
    return tuple(notes)


def _bytes(tensors: Any) -> int:
    """Return the bytes of tensors on the device, as the allocator rounds them; memory that is shared counts once."""
    storages = {private.storage_key(each): each.untyped_storage().nbytes() for each in tensors if each.is_cuda}
    return sum(-(-size // 512) * 512 for size in storages.values())


def _apply(mode: str | Layout, model: nn.Module) -> None:
    if isinstance(mode, Layout):
        compress(model, plan=mode)
        return
    parts = mode.split("+")
    if parts[0] in ("lossless", "int8"):
        codec: Mode = "lossless" if parts[0] == "lossless" else "int8"
        compress(model, mode=codec, fuse_head="head" in parts, offload=1.0 if "offload" in parts else False)
    if "checkpoint" in parts:
        _checkpoint(model)


def _checkpoint(model: nn.Module) -> None:
    """Checkpoint by the model's own switch, else each of the blocks that repeat."""
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is not None and getattr(model, "supports_gradient_checkpointing", False):
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    switches: list[Any] = [each for each in model.modules() if hasattr(each, "set_grad_checkpointing")]
    if switches:  # of a model of timm
        switches[0].set_grad_checkpointing()
        return
    blocks = list(repeating(model))
    if not blocks:
        raise PyactcompError(
            "mode 'checkpoint' needs blocks that repeat, in a ModuleList or Sequential, and there are none"
        )
    checkpoint_blocks(blocks)


class _Blocks:
    """Notes where a step runs the blocks that repeat: the forward of each, and its last gradient."""

    def __init__(self, native: Any, operators: Operators, model: nn.Module) -> None:
        self._now: Callable[[], tuple[int, float]] = lambda: (native.count(), operators.seconds)
        names = {module: name for name, module in model.named_modules()}
        self._names = {block: names[block] for block in repeating(model)}
        for block in self._names:
            for parameter in block.parameters():
                if parameter.requires_grad:
                    # Not a hook on a tensor of the block: the engine would store more.
                    hook = functools.partial(self._done, block)
                    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self.begin()

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._names

    def begin(self) -> None:
        """Forget the step before."""
        self._calls: dict[nn.Module, list[tuple[tuple[int, float], tuple[int, float]]]] = {}
        self._ends: dict[nn.Module, tuple[int, float]] = {}

    def run(self, block: nn.Module, forward: Callable[[], Any]) -> Any:
        before = self._now()
        out = forward()
        self._calls.setdefault(block, []).append((before, self._now()))
        return out

    def _done(self, block: nn.Module, _: Tensor) -> None:
        self._ends[block] = self._now()

    def runs(self) -> tuple[BlockRun, ...]:
        """Return the blocks that the last step ran once and trained, in the order of the forward."""
        once = {block: calls[0] for block, calls in self._calls.items() if len(calls) == 1 and block in self._ends}
        found = []
        last = 0.0  # backward comes from the last block to the first: each begins where the one after it is done
        for block, (before, after) in sorted(once.items(), key=lambda each: each[1][0], reverse=True):
            done, spent = self._ends[block]
            backward = max(spent - max(last, after[1]), 0.0)
            last = spent
            found.append(BlockRun(self._names[block], before[0], after[0], done, (after[1] - before[1], backward)))
        return tuple(found[::-1])


class _Labels:
    """Labels allocations: by the innermost module whose forward runs in the thread, else by the phase."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self.names: list[str] = list(PHASES)
        native.set_label(0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before = self._native.set_label(self.names.index(name))
        try:
            yield
        finally:
            self._native.set_label(before)

    @contextmanager
    def named(self, model: nn.Module, blocks: _Blocks | None = None) -> Iterator[None]:
        first = len(self.names)
        numbers = {id(module): first + index for index, (_, module) in enumerate(model.named_modules())}
        self.names += [name or type(model).__name__ for name, _ in model.named_modules()]

        original = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            number = numbers.get(id(module))
            if number is None:
                return original(module, *args, **kwargs)
            before = self._native.set_label(number)
            try:
                if blocks is not None and module in blocks:
                    return blocks.run(module, lambda: original(module, *args, **kwargs))
                return original(module, *args, **kwargs)
            finally:  # also after a module that raises: a checkpointed block stops in its middle
                self._native.set_label(before)

        # Not by hooks: a fused module whose children have hooks calls them, and allocates their results.
        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = original  # type: ignore[method-assign]


def quiet() -> None:
    """Silence warnings of models: they speak of a training that does not take place."""
    warnings.simplefilter("ignore")
