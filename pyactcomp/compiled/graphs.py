"""The record of one compiled graph, for the report."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_MIB = 2**20


@dataclass(frozen=True)
class SavedValue:
    """One tensor that a compiled graph saves for backward.

    Attributes
    ----------
    name, operator : str
        Name of the node in the graph, and the operator that made it.
    dtype : torch.dtype
    shape : tuple of int or str
        Sizes; a dynamic one by its symbol.
    before, after : int
        Bytes before and after compression; a dynamic size counts as in the call that compiled the graph.
    form : {"codes", "16 bits", "bits", "kept"}
    reason : str
        Why the tensor is kept; empty if packed.
    where : {"device", "host"}
        Where the stored bytes wait for backward.
    """

    name: str
    operator: str
    dtype: torch.dtype
    shape: tuple[int | str, ...]
    before: int
    after: int
    form: str
    reason: str
    where: str = "device"


@dataclass(frozen=True)
class GraphRecord:
    """All tensors that one compiled graph saves, parameters and other static inputs aside."""

    name: str
    saved: tuple[SavedValue, ...]

    def __str__(self) -> str:
        """Return one line, and one for each form and each reason."""
        before, after = self.before / _MIB, self.after / _MIB
        lines = [f"graph of {self.name}: {before:.2f} MiB saved for backward, {after:.2f} stored"]
        if sent := sum(value.after for value in self.saved if value.where == "host") / _MIB:
            lines[0] += f", of which {sent:.2f} leave for the host"
        sums: dict[str, list[int]] = {}
        for value in self.saved:
            found = sums.setdefault(value.form if not value.reason else f"kept: {value.reason}", [0, 0, 0])
            found[:] = found[0] + 1, found[1] + value.before, found[2] + value.after
        for form, (count, *sizes) in sorted(sums.items(), key=lambda item: -item[1][2]):
            before, after = (size / _MIB for size in sizes)
            lines.append(f"  {count:4} {form}: {before:.2f} -> {after:.2f} MiB")
        return "\n".join(lines)

    @property
    def before(self) -> int:
        """Bytes before compression."""
        return sum(value.before for value in self.saved)

    @property
    def after(self) -> int:
        """Bytes after compression."""
        return sum(value.after for value in self.saved)
