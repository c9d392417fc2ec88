"""``nn.BatchNorm2d`` and ``nn.MaxPool2d``, and the ResNets of timm and torchvision: norm, addition and ReLU in one."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import Module

from ...engine.marks import RECTIFIED
from ...functional import Codes
from ...functional.convolutional.batch_norm import batch_norm
from ...functional.convolutional.max_pool import max_pool2d
from ..fusion import Fused, Fusion, codes_for, fused_class, of_one_dtype
from ..state import next_codes
from ..tampering import bypassable_as, tampering_reason

# The modules that define ``BasicBlock``, ``Bottleneck`` and ``ResNet``.
_RESNETS = ("timm.models.resnet", "torchvision.models.resnet")
# The sums of a channel average the errors of codes over its elements. Over 72 elements of a random program, with a
# gradient that is mostly their mean, the input's gradient was off by 6 %: fewer groups a channel run torch's own norm.
_GROUPS_PER_CHANNEL = 4
_BYPASSED = ("bn1", "bn2", "bn3", "act1", "act2", "act3", "relu", "drop_block", "aa")


def _normalise(
    norm: nn.BatchNorm2d, x: Tensor, codes: Codes, *, relu: bool = False, residual: Tensor | None = None
) -> Tensor:
    """Apply a batch norm in training mode, with the module's update of running statistics."""
    parameters = norm.weight, norm.bias, norm.running_mean, norm.running_var
    few = x.numel() < _GROUPS_PER_CHANNEL * codes.group_size * norm.num_features
    if few or x.shape[1] != norm.num_features or not of_one_dtype(x, *parameters, mixed=True):
        out = nn.BatchNorm2d.forward(norm, x)
        out = out if residual is None else out + residual
        return torch.relu(out) if relu else out
    momentum = norm.momentum
    running = (norm.running_mean, norm.running_var) if norm.track_running_stats else (None, None)
    if norm.track_running_stats and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if momentum is None:
            momentum = 1.0 / float(norm.num_batches_tracked)
    momentum = 0.0 if momentum is None else momentum
    return batch_norm(
        x, *running, norm.weight, norm.bias, momentum, norm.eps, relu=relu, residual=residual, codes=codes
    )


class BatchNorm2d(Fused, nn.BatchNorm2d):
    """``nn.BatchNorm2d``."""

    stands_for = ("batch_norm",)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the channels of ``input``."""
        codes = codes_for(self, input)
        if codes is None or input.dim() != 4:
            return super().forward(input)
        return _normalise(self, input, codes)


class MaxPool2d(Fused, nn.MaxPool2d):
    """``nn.MaxPool2d`` without dilation, rounding up or indices."""

    stands_for = ("max_pool2d",)

    def forward(self, input: Tensor) -> Tensor:
        """Take the maximum of each window."""
        codes = codes_for(self, input)
        dilated = self.dilation not in (1, (1, 1))
        sizes = self.kernel_size, self.stride, self.padding
        if (
            codes is None
            or dilated
            or self.ceil_mode
            or self.return_indices
            or input.dim() != 4
            or not all(isinstance(size, int) or len(size) == 2 for size in sizes)
        ):
            return cast(Tensor, super().forward(input))
        return max_pool2d(input, self.kernel_size, self.stride, self.padding, impl=codes.impl)


class BatchNormReLU2d(Fused, nn.BatchNorm2d):
    """A batch norm with ReLU: only a :class:`PassingReLU` reads the output."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the channels of ``input`` and apply ReLU."""
        codes = codes_for(self, input)
        if codes is None or input.dim() != 4 or tampering_reason(self) is not None:
            return super().forward(input)
        out = _normalise(self, input, codes, relu=True)
        RECTIFIED.set(out, out._version)
        return out


class PassingReLU(Fused, nn.ReLU):
    """A ReLU that returns the output of a :class:`BatchNormReLU2d` unchanged."""

    def forward(self, input: Tensor) -> Tensor:
        """Apply ReLU unless the batch norm has."""
        if RECTIFIED.get(input) == input._version:
            return input
        return super().forward(input)


class ResidualBlock(Fused):
    """A ``BasicBlock`` or ``Bottleneck`` of timm or torchvision in its standard configuration."""

    downsample: Module | None

    def forward(self, x: Tensor) -> Tensor:
        """Add the output of the convolutions to ``x``, or to the projection of ``x``."""
        codes = codes_for(self, x)
        layers = _layers(self) if codes is not None and x.dim() == 4 else []
        if codes is None or not layers:
            return cast(Tensor, super().forward(x))
        out = x
        for convolution, norm in layers[:-1]:
            out = _normalise(norm, convolution(out), next_codes(self), relu=True)
        convolution, norm = layers[-1]
        out = convolution(out)
        shortcut: Tensor = x if self.downsample is None else self.downsample(x)
        if shortcut.dtype is not out.dtype or shortcut.shape != out.shape:
            # The sum promotes or broadcasts, as in the block's own forward.
            return torch.relu(_normalise(norm, out, codes, relu=False) + shortcut)
        return _normalise(norm, out, codes, relu=True, residual=shortcut)


def _layers(block: Module) -> list[tuple[Module, nn.BatchNorm2d]]:
    """Return the pairs of convolution and norm, each followed by ReLU; none if another child is in between."""
    children = block._modules
    if any(getattr(block, name, None) is not None for name in ("se", "drop_path")):
        return []
    if not all(bypassable_as(children[name], nn.Identity) for name in ("drop_block", "aa") if name in children):
        return []
    layers: list[tuple[Module, nn.BatchNorm2d]] = []
    for index in range(1, 4):
        convolution, norm = children.get(f"conv{index}"), children.get(f"bn{index}")
        if convolution is None:
            break
        activation = children.get(f"act{index}", children.get("relu"))
        if not isinstance(norm, nn.BatchNorm2d) or not bypassable_as(norm, nn.BatchNorm2d) or not norm.training:
            return []
        if not bypassable_as(activation, nn.ReLU):
            return []
        layers.append((convolution, norm))
    return layers


def by_place(model: Module) -> dict[Module, Fusion]:
    """Return the fusions of a ResNet's first norms and the ReLUs behind them.

    In these classes only the ReLU reads the norm's output; the norm alone does not show this.
    """
    if not any(type(model) is getattr(sys.modules.get(name), "ResNet", None) for name in _RESNETS):
        return {}
    if tampering_reason(model) is not None:
        return {}
    children = model._modules
    first = children.get("conv1")
    deep = list(first) if type(first) is nn.Sequential and tampering_reason(first) is None else []
    row = [*deep, children.get("bn1"), children.get("act1", children.get("relu"))]
    fusions: dict[Module, Fusion] = {}
    for norm, activation in itertools.pairwise(row):
        if (
            isinstance(norm, Module)
            and isinstance(activation, Module)
            and bypassable_as(norm, nn.BatchNorm2d)
            and bypassable_as(activation, nn.ReLU)
        ):
            fusions[norm] = Fusion(fused_class(BatchNormReLU2d, nn.BatchNorm2d))
            fusions[activation] = Fusion(fused_class(PassingReLU, nn.ReLU))
    return fusions


def by_class(classes: Collection[type[Module]]) -> dict[type[Module], Fusion]:
    """Return the fusion of each class; timm's and torchvision's classes only if loaded."""
    fusions: dict[type[Module], Fusion] = {
        nn.BatchNorm2d: Fusion(fused_class(BatchNorm2d, nn.BatchNorm2d)),
        nn.MaxPool2d: Fusion(fused_class(MaxPool2d, nn.MaxPool2d), exact=True),
    }
    for name in _RESNETS:
        resnet = sys.modules.get(name)
        for block in (getattr(resnet, attribute, None) for attribute in ("BasicBlock", "Bottleneck")):
            if block is not None:
                fusions[block] = Fusion(fused_class(ResidualBlock, block), bypassed=_BYPASSED)
    return fusions
