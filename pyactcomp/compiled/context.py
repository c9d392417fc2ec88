"""The mark of a compressed model on the graph being traced, and the records of the model's graphs."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
from pathlib import Path
from typing import Any, NamedTuple

from torch import fx
from torch.nn import Module

from ..config import Config
from ..engine.marks import compiled_mark
from ..torch_private import owner_being_traced, tracing_context
from .graphs import GraphRecord

_NAME = "_pyactcomp_mark"
_PACKAGE = Path(__file__).parent.parent
# From one on: the same in each process that compresses the same models, which then finds its graphs in torch's caches.
_tapes = itertools.count(1)


@functools.cache
def digest_of_sources(folder: Path = _PACKAGE) -> str:
    """Return a digest of the Python files in a folder: part of the keys of graphs in torch's caches on disk.

    The version alone is the same for all commits of a checkout, and a stale graph saves what an earlier commit chose.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


class Graphs:
    """The graphs of one compressed model.

    Attributes
    ----------
    config : Config
    records : list of GraphRecord
        One for each graph compiled so far in this process, or loaded from torch's cache.
    warned : bool
        A warning has named the reason why graphs keep what they save.
    classes : dict
        The marked class of each class of modules, skipped or not, and compiled under a name or not.
    tape : int
        Under ``offload`` the number by which the graphs find the model's tape as they run, else 0.
    """

    def __init__(self, config: Config, tape: int | None = None) -> None:
        self.config = config
        self.tape = (next(_tapes) if config.offload else 0) if tape is None else tape
        self.records: list[GraphRecord] = []
        self.warned = False
        self.classes: dict[tuple[type[Module], bool, str], type[Module]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Graphs, (self.config, self.tape)

    @property
    def explained(self) -> bool:
        """Whether a graph was compressed, or a warning has said why not."""
        return bool(self.records) or self.warned

    def add(self, record: GraphRecord) -> None:
        """Add the record of a graph; one compiled again, after a reset, has one record."""
        if record not in self.records:
            self.records.append(record)


class Mark(NamedTuple):
    """What a marked class says of its modules: the graphs of their model, a name, and whether they are skipped.

    ``compiled`` is the name under which a block compiles itself, or empty.
    """

    graphs: Graphs
    name: str
    skipped: bool
    compiled: str


def traced_mark() -> Mark | None:
    """Return the mark of the graph being traced in this thread, or None outside of marked modules."""
    return getattr(tracing_context(), _NAME, None)


def partitioned_mark() -> Mark | None:
    """Return the mark of the graph being partitioned in this thread, or None outside of marked modules.

    Around a graph break Dynamo compiles the parts of a forward as functions of their own, outside of the marked
    forward. The ``self`` of such a part has the mark.
    """
    owner = owner_being_traced()
    if isinstance(owner, Module) and owner.training and os.environ.get("PYACTCOMP_DISABLE") != "1":
        mark: Mark | None = compiled_mark(type(owner))
        if mark is not None and not mark.skipped and not mark.graphs.warned:
            return mark
    return traced_mark()


def is_skipped(node: fx.Node) -> bool:
    """Return whether a skipped module made a value of a graph."""
    stack = node.meta.get("nn_module_stack")
    classes = [cls for _, cls in stack.values()] if isinstance(stack, dict) else []
    marks = [compiled_mark(cls) for cls in classes if isinstance(cls, type)]
    return any(mark is not None and mark.skipped for mark in marks)


def set_traced_mark(mark: Mark) -> None:
    """Mark the graph being traced in this thread; the mark of the outermost module stays."""
    context = tracing_context()
    if context is not None and not hasattr(context, _NAME):
        setattr(context, _NAME, mark)
