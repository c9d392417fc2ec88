"""Gradients stay within 2 % beside edits, views, casts, fused modules and hooks of other code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness_checks import distance, error, leaf
from torch import Tensor, nn
from torch.nn import functional as F
from works_with import GRADIENT_BOUND

import pyactcomp


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_a_model_is_trained_to_a_low_loss_with_the_gradients_of_torch() -> None:
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 256))
    ids, targets = torch.arange(64).repeat(4), torch.randint(0, 256, (64,)).repeat(4)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    reached = []
    for step in range(101):
        if step % 25 == 0:
            found = pyactcomp.verify(model, ids, lambda y: F.cross_entropy(y, targets), min_bytes=0)
            assert found.error <= GRADIENT_BOUND
            reached.append(found.loss_exact)
        optimizer.zero_grad()
        F.cross_entropy(model(ids), targets).backward()
        optimizer.step()
    assert reached[0] > 5
    assert reached[-1] < 0.01


@pytest.mark.parametrize("first", ["product first", "maximum first"])
def test_a_tensor_that_a_product_and_a_maximum_read_is_exact_for_both(first: str) -> None:
    weight = leaf(64, 64)

    def loss(x: Tensor) -> Tensor:
        y = F.gelu(x)  # else computed again from codes
        operators = [lambda: (y @ weight).sum(), lambda: y.amax(0).square().sum()]
        first_one, other = operators if first == "product first" else reversed(operators)
        return first_one() + other()

    assert error(loss, leaf(1024, 64)) <= GRADIENT_BOUND


def test_relu_in_place_on_a_view_with_gaps_keeps_its_sign() -> None:
    x = leaf(96)

    def loss() -> Tensor:
        y = x * 1
        y.view(-1)[::2].relu_()
        return y.sum()

    (exact,) = torch.autograd.grad(loss(), x)
    with pyactcomp.compressed(min_bytes=0):
        value = loss()
    assert torch.equal(torch.autograd.grad(value, x)[0], exact)


@pytest.mark.parametrize("name", ["tanh_", "sigmoid_"])
def test_a_form_for_one_operators_results_holds_nothing_else_of_their_base(name: str) -> None:
    # The other elements of the base reach 8, where neither a logit nor an inverse tangent exists.
    def loss(x: Tensor) -> Tensor:
        y = 2 * x
        getattr(y.view(-1)[::2], name)()
        return y.square().sum()

    assert error(loss, leaf(512)) <= GRADIENT_BOUND


def test_a_cast_that_was_first_packed_in_another_shape_keeps_its_own() -> None:
    x, layer = torch.randn(2, 64, 8, dtype=torch.float16).requires_grad_(), nn.Linear(8, 8)

    def loss() -> Tensor:
        y = x.float()
        return F.gelu(layer(y)).sum() + y.sin().sum()

    (exact,) = torch.autograd.grad(loss(), x)
    with pyactcomp.compressed(min_bytes=0):
        value = loss()
    assert distance(torch.autograd.grad(value, x), (exact,)) <= GRADIENT_BOUND


def test_relu_in_place_on_a_view_keeps_its_sign() -> None:
    layer = nn.Linear(64, 64)
    with torch.no_grad():
        layer.weight.mul_(torch.logspace(-6, 0, 64)[:, None])  # results that codes would take for zero
        layer.bias.zero_()
    for shape in ((256, 64), (16, 16, 64)):  # of the second nn.Linear returns a view
        x = leaf(*shape)
        (exact,) = torch.autograd.grad(torch.relu_(layer(x)).sum(), x)
        with pyactcomp.compressed(layer, min_bytes=0):
            out = torch.relu_(layer(x))
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], exact)


class Divided(nn.Module):
    """Divides by the square of a module's result."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.linear, self.module = nn.Linear(64, 256), module

    def forward(self, x: Tensor) -> Tensor:
        return (1 / (self.module(self.linear(x)).square() + 1e-3)).sum()


def gelu_norm(eps: float = 1e-5) -> nn.Module:
    return nn.Sequential(nn.GELU(), nn.LayerNorm(256, eps=eps))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "GELU": nn.GELU,
    "tanh": lambda: nn.GELU("tanh"),
    "SiLU": nn.SiLU,
    "LayerNorm": lambda: nn.LayerNorm(256),
    "RMSNorm": lambda: nn.RMSNorm(256),
    "Dropout": lambda: nn.Dropout(0.3),
    "norm of GELU": gelu_norm,
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("name", MODULES)
def test_the_square_of_a_modules_result_is_exact_for_a_divisor(name: str, fuse: bool, device: str) -> None:
    model, x = Divided(MODULES[name]()).to(device), torch.randn(512, 64, device=device)
    parameters = tuple(model.parameters())

    def gradients() -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        return torch.autograd.grad(model(x), parameters)

    exact = gradients()
    pyactcomp.compress(model, min_bytes=0, fuse=fuse)
    assert distance(gradients(), exact) <= GRADIENT_BOUND


class CountedBlock(nn.Module):
    """Counts the saved bytes of one block by hooks of its own; a norm written out divides by the block's output."""

    def __init__(self, operator: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.operator = operator
        self.nbytes = 0

    def forward(self, x: Tensor) -> Tensor:
        def count(tensor: Tensor) -> Tensor:
            self.nbytes += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            x = self.operator(self.first(x))
        x = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        return self.last(x)


@pytest.mark.parametrize("options", [{}, {"fuse": False}, {"mode": "lossless"}], ids=str)
@pytest.mark.parametrize(
    "operator", [F.gelu, F.silu, lambda x: x * x.cos(), lambda x: F.layer_norm(x, (64,))], ids=range(4)
)
def test_a_norm_of_what_hooks_of_other_code_packed(
    operator: Callable[[Tensor], Tensor], options: dict[str, Any]
) -> None:
    model, x = CountedBlock(operator), torch.randn(512, 64)
    exact = torch.autograd.grad(model(x).sin().sum(), list(model.parameters()))
    counted = model.nbytes
    pyactcomp.compress(model, min_bytes=1, **options)
    got = torch.autograd.grad(model(x).sin().sum(), list(model.parameters()))
    assert distance(got, exact) <= (0 if "mode" in options else GRADIENT_BOUND)
    assert model.nbytes == 2 * counted
