"""Decisions about a module that the rerun of a checkpointed function takes as the first run did.

torch.utils.checkpoint runs a function again in backward, and raises if the second run saves other tensors. By then the
program may have called ``eval()`` or ``decompress``, or removed a hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch.nn import Module

from ..torch_private import checkpointed_run, saves_are_dropped, wrap_rerun
from .classes import give_class, own_class
from .marks import FUSING

Question = Callable[[Module], bool]
# A module's class and state of fusing, and the mode where a graph was compiled for it.
Form = tuple[type[Module], Any, bool | None]


class _FirstRun:
    """The answers of a first run, in order, and what the modules were that it asked about."""

    def __init__(self) -> None:
        self._answers: dict[tuple[Question, Module], list[bool]] = {}
        self._forms: dict[Module, Form] = {}
        self._repeated: dict[tuple[Question, Module], Iterator[bool]] = {}

    def answer(self, question: Question, module: Module) -> bool:
        self._forms.setdefault(module, (type(module), FUSING.get(module), None))
        answer = question(module)
        self._answers.setdefault((question, module), []).append(answer)
        return answer

    def repeat(self, question: Question, module: Module) -> bool:
        key = question, module
        if key not in self._repeated:
            self._repeated[key] = iter(self._answers.get(key, ()))
        return next(self._repeated[key], False)

    def keep_modes(self, block: Module) -> None:
        for module in block.modules():
            self._forms[module] = type(module), FUSING.get(module), module.training

    @contextmanager
    def again(self) -> Iterator[None]:
        """Give the modules their classes of the first run inside a ``with`` block: ``decompress`` took them."""
        self._repeated = {}
        before = [(module, (type(module), FUSING.get(module), module.training)) for module in self._forms]
        try:
            for module, form in self._forms.items():
                _give(module, form)
            yield
        finally:
            for module, form in before:
                _give(module, form)


def _give(module: Module, form: Form) -> None:
    cls, state, training = form
    if training is not None:
        module.__dict__["training"] = training
    # Another library may have derived a class since then, with our class or the module's own as a base.
    if (type(module), FUSING.get(module)) != (cls, state) and own_class(type(module)) is own_class(cls):
        give_class(module, cls)
        FUSING.pop(module)
        if state is not None:
            FUSING.set(module, state)


_first_runs: WeakKeyDictionary[object, _FirstRun] = WeakKeyDictionary()


def as_in_first_run(question: Question, module: Module) -> bool:
    """Return ``question(module)``; in the rerun of a checkpointed function, what the same call of the first run got.

    A question that the first run did not ask is False: the model may have been compressed in between.
    """
    run = checkpointed_run()
    if run is None:
        return question(module)
    if saves_are_dropped():
        return _first_run(run).answer(question, module)
    first = _first_runs.get(run)
    return first is not None and first.repeat(question, module)


def _first_run(run: object) -> _FirstRun:
    first = _first_runs.get(run)
    if first is None:
        first = _first_runs[run] = _FirstRun()
        wrap_rerun(run, first.again)
    return first


def repeat_modes(block: Module) -> None:
    """Have the rerun of a checkpointed function run a block in the modes of this run, which its graph is made for."""
    run = checkpointed_run()
    if run is not None and saves_are_dropped():
        _first_run(run).keep_modes(block)


def _is_training(module: Module) -> bool:
    return module.training


def trains(module: Module) -> bool:
    """Return whether a module is in training mode, or was in the first run."""
    return as_in_first_run(_is_training, module)
