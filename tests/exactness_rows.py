"""The measure and the bound of a row: a loss of activations and parameters, and how far its gradients may be off."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from compiled_backend import gradients as in_a_graph
from torch import Tensor
from works_with import GRADIENT_BOUND

import pyactcomp
from pyactcomp.config import Config

# A rounding to bfloat16 is an error that users of autocast accept; int8 may cost half as much again.
OF_BFLOAT16 = 1.5
# A tensor with so much less gradient than the largest of a row has none: it cancels up to float32's rounding.
NO_GRADIENT = 1e-6

Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class Operands:
    """What a loss is called with, in this order."""

    activations: Sequence[Tensor] = ()
    parameters: Sequence[Tensor] = ()
    constants: Sequence[Tensor] = ()


def normal(
    *activations: Sequence[int], parameters: Sequence[Sequence[int]] = (), scale: float = 1.0
) -> Callable[[], Operands]:
    """Return a draw of standard normal activations and of parameters times ``scale``."""
    return lambda: Operands(
        [torch.randn(*shape) for shape in activations], [torch.randn(*shape) * scale for shape in parameters]
    )


def gained(*shape: int) -> Callable[[], Operands]:
    """Return a draw of a standard normal activation, and of a gain for each column."""
    return lambda: Operands([torch.randn(*shape)], [torch.ones(shape[-1])])


@dataclass(frozen=True)
class Row:
    """A loss, what it is called with, and a bound.

    Attributes
    ----------
    loss : callable
        Called with activations, parameters and constants; a result of several elements is weighed at random.
    draw : callable
        Returns the operands, the same for the same seed.
    bound : float
        The largest relative L2 error of a tensor's gradient, or 1.5 times bfloat16's own where that is more. Where it
        is not the project's, the row says why.
    ways : tuple of str
        Ways of :func:`excess` that apply; a row with fewer says why.
    """

    loss: Loss
    draw: Callable[[], Operands]
    bound: float = GRADIENT_BOUND
    ways: tuple[str, ...] = ("plain", "layers", "graph")


Shape = Sequence[int]


def enter(rows: dict[str, Row]) -> Callable[..., Callable[[Loss], Loss]]:
    """Return a decorator of functions that are rows, with shapes of their activations.

    ``p`` are parameters, drawn as weights of layers are if they are shapes, and ``c`` constants.
    """

    def operands(
        *activations: Shape, p: Sequence[Shape | Tensor] = (), c: Sequence[Tensor] = ()
    ) -> Callable[[Loss], Loss]:
        def draw() -> Operands:
            made = [torch.randn(*x) for x in activations]
            return Operands(made, [x if isinstance(x, Tensor) else torch.randn(*x) / math.sqrt(x[0]) for x in p], c)

        def add(function: Loss) -> Loss:
            rows[function.__name__.replace("_", " ")] = Row(function, draw)
            return function

        return add

    return operands


@dataclass(frozen=True)
class Step:
    """One step of a row: a function of results of ``sources``, and of what else is given."""

    function: Loss
    sources: list[Tensor]
    parameters: list[Tensor]
    constants: list[Tensor]

    @property
    def leaves(self) -> list[Tensor]:
        """Return the tensors whose gradients are compared."""
        return [*self.sources, *self.parameters]

    def arguments(self) -> list[Tensor]:
        """Return what the function is called with; activations are no leaves, which graphs know to live anyway."""
        return [*(each * 1 for each in self.sources), *self.parameters, *self.constants]

    def gradients(self, context: AbstractContextManager[object] | None = None) -> list[Tensor]:
        """Return the gradients of the leaves, with the forward in ``context``."""
        torch.manual_seed(0)
        with context or nullcontext():
            loss = self.function(*self.arguments())
        return list(torch.autograd.grad(loss, self.leaves))


def step(row: Row, way: str, device: str = "cpu") -> Step:
    """Return the step of a row, whose parameters are leaves.

    Its activations are results of layers ("layers": each layer has a weight, the identity) or of a product with one
    ("plain").
    """
    # Whatever the test's seed: by the luck of a draw the gradient of a single number cancels.
    torch.manual_seed(0)
    with torch.device(device):
        operands = row.draw()
    sources, parameters = (
        [each.detach().requires_grad_() for each in some] for some in (operands.activations, operands.parameters)
    )
    weights = [torch.eye(each.shape[-1], device=device).requires_grad_() for each in sources] if way == "layers" else []
    with torch.no_grad():
        out = row.loss(*sources, *parameters, *operands.constants)
    upstream = torch.randn_like(out) if out.dim() else torch.ones_like(out)
    layers, others = len(sources), len(sources) + len(weights)

    def run(*given: Tensor) -> Tensor:
        activations = given[:layers]
        if weights:
            activations = tuple(x @ weight for x, weight in zip(activations, given[layers:others], strict=True))
        return (row.loss(*activations, *given[others:-1]) * given[-1]).sum()

    return Step(run, sources, [*weights, *parameters], [*operands.constants, upstream])


def errors(got: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """Return the relative L2 error of each tensor; infinity for one that is not finite where it should be."""
    assert all(bool(each.isfinite().all()) for each in exact), "torch's own gradients are not finite"
    largest = max(float(each.double().norm()) for each in exact)
    assert largest > 0
    moved = [float((one - other).double().norm()) for one, other in zip(got, exact, strict=True)]
    sizes = [max(float(each.double().norm()), NO_GRADIENT * largest) for each in exact]
    return [a / b if math.isfinite(a) else math.inf for a, b in zip(moved, sizes, strict=True)]


def excess(row: Row, way: str) -> tuple[float, float, float]:
    """Return error, bfloat16's own, and bound, of the gradient that is farthest beyond its bound.

    Ways are "plain" and "layers" in eager mode, and "graph", with layers.
    """
    one = step(row, "layers" if way == "graph" else way)
    exact = one.gradients()
    if way == "graph":
        got = in_a_graph(one.function, one.leaves, Config(min_bytes=1), *one.arguments())[1]
        if max(errors(got, exact)) > row.bound:  # the graph may draw other random numbers than eager mode
            exact = in_a_graph(one.function, one.leaves, None, *one.arguments())[1]
    else:
        got = one.gradients(pyactcomp.compressed(min_bytes=0))
    found = errors(got, exact)
    if max(found) <= row.bound:
        return max(found), 0.0, row.bound
    of_bfloat16 = errors(one.gradients(torch.autocast("cpu", torch.bfloat16)), exact)
    bounds = [max(row.bound, OF_BFLOAT16 * each) for each in of_bfloat16]
    worst = max(range(len(found)), key=lambda index: found[index] / bounds[index])
    return found[worst], of_bfloat16[worst], bounds[worst]
