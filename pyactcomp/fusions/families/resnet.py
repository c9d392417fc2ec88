"""``nn.BatchNorm2d``, alone or before activations, ``nn.MaxPool2d``, and ResNets: norm, addition and ReLU in one."""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import Module

from ...engine.reruns import trains
from ...functional import Codes
from ...functional.convolutional.batch_norm import batch_norm, kernels_for
from ...functional.convolutional.max_pool import max_pool2d
from ...functional.saving import Saving
from ...readers.observer import observer
from ..formulas import attributes_read, calls_in_turn, children_after, definition, forward_of
from ..fusion import Fused, Fusion, codes_for, fused_class, is_fused_class, of_one_dtype, original_of
from ..stand_ins import with_children
from ..state import active_codes, next_codes
from ..tampering import bypassable, bypassable_as

if TYPE_CHECKING:
    from ...functional.convolutional.launch import BatchNormKernels

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
    running = _running(norm)
    if norm.track_running_stats and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if momentum is None:
            momentum = 1.0 / float(norm.num_batches_tracked)
    momentum = 0.0 if momentum is None else momentum
    # Without the questions of `batch_norm` where nothing unusual surrounds the call.
    kernels = _kernels(norm, x, codes) if observer().is_ordinary() and x.requires_grad else None
    if kernels is not None:
        made = kernels.apply_where_served(x, residual, norm.weight, norm.bias, *running, momentum, norm.eps, relu)
        if made is not None:
            return made
    return batch_norm(
        x, *running, norm.weight, norm.bias, momentum, norm.eps, relu=relu, residual=residual, codes=codes
    )


def _running(norm: nn.BatchNorm2d) -> tuple[Tensor | None, Tensor | None]:
    """Return the running statistics that a norm updates."""
    return (norm.running_mean, norm.running_var) if norm.track_running_stats else (None, None)


def _kernels(norm: nn.BatchNorm2d, x: Tensor, codes: Codes) -> BatchNormKernels | None:
    """Return the kernels for a norm of [N, C, H, W], if there are."""
    return kernels_for(x, cast(Saving, codes)) if x.dim() == 4 and x.shape[1] == norm.num_features else None


def _serve(norm: nn.BatchNorm2d, x: Tensor, codes: Codes) -> bool:
    """Return whether a norm takes one pass, not the several of torch's operators."""
    kernels = _kernels(norm, x, codes)
    return kernels is not None and kernels.serves(x, None, norm.weight, norm.bias, *_running(norm), 0.0, 0.0, False)


class BatchNorm2d(Fused, nn.BatchNorm2d):
    """``nn.BatchNorm2d``."""

    stands_for = ("batch_norm",)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the channels of ``input``."""
        codes = codes_for(self, input)
        if codes is None or input.dim() != 4:
            return super().forward(input)
        return _normalise(self, input, codes)


class NormAndMore(Fused, nn.BatchNorm2d):
    """A class derived from ``nn.BatchNorm2d`` that runs children of its own, such as activations, on its result.

    Nobody else sees the norm's result, so an activation in place need not write over it: torch makes no copy of it.
    Where no kernel serves the norm, the class's own forward is as good: the engine computes the norm's result, and the
    copy, again from the norm's input.
    """

    stands_for = ("batch_norm",)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the channels of ``input``, and run the children in turn."""
        codes = codes_for(self, input)
        if codes is None or input.dim() != 4 or (input.is_cuda and not _serve(self, input, codes)):
            return super().forward(input)
        names = _children_of(original_of(type(self)))
        children = [child for child in map(self._modules.get, names) if not bypassable_as(child, nn.Identity)]
        relu = bool(children) and bypassable_as(children[0], nn.ReLU)
        x = _normalise(self, input, codes, relu=relu)
        for child in children[relu:]:
            x = _out_of_place(child)(x)
        return x


def _children_of(cls: type[Module]) -> tuple[str, ...]:
    """Return the children that a class runs after all that ``nn.BatchNorm2d`` does; none if it does anything else."""
    return children_after(forward_of(cls), forward_of(nn.BatchNorm2d))


def _out_of_place(child: Any) -> Callable[[Tensor], Tensor]:
    """Return an activation that leaves its input as it is; a child with hooks, which see the child, stays itself."""
    if not getattr(child, "inplace", False) or not bypassable(child):
        return cast(Callable[[Tensor], Tensor], child)
    copy = with_children(child, {})
    copy.inplace = False
    return cast(Callable[[Tensor], Tensor], copy)


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


class ResNet(Fused):
    """A ResNet of timm or torchvision: where its own code calls ReLU on the output of a norm, both run as one."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Override the methods that call a norm, and ReLU right after."""
        super().__init_subclass__(**options)
        if is_fused_class(cls):
            for name in _fusing_methods(cls.__bases__[1]):
                setattr(cls, name, _with_fused_pairs(cls.__bases__[1], name))


def _fusing_methods(cls: type[Module]) -> list[str]:
    """Return the methods of a class that call a child right after another, and no other method of the class."""

    def fuses(function: Any) -> bool:
        method = definition(function) if isinstance(function, types.FunctionType) else None
        return bool(calls_in_turn(method)) and not any(hasattr(cls, name) for name in attributes_read(method) or ())

    return [name for name, function in vars(cls).items() if fuses(function)]


def _with_fused_pairs(cls: type[Module], name: str) -> Callable[..., Any]:
    """Return a method like that of a class, with each norm and the ReLU right after in one pass."""
    method = getattr(cls, name)
    pairs = calls_in_turn(definition(method)).items()

    @functools.wraps(method)
    def run(self: Module, x: Any, *args: Any, **kwargs: Any) -> Any:
        own = getattr(cls, name)
        # A method that was replaced may do something else between the two. A proxy of torch.fx is no tensor.
        if own is not method or not isinstance(x, Tensor) or active_codes(self) is None:
            return own(self, x, *args, **kwargs)
        children: dict[str, Callable[..., Any]] = _pairs_fused(self, pairs)
        for part, child in self._modules.items():
            if bypassable_as(child, nn.Sequential):
                inside = _pairs_fused(cast(Module, child), itertools.pairwise(cast(Module, child)._modules))
                if inside:
                    children[part] = with_children(cast(Module, child), inside)
        return own(with_children(self, children) if children else self, x, *args, **kwargs)

    return run


def _pairs_fused(parent: Module, pairs: Iterable[tuple[str, str]]) -> dict[str, Callable[..., Tensor]]:
    """Return what computes the pairs of a norm and ReLU among the children of these names, for both names."""
    found: dict[str, Callable[..., Tensor]] = {}
    for first, second in pairs:
        norm, activation = parent._modules.get(first), parent._modules.get(second)
        if isinstance(norm, BatchNorm2d) and bypassable_as(activation, nn.ReLU):
            found[first] = functools.partial(_normalise_and_rectify, norm, cast(nn.ReLU, activation))
            found[second] = _as_it_is
    return found


def _normalise_and_rectify(norm: BatchNorm2d, activation: nn.ReLU, x: Tensor) -> Tensor:
    """Return ``activation(norm(x))``, in one pass where nobody looks at what is in between."""
    codes = codes_for(norm, x)
    if codes is None or x.dim() != 4 or not bypassable(norm) or not bypassable(activation):
        return cast(Tensor, activation(norm(x)))
    return _normalise(norm, x, codes, relu=True)


def _as_it_is(x: Tensor) -> Tensor:
    return x


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
        if not isinstance(norm, nn.BatchNorm2d) or not bypassable_as(norm, nn.BatchNorm2d) or not trains(norm):
            return []
        if not bypassable_as(activation, nn.ReLU):
            return []
        layers.append((convolution, norm))
    return layers


def by_class(classes: Collection[type[Module]]) -> dict[type[Module], Fusion]:
    """Return the fusion of each class; timm's and torchvision's classes only if loaded."""
    fusions: dict[type[Module], Fusion] = {
        nn.BatchNorm2d: Fusion(fused_class(BatchNorm2d, nn.BatchNorm2d)),
        nn.MaxPool2d: Fusion(fused_class(MaxPool2d, nn.MaxPool2d), exact=True),
    }
    for cls in classes:
        if issubclass(cls, nn.BatchNorm2d) and cls is not nn.BatchNorm2d and _children_of(cls):
            fusions[cls] = Fusion(fused_class(NormAndMore, cls))
    for name in _RESNETS:
        resnet = sys.modules.get(name)
        for block in (getattr(resnet, attribute, None) for attribute in ("BasicBlock", "Bottleneck")):
            if block is not None:
                fusions[block] = Fusion(fused_class(ResidualBlock, block), bypassed=_BYPASSED)
        model = getattr(resnet, "ResNet", None)
        if model is not None and _fusing_methods(model):
            fusions[model] = Fusion(fused_class(ResNet, model))
    return fusions
