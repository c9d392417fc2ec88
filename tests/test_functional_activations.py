"""The activations, dropout and rope on the CPU: torch's results, what is saved, and what is computed again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from functional_checks import SEED, assert_codes_saved, normal, saved_by, turned
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pyactcomp
from pyactcomp import codec, functional
from pyactcomp.codec import dequantize, quantize
from pyactcomp.engine.marks import RECIPE
from pyactcomp.engine.saved import Recipe
from pyactcomp.errors import PyactcompError
from pyactcomp.functional import Codes, dropout, rope, silu_mul
from pyactcomp.functional.activations.gelu.new_gelu import _chain, new_gelu
from pyactcomp.functional.codes import INT8
from pyactcomp.torch_private import top_saved_tensor_hooks

DTYPES = (torch.float32, torch.bfloat16)


def leaf(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return normal(*shape, seed=seed).to(dtype).requires_grad_()


def tables(tokens: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = 10 * normal(1, tokens, dim, seed=5)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rope_of(x: Tensor, codes: Codes = INT8) -> Tensor:
    """Return the rotation of x [tokens, 16], as one head."""
    q = x.view(1, 1, -1, 16)
    return rope(q, q, *tables(q.shape[2], 16, x.dtype), contiguous_grad=codes.bits is None)[0].view(x.shape)


def rope_of_torch(x: Tensor) -> Tensor:
    q = x.view(1, 1, -1, 16)
    cos, sin = (t.unsqueeze(1) for t in tables(q.shape[2], 16, x.dtype))
    return (q * cos + turned(q) * sin).view(x.shape)


def seeded(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def compute(x: Tensor, codes: Codes = INT8) -> Tensor:
        torch.manual_seed(SEED)
        return function(x, 0.3)

    return compute


FUNCTIONS = {
    "gelu": (functional.gelu, F.gelu),
    "silu_mul": (
        lambda x, codes=INT8: silu_mul(x, x.flip(0), codes=codes),
        lambda x: F.silu(x) * x.flip(0),
    ),
    "new_gelu": (new_gelu, _chain),
    "dropout": (seeded(dropout), seeded(F.dropout)),
    "rope": (rope_of, rope_of_torch),
}


@pytest.fixture(params=FUNCTIONS, ids=str)
def pair(request: pytest.FixtureRequest) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    ours, theirs = FUNCTIONS[request.param]
    return ours, theirs


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_codes_all_is_torchs(
    pair: tuple[Callable[..., Tensor], Callable[..., Tensor]], dtype: torch.dtype, autocast: bool
) -> None:
    x = leaf(70, 16, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours, theirs = pair[0](x, codes=Codes(bits=None)), pair[1](x)
    grad = normal(70, 16, seed=1).to(theirs.dtype)
    assert torch.equal(ours, theirs)
    assert torch.equal(torch.autograd.grad(ours, x, grad)[0], torch.autograd.grad(theirs, x, grad)[0])


def test_gradcheck(pair: tuple[Callable[..., Tensor], Callable[..., Tensor]]) -> None:
    x = normal(3, 16).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: pair[0](x, codes=Codes(bits=None)), (x,))


def test_what_is_not_recorded_is_torchs(pair: tuple[Callable[..., Tensor], Callable[..., Tensor]]) -> None:
    x = leaf(70, 16)
    with torch.no_grad():
        assert saved_by(lambda: pair[0](x)) == []
        assert torch.equal(pair[0](x), pair[1](x))


def test_a_recorded_graph_holds_what_packs_a_mask() -> None:
    def gradient(x: Tensor) -> Tensor:
        return torch.autograd.grad(dropout(x).sin().sum(), x)[0]

    x = leaf(70, 16)
    found = []
    for compute in (make_fx(gradient)(x), gradient):
        torch.manual_seed(1)
        found.append(compute(x))
    assert torch.equal(*found)


def test_dropout_of_nearly_all_in_half_precision_has_torchs_gradient() -> None:
    # 1 / (1 - p) is no float16 number: what is dropped is 0 all the same.
    def gradient(function: Callable[..., Tensor]) -> Tensor:
        torch.manual_seed(1)
        x = torch.ones(64, dtype=torch.float16, requires_grad=True)
        return torch.autograd.grad(function(x, 1 - 1e-5).sum(), x)[0]

    assert torch.equal(gradient(dropout), gradient(F.dropout))


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "dropout"])
def test_second_derivative_raises(name: str) -> None:
    x = leaf(70, 16)
    with pytest.raises(PyactcompError, match="only once"):
        torch.autograd.grad(FUNCTIONS[name][0](x).sum(), x, create_graph=True)


def test_dropout_has_its_second_derivative() -> None:
    def second(function: Callable[..., Tensor]) -> Tensor:
        x = leaf(70, 16)
        (first,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
        (found,) = torch.autograd.grad(first.square().sum(), x)
        return found

    ours, theirs = (second(function) for function in FUNCTIONS["dropout"])
    assert torch.equal(ours, theirs)
    assert float(theirs.abs().sum()) > 0


def recipe_of(out: Tensor) -> Recipe:
    recipe = RECIPE.get(out)
    assert recipe is not None
    return recipe


@pytest.mark.parametrize("bits", [8, None])
@pytest.mark.parametrize("name", ["gelu", "silu_mul", "new_gelu"])
def test_output_is_computed_again(name: str, bits: int | None) -> None:
    x = leaf(70, 16)
    out = FUNCTIONS[name][0](x, codes=Codes(bits=bits))
    recipe = recipe_of(out)
    again = recipe.compute(torch.float32)
    assert recipe.compute(torch.bfloat16).dtype == torch.bfloat16
    if bits is None:
        assert torch.equal(again, out)
    else:
        # Half a step of groups of a range of at most eight, in both factors of at most five.
        assert 0 < float((again - out.detach()).abs().max()) <= 8 / 255 / 2 * (1.1 * 5 + 5)


def test_a_write_to_what_is_kept_is_noticed() -> None:
    x = leaf(70, 16)
    kept = x * 1
    recipe = recipe_of(new_gelu(kept, codes=Codes(bits=None)))
    kept.data.add_(1)
    recipe.compute(torch.float32)
    with torch.no_grad():
        kept.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        recipe.compute(torch.float32)


def test_a_recipe_holds_no_graph() -> None:
    x = leaf(70, 16)
    kept = x * 1
    recipe = recipe_of(new_gelu(kept, codes=Codes(bits=None)))
    assert all(operand.grad_fn is None for operand in recipe.operands)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul_saves_codes_of_both(dtype: torch.dtype) -> None:
    gate, up = leaf(300, dtype=dtype), leaf(300, dtype=dtype, seed=1)
    saved = saved_by(lambda: silu_mul(gate, up, codes=Codes(seed=SEED)))
    for codes, x in zip(saved, (gate, up), strict=True):
        assert_codes_saved([codes], x, 8, 64, None)


def test_silu_mul_makes_up_again_once_a_backward_and_keeps_no_codes_of_it() -> None:
    gate, up, weight = (leaf(64, 64, seed=seed) for seed in range(3))
    made: list[Tensor] = []
    outputs: list[Tensor] = []

    def again() -> Tensor:
        made.append(up)
        return up

    saved = saved_by(lambda: outputs.append(silu_mul(gate, up, up_again=again)))
    assert [s.dtype for s in saved] == [torch.uint8]
    restored = dequantize(quantize(gate.detach())).requires_grad_()
    exact = torch.autograd.grad((F.silu(restored) * up) @ weight, (restored, up), torch.ones(64, 64))
    for backwards in (1, 2):
        recipe_of(outputs[0]).compute(torch.float32)
        grads = torch.autograd.grad(outputs[0] @ weight, (gate, up), torch.ones(64, 64), retain_graph=True)
        assert len(made) == backwards
        for ours, theirs in zip(grads, exact, strict=True):
            assert torch.equal(ours, theirs)


def test_silu_mul_of_two_dtypes_is_torchs() -> None:
    gate, up = leaf(300), leaf(300, dtype=torch.bfloat16, seed=1)
    ours, theirs = silu_mul(gate, up, codes=Codes(bits=None)), F.silu(gate) * up
    assert torch.equal(ours, theirs)
    for a, b in zip(*(torch.autograd.grad(y.sum(), (gate, up)) for y in (ours, theirs)), strict=True):
        assert torch.equal(a, b)


def test_dropout_saves_a_mask_of_which_the_engine_stores_bits() -> None:
    x = leaf(70, 16)
    assert [(s.dtype, s.numel()) for s in saved_by(lambda: dropout(x))] == [(torch.bool, 70 * 16)]
    with pyactcomp.compressed(min_bytes=0) as c:
        dropout(x)
    assert pyactcomp.report(c).stored_bytes == 70 * 16 // 8


def test_codes_that_checkpointing_throws_away_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    function, x = functional.gelu, leaf(70, 16)
    expected = torch.autograd.grad(function(x).sum(), x)[0]
    packed: list[int] = []
    bind = codec.bind

    def counting(*form: Any) -> SimpleNamespace:
        kernel = bind(*form)

        def encode(source: Tensor, out: Tensor, seed: int) -> None:
            packed.append(source.numel())
            kernel.encode(source, out, seed)

        return SimpleNamespace(encode=encode, decode=kernel.decode)

    monkeypatch.setattr(codec, "bind", counting)
    out = checkpoint(function, x, use_reentrant=False)
    assert packed == []
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert packed == [x.numel()]
    assert torch.equal(grad, expected)


def test_hooks_may_be_methods_of_tensors() -> None:
    x = leaf(70, 16)
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.cpu, lambda saved: saved):
        out = functional.gelu(x)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.autograd.grad(functional.gelu(x).sum(), x)[0])


def test_what_takes_the_names_of_the_hook_that_throws_away_is_served() -> None:
    x = leaf(70, 16)
    saved: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        hooks = top_saved_tensor_hooks()
        assert hooks is not None

        @functools.wraps(hooks[0])
        def keeping(tensor: Tensor) -> object:
            saved.append(tensor)
            return hooks[0](tensor)

        with torch.autograd.graph.saved_tensors_hooks(keeping, hooks[1]):
            return functional.gelu(x)

    checkpoint(function, x, use_reentrant=False)
    assert saved[0].shape == saved_by(lambda: functional.gelu(x))[0].shape


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_or_all(p: float) -> None:
    x = leaf(70, 16)
    ours, theirs = dropout(x, p), F.dropout(x, p)
    assert torch.equal(ours, theirs)
    assert torch.equal(torch.autograd.grad(ours.sum(), x)[0], torch.autograd.grad(theirs.sum(), x)[0])


def test_rope_differentiates_tables_that_require_grad() -> None:
    q = leaf(1, 1, 5, 16)
    cos, sin = (t.requires_grad_() for t in tables(5, 16, torch.float32))
    ours = rope(q, q, cos, sin)[0]
    theirs = q * cos.unsqueeze(1) + turned(q) * sin.unsqueeze(1)
    for a, b in zip(*(torch.autograd.grad(y.sum(), (q, cos, sin)) for y in (ours, theirs)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("compute", "error", "match"),
    [
        (lambda x: silu_mul(x, x[:3]), ValueError, "one shape"),
        (lambda x: silu_mul(x, x, inplace=True, codes=Codes(bits=None)), ValueError, "leave one of them out"),
        (lambda x: silu_mul(x, 3), TypeError, "up must be a floating-point"),
        (lambda x: new_gelu(x.int()), TypeError, "x must be a floating-point"),
        (lambda x: dropout(None), TypeError, "x must be a floating-point"),
        (lambda x: dropout(x, 1.5), ValueError, "p must be from 0 to 1"),
        (lambda x: rope(x, x, x, x), ValueError, "four dimensions"),
        (lambda x: rope(x, x, x, x, 3), ValueError, "unsqueeze_dim must be 1 or 2"),
    ],
)
def test_bad_input_raises(compute: Callable[[Tensor], object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        compute(leaf(70, 16))
