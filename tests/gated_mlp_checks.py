"""What the tests of ``gated_mlp`` share: inputs, and how far results of other sums in float32 may be apart."""

from __future__ import annotations

import torch
from functional_checks import EPS, normal
from torch import Tensor
from torch.nn import functional as F

from pyactcomp.functional import Projection
from pyactcomp.functional.activations.gated.gated_unit import Activation

RANK = 4


def projections(
    width: int, middle: int, dtype: torch.dtype, *, rich: bool, device: str | torch.device = "cpu"
) -> tuple[Projection, Projection, Projection]:
    """Return gate, up and down, whose tensors want gradients; if ``rich``, with biases and low-rank additions."""
    found = []
    for index, (out, into) in enumerate([(middle, width), (middle, width), (width, middle)]):
        shapes = [(out, into), (out,), (RANK, into), (out, RANK)]
        tensors = [normal(*shape, seed=4 * index + i) / shape[-1] ** 0.5 for i, shape in enumerate(shapes)]
        leaves = [t.to(device, dtype).requires_grad_() for t in tensors]
        found.append(Projection(*leaves, 0.5) if rich else Projection(leaves[0]))
    gate, up, down = found
    return gate, up, down


def leaves_of(*given: Projection) -> list[Tensor]:
    return [t for projection in given for t in projection[:4] if t is not None]  # type: ignore[misc]


def _linear(x: Tensor, projection: Projection) -> Tensor:
    weight, bias, a, b, scale = projection
    out = F.linear(x, weight, bias)
    return out if a is None or b is None else out + scale * (x @ a.T) @ b.T


def in_torch(x: Tensor, gate: Projection, up: Projection, down: Projection, activation: Activation) -> Tensor:
    """Return the MLP, of torch's functions."""
    gated = _linear(x, gate)
    if activation == "silu":
        gated = F.silu(gated)
    else:
        gated = F.gelu(gated, approximate="tanh" if activation == "gelu_tanh" else "none")
    return _linear(gated * _linear(x, up), down)


def apart(x: Tensor, gate: Projection, up: Projection, down: Projection, grad: Tensor) -> list[Tensor]:
    """Return how far two ways to sum in float32 may be apart in each gradient: of x, then of each leaf.

    Each sum of n products is off by at most (n + 1) half ulp of the sum of their magnitudes, which also bounds what a
    relative error of its factors does. So all roundings in sequence, K of them, are within K ulp of the chain that is
    computed of magnitudes. The first derivative of each activation is at most 1.2, the second at most 1.
    """
    x, grad = x.detach().double().abs().flatten(0, -2), grad.double().abs().flatten(0, -2)
    wide = [
        Projection(*(None if t is None else t.detach().double().abs() for t in each[:4]), each.scale)  # type: ignore[arg-type]
        for each in (gate, up, down)
    ]
    gated, upper = _linear(x, wide[0]), _linear(x, wide[1])

    def back(of: Tensor, projection: Projection) -> Tensor:
        weight, _, a, b, scale = projection
        return of @ weight if a is None or b is None else of @ weight + scale * (of @ b) @ a

    of_product = back(grad, wide[2])
    of_gate, of_up = of_product * upper * (1.2 + gated), of_product * (1.2 * gated)
    found = [back(of_gate, wide[0]) + back(of_up, wide[1])]
    for of, rows, (weight, bias, a, b, scale) in (
        (of_gate, x, wide[0]),
        (of_up, x, wide[1]),
        (grad, gated * upper, wide[2]),
    ):
        parts = [of.T @ rows, of.sum(0), None, None]
        if a is not None and b is not None:
            parts[2:] = [scale * (of @ b).T @ rows, scale * of.T @ (rows @ a.T)]
        found += [part for part, t in zip(parts, (weight, bias, a, b), strict=True) if t is not None]  # type: ignore[misc]
    roundings = len(x) + 3 * x.shape[1] + 3 * len(gate.weight) + 6 * RANK + 32
    return [roundings * EPS * each for each in found]
