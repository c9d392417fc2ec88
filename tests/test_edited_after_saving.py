"""A tensor that is written to after it was saved: backward raises where that of plain torch raises, and only there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pyactcomp
from pyactcomp import functional
from pyactcomp.functional import Codes
from pyactcomp.functional.activations.gelu.new_gelu import new_gelu
from pyactcomp.functional.convolutional.batch_norm import batch_norm
from pyactcomp.functional.norms.layer_norm import add_layer_norm

Graph = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
MODES = ("lossless", "int8")
MODIFIED = "modified by an inplace operation"


def raises(graph: Graph, edited: bool, mode: str | None) -> bool:
    """Return whether backward raises autograd's error; a graph returns its loss and the tensor to write to."""
    torch.manual_seed(0)
    x, w = torch.randn(16, 32, requires_grad=True), torch.nn.Parameter(torch.randn(32, 32))
    if mode is None:
        loss, target = graph(x, w)
    else:
        with pyactcomp.compressed(min_bytes=1, mode=mode):
            loss, target = graph(x, w)
    if edited:
        with torch.no_grad():
            target.mul_(2)
    try:
        loss.sum().backward()
    except RuntimeError as error:
        if MODIFIED not in str(error):
            raise
        return True
    return False


def product(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x * x
    return y @ w, y


def gelu(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.gelu(x * 2)
    return y @ w, y


def view_of_silu(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.silu(x * 2)
    return y[:, :16].exp() + y.view(2, 8, 32).sin().view(16, 32)[:, 16:], y


def cast_of_a_parameter(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = w.to(torch.bfloat16)
    return (x * 2).to(torch.bfloat16) @ y, y


def normalised(x: Tensor) -> Tensor:
    """Return what offers to be computed again, casts of it too."""
    return functional.layer_norm(x * 2, 32, codes=Codes(bits=None))


def cast_of_an_activation(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = normalised(x).to(torch.bfloat16)
    return y @ w.to(torch.bfloat16), y


def second_cast(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = normalised(x)
    first, second = y.to(torch.bfloat16), y.to(torch.bfloat16)
    return first @ w.to(torch.bfloat16) + second @ w.to(torch.bfloat16), second


def source_of_a_cast(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = normalised(x)
    return y.to(torch.bfloat16) @ w.to(torch.bfloat16), y


def narrow_probabilities(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = (x * 2).softmax(-1).to(torch.bfloat16)
    return y @ w.to(torch.bfloat16), y


def log_probabilities(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = (x * 2).log_softmax(-1) * 1.5
    return F.nll_loss(y, torch.arange(16)), y


def labels(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.arange(16)
    return F.cross_entropy(x @ w, y), y


def block_input(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return checkpoint(lambda y: (y @ w).sin(), y, use_reentrant=False), y


def unread_block_input(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y, scaled = x * 2, w.to(torch.bfloat16) * w
    return checkpoint(lambda y, scaled: y.sin(), y, scaled, use_reentrant=False), w


def product_in_checkpoint(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    made = []

    def block(x: Tensor) -> Tensor:
        made.append(F.gelu(x * 2))
        return made[-1] @ w

    return checkpoint(block, x, use_reentrant=False), made[0]


GRAPHS = [
    product,
    gelu,
    view_of_silu,
    cast_of_a_parameter,
    cast_of_an_activation,
    second_cast,
    source_of_a_cast,
    narrow_probabilities,
    log_probabilities,
    labels,
    block_input,
    unread_block_input,
    product_in_checkpoint,
]


def test_the_graphs_are_of_both_kinds() -> None:
    assert {raises(graph, True, None) for graph in GRAPHS} == {True, False}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("graph", GRAPHS)
def test_backward_raises_where_that_of_torch_raises(graph: Graph, mode: str) -> None:
    assert raises(graph, True, mode) == raises(graph, True, None)
    assert not raises(graph, False, mode)


@pytest.mark.parametrize("mode", [None, *MODES])
@pytest.mark.parametrize(
    "factor", [lambda x: x * 2, lambda x: F.gelu(x * 2), lambda x: (x * 2).t().reshape(32, 16).t()]
)
def test_a_factor_that_backward_does_not_read_is_checked(mode: str | None, factor: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(16, 32, requires_grad=True), torch.randn(32, 32, requires_grad=True)
    with pyactcomp.compressed(min_bytes=1, mode=mode) if mode else nullcontext():
        y = factor(x)
        out = y @ w
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match=MODIFIED):
        torch.autograd.grad(out.sum(), x)  # reads the other factor alone


def module_raises(module: nn.Module, x: Tensor, target: str, compressed: bool) -> bool:
    """Return whether backward raises where a module's input, output or parameter was written to after its forward."""
    model = nn.Sequential(module)
    if compressed:
        pyactcomp.compress(model, min_bytes=1)
    y = x.clone().requires_grad_() * 1
    out = model(y)
    edited = {"input": y, "output": out}.get(target)
    with torch.no_grad():
        (module.get_parameter(target) if edited is None else edited).mul_(2)
    try:
        out.backward(torch.ones_like(out))
    except RuntimeError as error:
        if MODIFIED not in str(error):
            raise
        return True
    return False


ROWS, IMAGES = torch.randn(4, 64), torch.randn(2, 4, 8, 8)
MODULES: list[tuple[Callable[[], nn.Module], Tensor, tuple[str, ...]]] = [
    (lambda: nn.LayerNorm(64), ROWS, ("weight", "bias")),
    (lambda: nn.RMSNorm(64, eps=1e-6), ROWS, ("weight",)),
    (nn.GELU, ROWS, ()),
    (lambda: nn.Dropout(0.5), ROWS, ()),
    (lambda: nn.MaxPool2d(2), IMAGES, ()),
    (lambda: nn.BatchNorm2d(4), IMAGES, ("weight", "bias")),
]


@pytest.mark.parametrize(("make", "x", "parameters"), MODULES, ids=lambda value: getattr(value, "__name__", ""))
def test_fused_modules_raise_where_those_of_torch_raise(
    make: Callable[[], nn.Module], x: Tensor, parameters: tuple[str, ...]
) -> None:
    for target in ("input", "output", *parameters):
        expected = module_raises(make(), x, target, compressed=False)
        assert module_raises(make(), x, target, compressed=True) == expected, target


def functions() -> list[tuple[str, Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...]]]:
    """Return functions of this package with what torch's operators compute and the operands of both."""
    rows, weight = torch.randn(4, 64), torch.randn(64)
    labels = torch.arange(4)
    return [
        ("silu_mul", functional.silu_mul, lambda gate, up: F.silu(gate) * up, (rows, rows + 1)),
        ("new_gelu", new_gelu, lambda x: x * torch.tanh(x.pow(3.0)), (rows,)),
        (
            "rms_norm",
            lambda x, w, codes: functional.rms_norm(x, w, 1e-6, codes=codes),
            lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
            (rows, weight),
        ),
        (
            "add_layer_norm",
            lambda x, y, w, codes: add_layer_norm(x, y, 64, w, codes=codes),
            lambda x, y, w: F.layer_norm(x + y, (64,), w),
            (rows, rows + 1, weight),
        ),
        (
            "batch_norm_relu",
            lambda x, codes: batch_norm(x, None, None, relu=True, codes=codes),
            lambda x: F.batch_norm(x, None, None, training=True).relu(),
            (torch.randn(2, 4, 8, 8),),
        ),
        (
            "linear_cross_entropy",
            lambda x, w, codes: functional.linear_cross_entropy(x, w, labels),
            lambda x, w: F.cross_entropy(F.linear(x, w), labels),
            (rows, torch.randn(8, 64)),
        ),
    ]


@pytest.mark.parametrize("bits", [8, None])
@pytest.mark.parametrize(("ours", "theirs", "values"), [pytest.param(*case, id=name) for name, *case in functions()])
def test_functions_raise_where_operators_raise(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], values: tuple[Tensor, ...], bits: int | None
) -> None:
    def raised(function: Callable[..., Tensor], position: int) -> bool:
        operands = [value.clone().requires_grad_() * 1 for value in values]
        out = function(*operands)
        with torch.no_grad():
            (*operands, out)[position].mul_(2)
        try:
            out.backward(torch.ones_like(out))
        except RuntimeError as error:
            if MODIFIED not in str(error):
                raise
            return True
        return False

    for position in range(len(values) + 1):
        assert raised(functools.partial(ours, codes=Codes(bits=bits)), position) == raised(theirs, position), position
