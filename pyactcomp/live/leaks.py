"""Tensors that grow from step to step: counted by the line that makes them, at the end of each step."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from .held import alive, memory_of, nodes_from, saved_in
from .holders import way_to
from .recorder import Recorder

#: A check of fewer steps cannot tell a cache that fills from a leak: memory must grow in each third of the check.
FEWEST_STEPS = 8
# Tensors of this step and the last come and go: batches that a loader prefetches, results that a variable still holds.
_YOUNG = 2


@dataclass(frozen=True)
class Leak:
    """Tensors of one line that grow from step to step.

    Attributes
    ----------
    line : str
        The line that makes the tensors, as in ``train.py:12 in step``; empty for tensors made in C++.
    shape, dtype, device
        Of one of them.
    grows : {"tensors", "bytes", "graph"}
        What grows: their number, their size, or the autograd graph that they hold.
    first, last : int
        What grows, early in the check and at the end; "graph" counts nodes.
    nbytes : int
        Memory of the tensors, and of the tensors that their graphs hold for backward.
    holder : str
        The way from a variable to one of them, as in ``history[3] in train() (train.py:20)``; empty if no Python
        object holds it.
    advice : str
    """

    line: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    grows: str
    first: int
    last: int
    nbytes: int
    holder: str
    advice: str

    def __str__(self) -> str:
        what = {"tensors": "tensors", "bytes": "bytes", "graph": "nodes of a graph"}[self.grows]
        made = f" made at {self.line}" if self.line else " made in C++"
        text = f"{self.dtype}{list(self.shape)} on {self.device}{made}: {self.first:,} -> {self.last:,} {what}"
        text += f", {self.nbytes / 2**20:,.2f} MiB"
        return "\n  ".join(filter(None, (text, self.holder and f"held by {self.holder}", self.advice)))


class Leaks(tuple[Leak, ...]):
    """The leaks that a check found, the largest first; empty and false without any."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) if self else "nothing grows from step to step"


@dataclass
class _Group:
    """The tensors of one line at the end of each step."""

    old: list[int] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    newest: Any = None  # a weak reference
    oldest: Any = None

    def growing(self) -> list[tuple[str, list[int]]]:
        """Return the first that grows of number, size and graph, with the values; nothing if none does."""
        series = {"tensors": self.old[_YOUNG:], "bytes": self.nbytes[1:], "graph": self.nodes[1:]}
        return [(name, values) for name, values in series.items() if grows(values)][:1]


def grows(values: Sequence[int]) -> bool:
    """Return whether numbers never fall, and rise in each third of them: a cache that fills once does not."""
    last = len(values) - 1
    marks = [values[last * third // 3] for third in range(4)]
    return all(a <= b for a, b in pairwise(values)) and all(a < b for a, b in pairwise(marks))


class LeakCheck:
    """Counts live tensors at the end of each step, and says which grew."""

    def __init__(self) -> None:
        self._recorder = Recorder()
        self._born: Any = WeakTensorKeyDictionary()
        self._groups: dict[object, _Group] = {}
        self.steps = 0

    def start(self) -> None:
        """Begin to note the lines that make tensors."""
        for tensor in alive(Tensor):
            self._born[tensor] = 0
        self._recorder.start()

    def stop(self) -> None:
        """Note no more lines."""
        self._recorder.stop()

    def step(self) -> None:
        """Count the tensors that are alive at the end of a step, without those in garbage cycles."""
        gc.collect()
        self.steps += 1
        members: dict[object, list[Tensor]] = {}
        for tensor in alive(Tensor):
            self._born.setdefault(tensor, self.steps)
            members.setdefault(self._key(tensor), []).append(tensor)
        for key in members.keys() - self._groups.keys():
            earlier = [0] * (self.steps - 1)
            self._groups[key] = _Group(list(earlier), list(earlier), list(earlier))
        for key, group in self._groups.items():
            tensors = sorted(members.get(key, ()), key=lambda tensor: self._born[tensor])
            old = [tensor for tensor in tensors if self._born[tensor] <= self.steps - _YOUNG]
            group.old.append(len(old))
            group.nbytes.append(_nbytes(tensors))
            group.nodes.append(len(nodes_from(tensors)))
            group.newest = TensorWeakRef(tensors[-1]) if tensors else None
            # Show a tensor made after the first step, which also makes what stays, and before the last two, whose
            # tensors variables may still hold.
            late = [tensor for tensor in old if self._born[tensor] > 1]
            group.oldest = TensorWeakRef(late[0]) if late else group.newest

    def leaks(self) -> Leaks:
        """Return the lines whose tensors grew over the counted steps; none before the fewest steps of a check."""
        if self.steps < FEWEST_STEPS:
            return Leaks()
        # If a line replaces a buffer's entries one by one, its tensors become more, but those of all lines together do
        # not.
        totals = [sum(counts) for counts in zip(*(group.old for group in self._groups.values()), strict=True)]
        more = totals[-1] - totals[_YOUNG]
        found = {
            key: (kind, values)
            for key, group in self._groups.items()
            for kind, values in group.growing()
            if kind != "tensors" or 2 * more >= values[-1] - values[0]
        }
        # Of the results that hold a growing graph, the first is the cause: the graphs of the others contain its graph.
        graphs = {key: self._nodes(key) for key in found}
        causes = [
            key
            for key, (kind, _) in found.items()
            if kind != "graph" or not any(graphs[key] > graphs[other] for other in found if graphs[other])
        ]
        graphs.clear()
        leaks = [self._leak(key, *found[key]) for key in causes]
        return Leaks(sorted((leak for leak in leaks if leak is not None), key=lambda leak: -leak.nbytes))

    def _key(self, tensor: Tensor) -> object:
        line = self._recorder.lines.get(tensor)
        if line is not None:
            return line
        return tuple(tensor.shape), tensor.dtype, tensor.device, type(tensor.grad_fn)

    def _nodes(self, key: object) -> set[Node]:
        return nodes_from([tensor for tensor in alive(Tensor) if self._key(tensor) == key])

    def _leak(self, key: object, kind: str, values: list[int]) -> Leak | None:
        group = self._groups[key]
        reference = group.oldest if kind == "tensors" else group.newest
        tensor = None if reference is None else reference()
        if tensor is None:  # freed since
            return None
        count, nbytes = _held([each for each in alive(Tensor) if self._key(each) == key])
        advice = ""
        if count and (kind == "graph" or tensor.grad_fn is not None):
            advice = f"holds the graph that made it, {count:,} nodes in all: keep x.item(), or x.detach()"
        return Leak(
            str(key) if hasattr(key, "number") else "",
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            str(tensor.device),
            kind,
            values[0],
            values[-1],
            nbytes,
            way_to(tensor) or _graph_that_holds(tensor),
            advice,
        )


def _graph_that_holds(tensor: Tensor) -> str:
    """Return the way to a result whose graph holds a tensor for backward, as C++ alone refers to the tensor."""
    owned = {address for _, address, _ in memory_of(tensor)}
    candidates = [TensorWeakRef(each) for each in alive(Tensor) if not each.is_leaf]
    for candidate in candidates:
        result = candidate()
        if result is None or result is tensor:
            continue
        holds = any(address in owned for each in _saved([result]) for _, address, _ in memory_of(each))
        if holds and (way := way_to(result)):
            return f"the graph of {way}"
    return ""


def _saved(tensors: Iterable[Tensor]) -> list[Tensor]:
    codes, saved = saved_in(nodes_from(tensors))
    return [*codes, *saved]


def _held(tensors: list[Tensor]) -> tuple[int, int]:
    """Return the number of nodes of the tensors' graphs, and the bytes of the tensors and of what these graphs hold."""
    return len(nodes_from(tensors)), _nbytes([*tensors, *_saved(tensors)])


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum({address: nbytes for tensor in tensors for _, address, nbytes in memory_of(tensor)}.values())
