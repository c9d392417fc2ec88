"""Classes that run activations of their own after a batch norm, as timm's convolutional networks are built of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from works_with import GRADIENT_BOUND

import pyactcomp
from pyactcomp.codec import format as fmt
from pyactcomp.fusions import fused_modules


class NormAct(nn.BatchNorm2d):
    """What ``nn.BatchNorm2d`` does, with another name for the argument, and two children after it."""

    def __init__(self, channels: int, act: nn.Module) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), act

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, "expected images")
        if self.momentum is None:
            exponential_average_factor = 0.0
        else:
            exponential_average_factor = self.momentum

        if self.training and self.track_running_stats:
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
                if self.momentum is None:
                    exponential_average_factor = 1.0 / float(self.num_batches_tracked)
                else:
                    exponential_average_factor = self.momentum

        if self.training:
            bn_training = True
        else:
            bn_training = (self.running_mean is None) and (self.running_var is None)

        x = F.batch_norm(
            x,
            self.running_mean if not self.training or self.track_running_stats else None,
            self.running_var if not self.training or self.track_running_stats else None,
            self.weight,
            self.bias,
            bn_training,
            exponential_average_factor,
            self.eps,
        )
        x = self.drop(x)
        x = self.act(x)
        return x


class Doubled(NormAct):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        x = 2 * x
        return x


class Passed(nn.BatchNorm2d):
    def forward(*given: Any) -> Tensor:
        return nn.BatchNorm2d.forward(*given)


CHANNELS = 48
NUMEL = 4 * 16 * 16 * CHANNELS
CODES = fmt.packed_nbytes(NUMEL, 8, 64)
# Each activation, and the bytes stored besides the codes of the norm's input: bits for ReLU, the fused GELU's own
# codes, Hardswish's input as it is and the codes of its result, which is not computed again.
ACTIVATIONS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "SiLU in place": (lambda: nn.SiLU(inplace=True), 0),
    "ReLU in place": (lambda: nn.ReLU(inplace=True), NUMEL // 8),
    "GELU": (nn.GELU, CODES),
    "Hardswish in place": (lambda: nn.Hardswish(inplace=True), CODES + 4 * NUMEL),
}


def network(act: Callable[[], nn.Module], cls: type[NormAct] = NormAct) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(8, CHANNELS, 1), cls(CHANNELS, act()), nn.Conv2d(CHANNELS, 8, 3)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def images() -> Tensor:
    return torch.randn(4, 8, 16, 16, generator=torch.Generator().manual_seed(1)).to(memory_format=torch.channels_last)


def gradients(model: nn.Module) -> Tensor:
    model.zero_grad()
    model(images()).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_the_result_of_a_norm_is_computed_again_for_its_activation(act: str) -> None:
    make, more = ACTIVATIONS[act]
    plain = network(make)
    compressed = pyactcomp.compress(copy.deepcopy(plain), min_bytes=1)
    assert fused_modules(compressed)[0] == ("1", "NormAndMore")
    exact, got = gradients(plain), gradients(compressed)
    assert (got - exact).norm() <= GRADIENT_BOUND * exact.norm()
    for name, buffer in plain[1].named_buffers():
        torch.testing.assert_close(compressed[1].get_buffer(name), buffer)
    wide = [t for t in pyactcomp.report(compressed).tensors if len(t.shape) == 4 and CHANNELS in t.shape]
    assert sum(t.stored_bytes for t in wide) <= CODES + more


@pytest.mark.parametrize("cls", [Doubled, Passed])
def test_a_class_that_does_more_or_less_than_run_children_stays_as_it_is(cls: Any) -> None:
    plain = network(nn.ReLU, Doubled) if cls is Doubled else nn.Sequential(nn.Conv2d(8, 8, 1), cls(8))
    compressed = pyactcomp.compress(copy.deepcopy(plain), min_bytes=1)
    assert all(name != "1" for name, _ in fused_modules(compressed))
    exact = gradients(plain)
    assert (gradients(compressed) - exact).norm() <= GRADIENT_BOUND * exact.norm()


def test_hooks_of_an_activation_see_it_and_its_result() -> None:
    model = network(ACTIVATIONS["SiLU in place"][0])
    seen: list[tuple[Any, bool]] = []
    act: Any = model[1].act
    act.register_forward_hook(lambda module, inputs, out: seen.append((module, inputs[0] is out)))
    pyactcomp.compress(model, min_bytes=1)
    gradients(model)
    assert seen == [(act, True)]


@pytest.mark.parametrize(("device", "fuse"), [("cpu", False), pytest.param("cuda", True, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("dtype", "nbytes"), [(torch.bfloat16, 2 * NUMEL), (torch.float32, 2 * NUMEL + CODES)])
def test_channels_that_no_kernel_serves_keep_16_bits_of_the_input(
    device: str, fuse: bool, dtype: torch.dtype, nbytes: int
) -> None:
    """They are the whole input in 16 bits, and its result is computed again; of a float32 one the result's codes."""
    plain = network(ACTIVATIONS["SiLU in place"][0]).to(device, dtype)
    model = pyactcomp.compress(copy.deepcopy(plain), min_bytes=1, fuse=fuse)
    exact, got = [], []
    for each, into in ((plain, exact), (model, got)):
        each(images().to(device, dtype)).float().square().sum().backward()
        into.extend(p.grad.float().flatten() for p in each.parameters())
    error = torch.cat(got) - torch.cat(exact)
    # A result that is computed again and the gradients computed from it are rounded anew.
    assert error.norm() <= (GRADIENT_BOUND + torch.finfo(dtype).eps) * torch.cat(exact).norm()
    wide = [t for t in pyactcomp.report(model).tensors if t.shape == (4, CHANNELS, 16, 16)]
    assert sum(t.stored_bytes for t in wide) == nbytes
