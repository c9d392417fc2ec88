"""Products of one input with several matrices: gradients, what is saved, and bfloat16's roundings."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from functional_checks import normal, saved_by
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from pyactcomp.errors import PyactcompError
from pyactcomp.functional._linears import linears

IN, OUT = 48, (64, 40, 24)


def operands(dtype: torch.dtype) -> list[Tensor]:
    return [t.to(dtype).requires_grad_() for t in (normal(3, 5, IN), *(normal(n, IN, seed=n) for n in OUT))]


def separately(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return tuple(F.linear(x, weight) for weight in weights)


@pytest.mark.parametrize("used", [(0, 1, 2), (0,), (1,), (2,), (0, 2)])
@pytest.mark.parametrize("frozen", [None, 1, 2, 3])
def test_gradients_are_those_of_separate_linears(used: tuple[int, ...], frozen: int | None) -> None:
    found = []
    for multiply in (linears, separately):
        x, *weights = (t.requires_grad_(i != frozen) for i, t in enumerate(operands(torch.float64)))
        products = multiply(x, *weights)
        kept = [i for i in used if products[i].requires_grad]
        torch.autograd.backward([products[i] for i in kept], [normal(3, 5, OUT[i], seed=9).double() for i in kept])
        found.append([*products, *(t.grad for t in (x, *weights))])
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            # Sums of at most 128 or 15 products in another order.
            torch.testing.assert_close(ours, theirs, rtol=128 * torch.finfo(torch.float64).eps, atol=1e-12)


def test_sum_of_the_inputs_gradients_is_rounded_once_less() -> None:
    x, *weights = operands(torch.bfloat16)[:3]
    grads = [normal(3, 5, n, seed=9).bfloat16() for n in OUT[:2]]
    ours, separate = (
        torch.autograd.grad(multiply(x, *weights), x, grads)[0].double() for multiply in (linears, separately)
    )
    parts = [g.double() @ weight.detach().double() for g, weight in zip(grads, weights, strict=True)]
    exact = parts[0] + parts[1]
    half = torch.finfo(torch.bfloat16).eps / 2
    # One rounding of the last product and one of the sum, which is what their separate roundings are on top of.
    bound = (1 + 2 * half) * half * (parts[1].abs() + exact.abs()) + 1e-5
    assert bool(((ours - exact).abs() <= bound).all())
    assert float((ours - exact).norm()) < float((separate - exact).norm())


def test_what_is_saved_is_what_linear_saves() -> None:
    x, *weights = operands(torch.float32)
    for frozen in ((), (0,), (0, 1, 2)):
        given = [weight.detach() if i in frozen else weight for i, weight in enumerate(weights)]
        ours, theirs = (saved_by(functools.partial(multiply, x, *given)) for multiply in (linears, separately))
        assert sorted(t.data_ptr() for t in ours) == sorted(t.data_ptr() for t in theirs)


def test_gradient_of_a_weight_is_handed_on_before_the_next_is_computed() -> None:
    x, *weights = operands(torch.float32)
    events: list[str] = []
    for i, weight in enumerate(weights):
        weight.register_post_accumulate_grad_hook(lambda _, i=i: events.append(f"weight {i}"))

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
                events.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    products = linears(x, *weights)
    with Watch():
        torch.autograd.backward(products, [torch.ones_like(product) for product in products])
    assert events == ["mm", "mm", "weight 2", "addmm", "mm", "weight 1", "addmm", "mm", "weight 0"]


def test_gradients_in_a_batch_are_those_one_by_one() -> None:
    x, *weights = operands(torch.float64)
    products = linears(x, *weights)
    grads = [torch.stack([normal(3, 5, n, seed=seed).double() for seed in (1, 2)]) for n in OUT]
    batched = torch.autograd.grad(products, (x, *weights), grads, is_grads_batched=True, retain_graph=True)
    for i in range(2):
        single = torch.autograd.grad(products, (x, *weights), [g[i] for g in grads], retain_graph=True)
        for ours, theirs in zip(batched, single, strict=True):
            torch.testing.assert_close(ours[i], theirs, rtol=128 * torch.finfo(torch.float64).eps, atol=1e-12)


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
