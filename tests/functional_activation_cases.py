"""The kernels of the activations, on the device that this process has Triton kernels for.

Run by ``test_triton.py`` in processes of their own, with Triton's interpreter and, where there is a
GPU, without.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functional_checks import EPS, SEED, Passing, assert_codes_saved, assert_within, error_of, normal, saved_by
from native_cases import DTYPES
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import pyactcomp
from pyactcomp import functional
from pyactcomp.codec import Packed, dequantize
from pyactcomp.codec.kernels import triton as kernels
from pyactcomp.codec.seeds import second_of
from pyactcomp.engine.marks import RECIPE
from pyactcomp.engine.saved import Recipe
from pyactcomp.functional import Codes, silu_mul
from pyactcomp.functional import launch as shared_launch
from pyactcomp.functional.activations.gated import launch as gated_launch
from pyactcomp.functional.activations.gelu import launch as gelu_launch
from pyactcomp.functional.activations.gelu.launch import gelu_of
from pyactcomp.functional.activations.gelu.new_gelu import new_gelu
from pyactcomp.functional.norms import launch as norm_launch
from pyactcomp.functional.saving import Saving, saving

DEVICE = torch.device("cpu" if kernels.interpreted() else "cuda")
EXACT = Codes(bits=None, impl="triton")
FORMATS = [(8, 64), (8, 256), (4, 64), (2, 128)]
# Whole tiles and a part of one, in which the last group is not whole either.
NUMEL = kernels.DECODE_TILE + 99
SPECIALS = (float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 65504.0, -65504.0, 2.0**-149, 2.0**-24, 88.5, -88.5)


def on_device(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(DEVICE, dtype)


def restored(codes: Tensor, numel: int, bits: int, group_size: int) -> Tensor:
    """Return the float64 values that codes stand for."""
    packed = Packed(codes.detach().cpu(), (numel,), (1,), torch.float32, bits, group_size)
    return dequantize(packed, impl="reference").double()


def recipe_of(out: Tensor) -> Recipe:
    recipe = RECIPE.get(out)
    assert recipe is not None
    return recipe


def silu_slope(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


# With codes.


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize(("bits", "group_size"), FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gelu_is_recomputed_from_its_codes(dtype: torch.dtype, bits: int, group_size: int, approximate: str) -> None:
    x = on_device(3 * normal(NUMEL), torch.bfloat16).requires_grad_()
    outputs = []

    def compute() -> Tensor:
        outputs.append(
            functional.gelu(x, approximate, codes=Codes(bits=bits, group_size=group_size, seed=SEED, impl="triton"))
        )
        return outputs[0]

    (codes,) = saved_by(compute)
    exact = restored(codes, NUMEL, bits, group_size)
    again = recipe_of(outputs[0]).compute(dtype)
    assert again.dtype == dtype
    # As of check_gelu.
    assert_within(again, F.gelu(exact, approximate=approximate), 12 * EPS * exact.abs())


@pytest.mark.parametrize("tanh", [False, True], ids=["erf", "tanh"])
@pytest.mark.parametrize("group_size", [64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numel", [NUMEL, 2 * kernels.TILE, 16 * 67])
def test_the_derivative_and_gelu_are_computed_in_one_pass(
    numel: int, dtype: torch.dtype, group_size: int, tanh: bool
) -> None:
    x, grad = on_device(3 * normal(numel), dtype), on_device(normal(numel), dtype)
    x[5], x[6] = float("inf"), float("nan")
    how = saving(Codes(group_size=group_size, impl="triton"))
    fused = gelu_of(tanh, how)
    _, packed = fused.forward(x)
    derivative, again = fused.backward_and_recompute(packed, grad)
    assert derivative.dtype == again.dtype == dtype
    exact = restored(packed, numel, 8, group_size)
    approximate = "tanh" if tanh else "none"
    # torch's float64 GELU of infinity is exact in the derivative alone.
    finite = exact.isfinite()
    assert not again.cpu()[~finite].isfinite().any()
    assert derivative.cpu()[6].isnan()
    slope = torch.ops.aten.gelu_backward(grad.cpu().double(), exact, approximate=approximate)
    # As of check_gelu.
    assert_within(again[finite], F.gelu(exact[finite], approximate=approximate), 12 * EPS * exact[finite].abs())
    assert_within(derivative[finite], slope[finite], (12 * EPS * (1 + exact.abs()) * grad.cpu().double().abs())[finite])


def test_a_recompute_kernel_keeps_the_strides_of_the_output() -> None:
    x = on_device(normal(2, 8, 5, 7), torch.bfloat16).to(memory_format=torch.channels_last).requires_grad_()
    for out in (
        functional.gelu(x, codes=Codes(impl="triton")),
        silu_mul(x, x, codes=Codes(impl="triton")),
        new_gelu(x, codes=Codes(bits=None, impl="triton")),
    ):
        assert recipe_of(out).compute(out.dtype).stride() == out.stride() == x.stride()


@pytest.mark.parametrize("bits", [8, None])
def test_a_recipe_holds_no_graph(bits: int | None) -> None:
    x = on_device(normal(NUMEL), torch.bfloat16).requires_grad_() * 1
    for out in (
        silu_mul(x, x, codes=Codes(bits=bits, impl="triton")),
        new_gelu(x, codes=Codes(bits=bits, impl="triton")),
    ):
        assert all(operand.grad_fn is None for operand in recipe_of(out).operands)


@pytest.mark.parametrize(("bits", "group_size"), FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul_saves_the_bytes_of_the_reference(dtype: torch.dtype, bits: int, group_size: int) -> None:
    gate, up = (on_device(normal(NUMEL, seed=seed), dtype) for seed in (0, 1))
    gate[3], gate[70], up[200] = float("inf"), float("nan"), -float("inf")
    leaves = [t.clone().requires_grad_() for t in (gate, up)]
    stored = Codes(bits=bits, group_size=group_size, seed=SEED, impl="triton")
    saved = saved_by(lambda: silu_mul(*leaves, codes=stored))
    for codes, x, seed in zip(saved, (gate, up), (SEED, second_of(SEED)), strict=True):
        assert_codes_saved([codes], x, bits, group_size, None, seed)


@pytest.mark.parametrize(("bits", "group_size"), FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul_is_within_its_bounds(dtype: torch.dtype, bits: int, group_size: int) -> None:
    gate, up, grad = (on_device(2 * normal(3, NUMEL // 3, seed=seed), dtype) for seed in (0, 1, 2))
    leaves = [t.clone().requires_grad_() for t in (gate, up)]
    out = silu_mul(*leaves, codes=Codes(bits=bits, group_size=group_size, seed=SEED, impl="triton"))
    grads = torch.autograd.grad(out, leaves, grad)
    wide = [t.cpu().double().requires_grad_() for t in (gate, up)]
    exact = F.silu(wide[0]) * wide[1]
    exact_grads = torch.autograd.grad(exact, wide, grad.cpu().double())
    assert out.dtype == dtype

    # A dozen float32 operations, the rounding of silu, of grad * up and of the result; where slope and sigmoid are
    # restored from other values than those of gate, the bounds of silu_mul's documentation.
    eps = torch.finfo(dtype).eps
    g, (a, b) = grad.cpu().double().abs(), (t.detach().abs() for t in wide)
    e, f = error_of(gate, bits, group_size), error_of(up, bits, group_size)
    assert_within(out, exact.detach(), (eps + 12 * EPS) * exact.detach().abs() + torch.finfo(dtype).tiny * b)
    quantised = g * (1.1 * f + e * (b + f) / 2)
    assert_within(grads[0], exact_grads[0], quantised + 1.1 * (eps + 12 * EPS) * g * (b + f))
    assert_within(grads[1], exact_grads[1], 1.1 * e * g + (eps + 12 * EPS) * g * (a + e))


@pytest.mark.parametrize(("bits", "group_size"), [(8, 64), (4, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_silu_mul_is_recomputed_from_its_codes(dtype: torch.dtype, bits: int, group_size: int) -> None:
    gate, up = (on_device(3 * normal(NUMEL, seed=seed), torch.bfloat16).requires_grad_() for seed in (0, 1))
    outputs = []

    def compute() -> Tensor:
        outputs.append(silu_mul(gate, up, codes=Codes(bits=bits, group_size=group_size, seed=SEED, impl="triton")))
        return outputs[0]

    a, b = (restored(codes, NUMEL, bits, group_size) for codes in saved_by(compute))
    exact = F.silu(a) * b
    again = recipe_of(outputs[0]).compute(dtype)
    assert again.dtype == dtype
    assert_within(again, exact, (torch.finfo(dtype).eps + 12 * EPS) * exact.abs() + torch.finfo(dtype).tiny * b.abs())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_silu_mul_with_up_made_again_restores_gate_alone(dtype: torch.dtype) -> None:
    gate, up, grad = (on_device(2 * normal(3, NUMEL // 3, seed=seed), dtype) for seed in (0, 1, 2))
    codes: list[Tensor] = []

    def compute(kept: Tensor, bits: int | None = 8, **options: Any) -> tuple[Tensor, ...]:
        leaves = [kept.clone().requires_grad_(), up.clone().requires_grad_()]
        outputs: list[Tensor] = []
        saved = saved_by(lambda: outputs.append(silu_mul(*leaves, codes=Codes(bits=bits, impl="triton"), **options)))
        codes[:] = [c for c in saved if c.dtype is torch.uint8]
        recipe = recipe_of(outputs[0])
        again = recipe.compute(dtype)
        return outputs[0].detach(), again, *torch.autograd.grad(outputs[0], leaves, grad)

    ours = compute(gate, up_again=lambda: up)
    assert len(codes) == 1
    # The same as with codes of nothing, where gate is what its codes give.
    exact = compute(restored(codes[0], gate.numel(), 8, 64).to(gate).view_as(gate), bits=None)
    eps = 2 * torch.finfo(dtype).eps + 24 * EPS
    scale = gate.double().abs().cpu() + 1
    size, weight = up.double().abs().cpu(), grad.double().abs().cpu()
    assert_within(ours[1], exact[1].double().cpu(), eps * scale * size)
    assert_within(ours[2], exact[2].double().cpu(), eps * scale * size * weight)
    assert_within(ours[3], exact[3].double().cpu(), eps * scale * weight)


def test_silu_mul_without_codes_keeps_gate_alone_where_up_is_made_again() -> None:
    gate, up = (on_device(normal(NUMEL, seed=seed), torch.bfloat16).requires_grad_() for seed in (0, 1))
    grad = on_device(normal(NUMEL, seed=2), torch.bfloat16)
    results = []
    for again in (lambda: up, None):
        outputs: list[Tensor] = []
        saved = saved_by(lambda: outputs.append(silu_mul(gate, up, up_again=again, codes=EXACT)))  # noqa: B023
        assert [s.data_ptr() for s in saved] == [t.data_ptr() for t in ((gate, up) if again is None else (gate,))]
        recomputed = recipe_of(outputs[0]).compute(torch.bfloat16)
        results.append((outputs[0], recomputed, *torch.autograd.grad(outputs[0], (gate, up), grad)))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_silu_mul_in_place_is_the_same_in_less_memory(dtype: torch.dtype, again: bool) -> None:
    results = []
    for inplace in (False, True):
        gate, source, grad = (on_device(2 * normal(NUMEL, seed=seed), dtype) for seed in (0, 1, 2))
        gate.requires_grad_()
        up = source.clone().requires_grad_() * 1
        made: list[Tensor] = []

        def up_again() -> Tensor:
            made.append(source.clone())  # noqa: B023
            return made[-1]  # noqa: B023

        out = silu_mul(gate, up, up_again=up_again if again else None, inplace=inplace, codes=Codes(impl="triton"))
        recipe = recipe_of(out)
        recomputed = recipe.compute(dtype)
        of_gate, of_up = torch.autograd.grad(out, (gate, up), grad)
        shared = [out.data_ptr() == up.data_ptr(), of_up.data_ptr() == grad.data_ptr()]
        shared += [of_gate.data_ptr() == made[-1].data_ptr()] if again else []
        assert shared == [inplace] * len(shared)
        assert up._version == int(inplace)
        results.append((out.detach(), recomputed, of_gate, of_up))
    for theirs, ours in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_silu_mul_in_place_leaves_memory_that_others_share() -> None:
    both = on_device(normal(2, NUMEL), torch.bfloat16).requires_grad_()
    gate, up = both.unbind()
    before = up.detach().clone()
    out = silu_mul(gate, up, inplace=True, codes=Codes(impl="triton"))
    assert torch.equal(up, before)
    assert torch.equal(out, silu_mul(gate, up, codes=Codes(impl="triton")))


def test_silu_mul_writes_over_nothing_that_a_dispatch_mode_saw() -> None:
    gate, up, grad = (on_device(normal(NUMEL, seed=seed), torch.bfloat16) for seed in (0, 1, 2))
    before = up.clone(), grad.clone()
    leaf = gate.clone().requires_grad_()
    with Passing():
        out = silu_mul(leaf, up, inplace=True, codes=Codes(impl="triton"))
        torch.autograd.grad(out, leaf, grad)
    assert torch.equal(up, before[0])
    assert torch.equal(grad, before[1])


@pytest.mark.gpu
def test_selective_checkpointing_keeps_what_the_kernel_reads() -> None:
    x, *weights = (on_device(normal(256, 256, seed=seed), torch.bfloat16).requires_grad_() for seed in range(4))

    def block(x: Tensor) -> Tensor:
        return silu_mul(x @ weights[0], x @ weights[1], inplace=True) @ weights[2]

    def policy(_: object, op: object, *__: object, **___: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    outputs = block(x), checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    plain, selective = (torch.autograd.grad(out, (x, *weights), torch.ones_like(out)) for out in outputs)
    assert all(torch.equal(a, b) for a, b in zip(plain, selective, strict=True))


@pytest.mark.parametrize("bits", [8, None])
def test_silu_mul_keeps_what_is_not_finite(bits: int | None) -> None:
    gate = on_device(torch.tensor(SPECIALS).repeat(64), torch.float32)
    up = on_device(torch.full((gate.numel(),), 2.0), torch.float32)
    up[: len(SPECIALS)] = float("inf")
    leaves = [t.clone().requires_grad_() for t in (gate, up)]
    out = silu_mul(*leaves, codes=Codes(bits=bits, impl="triton"))
    expected = F.silu(leaves[0]) * leaves[1]
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.isinf(), expected.isinf())
    grads, eager = (torch.autograd.grad(y, leaves, torch.ones_like(y)) for y in (out, expected))
    for ours, theirs in zip(grads, eager, strict=True):
        assert bool((~ours.isfinite() | theirs.isfinite()).all())


# Under checkpointing, which runs a function once for its output alone.


def checkpointed(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    out: Tensor = checkpoint(function, x, use_reentrant=False)
    return out


def test_a_report_counts_the_same_in_place() -> None:
    x, *weights = (on_device(normal(64, 64, seed=seed), torch.float32).requires_grad_() for seed in range(4))
    counted = []
    for inplace in (False, True):
        with pyactcomp.compressed(min_bytes=0, impl="triton") as c:
            silu_mul(x @ weights[0], x @ weights[1], inplace=inplace, codes=Codes(impl="triton")) @ weights[2]
        counted.append([(t.shape, t.unique_bytes, t.stored_bytes) for t in pyactcomp.report(c).tensors])
    assert counted[0] == counted[1]
    assert sum(unique for shape, unique, _ in counted[0] if shape == (64, 64)) >= 3 * x.nbytes


def test_codes_that_are_thrown_away_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor) -> Tensor:
        return silu_mul(x, x.flip(0), codes=Codes(impl="triton"))

    x = on_device(2 * normal(20, 128), torch.bfloat16).requires_grad_()
    grad = on_device(normal(20, 128, seed=1), torch.bfloat16)
    expected = function(x)
    (expected_grad,) = torch.autograd.grad(expected, x, grad)

    poison = 0xAB
    buffers: list[Tensor] = []

    def poisoned(like: Tensor, how: Saving, *numel: int) -> Tensor:
        buffers.append(shared_launch.buffer(like, how, *numel).fill_(poison))
        return buffers[-1]

    monkeypatch.setattr(gated_launch, "buffer", poisoned)
    out = checkpointed(function, x)
    unwritten = len(buffers)
    assert unwritten > 0
    assert torch.equal(out, expected)
    assert torch.equal(torch.autograd.grad(out, x, grad)[0], expected_grad)
    assert len(buffers) == 2 * unwritten
    assert [bool((b == poison).all()) for b in buffers] == [True] * unwritten + [False] * unwritten


# With an eps, or a seed, of which no kernels are known yet.
UNKNOWN_EPS, UNKNOWN_SEED = 2e-5, 0x5EED


@pytest.mark.parametrize(
    ("launches", "kernel", "function"),
    [
        (
            norm_launch,
            "norm_forward_kernel",
            lambda x, w, c: functional.layer_norm(x, (128,), eps=UNKNOWN_EPS, codes=c),
        ),
        (norm_launch, "norm_forward_kernel", lambda x, w, c: functional.rms_norm(x, w, UNKNOWN_EPS, codes=c)),
        (gelu_launch, "gelu_forward_kernel", lambda x, w, c: functional.gelu(x, codes=c)),
        (gelu_launch, "gelu_forward_kernel", lambda x, w, c: functional.gelu(x, "tanh", codes=c)),
    ],
    ids=["layer_norm", "rms_norm", "gelu", "gelu_tanh"],
)
def test_a_function_whose_codes_are_thrown_away_takes_the_kernel_that_writes_none(
    launches: Any, kernel: str, function: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.ones(128, dtype=torch.bfloat16, device=DEVICE)
    codes = Codes(seed=UNKNOWN_SEED, impl="triton")
    function = functools.partial(function, w=weight, c=codes)
    x = on_device(2 * normal(20, 128), torch.bfloat16).requires_grad_()
    grad = on_device(normal(20, 128, seed=1), torch.bfloat16)
    plan, drops = launches._plan, []

    def seen(form: Any, name: str, numel: int, flags: Any, dropped: bool, device: torch.device) -> Any:
        drops.extend([dropped] if name == kernel else [])
        return plan(form, name, numel, flags, dropped, device)

    monkeypatch.setattr(launches, "_plan", seen)
    out = checkpointed(function, x)
    (found,) = torch.autograd.grad(out, x, grad)
    assert drops == [True, False]
    expected = function(x)
    assert torch.equal(out, expected)
    assert torch.equal(found, torch.autograd.grad(expected, x, grad)[0])


def test_what_is_run_for_its_output_alone_is_not_computed_again_from_its_codes() -> None:
    x = on_device(normal(NUMEL), torch.float32).requires_grad_()
    weight = on_device(normal(NUMEL, seed=1), torch.float32).requires_grad_()

    class Scaled(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return checkpointed(lambda x: functional.gelu(x, codes=Codes(impl="triton")), x) * weight

    (grad,) = torch.autograd.grad(pyactcomp.compress(Scaled(), min_bytes=0)(x).sum(), weight)
    exact = F.gelu(x.detach().double()).cpu()
    # As of check_gelu, and the rounding to bfloat16 of the product's operand, which no layer made.
    assert_within(grad, exact, 12 * EPS * x.detach().double().abs().cpu() + exact.abs() * 2**-8)


# Without codes.


def chain(x: Tensor, wide: bool) -> Tensor:
    """Return what autocast on CUDA makes of new_gelu's operators where ``wide``, on any device."""
    cube = torch.pow(x.float() if wide else x, 3.0)
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * cube)))


@pytest.mark.parametrize(("dtype", "wide"), [(d, w) for d in DTYPES for w in (False, True)])
def test_new_gelu_repeats_the_chain(dtype: torch.dtype, wide: bool) -> None:
    x = on_device(2 * normal(NUMEL), dtype).requires_grad_()
    expected = chain(x, wide)
    grad = on_device(normal(NUMEL, seed=1), expected.dtype)
    (theirs,) = torch.autograd.grad(expected, x, grad)
    with torch.no_grad():
        out, kept, backward, compute = gelu_launch.new_gelu(x, wide)
        ours = backward(kept, grad)
    assert (out.dtype, ours.dtype) == (expected.dtype, dtype)
    # The interpreter's tanh differs by a few ulp of 1, which may turn the rounding of what follows it, ten times.
    eps, scale = torch.finfo(out.dtype).eps, x.detach().abs() + 1
    assert float(((out - expected).detach().abs() / scale).max()) <= 8 * eps
    assert float(((ours - theirs).abs() / (grad.abs() * scale**3 + 1)).max()) <= 10 * (eps + torch.finfo(dtype).eps)
    assert torch.equal(compute(kept, out.dtype), out)
    assert torch.equal(compute(kept, torch.bfloat16), out.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul_without_codes_is_eager(dtype: torch.dtype) -> None:
    leaves = [on_device(2 * normal(NUMEL, seed=seed), dtype).requires_grad_() for seed in (0, 1)]
    grad = on_device(normal(NUMEL, seed=2), dtype)
    saved: list[Tensor] = []
    out = None

    def compute() -> Tensor:
        nonlocal out
        out = silu_mul(*leaves, codes=Codes(bits=None, impl="triton"))
        return out

    saved = saved_by(compute)
    assert [s.data_ptr() for s in saved] == [t.data_ptr() for t in leaves]
    assert out is not None
    assert torch.equal(recipe_of(out).compute(dtype), out)
    expected = F.silu(leaves[0]) * leaves[1]
    grads, eager = (torch.autograd.grad(y, leaves, grad) for y in (out, expected))
    # The interpreter has another exp, and no contraction: a few ulp, in values of at most (|gate| + 1) |up| |grad|.
    eps = torch.finfo(dtype).eps + 8 * EPS
    scale = (leaves[0].detach().abs() + 1) * (leaves[1].detach().abs() + 1)
    assert float(((out - expected).detach().abs() / scale).max()) <= 2 * eps
    for ours, theirs in zip(grads, eager, strict=True):
        assert float(((ours - theirs).abs() / (scale * (grad.abs() + 1))).max()) <= 4 * eps


# On the GPU, to the bit.


def bits_of(x: Tensor) -> Tensor:
    """Return the bits of a tensor, those of NaN all the same."""
    x = x.detach().clone()
    x[x.isnan()] = float("nan")
    return x.view(torch.int32 if x.dtype.itemsize == 4 else torch.int16)


def random_bits(dtype: torch.dtype, seed: int) -> Tensor:
    """Return 2**22 values, half of them of random bits, so of every magnitude, with infinities, NaN and subnormals."""
    n = 2**21
    kind = torch.int32 if dtype.itemsize == 4 else torch.int16
    limit = torch.iinfo(kind)
    generator = torch.Generator().manual_seed(seed)
    any_bits = torch.randint(limit.min, limit.max, (n,), generator=generator, dtype=torch.int64).to(kind).view(dtype)
    any_bits[: len(SPECIALS)] = torch.tensor(SPECIALS).to(dtype)
    return torch.cat((any_bits, (3 * torch.randn(n, generator=generator)).to(dtype))).to(DEVICE)


def assert_bitwise(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == theirs.dtype
    differ = bits_of(ours) != bits_of(theirs)
    first = differ.nonzero()[:4].flatten().tolist()
    assert not first, (
        f"{int(differ.sum())} of {differ.numel()} differ: {[(float(ours[i]), float(theirs[i])) for i in first]}"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [8, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_silu_of_every_number_of_16_bits_is_bitwise_eager(dtype: torch.dtype, bits: int | None) -> None:
    every = torch.arange(2**16, dtype=torch.int32, device=DEVICE).to(torch.int16).view(dtype)
    # Tiles that hold what the short way of a division does not serve take the long one, so they are tried without too.
    served = every[every.float().abs() <= 64]
    mixed = served.repeat(kernels.TILE)[: served.numel() // kernels.TILE * kernels.TILE + kernels.TILE]
    for gate in (every, mixed):
        ours = silu_mul(gate.clone().requires_grad_(), torch.ones_like(gate), codes=Codes(bits=bits, impl="triton"))
        assert_bitwise(ours, F.silu(gate))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul_without_codes_is_bitwise_eager(dtype: torch.dtype) -> None:
    leaves = [random_bits(dtype, seed).requires_grad_() for seed in (0, 1)]
    grad = random_bits(dtype, 2)
    ours, theirs = silu_mul(*leaves, codes=Codes(bits=None, impl="triton")), F.silu(leaves[0]) * leaves[1]
    assert_bitwise(ours, theirs)
    assert_bitwise(recipe_of(ours).compute(dtype), theirs)
    for a, b in zip(*(torch.autograd.grad(y, leaves, grad) for y in (ours, theirs)), strict=True):
        assert_bitwise(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_new_gelu_without_codes_is_bitwise_eager(dtype: torch.dtype, autocast: torch.dtype | None) -> None:
    x = random_bits(dtype, 0).requires_grad_()
    with torch.autocast("cuda", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        # In the order of the module's own operators, by which autograd adds the gradients.
        theirs = 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
        ours = new_gelu(x, codes=Codes(bits=None, impl="triton"))
    assert_bitwise(ours, theirs)
    assert_bitwise(recipe_of(ours).compute(torch.bfloat16), theirs.to(torch.bfloat16))
    grad = random_bits(ours.dtype, 1)
    assert_bitwise(torch.autograd.grad(ours, x, grad)[0], torch.autograd.grad(theirs, x, grad)[0])
