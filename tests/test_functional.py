"""The autograd functions: what they compute, what they save, and how exact their gradients are."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from functional_checks import (
    SEED,
    assert_codes_saved,
    check_gelu,
    normal,
    padded,
    saved_by,
)
from torch import Tensor
from torch.nn import functional as F

from pyactcomp import codec, compressed, functional
from pyactcomp.errors import ImplementationUnavailableError, PyactcompError
from pyactcomp.functional import Codes
from pyactcomp.functional.activations.gelu.new_gelu import new_gelu
from pyactcomp.functional.convolutional.batch_norm import batch_norm
from pyactcomp.functional.convolutional.max_pool import max_pool2d
from pyactcomp.functional.norms.add_rms_norm import add_rms_norm
from pyactcomp.functional.norms.layer_norm import add_layer_norm
from pyactcomp.functional.windows.residual_add import residual_add
from pyactcomp.functional.windows.window_attention import window_attention

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = [(8, 64), (8, 256), (4, 64), (2, 128)]


@pytest.fixture(params=["reference", "cpu"])
def impl(request: pytest.FixtureRequest) -> str:
    reason = codec.unavailable_reason(request.param, CPU)
    if reason is not None:
        pytest.skip(f"impl={request.param!r} cannot be used for {CPU}: {reason}")
    return str(request.param)


def wide(*shape: int, seed: int = 0) -> Tensor:
    return normal(*shape, seed=seed).double().requires_grad_()


# Without quantisation the functions are those of torch.


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4,), (3, 4)])
def test_layer_norm_passes_gradcheck(shape: tuple[int, ...], weight: bool, bias: bool) -> None:
    arguments = wide(2, 3, 4), wide(*shape, seed=1) if weight else None, wide(*shape, seed=2) if bias else None
    assert torch.autograd.gradcheck(
        lambda x, w, b: functional.layer_norm(x, shape, w, b, codes=Codes(bits=None)), arguments
    )


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_passes_gradcheck(approximate: str) -> None:
    assert torch.autograd.gradcheck(lambda x: functional.gelu(x, approximate, codes=Codes(bits=None)), (wide(4, 5),))


@pytest.mark.parametrize("bits", [None, 8])
def test_output_is_that_of_torch(bits: int | None) -> None:
    x = normal(6, 64).requires_grad_()
    assert torch.equal(functional.gelu(x, codes=Codes(bits=bits)), F.gelu(x))
    assert torch.equal(functional.layer_norm(x, 64, codes=Codes(bits=bits)), F.layer_norm(x, (64,)))


# What is saved.


@pytest.mark.parametrize(("bits", "group_size"), FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_saved_bytes_are_those_of_the_reference(dtype: torch.dtype, bits: int, group_size: int, impl: str) -> None:
    x = normal(7, 384).to(dtype)
    leaf = x.clone().requires_grad_()
    codes = Codes(bits=bits, group_size=group_size, seed=SEED, impl=impl)
    for compute, packed in (
        (lambda: functional.gelu(leaf, codes=codes), x),
        (lambda: functional.layer_norm(leaf, 384, codes=codes), padded(x, group_size)),
    ):
        assert_codes_saved(saved_by(compute), packed, bits, group_size, None)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_rounding_and_seed_reach_the_codes(rounding: codec.Rounding, impl: str) -> None:
    x = normal(300).requires_grad_()
    saved = saved_by(lambda: functional.gelu(x, codes=Codes(bits=4, rounding=rounding, seed=SEED, impl=impl)))
    assert_codes_saved(saved, x, 4, 64, rounding)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, bias: functional.gelu(x),
        lambda x, bias: functional.layer_norm(x, 64),
        lambda x, bias: functional.layer_norm(x, 64, None, bias),
    ],
)
def test_nothing_is_saved_that_no_gradient_needs(compute: Callable[..., Tensor]) -> None:
    bias = normal(64).requires_grad_()
    assert saved_by(lambda: compute(normal(8, 64), bias)) == []


def test_no_grad_saves_nothing() -> None:
    x = normal(8, 64).requires_grad_()
    outputs: list[Tensor] = []
    with torch.no_grad():
        saved = saved_by(lambda: outputs.extend((functional.gelu(x), functional.layer_norm(x, 64))) or outputs[0])
    assert saved == []
    assert not any(out.requires_grad for out in outputs)


# How exact the gradients are.


@pytest.mark.parametrize(("bits", "group_size"), FORMATS)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_gradient_is_within_its_bound(approximate: str, bits: int, group_size: int) -> None:
    check_gelu(3 * normal(6, 300), normal(6, 300, seed=1), approximate, bits, group_size, "auto")


def test_layer_norm_over_several_dimensions_has_the_gradients_of_torch() -> None:
    arguments = [normal(3, 4, 5, 6).requires_grad_(), normal(5, 6).requires_grad_(), normal(5, 6).requires_grad_()]
    ours = torch.autograd.grad(
        functional.layer_norm(arguments[0], (5, 6), *arguments[1:], codes=Codes(bits=None)).sum(), arguments
    )
    torchs = torch.autograd.grad(F.layer_norm(arguments[0], (5, 6), *arguments[1:]).sum(), arguments)
    for a, b in zip(ours, torchs, strict=True):
        assert torch.equal(a, b)


def test_empty_tensors() -> None:
    x = torch.empty(0, 64, requires_grad=True)
    (functional.gelu(x).sum() + functional.layer_norm(x, 64).sum()).backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 64)


# Autocast.


def test_functions_under_autocast_have_the_dtype_of_torch() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            x = normal(4, 64).to(dtype).requires_grad_()
            assert functional.layer_norm(x, 64).dtype == F.layer_norm(x, (64,)).dtype
            assert functional.gelu(x).dtype == F.gelu(x).dtype


# Misuse.


def test_second_derivative_raises() -> None:
    x = normal(4, 64).requires_grad_()
    for function in (functional.gelu, lambda t: functional.layer_norm(t, 64)):
        with pytest.raises(PyactcompError, match="only once"):
            torch.autograd.grad(function(x).sum(), x, create_graph=True)


X = normal(4, 64)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: functional.gelu(X, codes=Codes(bits=7)), ValueError, "bits must be one of"),
        (lambda: functional.gelu(X, codes=Codes(group_size=32)), ValueError, "group_size must be one of"),
        (lambda: functional.gelu(X, codes=Codes(rounding="up")), ValueError, "rounding must be one of"),  # type: ignore[arg-type]
        (lambda: functional.gelu(X, codes=Codes(impl="gpu")), ValueError, "impl must be one of"),  # type: ignore[arg-type]
        (lambda: functional.gelu(X, codes=Codes(seed=0.5)), TypeError, "seed must be an integer"),  # type: ignore[arg-type]
        (lambda: functional.gelu(X, codes=Codes(bits=16)), ValueError, "16, which only window_attention takes"),
        (lambda: functional.gelu(X, codes=8), TypeError, "codes must be a pyactcomp.functional.Codes, got 8"),  # type: ignore[arg-type]
        (lambda: functional.gelu(X, "erf"), ValueError, "approximate must be"),  # type: ignore[arg-type]
        (lambda: functional.gelu(X.int()), TypeError, "floating-point torch.Tensor, got torch.int32"),
        (lambda: functional.gelu([1.0]), TypeError, "got list"),  # type: ignore[arg-type]
        (lambda: functional.layer_norm(X, 63), ValueError, "end with normalized_shape"),
        (lambda: functional.layer_norm(X, 64, X), ValueError, r"weight of \(64,\), got \(4, 64\)"),
        (lambda: functional.layer_norm(X, 64, None, X.int()[0]), TypeError, "bias must be a floating-point"),
    ],
)
def test_bad_arguments_raise(call: Callable[[], Tensor], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()


STORE_NO_CODES = {"dropout", "linear_cross_entropy", "max_pool2d", "residual_add", "rope"}


FUNCTIONS = [
    *(getattr(functional, name) for name in functional.__all__ if name not in {"Codes", "Projection"}),
    *(add_layer_norm, add_rms_norm, batch_norm, max_pool2d, new_gelu, residual_add, window_attention),
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_one_option_says_how_tensors_are_stored(function: Callable[..., Any]) -> None:
    name = function.__name__
    parameters = inspect.signature(function).parameters
    own = {"codes"} if name not in STORE_NO_CODES else {"impl"} - ({"impl"} if name == "dropout" else set())
    assert own == parameters.keys() & {"codes", *(field.name for field in fields(Codes))}
    advice = "it stores no codes" if name in STORE_NO_CODES else r"codes=Codes\(bits=4, rounding='nearest'\)"
    with pytest.raises(TypeError, match=rf"^{name}\(\) takes no bits=4, rounding='nearest'; .*{advice}"):
        function(X, bits=4, rounding="nearest")


def test_implementation_for_another_device_raises() -> None:
    x = normal(4, 64).requires_grad_()
    with pytest.raises(ImplementationUnavailableError, match="impl='cuda'") as caught:
        functional.gelu(x, codes=Codes(impl="cuda"))
    assert isinstance(caught.value, PyactcompError)


def _exact(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *tensors: function(*tensors, codes=Codes(bits=None))


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (_exact(functional.gelu), [(8, 64)]),
        (_exact(new_gelu), [(8, 64)]),
        (_exact(functional.silu_mul), [(8, 64), (8, 64)]),
        (lambda x, w: functional.rms_norm(x, w, 1e-6, codes=Codes(bits=None)), [(8, 64), (64,)]),
        (lambda x, w: functional.layer_norm(x, 64, w, codes=Codes(bits=None)), [(8, 64), (64,)]),
        (lambda x, w: batch_norm(x, None, None, w, codes=Codes(bits=None)), [(2, 64, 2, 2), (64,)]),
        (lambda x, b: window_attention(x, 2, b, codes=Codes(bits=None)), [(2, 4, 192), (2, 4, 4)]),
        (lambda x, m: window_attention(x, 2, x.new_zeros(2, 4, 4), 100 * m), [(2, 4, 192), (1, 4, 4)]),
    ],
)
def test_tensors_that_functions_keep_exact_are_exact_in_a_compressed_forward(
    function: Callable[..., Tensor], shapes: list[tuple[int, ...]]
) -> None:
    leaves = [normal(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]

    def run() -> Tensor:
        return function(*(2 * leaf for leaf in leaves))  # what requires grad and is no leaf, the hooks may pack

    def gradients(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, normal(*out.shape, seed=9), materialize_grads=True)

    with compressed(min_bytes=0):
        ours = run()
    exact = gradients(run())
    assert exact[0].any()
    assert all(torch.equal(*pair) for pair in zip(exact, gradients(ours), strict=True))


@pytest.mark.parametrize("bits", [8, None])
def test_a_result_without_a_gradient_gives_none(bits: int | None) -> None:
    class Unused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *unused: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            return grad, *(None for _ in ctx.needs_input_grad[1:])

    x, image = torch.randn(16, 64, requires_grad=True), torch.randn(2, 4, 8, 8, requires_grad=True)
    weight = torch.randn(64, 64, requires_grad=True)
    q = torch.randn(1, 2, 16, 8, requires_grad=True)
    angles = torch.randn(1, 16, 8)
    results = [
        functional.layer_norm(x, 64, codes=Codes(bits=bits)),
        functional.rms_norm(x, weight[0], 1e-6, codes=Codes(bits=bits)),
        functional.gelu(x, codes=Codes(bits=bits)),
        new_gelu(x, codes=Codes(bits=bits)),
        functional.silu_mul(x, x, codes=Codes(bits=bits)),
        functional.dropout(x),
        residual_add(x, x),
        functional.rope(q, q, angles, angles)[0],
        max_pool2d(image, 2),
        batch_norm(image, None, None, codes=Codes(bits=bits)),
        window_attention(x.repeat(1, 3).view(4, 4, 192), 2, torch.zeros(2, 4, 4), codes=Codes(bits=bits)),
        functional.linear_cross_entropy(x, weight, torch.arange(16)),
    ]
    leaf = torch.randn(3, requires_grad=True)
    out = Unused.apply(leaf, *results)  # type: ignore[no-untyped-call]
    grads = torch.autograd.grad(out.sum(), (leaf, x, weight, image, q), allow_unused=True)
    assert [grad is None for grad in grads] == [False, True, True, True, True]


@pytest.mark.parametrize("bits", [8, None])
def test_a_vector_is_one_row(bits: int | None) -> None:
    weight = torch.randn(64, requires_grad=True)
    for function in (
        lambda x: functional.rms_norm(x, weight, 1e-6, codes=Codes(bits=bits)),
        lambda x: functional.layer_norm(x, 64, weight, codes=Codes(bits=bits)),
    ):
        x = torch.randn(64, requires_grad=True)
        of_vector = torch.autograd.grad(function(x).sum(), (x, weight))
        of_row = torch.autograd.grad(function(x[None]).sum(), (x, weight))
        for got, expected in zip(of_vector, of_row, strict=True):
            torch.testing.assert_close(got, expected)


NORMS_OF_TORCH: list[tuple[Callable[..., Tensor], Callable[..., Tensor]]] = [
    (lambda x, w: functional.rms_norm(x, w, 1e-6), lambda x, w: F.rms_norm(x, w.shape, w, 1e-6)),
    (lambda x, w: functional.layer_norm(x, 64, w), lambda x, w: F.layer_norm(x, (64,), w)),
    (lambda x, w: batch_norm(x, None, None, w), lambda x, w: F.batch_norm(x, None, None, w, training=True)),
    (lambda x, w: add_layer_norm(x, x, 64, w), lambda x, w: F.layer_norm(x + x, (64,), w)),
]


@pytest.mark.parametrize(("ours", "theirs"), NORMS_OF_TORCH, ids=["rms", "layer", "batch", "sum and layer"])
def test_inference_tensors_are_left_to_torch(ours: Callable[..., Tensor], theirs: Callable[..., Tensor]) -> None:
    """Torch's composite RMS norm takes them in a graph, its other norms refuse to save them."""
    with torch.inference_mode():
        x = normal(32, 64)
    results = []
    for function in (ours, theirs):
        weight = normal(64, seed=1).requires_grad_()
        try:
            results.append(torch.autograd.grad(function(x, weight).sum(), weight)[0])
        except RuntimeError as error:
            results.append(str(error))
    assert type(results[0]) is type(results[1])
    if isinstance(results[1], str):
        assert results[0] == results[1]
    else:
        torch.testing.assert_close(*results)
