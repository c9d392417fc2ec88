"""What the tests of batch norm and max-pool share: inputs, and how far outputs and gradients may be off."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from functional_checks import EPS, SEED, assert_within, normal
from torch import Tensor
from torch.nn import functional as F
from works_with import GRADIENT_BOUND

from pyactcomp.codec import reference
from pyactcomp.engine.marks import RECIPE
from pyactcomp.engine.saved import Recipe
from pyactcomp.functional import Codes
from pyactcomp.functional.convolutional.batch_norm import batch_norm

ROWS = (0, 2, 3)


@dataclass
class Case:
    """A batch norm's arguments and the gradient of its output, channels-last."""

    x: Tensor
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    grad: Tensor
    relu: bool

    @classmethod
    def make(
        cls,
        shape: tuple[int, int, int, int],
        *,
        residual: bool = False,
        relu: bool = True,
        affine: bool = True,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        layout: torch.memory_format = torch.channels_last,
    ) -> Case:
        def tensor(seed: int) -> Tensor:
            return normal(*shape, seed=seed).to(device, dtype).contiguous(memory_format=layout)

        def parameter(seed: int) -> Tensor | None:
            return normal(shape[1], seed=seed).to(device) if affine else None

        return cls(3 * tensor(0) + 1, tensor(1) if residual else None, parameter(2), parameter(3), tensor(4), relu)

    def leaves(self) -> list[Tensor | None]:
        """Return fresh leaves: x, weight, bias, residual."""
        given = (self.x, self.weight, self.bias, self.residual)
        return [None if t is None else t.clone().requires_grad_() for t in given]

    def running(self) -> tuple[Tensor, Tensor]:
        """Return running statistics to start from."""
        channels = self.x.shape[1]
        return torch.full((channels,), 0.5, device=self.x.device), torch.full((channels,), 2.0, device=self.x.device)

    def run(self, leaves: list[Tensor | None], running: tuple[Tensor | None, Tensor | None], **how: object) -> Tensor:
        """Return the output of ``batch_norm``."""
        x, weight, bias, residual = leaves
        assert x is not None
        codes = Codes(**{"seed": SEED, **how})  # type: ignore[arg-type]
        return batch_norm(x, *running, weight, bias, 0.1, 1e-5, relu=self.relu, residual=residual, codes=codes)


def recipe_of(out: Tensor) -> Recipe | None:
    """Return how an output that nothing was written to since can be computed again."""
    recipe = RECIPE.get(out)
    return recipe if recipe is not None and recipe.serves(out) else None


def error_of(x: Tensor, group_size: int) -> Tensor:
    """Return the largest error of each element of a dense ``x`` that is restored from 8 bits, float64."""
    last = x.detach().cpu().to(memory_format=torch.channels_last)
    flat = last.as_strided((x.numel(),), (1,))
    bound = reference.error_bound(flat, bits=8, group_size=group_size, stochastic=False, dtype=x.dtype)
    return bound.as_strided(x.shape, last.stride())


def normalised(x: Tensor) -> Tensor:
    """Return what a batch norm without weight and bias makes of ``x``, in float64 and laid out as ``x``."""
    wide = x.detach().cpu().double()
    rows = tuple(d for d in range(x.dim()) if d != 1)
    mean, var = wide.mean(rows, keepdim=True), wide.var(rows, keepdim=True, unbiased=False)
    return (wide - mean) / (var + 1e-5).sqrt()


def assert_codes_of_normalised(codes: Tensor, case: Case, group_size: int, *, stochastic: bool = False) -> None:
    """Assert that packed ``codes`` restore the normalised x within the codec's bound."""
    exact = normalised(case.x)
    flat = exact.as_strided((exact.numel(),), (1,))
    numel, options = exact.numel(), {"bits": 8, "group_size": group_size, "dtype": torch.float32}
    restored = reference.dequantize(codes.cpu(), numel, **options)  # type: ignore[arg-type]
    assert torch.equal(restored.isnan(), flat.isnan())
    bound = reference.error_bound(flat.float(), stochastic=stochastic, **options)  # type: ignore[arg-type]
    # Mean and deviation are sums in float32, over all elements of a channel.
    rounding = (numel // exact.shape[1] + 12) * EPS * (flat.abs() + 1)
    kept = ~flat.isnan()
    assert float(((restored.double() - flat).abs() / (bound + rounding))[kept].max()) <= 1


def assert_small_channels_have_their_gradients(
    shape: tuple[int, ...],
    layout: torch.memory_format | None,
    residual: bool,
    device: str | torch.device = "cpu",
    **how: object,
) -> None:
    """Assert that each channel meets GRADIENT_BOUND beside channels a million times larger in the same groups."""
    x, grad, other = (normal(*shape, seed=seed) for seed in (0, 1, 2))
    scale = 10.0 ** (torch.arange(shape[1]) % 7).view(-1, *(1,) * (len(shape) - 2))
    leaf = (x * scale).to(device)
    leaf = (leaf if layout is None else leaf.contiguous(memory_format=layout)).requires_grad_()
    given = other.to(device).to(leaf.dtype) if residual else None
    weight = torch.ones(shape[1], device=device, requires_grad=True)
    out = batch_norm(leaf, None, None, weight, None, residual=given, codes=Codes(seed=SEED, **how))  # type: ignore[arg-type]
    found = torch.autograd.grad(out, (leaf, weight), grad.to(device))
    wide, wide_weight = leaf.detach().cpu().double().requires_grad_(), weight.detach().cpu().double().requires_grad_()
    exact = torch.autograd.grad(F.batch_norm(wide, None, None, wide_weight, training=True), (wide, wide_weight), grad)
    rows = tuple(d for d in range(len(shape)) if d != 1)
    error = (found[0].cpu().double() - exact[0]).square().sum(rows).sqrt() / exact[0].square().sum(rows).sqrt()
    assert float(error.max()) <= GRADIENT_BOUND
    # A weight's gradient is a sum that may cancel: the bound is relative to the root of its squared terms.
    terms = (grad.double().square() * normalised(leaf).square()).sum(rows).sqrt()
    assert float(((found[1].cpu().double() - exact[1]).abs() / terms).max()) <= GRADIENT_BOUND


def check_batch_norm(case: Case, **how: object) -> Tensor:
    """Assert that output, running statistics and gradients are within their bounds; return the output."""
    leaves, running = case.leaves(), case.running()
    out = case.run(leaves, running, **how)
    out.backward(case.grad)
    assert out.dtype == case.x.dtype
    assert out.stride() == case.x.stride()

    wide = [None if t is None else t.detach().cpu().double().requires_grad_() for t in leaves]
    exact_running = tuple(t.cpu().double() for t in case.running())
    exact = F.batch_norm(wide[0], *exact_running, *wide[1:3], training=True)
    if wide[3] is not None:
        exact = exact + wide[3]
    # Which elements are positive is asked of the output: near zero, rounding decides.
    mask = (out.detach().cpu() > 0).double() if case.relu else torch.ones_like(exact)
    exact.backward(case.grad.cpu().double() * mask)

    def mean(t: Tensor) -> Tensor:
        return t.mean(ROWS, keepdim=True)

    x64 = wide[0].detach()
    gamma = torch.ones(1) if wide[1] is None else wide[1].detach().abs().view(1, -1, 1, 1)
    g = case.grad.cpu().double().abs() * mask
    rstd = 1 / (x64.var(ROWS, keepdim=True, unbiased=False) + 1e-5).sqrt()
    row = normalised(case.x).abs()
    size = row + x64.abs() * rstd + 1
    count = x64.numel() // x64.shape[1]
    # Sums over a channel in float32, in any order; a dozen operations more on each element.
    rounding = (count + 12) * EPS
    value = gamma * size + (0 if wide[2] is None else wide[2].detach().abs().view(1, -1, 1, 1))
    value = value + (0 if wide[3] is None else wide[3].detach().abs())
    # Eager rounds the sum of a norm and a residual twice, which the reference does.
    twice = torch.finfo(case.x.dtype).eps * value if case.residual is not None else 0.0
    assert_within(out, exact.detach().relu() if case.relu else exact.detach(), rounding * value + twice)

    spread = mean((x64 - mean(x64)).square())
    for mine, theirs, scale in zip(running, exact_running, (mean(x64.abs()), spread), strict=True):
        assert_within(mine, theirs, rounding * (scale.view(-1) + theirs.abs()))

    bits = how.get("bits", 8)
    delta = (
        error_of(normalised(case.x).float(), int(str(how.get("group_size", 64))))
        if bits is not None
        else torch.zeros(1)
    )
    along = mean(g * row)
    quantised = delta * along + row * mean(g * delta) + delta * mean(g * delta)
    summed = (g + mean(g) + row * along) * size
    assert leaves[0] is not None
    assert wide[0] is not None
    assert_within(leaves[0].grad, wide[0].grad, gamma * rstd * (quantised + rounding * summed))
    if leaves[1] is not None:
        assert_within(leaves[1].grad, wide[1].grad, (g * (delta + rounding * size)).sum(ROWS))
        assert_within(leaves[2].grad, wide[2].grad, rounding * g.sum(ROWS))
    if leaves[3] is not None:
        assert torch.equal(leaves[3].grad.cpu(), (case.grad.cpu().double() * mask).to(case.x.dtype))
    return out
