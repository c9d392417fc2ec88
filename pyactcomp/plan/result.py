"""The plan: what each block does, the peak it was found to have, and the time it takes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from ..layout import Layout
from ..sizes import size_text


@dataclass(frozen=True, kw_only=True)
class Plan(Layout):
    """Which blocks of a model keep, compress, offload or run again; :func:`pyactcomp.plan` returns it.

    ``str(plan)`` is a table. ``pyactcomp.compress(model, plan=plan)`` applies the plan.

    Attributes
    ----------
    mode : {"int8", "lossless"} or None
        How the model is compressed around the blocks, and in those whose choice says so; None for not at all.
    blocks : tuple of tuple of str
        Pairs of a block's qualified name and its choice, in the order of the forward.
    fuse_head : bool
        Whether a language model computes its loss in chunks of tokens, so that the logits of a batch never exist.
    budget, peak : int
        The most bytes that tensors may take at once, and the most that they took in steps on phantom tensors.
    reserved : dict of str to int
        The most that each allocator takes from the driver.
    kept_peak : int
        The peak if all blocks are kept.
    seconds, kept_seconds : float
        Of the forward and backward of the blocks, or of the step if it was measured: by this plan, and with all kept.
    measured : bool
        Whether the seconds were measured; else they are estimated from the GPU's rates.
    gpu : str
    pinned : int
        Pinned memory of the host that offload takes; 0 without.
    """

    budget: int
    peak: int
    reserved: dict[str, int] = field(hash=False)
    kept_peak: int
    seconds: float
    kept_seconds: float
    measured: bool
    gpu: str
    pinned: int = 0

    @property
    def slowdown(self) -> float:
        """The time of the blocks over that of blocks that are all kept."""
        return self.seconds / self.kept_seconds if self.kept_seconds else 1.0

    def runs(self) -> list[tuple[int, int, str]]:
        """Return the first and the last number of neighbours with one choice, and the choice."""
        grouped = groupby(enumerate(self.blocks), key=lambda each: each[1][1])
        spans = [(choice, [number for number, _ in members]) for choice, members in grouped]
        return [(numbers[0], numbers[-1], choice) for choice, numbers in spans]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, for JSON."""
        return {**asdict(self), "blocks": [list(each) for each in self.blocks]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        """Return the plan that :meth:`to_dict` gave."""
        return cls(**{**values, "blocks": tuple((name, choice) for name, choice in values["blocks"])})

    def __str__(self) -> str:
        spans = [(f"{a}-{b}" if b > a else str(a), choice.replace("+", " + ")) for a, b, choice in self.runs()]
        what = ", ".join(f"{span} {choice}" for span, choice in spans) or "none"
        first = f"blocks {what}: {size_text(self.peak)} of {size_text(self.budget)}, {self.slowdown:.2f}x"
        rows = [
            (span, self.blocks[a][0] if a == b else f"{self.blocks[a][0]} to {self.blocks[b][0]}", choice)
            for (a, b, _), (span, choice) in zip(self.runs(), spans, strict=True)
        ]
        head = " with its loss in chunks" if self.fuse_head else ""
        rows.append(("", "the rest of the model", (self.mode or "keep") + head))
        wide, long = (max(len(row[i]) for row in rows) for i in (0, 1))
        reserved = ", ".join(f"{size_text(size)} {name}" for name, size in self.reserved.items())
        host = f"; {size_text(self.pinned)} pinned on the host" if self.pinned else ""
        times = (
            f"time of the step {self.slowdown:.2f}x of {1e3 * self.kept_seconds:.3g} ms (measured)"
            if self.measured
            else f"time of the blocks {self.slowdown:.2f}x of {1e3 * self.kept_seconds:.3g} ms (estimated from data "
            f"sheets, {self.gpu})"
        )
        return "\n".join(
            [
                first,
                *(f"  {number:{wide}}  {name:{long}}  {choice}" for number, name, choice in rows),
                f"peak {size_text(self.peak)} instead of {size_text(self.kept_peak)}; reserved {reserved}{host}",
                times,
            ]
        )
