"""What the tests of the norms share: their inputs, and how far an output or a gradient may be off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from functional_checks import EPS, SEED, assert_within, error_of, normal, padded
from torch import Tensor

from pyactcomp.codec import Impl, reference
from pyactcomp.engine.saved import Recipe, library
from pyactcomp.functional import Codes, layer_norm, rms_norm
from pyactcomp.functional.norms.layer_norm import add_layer_norm

EPSILON = 1e-5


@dataclass(frozen=True)
class Case:
    """A norm of ``x``, or of x + residual, with what it computes in float64."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    grad: Tensor
    residual: Tensor | None = None
    centred: bool = True

    @property
    def normalised(self) -> Tensor:
        """What is normalised, and packed."""
        return self.x if self.residual is None else self.x + self.residual

    def leaves(self) -> list[Tensor | None]:
        """Return copies that require gradients."""
        inputs = (self.x, self.residual, self.weight, self.bias)
        return [None if t is None else t.clone().requires_grad_() for t in inputs]

    def run(
        self, leaves: list[Tensor | None], impl: Impl, *, bits: int | None = 8, group_size: int = 64, copy: bool = False
    ) -> Tensor:
        """Return the function's output."""
        x, residual, weight, bias = leaves
        assert x is not None
        codes = Codes(bits=bits, group_size=group_size, seed=SEED, impl=impl)
        if not self.centred:
            return rms_norm(x, weight, EPSILON, copy=copy, codes=codes)
        if residual is None:
            return layer_norm(x, x.shape[-1], weight, bias, EPSILON, codes=codes)
        return add_layer_norm(x, residual, x.shape[-1], weight, bias, EPSILON, codes=codes)

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows of ``x`` less their means, where centred, and the reciprocal deviations, in float64."""
        x = x.double()
        centred = x - x.mean(-1, keepdim=True) if self.centred else x
        return centred, 1 / (centred.square().mean(-1, keepdim=True) + EPSILON).sqrt()

    def scaled(self, row: Tensor) -> Tensor:
        """Return normalised rows times weight plus bias, in float64."""
        row = row if self.weight is None else row * self.weight.double()
        return row if self.bias is None else row + self.bias.double()


def case(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    residual: torch.dtype | None = None,
    centred: bool = True,
    parameters: tuple[bool, bool] = (True, True),
    device: torch.device | str = "cpu",
) -> Case:
    """Return a case with normal numbers, the parameters in the output's dtype; a mean square norm has no bias."""
    out_dtype = dtype if residual is None else torch.promote_types(dtype, residual)
    x, other, grad = (normal(*shape, seed=seed).to(device) for seed in (0, 4, 1))
    wanted = parameters[0], parameters[1] and centred
    weight, bias = (normal(shape[-1], seed=2 + i).to(device, out_dtype) if wanted[i] else None for i in (0, 1))
    added = None if residual is None else other.to(residual)
    return Case(x.to(dtype), weight, bias, grad.to(out_dtype), added, centred)


def check(c: Case, impl: Impl, *, bits: int = 8, group_size: int = 64, copy: bool = False) -> None:
    """Check the output, the gradients and the output computed again against float64."""
    leaves = c.leaves()
    out = c.run(leaves, impl, bits=bits, group_size=group_size, copy=copy)
    recomputed = recipe_of(out).compute(out.dtype)
    out.backward(c.grad)
    assert out.dtype == c.grad.dtype
    assert [t.grad.dtype for t in leaves if t is not None] == [t.dtype for t in leaves if t is not None]

    host = Case(*(None if t is None else t.cpu() for t in (c.x, c.weight, c.bias, c.grad, c.residual)), c.centred)
    x = host.normalised
    wide = [None if t is None else t.double().requires_grad_() for t in (x, host.weight, host.bias)]
    centred, rstd = Case(*wide, host.grad, None, c.centred).statistics(wide[0])
    exact = Case(*wide, host.grad, None, c.centred).scaled(centred * rstd)
    exact.backward(host.grad.double())

    x64, rstd = x.double(), rstd.detach()
    row, g = (centred.detach() * rstd), host.grad.double().abs()
    gain = torch.ones(()).double() if host.weight is None else host.weight.double().abs()
    length = x.shape[-1]

    def mean(t: Tensor) -> Tensor:
        return t.mean(-1, keepdim=True)

    # What an element of the restored row is off by, the mean of the row with it.
    delta = torch.zeros_like(x64) if copy else error_of(padded(x, group_size), bits, group_size)[..., :length] * rstd
    delta = delta + mean(delta) if c.centred else delta
    # Sums of a row and sums over rows in float32, in any order; a dozen operations more on each element.
    rounding = (length + 12) * EPS
    size = 1 + x64.abs() * rstd
    # The mean square norm rounds rows to their own dtype on the way.
    own = 0.0 if c.centred else torch.finfo(x.dtype).eps
    value = (row.abs() + size) * gain + (0 if host.bias is None else host.bias.double().abs())
    assert_within(out, exact.detach(), rounding * value + own * row.abs() * gain)

    rows = padded(x, group_size)
    codes = reference.quantize(rows.reshape(-1), bits=bits, group_size=group_size, stochastic=bits != 8, seed=SEED)
    restored = reference.dequantize(codes, rows.numel(), bits=bits, group_size=group_size).view(rows.shape)
    restored = restored[..., :length]
    restored = x if copy else restored
    again, _ = host.statistics(restored)
    cast = torch.finfo(x.dtype).eps * (1 + (again.abs() + mean(restored.double().abs())) * rstd) * gain
    assert_within(recomputed, host.scaled(again * rstd), rounding * (value + delta * gain) + 2 * cast)

    a = g * gain
    along = mean(a * row.abs())
    quantised = delta * along + row.abs() * mean(a * delta) + delta * mean(a * delta)
    summed = a + mean(a) + row.abs() * along
    bound = rstd * (quantised + rounding * (summed + quantised) * size)
    rows = tuple(range(x.dim() - 1))
    count = (x.numel() // length + length + 12) * EPS
    bounds = bound, bound, (g * delta).sum(rows) + count * (g * (size + delta)).sum(rows), count * g.sum(rows)
    grads = wide[0].grad, wide[0].grad, *(None if t is None else t.grad for t in wide[1:])
    for leaf, expected, limit in zip(leaves, grads, bounds, strict=True):
        if leaf is not None:
            assert leaf.grad is not None
            assert expected is not None
            assert_within(leaf.grad, expected, limit)


def recipe_of(tensor: Tensor) -> Recipe:
    """Return the recipe that an operator which saves ``tensor`` finds."""
    found: Recipe | None = library().recipe_of(tensor)
    assert found is not None
    return found


def gradient_of(compute: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of ``x``."""
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(compute(leaf), leaf, grad)[0]
