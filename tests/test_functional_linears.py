"""Products of one input with several matrices: gradients, what is saved, and bfloat16's roundings."""

from __future__ import annotations

import pytest
import torch
from functional_checks import normal, saved_by
from torch import Tensor
from torch.nn import functional as F

from pyactcomp.errors import PyactcompError
from pyactcomp.functional._linears import linears

IN, OUT = 48, (64, 40)


def operands(dtype: torch.dtype) -> list[Tensor]:
    return [t.to(dtype).requires_grad_() for t in (normal(3, 5, IN), *(normal(n, IN, seed=n) for n in OUT))]


@pytest.mark.parametrize("used", [(0, 1), (0,), (1,)])
@pytest.mark.parametrize("frozen", [None, 0, 1, 2])
def test_gradients_are_those_of_separate_linears(used: tuple[int, ...], frozen: int | None) -> None:
    found = []
    for together in (True, False):
        x, *weights = (t.requires_grad_(i != frozen) for i, t in enumerate(operands(torch.float64)))
        products = linears(x, *weights) if together else tuple(F.linear(x, weight) for weight in weights)
        grads = [normal(3, 5, OUT[i], seed=9).double() for i in used]
        torch.autograd.backward([products[i] for i in used], grads)
        found.append([*products, *(t.grad for t in (x, *weights))])
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            # Sums of at most 104 or 15 products in another order.
            torch.testing.assert_close(ours, theirs, rtol=104 * torch.finfo(torch.float64).eps, atol=1e-12)


def test_sum_of_the_inputs_gradients_is_rounded_once_less() -> None:
    x, *weights = operands(torch.bfloat16)
    grads = [normal(3, 5, n, seed=9).bfloat16() for n in OUT]
    ours, separate = (
        torch.autograd.grad(products, x, grads)[0].double()
        for products in (linears(x, *weights), [F.linear(x, weight) for weight in weights])
    )
    parts = [g.double() @ weight.detach().double() for g, weight in zip(grads, weights, strict=True)]
    exact = parts[0] + parts[1]
    half = torch.finfo(torch.bfloat16).eps / 2
    # One rounding of the first product and one of the sum, which is what their separate roundings are on top of.
    bound = (1 + 2 * half) * half * (parts[0].abs() + exact.abs()) + 1e-5
    assert bool(((ours - exact).abs() <= bound).all())
    assert float((ours - exact).norm()) < float((separate - exact).norm())


def test_input_is_saved_once() -> None:
    x, *weights = operands(torch.float32)
    saved = saved_by(lambda: linears(x, *weights)[0])
    assert sorted(t.data_ptr() for t in saved) == sorted(t.data_ptr() for t in (x, *weights))


def test_what_no_gradient_needs_is_not_saved() -> None:
    x, *weights = operands(torch.float32)
    only_x = saved_by(lambda: linears(x, *(weight.detach() for weight in weights))[0])
    assert [t.data_ptr() for t in only_x] == [weight.data_ptr() for weight in weights]
    one_weight = saved_by(lambda: linears(x.detach(), weights[0], weights[1].detach())[0])
    assert [t.data_ptr() for t in one_weight] == [x.data_ptr()]


def test_backward_inside_autocast_is_that_outside() -> None:
    x, *weights = operands(torch.float32)
    grads = [normal(3, 5, n, seed=9) for n in OUT]
    found = []
    for enabled in (False, True):
        products = linears(x, *weights)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append(torch.autograd.grad(products, (x, *weights), grads))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_second_derivative_raises() -> None:
    x, *weights = operands(torch.float32)
    with pytest.raises(PyactcompError, match="only once"):
        torch.autograd.grad(linears(x, *weights)[1].sum(), x, create_graph=True)
