"""What ``verify`` returns: plain data that prints as a few lines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

# An error up to this is a good one, whatever the noise of the model's dtype.
_GOOD = 0.02
_ROWS = 5


class Look(NamedTuple):
    """One comparison: the training steps before it, the exact loss, the error, and the noise of the dtype."""

    step: int
    loss: float
    error: float
    noise: float | None


@dataclass(frozen=True)
class Verification:
    """How far compressed gradients are from exact ones.

    Attributes
    ----------
    error : float
        Relative L2 error over all gradients together: ``|compressed - exact| / |exact|``.
    errors : dict of str to float
        The same for each parameter; infinite where only the exact gradient is zero.
    worst : str
        Name of the parameter with the largest error; empty if no parameter has a gradient.
    columns : dict of str to float
        For each weight the largest relative error of one input column (or channel) of its gradient. Optimizers such as
        Adam see each column, however small it is in the whole; columns that share a group of codes with an outlying
        channel have larger errors.
    noise : float or None
        Relative L2 distance by which another rounding of the layers' results moves the exact gradients, in a model or
        under an autocast of 16 bits; None in float32, in lossless mode, and for compiled models.
    loss_exact, loss_compressed : float
        The two losses; both forwards compute the same, so the losses differ by less than the forward's own noise.
    notes : tuple of str
        Sentences about the model states covered by the figures; empty in lossless mode, where gradients are exact in
        every state.
    history : tuple of Look
        Training step, exact loss, error and noise of each comparison; one entry at step 0 unless ``steps`` is given.
    """

    error: float
    errors: dict[str, float]
    worst: str
    loss_exact: float
    loss_compressed: float
    notes: tuple[str, ...] = ()
    history: tuple[Look, ...] = ()
    columns: dict[str, float] = field(default_factory=dict)
    noise: float | None = None

    @property
    def good(self) -> bool:
        """Whether the error is at most 2 %, or at most the noise of the model's own dtype."""
        return self.error <= max(_GOOD, self.noise or 0.0)

    def __str__(self) -> str:
        lines = [f"gradients: relative error {self.error:.3%} over all {len(self.errors)} parameters"]
        shown = sorted(self.errors, key=lambda name: -self.errors[name])[:_ROWS]
        worst = max(self.columns, key=lambda name: self.columns[name], default=None)
        if worst is not None and worst not in shown:
            shown[-1] = worst
        for name in shown:
            column = f", worst input column {self.columns[name]:.3%}" if name in self.columns else ""
            lines.append(f"  {self.errors[name]:.3%}  {name}{column}")
        if self.noise is not None:
            judged = "below that" if self.error <= self.noise else "at most 2 %" if self.good else "more than that"
            lines.append(f"another rounding to 16 bits moves gradients by {self.noise:.3%}: the error is {judged}")
        lines.append(f"loss: exact {self.loss_exact:.6g}, compressed {self.loss_compressed:.6g}")
        if len(self.history) > 1:
            for step, loss, error, noise in self.history:
                beside = "" if noise is None else f", noise {noise:.3%}"
                lines.append(f"  step {step:<6} loss {loss:<10.4g} error {error:.3%}{beside}")
        return "\n".join(lines + [f"note: {note}" for note in self.notes])
