"""What each choice takes in each block: bytes from steps on phantom tensors, seconds from rooflines or measured."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from ..estimate.gpus import Gpu
from ..estimate.result import Recorded
from ..layout import OFFLOAD
from .chain import Chain, Choice

_ROUNDING = 512  # bytes, of PyTorch's allocator
_CHANGE = 0.01  # of a block's time
_CHANCE = 0.001  # of a step, below the scatter of measurements, so it only breaks ties


@dataclass(frozen=True)
class Table:
    """The bytes of a step in which all blocks have the same choice, such that :class:`.Chain` gives its peak.

    Attributes
    ----------
    names : tuple of str
        Of the blocks, in the order of the forward.
    base : int
        Bytes before the first block.
    bytes : tuple
        For each block what it stores, and what its forward and its backward take beside, as in :class:`.Choice`.
    fixed : int
        The peak outside of the blocks.
    """

    names: tuple[str, ...]
    base: int
    bytes: tuple[tuple[int, int, int], ...]
    fixed: int


def table_of(recorded: Recorded) -> Table:
    """Return the table of a recorded training.

    The step is cut where a block's forward begins, and where a block's last gradient is there. What lies between two
    blocks belongs to the first of them; the loss and what comes after the last block belong to its backward.
    """
    live = _live(recorded)
    blocks, marks = recorded.blocks, recorded.marks
    begins = [*(each.began for each in blocks), blocks[-1].ended]
    ends = [*reversed(list(accumulate((each.done for each in reversed(blocks)), max))), begins[-1]]
    found = []
    for i in range(len(blocks)):
        before, after = live[begins[i]], live[begins[i + 1]]
        forward = max(live[begins[i] : begins[i + 1] + 1]) - before
        backward = max(live[ends[i + 1] : ends[i] + 1]) - after
        found.append((after - before, forward, backward))
    begin, end = marks["step1"], marks["step2"]
    outside = max(max(live[begin : begins[0] + 1]), max(live[ends[0] : end + 1]))
    return Table(tuple(each.name for each in blocks), live[begins[0]], tuple(found), outside)


def _live(recorded: Recorded) -> list[int]:
    """Return the bytes in use after each number of events."""
    action, size = array("B"), array("q")
    action.frombytes(recorded.columns[0])
    size.frombytes(recorded.columns[2])
    signs = {0: 1, 2: -1}
    steps = (signs.get(a, 0) * (-(-n // _ROUNDING) * _ROUNDING) for a, n in zip(action, size, strict=True))
    return list(accumulate(steps, initial=0))


def roofline(keep: Recorded, tables: Mapping[str, Table], gpu: Gpu) -> dict[str, tuple[float, ...]]:
    """Return the seconds of each block by choice, estimated from the GPU's rates.

    A checkpointed block runs its forward once more. Codes are written and read, by kernels that read and write the
    tensors anyway. Without loss, what is not stored is computed again: read from an operand, and written.

    Copies to the host overlap with the block's own forward, copies back with its backward: a pass takes the longer of
    computing and copying. Copies also read and write the GPU's memory. ``tables`` has the choice without offload too.
    """
    seconds = {}
    for name in tables:
        again, leaves, alike = name.endswith("checkpoint"), name.endswith(OFFLOAD), tables[name.removesuffix(OFFLOAD)]
        found = []
        for i, run in enumerate(keep.blocks):
            stored, saved = max(alike.bytes[i][0], 0), max(tables["keep"].bytes[i][0], 0)
            moved = 2 * stored if name.startswith("int8") else 2 * max(saved - stored, 0) if name == "lossless" else 0
            copied = stored if leaves else 0
            passes = sum(max(each, copied / gpu.link) for each in run.seconds)
            found.append(passes + (run.seconds[0] if again else 0.0) + (moved + 2 * copied) / gpu.bandwidth)
        seconds[name] = tuple(found)
    return seconds


def shared_out(keep: Recorded, steps: Mapping[str, float]) -> dict[str, tuple[float, ...]]:
    """Return the seconds of each block by choice: the measured step, divided among the blocks as the estimate is.

    Offload counts as no faster than the same choice without: if two steps differ by chance alone, nothing need leave.
    """
    total = sum(sum(run.seconds) for run in keep.blocks)
    least = {
        name: (1 + _CHANCE) * steps.get(name.removesuffix(OFFLOAD), 0.0) for name in steps if name.endswith(OFFLOAD)
    }
    steps = {name: max(step, least.get(name, 0.0)) for name, step in steps.items()}
    return {name: tuple(step * sum(run.seconds) / total for run in keep.blocks) for name, step in steps.items()}


def chain_of(tables: Mapping[str, Table], seconds: Mapping[str, tuple[float, ...]], beside: float) -> Chain:
    """Return the chain of blocks with the choices of the tables."""
    base = min(table.base for table in tables.values())
    # The first blocks that offload fill the window, whichever they are: it is part of what the chain does not see.
    most = {
        name: max(min(stored for stored, _, _ in table.bytes), 0) if name.endswith(OFFLOAD) else sys.maxsize
        for name, table in tables.items()
    }
    blocks = tuple(
        tuple(
            # What the model stores before its blocks may depend on the choice: it is the first block's then.
            Choice(name, seconds[name][i], min(stored, most[name]) + more, forward + more, backward)
            for name, table in tables.items()
            for stored, forward, backward in (table.bytes[i],)
            for more in ((table.base - base) if i == 0 else 0,)
        )
        for i in range(len(next(iter(tables.values())).names))
    )
    change = _CHANGE * min(sum(times) / len(times) for times in seconds.values())
    return Chain(base, blocks, max(table.fixed for table in tables.values()), beside, change)
