"""Norms written from operators, of rows of very unlike size, in every layout: codes span rows where memory does."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from compiled_backend import trained
from torch import Tensor
from torch.nn import functional as F
from works_with import GRADIENT_BOUND

import pyactcomp
from pyactcomp import functional
from pyactcomp.functional.codes import INT8
from pyactcomp.functional.norms.add_rms_norm import add_rms_norm
from pyactcomp.functional.norms.layer_norm import add_layer_norm
from pyactcomp.report import Report

TINY = 1e-12
Norm = Callable[[Tensor, tuple[int, ...]], Tensor]


def _centred(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return x - x.mean(dims, keepdim=True)


def _rms_of_squares(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(dims, keepdim=True) + TINY)


NORMS: dict[str, Norm] = {
    "mean of squares": _rms_of_squares,
    "divided by a root": lambda x, dims: x / (x.square().mean(dims, keepdim=True) + TINY).sqrt(),
    "var": lambda x, dims: _centred(x, dims) * (x.var(dims, keepdim=True) + TINY).rsqrt(),
    "std": lambda x, dims: _centred(x, dims) / (x.std(dims, keepdim=True) + TINY),
    "divided by a norm": lambda x, dims: x / torch.linalg.vector_norm(x, dim=dims, keepdim=True),
}


def _sizes(rows: int) -> Tensor:
    """Return sizes of rows over six orders of magnitude, in random order."""
    return torch.logspace(-3, 3, rows)[torch.randperm(rows)]


def _channels(width: int) -> Tensor:
    return torch.randn(8, width, 64, 4) * _sizes(8 * 64 * 4).view(8, 1, 64, 4)


def _images() -> Tensor:
    return torch.randn(512, 4, 8, 8) * _sizes(512).view(-1, 1, 1, 1)


# The rows' dimensions, and tensors of 256 KiB or more in float32 whose rows' statistics are below min_bytes.
LAYOUTS: dict[str, tuple[Callable[[], Tensor], tuple[int, ...]]] = {
    "rows": (lambda: torch.randn(1024, 128) * _sizes(1024)[:, None], (-1,)),
    "rows that end inside a group": (lambda: torch.randn(1024, 160) * _sizes(1024)[:, None], (-1,)),
    "short rows": (lambda: torch.randn(2048, 32) * _sizes(2048)[:, None], (-1,)),
    "transposed rows": (lambda: (torch.randn(128, 1024) * _sizes(1024)).t(), (-1,)),
    "columns": (lambda: torch.randn(128, 1024) * _sizes(1024), (0,)),
    "channels": (lambda: _channels(32), (1,)),
    "channels last": (lambda: _channels(128).to(memory_format=torch.channels_last), (1,)),
    "images": (_images, (1, 2, 3)),
    "images, channels last": (lambda: _images().to(memory_format=torch.channels_last), (-3, -2, -1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("norm", NORMS)
def test_small_rows_beside_large_ones_have_their_gradients(norm: str, layout: str, dtype: torch.dtype) -> None:
    make, dims = LAYOUTS[layout]
    x = make().to(dtype).requires_grad_()
    weight = torch.randn(x.shape).to(dtype)

    def gradient(out: Tensor) -> Tensor:
        return torch.autograd.grad((out * weight).sum(), x)[0].double()

    exact = gradient(NORMS[norm](x * 1, dims))
    with pyactcomp.compressed():
        out = NORMS[norm](x * 1, dims)
    assert math.isfinite(float(exact.norm()))
    assert float((gradient(out) - exact).norm() / exact.norm()) <= GRADIENT_BOUND


MODULES: dict[str, Callable[[int], torch.nn.Module]] = {
    "LayerNorm": lambda width: torch.nn.LayerNorm(width, eps=TINY),
    "RMSNorm": lambda width: torch.nn.RMSNorm(width, eps=TINY),
    # Rows of 32 elements, shorter than a group of codes.
    "GroupNorm": lambda width: torch.nn.GroupNorm(width // 32, width, eps=TINY),
}


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("layout", ["rows", "rows that end inside a group", "short rows", "transposed rows"])
@pytest.mark.parametrize("module", MODULES)
def test_norms_of_torch_have_the_gradients_of_small_rows(module: str, layout: str, fuse: bool) -> None:
    x = LAYOUTS[layout][0]()
    weight = torch.randn(x.shape)
    model = torch.nn.Sequential(MODULES[module](x.shape[1]))
    x = x.requires_grad_()

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad((model(x * 1) * weight).sum(), (x, *model.parameters()))

    exact = gradients()
    pyactcomp.compress(model, fuse=fuse)
    for got, expected in zip(gradients(), exact, strict=True):
        assert float((got - expected).norm() / expected.norm()) <= GRADIENT_BOUND


@pytest.mark.parametrize("function", ["layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm"])
@pytest.mark.parametrize("layout", ["rows", "rows that end inside a group", "transposed rows"])
def test_functions_have_the_gradients_of_small_rows(function: str, layout: str) -> None:
    x = LAYOUTS[layout][0]().requires_grad_()
    gamma, weight = torch.randn(x.shape[1]).requires_grad_(), torch.randn(x.shape)
    shape = (x.shape[1],)
    calls: dict[str, Callable[[functional.Codes], Tensor]] = {
        "layer_norm": lambda codes: functional.layer_norm(x * 1, shape, gamma, None, TINY, codes=codes),
        "rms_norm": lambda codes: functional.rms_norm(x * 1, gamma, TINY, codes=codes),
        "add_layer_norm": lambda codes: add_layer_norm(x * 1, x * 0, shape, gamma, None, TINY, codes=codes),
        "add_rms_norm": lambda codes: add_rms_norm(x * 1, x * 0, gamma, TINY, codes=codes)[0],
    }

    def gradients(codes: functional.Codes) -> tuple[Tensor, ...]:
        return torch.autograd.grad((calls[function](codes) * weight).sum(), (x, gamma))

    for got, expected in zip(gradients(INT8), gradients(functional.Codes(bits=None)), strict=True):
        assert float((got - expected).norm() / expected.norm()) <= GRADIENT_BOUND


@pytest.mark.parametrize("norm", ["batch", "group", "instance"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shape", "layout", "in_codes"),
    [
        ((4, 64, 8, 8), torch.contiguous_format, True),
        ((4, 64, 8, 8), torch.channels_last, False),
        ((4, 64, 7, 7), torch.contiguous_format, False),
        ((4, 64, 14, 14), torch.contiguous_format, False),
        ((64, 128), torch.contiguous_format, False),
        ((16, 64, 16), torch.contiguous_format, False),
    ],
    ids=str,
)
def test_a_norm_of_channels_orders_of_magnitude_apart(
    shape: tuple[int, ...], layout: torch.memory_format, in_codes: bool, dtype: torch.dtype, norm: str
) -> None:
    """Torch's own norms, as functions and other libraries' modules call them: each channel meets GRADIENT_BOUND."""
    if norm == "instance" and len(shape) == 2:
        pytest.skip("an instance norm has more than one element per channel and sample")
    generator = torch.Generator().manual_seed(0)
    # Eight neighbouring channels share a statistic of the group norm.
    scale = 10.0 ** (torch.arange(shape[1]) // 8 % 7).view(-1, *(1,) * (len(shape) - 2))
    x, grad = (torch.randn(shape, generator=generator) for _ in range(2))
    leaf = (x * scale).to(dtype).contiguous(memory_format=layout).requires_grad_()

    def normalise() -> Tensor:
        if norm == "batch":
            return F.batch_norm(leaf * 1, None, None, training=True)
        return F.group_norm(leaf * 1, shape[1] // 8) if norm == "group" else F.instance_norm(leaf * 1)

    def gradient() -> tuple[Tensor, Report]:
        with pyactcomp.compressed(min_bytes=0) as compressed:
            out = normalise()
        return torch.autograd.grad(out, leaf, grad.to(dtype))[0], pyactcomp.report(compressed)

    exact = torch.autograd.grad(normalise(), leaf, grad.to(dtype))[0]
    found, report = gradient()
    rows = tuple(d for d in range(len(shape)) if d != 1)
    error = (found.double() - exact.double()).square().sum(rows).sqrt() / exact.double().square().sum(rows).sqrt()
    assert float(error.max()) <= GRADIENT_BOUND
    # An instance norm saves a contiguous copy of channels-last images.
    copied = norm == "instance" and layout is torch.channels_last
    assert (report.stored_bytes < 1.5 * leaf.numel()) == (in_codes or copied)


@pytest.mark.parametrize("width", [96, 100, 336])
def test_rows_that_end_inside_a_group_are_padded_where_fused(width: int) -> None:
    model = pyactcomp.compress(torch.nn.Sequential(torch.nn.Linear(32, width), torch.nn.LayerNorm(width)), min_bytes=0)
    model(torch.randn(64, 32)).square().mean().backward()
    (rows,) = (t for t in pyactcomp.report(model).tensors if t.shape == (64, width) and t.module == "1")
    assert rows.stored_bytes == 64 * -(-width // 64) * (64 + 4)


@pytest.mark.parametrize("norm", [torch.nn.LayerNorm, torch.nn.RMSNorm])
@pytest.mark.parametrize("width", [64, 96, 100, 336])
def test_norms_in_a_graph_have_the_gradients_of_small_rows(width: int, norm: type[torch.nn.Module]) -> None:
    """Each row counts as much as any other, since the gradients that come in are equally large."""
    x = torch.randn(64, 32)
    rows = x * torch.tensor([1.0, 100.0]).repeat(32)[:, None]

    def build() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(32, width, bias=False), norm(width), torch.nn.Linear(width, 32))

    models = (trained(build, lambda model: (model(rows) - x).square().mean(), packed) for packed in (False, True))
    exact, got = (torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]) for m in models)
    assert float((got - exact).norm() / exact.norm()) <= GRADIENT_BOUND
