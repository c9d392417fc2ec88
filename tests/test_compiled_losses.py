"""Gradients in compressed graphs stay within 2 % of those of the graph without compression, however low a loss is."""

from __future__ import annotations

from collections.abc import Callable

import losses
import pytest
import torch
from compiled_backend import gradients, off
from torch import Tensor, nn
from torch.nn import functional as F

import pyactcomp
from pyactcomp.config import Config

BAR = 0.02
INT8 = Config(min_bytes=1)


class Head(nn.Module):
    """A projection that gives the logits asked for, which backward does not compute again, and a loss of them."""

    def __init__(self, function: Callable[..., Tensor], targets: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(losses.CLASSES))
        self.function, self.targets = function, targets

    def forward(self, z: Tensor) -> Tensor:
        return self.function(z @ self.weight, self.targets)


def error(function: Callable[..., Tensor], z: Tensor, targets: Tensor) -> float:
    head = Head(function, targets)
    exact, got = (gradients(head, [z, head.weight], config, z)[1] for config in (None, INT8))
    return off(got, exact)


@pytest.mark.parametrize("loss", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize("function", [*losses.LOSSES, *losses.SMOOTH_LOSSES], ids=lambda f: f.__name__)
def test_gradients_of_a_loss_stay_exact_however_low_it_is(function: Callable[..., Tensor], loss: float) -> None:
    torch.manual_seed(0)
    if function is losses.categorical:
        pytest.skip("torch.compile does not trace the checks of a distribution as one graph")
    assert error(function, *losses.classes(loss)) <= BAR


@pytest.mark.parametrize("loss", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize(("function", "sample"), losses.NEAR, ids=lambda f: f.__name__)
def test_gradients_stay_exact_however_near_a_distribution_is_to_its_target(
    function: Callable[..., Tensor], sample: Callable[[float], tuple[Tensor, Tensor]], loss: float
) -> None:
    torch.manual_seed(0)
    assert error(function, *sample(loss)) <= BAR


@pytest.mark.parametrize("loss", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize("function", losses.BINARY_LOSSES, ids=lambda f: f.__name__)
def test_gradients_of_a_binary_loss_stay_exact_however_low_it_is(function: Callable[..., Tensor], loss: float) -> None:
    torch.manual_seed(0)
    assert error(function, *losses.answers(loss)) <= BAR


def through_inductor(head: Head, z: Tensor) -> list[Tensor]:
    torch._dynamo.reset()
    z.grad = head.weight.grad = None
    torch.compile(head)(z).backward()
    return [tensor.grad.clone() for tensor in (z, head.weight) if tensor.grad is not None]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.parametrize(
    ("function", "sample"),
    [
        *((f, losses.classes) for f in (F.cross_entropy, losses.gathered_probabilities, losses.smoothed)),
        *((f, losses.answers) for f in (losses.with_logits, losses.soft_margin, losses.focal)),
        *losses.NEAR,
    ],
    ids=lambda f: f.__name__,
)
def test_gradients_of_a_low_loss_stay_exact_through_inductor(
    function: Callable[..., Tensor], sample: Callable[[float], tuple[Tensor, Tensor]]
) -> None:
    torch.manual_seed(0)
    z, targets = sample(1e-4)
    z = z.detach().cuda().requires_grad_()
    head = Head(function, targets.cuda()).cuda()
    exact = through_inductor(head, z)
    pyactcomp.compress(head, min_bytes=1)
    got = through_inductor(head, z)
    assert pyactcomp.report(head).graphs
    assert off(got, exact) <= BAR
