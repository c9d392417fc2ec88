"""Outputs of norms are computed again from the input that the norm stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from works_with import GRADIENT_BOUND

import pyactcomp
from pyactcomp.engine import reasons, saved

CHANNELS, SIDE = 16, 16
SCALES = torch.logspace(-1, 1, CHANNELS)
Norm = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]


def batch_norm(x: Tensor, gain: Tensor | None, bias: Tensor | None, training: bool = True) -> Tensor:
    mean, variance = (None, None) if training else (torch.zeros(CHANNELS), CHANNELS * SCALES**2)
    return F.batch_norm(x, mean, variance, gain, bias, training)


def group_norm(x: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
    return F.group_norm(x, 4, gain, bias)


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


NORMS = [batch_norm, group_norm]


def leaves(side: int = SIDE, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return images, two kernels, gain and bias; channels differ by a factor of a hundred, and lie off zero."""
    generator = torch.Generator().manual_seed(0)
    shapes = (4, CHANNELS, side, side), (CHANNELS, CHANNELS, 1, 1), (CHANNELS, CHANNELS, 3, 3), (CHANNELS,), (CHANNELS,)
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    drawn[1] *= SCALES.view(-1, 1, 1, 1)
    drawn[0] += 0.5
    return [each.to(dtype).requires_grad_() for each in drawn]


def forward(norm: Norm, x: Tensor, first: Tensor, second: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
    return F.conv2d(F.silu(norm(F.conv2d(x, first), gain, bias)), second)


def gradients(norm: Norm, given: list[Tensor], mode: str | None = None) -> tuple[tuple[Tensor, ...], int]:
    """Return the gradients, and how many saved tensors are computed again."""
    upstream = torch.randn(4, CHANNELS, *[given[0].shape[-1] - 2] * 2, generator=torch.Generator().manual_seed(1))
    again = 0
    if mode is None:
        out = forward(norm, *given)
    else:
        with pyactcomp.compressed(mode=mode, min_bytes=1) as c:
            out = forward(norm, *given)
        again = [tensor.kept for tensor in pyactcomp.report(c).tensors].count(reasons.RECOMPUTED)
    return torch.autograd.grad(out, [each for each in given if each.requires_grad], upstream.to(out.dtype)), again


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_of_a_norm_is_computed_again_and_so_is_its_activation(norm: Norm, dtype: torch.dtype) -> None:
    given = leaves(dtype=dtype)
    exact, _ = gradients(norm, given)
    found, again = gradients(norm, given, "int8")
    assert again == 2
    for one, other in zip(found, exact, strict=True):
        assert relative_error(one, other) <= GRADIENT_BOUND


@pytest.mark.parametrize("norm", NORMS)
def test_lossless_gradients_are_bitwise_those_of_torch(norm: Norm) -> None:
    given = leaves()
    exact, _ = gradients(norm, given)
    found, again = gradients(norm, given, "lossless")
    assert again == 1  # the activation alone: a norm by other kernels rounds otherwise
    assert all(torch.equal(one, other) for one, other in zip(found, exact, strict=True))


@pytest.mark.parametrize("norm", NORMS)
def test_bytes_of_an_output_are_not_stored(norm: Norm) -> None:
    with pyactcomp.compressed(min_bytes=1) as c:
        forward(norm, *leaves())
    stored = [tensor for tensor in pyactcomp.report(c).tensors if tensor.kept is None]
    image = 4 * CHANNELS * SIDE * SIDE
    assert [tensor.stored_bytes for tensor in stored] == [image + image // 64 * 4]  # the norm's input, in 8.5 bits


@pytest.mark.parametrize(
    ("norm", "change", "side"),
    [
        (batch_norm, lambda given: given[4].requires_grad_(False), SIDE),
        (group_norm, lambda given: given[3].requires_grad_(False), SIDE),
        (lambda x, gain, bias: batch_norm(x, gain, bias * 1), lambda given: None, SIDE),
        (lambda x, gain, bias: group_norm(x, gain, None), lambda given: given[4].requires_grad_(False), SIDE),
        (lambda x, gain, bias: batch_norm(x, gain, bias, training=False), lambda given: None, SIDE),
        # Groups span channels, whose norm reads 16 bits: far from zero they would round the output, too.
        (batch_norm, lambda given: None, 10),
    ],
    ids=["frozen bias", "frozen gain", "computed bias", "no bias", "evaluation", "16 bits"],
)
def test_output_of_another_norm_is_stored(norm: Norm, change: Callable[[list[Tensor]], object], side: int) -> None:
    given = leaves(side)
    change(given)
    exact, _ = gradients(norm, given)
    found, again = gradients(norm, given, "int8")
    assert again == 1
    for one, other in zip(found, exact, strict=True):
        assert relative_error(one, other) <= GRADIENT_BOUND


def test_parameters_are_those_of_the_forward() -> None:
    given = leaves()
    exact, _ = gradients(batch_norm, given)
    gain, bias = nn.Parameter(given[3].detach().clone()), nn.Parameter(given[4].detach().clone())
    with pyactcomp.compressed(min_bytes=1):
        out = forward(batch_norm, *given[:3], gain, bias)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    gain.data, bias.data = torch.zeros(CHANNELS), torch.zeros(CHANNELS)
    found = torch.autograd.grad(out, given[2], upstream)[0]
    assert relative_error(found, exact[2]) <= GRADIENT_BOUND


@pytest.mark.parametrize("freed", [3, 4], ids=["gain", "bias"])
@pytest.mark.parametrize("norm", NORMS)
def test_output_is_stored_if_its_parameters_are_freed_after_the_norm(norm: Norm, freed: int) -> None:
    given = leaves()
    exact, _ = gradients(norm, given)
    x, first, second, gain, bias = (nn.Parameter(each.detach().clone()) for each in given)
    parameters = [x, first, second, gain, bias]
    with pyactcomp.compressed(min_bytes=1):
        y = norm(F.conv2d(x, first), gain, bias)
        whole, parameters[freed].data = parameters[freed].data, torch.empty(0)  # as ZeRO does
        out = F.conv2d(F.silu(y), second)
        parameters[freed].data = whole
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(out, second, upstream)[0]
    assert relative_error(found, exact[2]) <= GRADIENT_BOUND


class Passes(TorchDispatchMode):
    """Names the operators that write as many elements as ``whole`` has."""

    def __init__(self, whole: Tensor) -> None:
        super().__init__()
        self.whole, self.names = whole, list[str]()

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        fills = not (func.is_view or "empty" in func.__name__)
        if fills and isinstance(out, Tensor) and out.numel() == self.whole.numel():
            self.names.append(str(func))
        return out


def rows_of(norm: Callable[..., Tensor], vectors: int) -> Callable[[Tensor], Tensor]:
    """Return a norm of rows of 64 with ``vectors`` parameters."""
    drawn = torch.randn(vectors, 64, generator=torch.Generator().manual_seed(2))
    return lambda x: norm(x, (64,), *[each.to(x).requires_grad_() for each in drawn])


def groups_of(x: Tensor) -> Tensor:
    gain, bias = torch.randn(2, 32, generator=torch.Generator().manual_seed(2)).to(x)
    return F.group_norm(x.view(-1, 32, 64), 4, gain.requires_grad_(), bias.requires_grad_())


FEW_PASSES = {
    "rows": (rows_of(F.layer_norm, 0), 1),
    "rows, gain": (rows_of(F.layer_norm, 1), 2),
    "rows, gain and bias": (rows_of(F.layer_norm, 2), 2),
    "groups": (groups_of, 1),
}
ON_GPU = {**FEW_PASSES, "root mean square": (rows_of(F.rms_norm, 1), 2)}  # on the CPU torch computes it by products


@pytest.mark.parametrize("offset", [0.0, 30.0], ids=["around zero", "far from zero"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "device"),
    [
        *((name, "cpu") for name in FEW_PASSES),
        *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in ON_GPU),
    ],
)
def test_a_norm_is_computed_again_in_few_passes(name: str, device: str, dtype: torch.dtype, offset: float) -> None:
    norm, passes = ON_GPU[name]
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(8 * 32, 64, generator=generator) + offset).to(device, dtype).requires_grad_()
    with pyactcomp.compressed(min_bytes=1):
        out = norm(x * 1)
        read = out @ torch.eye(64, device=device, dtype=dtype).requires_grad_()
    assert read.requires_grad
    recipe = saved.library().recipe_of(out)
    assert recipe is not None
    for wanted in (dtype, torch.bfloat16):
        with Passes(out) as seen:
            again = recipe.compute(wanted)
        assert len(seen.names) == passes, seen.names
        # A code is off by up to half a step of 1 / 255 of a group's range, which is some five deviations.
        assert relative_error(again, out.detach()) <= 0.5 * 5 / 255 + torch.finfo(wanted).eps


def written_by(write: Callable[[Tensor], object]) -> Callable[[Tensor], Tensor]:
    """Return SiLU in place, after a write that autograd does not see."""

    def activate(y: Tensor) -> Tensor:
        with torch.no_grad():
            write(y)
        return F.silu(y, inplace=True)

    return activate


def silu_then_written(y: Tensor) -> Tensor:
    y = F.silu(y, inplace=True)
    with torch.no_grad():
        y.add_(1)
    return y


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("activate", "again"),
    [
        (lambda y: F.silu(y, inplace=True), 2),
        (written_by(lambda y: y.add_(1)), 0),
        (silu_then_written, 1),
        (lambda y: F.silu(y.clone()), 1),
    ],
    ids=["in place", "written before", "written after", "a copy of the program's own"],
)
def test_what_an_activation_in_place_writes_over_is_computed_again(
    norm: Norm, activate: Callable[[Tensor], Tensor], again: int
) -> None:
    """Of a copy that the program makes nobody tells whether the norm's result was written to before."""
    given = leaves()

    def out() -> Tensor:
        x, first, second, gain, bias = given
        return F.conv2d(activate(norm(F.conv2d(x, first), gain, bias)), second)

    exact, found = (torch.autograd.grad(each.square().sum(), given) for each in (out(), compressed_out(out, again)))
    for one, other in zip(found, exact, strict=True):
        assert relative_error(one, other) <= GRADIENT_BOUND


def compressed_out(out: Callable[[], Tensor], again: int) -> Tensor:
    """Return a forward's result under compression, after as many of its tensors are to be computed again."""
    with pyactcomp.compressed(min_bytes=1) as c:
        made = out()
    assert [tensor.kept for tensor in pyactcomp.report(c).tensors].count(reasons.RECOMPUTED) == again
    return made


def instance_norm(x: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
    return F.instance_norm(x, None, None, gain, bias)


def leaky_again(norm: Norm, activate: Callable[[Tensor], Tensor]) -> int:
    """Assert that gradients behind a norm and an activation are right; return what the activation's result takes."""
    given = leaves()

    def out() -> Tensor:
        x, first, second, gain, bias = given
        return F.conv2d(activate(norm(F.conv2d(x, first), gain, bias)), second)

    with pyactcomp.compressed(min_bytes=1) as c:
        compressed = out()
    upstream = torch.randn(compressed.shape, generator=torch.Generator().manual_seed(1))
    exact = torch.autograd.grad(out(), given, upstream)
    for one, other in zip(torch.autograd.grad(compressed, given, upstream), exact, strict=True):
        assert relative_error(one, other) <= GRADIENT_BOUND
    image = 4 * CHANNELS * SIDE * SIDE
    whole = [t.stored_bytes for t in pyactcomp.report(c).tensors if t.kept is None or t.kept == reasons.RECOMPUTED]
    return sum(whole) - image - image // 64 * 4 - image // 8  # but for the norm's input in codes, and the bits


def added_to(y: Tensor) -> Tensor:
    with torch.no_grad():
        y.add_(1)
    return y


def half_replaced(y: Tensor) -> Tensor:
    F.leaky_relu_(y[:2], 0.3)
    return y


@pytest.mark.parametrize("norm", [*NORMS, instance_norm])
@pytest.mark.parametrize("inplace", [False, True])
def test_leaky_relu_behind_a_norm_is_computed_again(norm: Norm, inplace: bool) -> None:
    assert leaky_again(norm, lambda y: F.leaky_relu(y, 0.3, inplace)) == 0


@pytest.mark.parametrize("norm", [*NORMS, instance_norm])
@pytest.mark.parametrize(
    "activate",
    [
        lambda y: F.leaky_relu(added_to(y), 0.3),
        lambda y: F.leaky_relu_(added_to(y), 0.3),
        lambda y: added_to(F.leaky_relu(y, 0.3)),
        half_replaced,
    ],
    ids=["written before", "written before, in place", "written after", "a half"],
)
def test_leaky_relu_is_stored_where_others_wrote(norm: Norm, activate: Callable[[Tensor], Tensor]) -> None:
    assert leaky_again(norm, activate) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [batch_norm, instance_norm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_large_images_are_normalised_again_as_others(norm: Norm, dtype: torch.dtype) -> None:
    """CUDA's own kernel for them has too few blocks, so another one runs."""
    given = [each.detach().cuda().requires_grad_() for each in leaves(side=64, dtype=dtype)]
    given[0] = given[0].detach()[:1].contiguous().requires_grad_()
    x, first, second, gain, bias = given

    def out() -> Tensor:
        return F.conv2d(F.silu(norm(F.conv2d(x, first), gain, bias)), second)

    exact = torch.autograd.grad(out().float().square().sum(), given)
    found = torch.autograd.grad(compressed_out(out, 2).float().square().sum(), given)
    for one, other in zip(found, exact, strict=True):
        # A result that is computed again is rounded again to its dtype, as are the gradients that follow.
        assert relative_error(one, other) <= GRADIENT_BOUND + torch.finfo(dtype).eps
