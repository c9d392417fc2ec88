"""The rule: what made an operand, what it is multiplied by, and which form follows."""

from __future__ import annotations

import functools
import importlib
import itertools
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pyactcomp
from pyactcomp import functional
from pyactcomp.codec.layouts import Layout, layout_of
from pyactcomp.functional.windows.residual_add import residual_add
from pyactcomp.readers import lookup, rule
from pyactcomp.readers.forms import AS_CODES, BFLOAT16, GAINED, ITSELF, SCALED, Form, Reading, Use
from pyactcomp.readers.observer import observer
from pyactcomp.readers.rule import Maker, Partner
from pyactcomp.torch_private import extensions

pytestmark = pytest.mark.skipif(extensions.load("_observer")[0] is None, reason="the observer is not built")

WIDTH = 64
W = (torch.randn(WIDTH, WIDTH) / 8).requires_grad_()
GAIN = torch.rand(WIDTH).requires_grad_()
ONE = torch.rand(1, 1).requires_grad_()
CONSTANT = torch.rand(WIDTH)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def layer(x: Tensor) -> Tensor:
    return x @ W


def activation() -> Tensor:
    return torch.randn(128, WIDTH, requires_grad=True).sin()


# What makes an operand from an activation of which nothing is known.
MADE: dict[str, tuple[Callable[[Tensor], Tensor], Maker]] = {
    "an activation": (lambda x: x, Maker.OTHER),
    "product with a parameter": (layer, Maker.LAYER),
    "product with a cast parameter": (lambda x: x.bfloat16() @ W.bfloat16(), Maker.LAYER),
    "product with a bias": (lambda x: torch.addmm(GAIN, x, W), Maker.LAYER),
    "bias of rows that lie apart": (lambda x: F.linear(x.expand(2, -1, -1).transpose(0, 1), W, GAIN), Maker.LAYER),
    "bias of an activation": (lambda x: x + GAIN, Maker.OTHER),
    "product of activations and a bias": (lambda x: torch.addmm(GAIN, x, x[:WIDTH]), Maker.OTHER),
    "product of activations": (lambda x: x @ x.t(), Maker.OTHER),
    "probabilities times values": (lambda x: (x @ x.t()).softmax(-1) @ x, Maker.LAYER),
    "convolution": (lambda x: F.conv1d(x[None], torch.randn(4, 128, 1).requires_grad_()), Maker.LAYER),
    "norm": (lambda x: F.layer_norm(x, (WIDTH,)), Maker.LAYER),
    "fused norm": (lambda x: pyactcomp.functional.layer_norm(x, (WIDTH,), GAIN, GAIN), Maker.LAYER),
    "lookup": (lambda x: F.embedding(torch.arange(WIDTH), W), Maker.LAYER),
    "view and cast": (lambda x: layer(x).view(-1, 8, 8).transpose(0, 1).double()[1:], Maker.LAYER),
    "twelve views": (lambda x: functools.reduce(lambda y, _: y.t(), range(12), layer(x)), Maker.LAYER),
    "rows, padded": (lambda x: F.pad(layer(x)[torch.arange(7)], (1, 1)), Maker.LAYER),
    "multiple": (lambda x: -layer(x) * 0.5 / 3, Maker.LAYER),
    "a number more": (lambda x: 1 - layer(x), Maker.OTHER),
    "constant tensor as a factor": (lambda x: layer(x) * CONSTANT, Maker.OTHER),
    "gain": (lambda x: layer(x) * GAIN, Maker.GAINED),
    "gain of an activation, and a bias": (lambda x: GAIN + (x * (1 + GAIN)).half(), Maker.GAINED),
    "gain of a constant": (lambda x: CONSTANT * GAIN, Maker.GAINED),
    "norm with a gain": (lambda x: F.layer_norm(x, (WIDTH,), GAIN, GAIN).view(-1, 8), Maker.GAINED),
    "one number for all": (lambda x: layer(x) * ONE, Maker.LAYER),
    "residual of a gain": (lambda x: layer(x) * GAIN + layer(x), Maker.RESIDUAL),
    "gated, of a gain": (lambda x: layer(x).sigmoid() * (layer(x) * GAIN), Maker.LAYER),
    "rows behind a constant": (lambda x: torch.cat([CONSTANT[None], x]) * x[:1], Maker.OTHER),
    "quotient by a parameter": (lambda x: layer(x) / GAIN, Maker.OTHER),
    "sum of layers": (lambda x: layer(x) + layer(x).view(128, WIDTH), Maker.RESIDUAL),
    "residual stream": (lambda x: sum((layer(x) for _ in range(6)), layer(x)), Maker.RESIDUAL),
    "fused residual": (lambda x: residual_add(layer(x), layer(x)), Maker.RESIDUAL),
    "sum with an activation": (lambda x: layer(x) + x, Maker.OTHER),
    "difference of layers": (lambda x: layer(x) - layer(x), Maker.OTHER),
    "GELU": (lambda x: F.gelu(layer(x)), Maker.GATE),
    "fused GELU": (lambda x: pyactcomp.functional.gelu(layer(x)), Maker.GATE),
    "dropped out": (lambda x: torch.native_dropout(layer(x), 0.1, True)[0], Maker.GATE),
    "GELU of an activation": (F.gelu, Maker.OTHER),
    "sigmoid of an activation": (torch.sigmoid, Maker.GATE),
    "softmax of an activation": (lambda x: x.softmax(-1), Maker.GATE),
    "gated": (lambda x: F.silu(layer(x)) * layer(x), Maker.LAYER),
    "product of layers": (lambda x: layer(x) * layer(x), Maker.OTHER),
    "norm of operators": (lambda x: x * x.square().mean(-1, keepdim=True).rsqrt(), Maker.LAYER),
    "ReLU": (lambda x: layer(x).relu(), Maker.RECTIFIED),
    "gated by a ReLU": (lambda x: layer(x).relu() * layer(x), Maker.RECTIFIED),
    "logarithm": (lambda x: x.exp().log().float(), Maker.LOGARITHM),
    "log-probabilities": (lambda x: -layer(x).log_softmax(-1), Maker.LOGARITHM),
    "difference of logarithms": (lambda x: layer(x).log_softmax(-1) - CONSTANT, Maker.LOGARITHM),
    "scores less a logarithm": (lambda x: layer(x) - layer(x).logsumexp(-1, keepdim=True), Maker.LOGARITHM),
    "exponential": (lambda x: 2 * layer(x).exp().t(), Maker.EXPONENTIAL),
    "masked": (lambda x: layer(x).masked_fill(CONSTANT > 0.5, -1e9), Maker.MASKED),
    "mask added": (lambda x: layer(x) + CONSTANT, Maker.MASKED),
    "autograd function": (lambda x: Doubled.apply(layer(x)), Maker.OTHER),
}


@pytest.mark.parametrize("name", MADE)
def test_the_maker_of_an_operand(name: str) -> None:
    make, maker = MADE[name]
    assert observer().facts(make(activation()))[1] is maker


@pytest.fixture
def _registry() -> Iterator[None]:
    yield
    lookup._layers.clear()
    lookup._registered_functions.clear()
    for changed in lookup.on_change:
        changed()


@pytest.mark.usefixtures("_registry")
def test_a_registered_function_counts_as_a_layer() -> None:
    assert observer().facts(Doubled.apply(activation()))[1] is Maker.OTHER
    pyactcomp.register_reader(Doubled, result="layer")
    assert observer().facts(Doubled.apply(activation()))[1] is Maker.LAYER
    pyactcomp.register_reader(Doubled, {0: "linear"})
    assert observer().facts(Doubled.apply(activation()))[1] is Maker.OTHER


def test_an_operator_of_torch_is_registered_by_no_one_as_a_layer() -> None:
    with pytest.raises(ValueError, match="autograd functions, not 'aten::atan2'"):
        pyactcomp.register_reader("aten::atan2", result="layer")
    assert lookup._registered == {}


# What a product multiplies the operand x by; y is a layer's result.
BESIDE: dict[str, tuple[Callable[[Tensor, Tensor], object], Partner]] = {
    "constant": (lambda x, y: torch.pow(x, 2), Partner.NOTHING),
    "itself": (lambda x, y: x * x, Partner.ITSELF),
    "its own transpose": (lambda x, y: x @ x.t(), Partner.ITSELF),
    "a part of the same memory": (lambda x, y: x[:64] @ x[64:], Partner.OTHER),
    "gain": (lambda x, y: x * GAIN, Partner.GAIN),
    "one more than a gain": (lambda x, y: x * (1 + GAIN.float()), Partner.GAIN),
    "parameter": (lambda x, y: x @ W, Partner.PARAMETER),
    "transposed parameter": (lambda x, y: F.linear(x, W), Partner.PARAMETER),
    "parameter of each element": (lambda x, y: x[:64] * W, Partner.PARAMETER),
    "multiple of a parameter": (lambda x, y: x @ (2 * W), Partner.OTHER),
    "statistic": (lambda x, y: x * x.mean(-1, keepdim=True), Partner.STATISTIC),
    "gate": (lambda x, y: x * F.silu(y), Partner.GATE),
    "logarithm": (lambda x, y: x * y.log_softmax(-1), Partner.LOGARITHM),
    "layer": (lambda x, y: x * y, Partner.LAYER),
}


@pytest.mark.parametrize("name", BESIDE)
def test_the_partner_of_an_operand(name: str) -> None:
    call, partner = BESIDE[name]
    x = activation()
    y = layer(x)
    found: list[Partner] = []

    def pack(tensor: Tensor) -> Tensor:
        observer().note_save()
        if tensor.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
            found.append(observer().facts(tensor)[2])
        return tensor

    observer().start()
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            call(x, y)
    finally:
        observer().stop()
    assert partner in found
    assert set(found) <= {partner, Partner.NOTHING}


def form(use: Use | Form, maker: Maker, partner: Partner, *shape: int, operator: str = "aten::x") -> Form:
    layout = layout_of(torch.empty(shape or (128, WIDTH), device="meta"))
    return rule.form(Reading.of(operator, "self", use, "for a test"), maker, partner, layout, 64)


LAYERS = {Maker.LAYER, Maker.RESIDUAL, Maker.GATE, Maker.RECTIFIED, Maker.GAINED}
PARAMETERS = {Partner.NOTHING, Partner.GAIN, Partner.PARAMETER}


@pytest.mark.parametrize(("maker", "partner"), list(itertools.product(Maker, Partner)), ids=str)
def test_eight_bits_are_for_operands_of_layers(maker: Maker, partner: Partner) -> None:
    beside_a_gate = partner is Partner.GATE or (maker in (Maker.GATE, Maker.RECTIFIED) and partner is Partner.OTHER)
    matrix = partner in PARAMETERS or (maker in LAYERS - {Maker.RECTIFIED} and partner is not Partner.ITSELF)
    coarse = GAINED if maker is Maker.GAINED else AS_CODES
    assert form(Use.MATRIX, maker, partner) is (coarse if matrix else BFLOAT16)
    factor = maker in LAYERS and (beside_a_gate or partner in {*PARAMETERS, Partner.STATISTIC, Partner.LAYER})
    beside_a_logarithm = partner is Partner.LOGARITHM and maker not in LAYERS
    exact = maker is Maker.LOGARITHM or beside_a_logarithm
    assert form(Use.FACTOR, maker, partner) is (ITSELF if exact else coarse if factor else BFLOAT16)
    square = maker in (Maker.RESIDUAL, Maker.RECTIFIED)
    assert form(Use.SQUARE, maker, partner) is (AS_CODES if square else BFLOAT16)
    # What decides the form by itself.
    for fixed in (ITSELF, SCALED, BFLOAT16, AS_CODES):
        assert form(fixed, maker, partner) is fixed
    assert form(AS_CODES, maker, partner, 63) is BFLOAT16


@pytest.mark.parametrize(
    ("use", "shape", "expected"),
    [
        (Use.ROWS, (128, 64), AS_CODES),
        (Use.ROWS, (128, 96), BFLOAT16),
        (Use.ROWS, (128, 32), BFLOAT16),
        (Use.ROWS, (128, 2), ITSELF),
        (Use.ROWS, (2, 16), ITSELF),
        (Use.HEADS, (2, 4, 8, 64), AS_CODES),
        (Use.HEADS, (2, 4, 8, 32), SCALED),
        (Use.CHANNELS, (2, 4, 8, 8), AS_CODES),
        (Use.CHANNELS, (2, 4, 7, 7), BFLOAT16),
        (Use.CHANNELS, (128, 64), BFLOAT16),
        (Use.CHANNELS, (2, 128), ITSELF),
        (Use.INPUT, (2, 3, 128), AS_CODES),
        (Use.INPUT, (2, 3, 96), BFLOAT16),
        (Use.INPUT, (2, 3, 7, 7), AS_CODES),
    ],
    ids=str,
)
def test_a_group_lies_within_what_has_a_statistic_of_its_own(use: Use, shape: tuple[int, ...], expected: Form) -> None:
    assert form(use, Maker.OTHER, Partner.NOTHING, *shape) is expected


def test_rows_that_lie_apart_in_memory_share_groups() -> None:
    reading = Reading.of("aten::x", "self", Use.ROWS, "for a test")
    transposed = Layout(torch.Size((128, 64)), (1, 128), True)
    assert rule.form(reading, Maker.LAYER, Partner.NOTHING, transposed, 64) is BFLOAT16


@pytest.mark.parametrize("maker", Maker, ids=str)
def test_a_masked_input_of_a_block_is_exact(maker: Maker) -> None:
    exact = maker in (Maker.MASKED, Maker.LOGARITHM, Maker.EXPONENTIAL)
    assert form(Use.INPUT, maker, Partner.NOTHING) is (ITSELF if exact else AS_CODES)


def test_the_rule_knows_every_function_of_the_package() -> None:
    """A class that is new or was renamed would not count as a layer."""
    for module in pkgutil.walk_packages(functional.__path__, functional.__name__ + "."):
        if not module.name.endswith("kernels"):  # Triton's language
            importlib.import_module(module.name)
    own = {f"{each.__module__}.{each.__qualname__}" for each in torch.autograd.Function.__subclasses__()}
    own = {name for name in own if name.startswith(functional.__name__)}
    # Of a loss: one number.
    own.remove("pyactcomp.functional.head.linear_cross_entropy._LinearCrossEntropy")
    assert own == {name for name in rule.FUNCTION_KINDS if name.startswith("pyactcomp.")}


def test_the_rule_knows_every_function_of_the_library() -> None:
    """Otherwise what reads the function's result is kept, for want of a layer that made it."""
    sources = (Path(__file__).parents[1] / "csrc" / "functions").glob("*.hpp")
    names = [
        name for path in sources for name in re.findall(r"struct (\w+) : torch::autograd::Function<", path.read_text())
    ]
    assert "BatchNorm" in names
    kinds = {name: rule.kind_of_node(f"torch::autograd::CppNode<pac::functions::{name}>") for name in names}
    assert [name for name, kind in kinds.items() if kind is rule.Kind.OTHER] == []


def test_a_models_operands_take_the_forms_that_the_rule_says() -> None:
    """Gated units between layers are stored in 8 bits, what a loss multiplies in 16."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(128, WIDTH)
    with pyactcomp.compressed(min_bytes=0) as c:
        out = model(x)
        _ = out * out.cumsum(0)
    by_reader = [t.stored_bytes for t in pyactcomp.report(c).tensors if t.kept is None]
    codes, half = 128 * (WIDTH + 4), 128 * WIDTH * 2
    assert by_reader.count(codes) == 1
    assert by_reader.count(half) == 2
