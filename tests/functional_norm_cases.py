"""The kernels of the norms, on the device that this process has Triton kernels for.

Run by ``test_triton.py`` in processes of their own, with Triton's interpreter and, where there is a GPU,
without.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from functional_checks import EPS, SEED, Passing, assert_codes_saved, assert_within, normal, padded, saved_by
from native_cases import DTYPES
from norm_checks import EPSILON, Case, case, check, gradient_of, recipe_of
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pyactcomp import codec
from pyactcomp.codec.kernels import triton as kernels
from pyactcomp.functional import Codes, layer_norm, rms_norm
from pyactcomp.functional.masks import noise
from pyactcomp.functional.masks.noise import QUIET, Noise, draw
from pyactcomp.functional.norms import launch
from pyactcomp.functional.norms.add_rms_norm import add_rms_norm
from pyactcomp.functional.norms.layer_norm import add_layer_norm
from pyactcomp.functional.saving import saving

DEVICE = torch.device("cpu" if kernels.interpreted() else "cuda")
FORMATS = [(8, 64), (8, 256), (4, 64), (2, 128)]
# Several rows a program; rows of another number of groups than a power of two; of no whole number; not fused.
LENGTHS = [256, 384, 288, 200]
# An odd number of rows: a program has one. More rows than programs of backward have at once. Rows that end inside a
# group.
SHAPES = [(5, 256), (4, 12, 128), (3, 768), (2, 2048), (7, 96), (3, 672)]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("bits", "group_size"), FORMATS)
def test_codes_are_those_of_the_reference(bits: int, group_size: int, length: int) -> None:
    x, residual = (normal(6, length, seed=seed).to(DEVICE) for seed in (0, 1))
    x[2, 7], x[3, 9] = float("inf"), float("nan")
    x = x.bfloat16()
    rows = torch.tensor([3, 0, 5, 1, 2, 4], device=DEVICE)
    codes = Codes(bits=bits, group_size=group_size, seed=SEED, impl="triton")
    leaf = x.clone().requires_grad_()
    weight = normal(length).to(DEVICE)
    served = length % group_size == 0 or (length % 32 == 0 and length > group_size)
    for compute, packed, statistics in (
        (lambda: layer_norm(leaf, length, codes=codes), x, 6),
        (lambda: layer_norm(leaf, length, rows=rows, codes=codes), x[rows], 6),
        (lambda: add_layer_norm(leaf, residual, length, codes=codes), x + residual, 6),
        (lambda: rms_norm(leaf, None, 1e-6, codes=codes), x, 6),
        # The kernels read the weight, and save no second reference to it.
        (lambda: rms_norm(leaf, weight, 1e-6, codes=codes), x, 6 if served else 6 + length),
    ):
        saved = saved_by(compute)
        assert_codes_saved(saved, padded(packed, group_size), bits, group_size, None)
        assert sum(s.numel() for s in saved if s.dtype is torch.float32) == statistics
    form = (
        x,
        residual,
        (length,),
        torch.float32,
        saving(Codes(bits=bits, group_size=group_size, seed=SEED, impl="triton")),
    )
    assert launch.serves(*form) == served


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("centred", [True, False])
def test_norm_is_within_its_bounds(centred: bool, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    check(case(*shape, dtype=dtype, centred=centred, device=DEVICE), "triton")


@pytest.mark.parametrize("shape", [*SHAPES, (5, 200)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_with_a_copy_is_within_bounds_of_rounding_alone(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    c = case(*shape, dtype=dtype, centred=False, device=DEVICE)
    check(c, "triton", copy=True)
    kept = [s for s in saved_by(lambda: c.run(c.leaves(), "triton", copy=True)) if s.dtype is torch.uint8]
    assert [s.tolist() for s in kept] == [c.x.view(-1).view(torch.uint8).tolist()]


@pytest.mark.parametrize(("bits", "group_size"), FORMATS[1:])
@pytest.mark.parametrize("centred", [True, False])
def test_norm_in_other_formats_is_within_its_bounds(centred: bool, bits: int, group_size: int) -> None:
    check(case(6, 512, centred=centred, device=DEVICE), "triton", bits=bits, group_size=group_size)


@pytest.mark.parametrize("shape", [(8, 128), (3, 768)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("residual", [torch.float32, torch.bfloat16], ids=str)
def test_norm_of_a_sum_is_within_its_bounds(residual: torch.dtype, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    check(case(*shape, dtype=dtype, residual=residual, device=DEVICE), "triton")


@pytest.mark.parametrize("parameters", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("centred", [True, False])
def test_norm_without_weight_or_bias(centred: bool, parameters: tuple[bool, bool]) -> None:
    check(case(6, 192, centred=centred, parameters=parameters, device=DEVICE), "triton")


@pytest.mark.parametrize("summed", [False, True])
def test_layer_norm_of_transposed_rows_is_that_of_a_contiguous_copy(summed: bool) -> None:
    transposed, residual = (normal(4, 128, 6, seed=seed).to(DEVICE).mT for seed in (0, 1))
    grad = normal(4, 6, 128, seed=2).to(DEVICE)

    def of(t: Tensor) -> Tensor:
        codes = Codes(impl="triton")
        return add_layer_norm(t, residual, 128, codes=codes) if summed else layer_norm(t, 128, codes=codes)

    apart, together = transposed.detach().requires_grad_(), transposed.contiguous().requires_grad_()
    assert torch.equal(of(apart), of(together))
    assert torch.equal(gradient_of(of, transposed, grad), gradient_of(of, transposed.contiguous(), grad))
    assert torch.equal(recipe_of(of(apart)).compute(torch.float32), recipe_of(of(together)).compute(torch.float32))


def test_transposed_rows_without_a_gradient_are_saved_as_they_are() -> None:
    x, weight = normal(4, 128, 6).to(DEVICE).mT, normal(128, seed=1).to(DEVICE).requires_grad_()
    grad = normal(4, 6, 128, seed=2).to(DEVICE)
    found = layer_norm(x, 128, weight, codes=Codes(impl="triton"))
    expected = F.layer_norm(x, [128], weight)
    # A row of 128 and sums over 24 rows in another order, and a dozen operations on each element.
    within = (128 + 24 + 12) * EPS
    assert_within(found, expected.detach().double().cpu(), within * (1 + expected.detach().abs()).double().cpu())
    (of_found,) = torch.autograd.grad(found, weight, grad)
    (of_expected,) = torch.autograd.grad(expected, weight, grad)
    size = (grad.abs() * (1 + F.layer_norm(x, [128]).abs())).sum((0, 1))
    assert_within(of_found, of_expected.double().cpu(), within * size.double().cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norm_of_a_sum_is_the_norm_of_the_rounded_sum(dtype: torch.dtype) -> None:
    x, residual = normal(8, 256).to(DEVICE, torch.bfloat16), normal(8, 256, seed=1).to(DEVICE, dtype)
    grad = normal(8, 256, seed=2).to(DEVICE, dtype)

    def of_sum(t: Tensor) -> Tensor:
        return add_layer_norm(t, residual, 256, codes=Codes(impl="triton"))

    # Of one row, but compiled for other arguments: a sum of 256 may be in another order, and a rounding turn.
    one = layer_norm((x + residual).requires_grad_(), 256, codes=Codes(impl="triton")).detach()
    eps = 256 * EPS + torch.finfo(dtype).eps
    assert_within(of_sum(x.clone().requires_grad_()), one.double().cpu(), eps * (one.abs() + 1).double().cpu())
    separate = gradient_of(lambda t: layer_norm(t, 256, codes=Codes(impl="triton")), x + residual, grad).to(x.dtype)
    eps = 256 * EPS + torch.finfo(x.dtype).eps
    assert_within(gradient_of(of_sum, x, grad), separate.double().cpu(), eps * (separate.abs() + 1).double().cpu())


@pytest.mark.parametrize(
    ("count", "length", "index"),
    [
        (12, 128, torch.int32),
        (12, 128, torch.int64),
        (3, 192, torch.int64),
        (3, 96, torch.int64),
        (3, 200, torch.int32),
    ],
)
def test_rows_come_in_the_order_asked_for(count: int, length: int, index: torch.dtype) -> None:
    x, grad = (normal(2, count, length, seed=seed).to(DEVICE) for seed in (0, 1))
    rows = torch.randperm(2 * count, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    flat = x.view(-1, length)
    leaf = x.clone().requires_grad_()
    out = layer_norm(leaf, length, rows=rows.to(index), codes=Codes(impl="triton"))
    expected = layer_norm(flat[rows].requires_grad_(), length, codes=Codes(impl="triton"))
    assert torch.equal(out, expected)
    assert torch.equal(recipe_of(out).compute(torch.float32), recipe_of(expected).compute(torch.float32))
    out.backward(grad.view(-1, length))
    gathered = gradient_of(
        lambda t: layer_norm(t, length, codes=Codes(impl="triton")), flat[rows], grad.view(-1, length)
    )
    assert leaf.grad is not None
    assert torch.equal(leaf.grad.view(-1, length)[rows], gathered)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_has_the_dtype_asked_for(dtype: torch.dtype) -> None:
    x = normal(8, 256).to(DEVICE).requires_grad_()
    out = layer_norm(x, 256, dtype=dtype, codes=Codes(impl="triton"))
    whole = layer_norm(x, 256, codes=Codes(impl="triton"))
    assert out.dtype is dtype
    assert torch.equal(out, whole.to(dtype))
    # What the kernel rounds once, a cast of its float32 result rounds the same way.
    assert torch.equal(recipe_of(whole).compute(dtype), recipe_of(whole).compute(torch.float32).to(dtype))


@pytest.mark.parametrize("centred", [True, False])
def test_gradients_that_are_not_wanted_are_not_computed(centred: bool) -> None:
    c = case(8, 256, centred=centred, device=DEVICE)
    everything, unpacked = c.leaves(), c.leaves()
    c.run(everything, "triton").backward(c.grad)
    c.run(unpacked, "reference", bits=None).backward(c.grad)
    for wanted in (0, 2, 3) if centred else (0, 2):
        # An input that needs no gradient is kept as it is.
        reference_leaves = everything if wanted == 0 else unpacked
        leaves = [None if t is None else t.detach().requires_grad_(i == wanted) for i, t in enumerate(everything)]
        c.run(leaves, "triton").backward(c.grad)
        for i, (leaf, reference_leaf) in enumerate(zip(leaves, reference_leaves, strict=True)):
            if leaf is not None and reference_leaf is not None:
                assert (leaf.grad is not None) == (i == wanted)
                if i == wanted:
                    # The same sums of 8 or of 256, compiled for other results, which may add in another order.
                    exact = reference_leaf.grad.double().cpu()
                    assert_within(leaf.grad, exact, 256 * EPS * (exact.abs() + 1))


def test_only_the_gradient_of_x_reads_the_weight_of_an_rms_norm() -> None:
    c = case(8, 256, centred=False, device=DEVICE)
    weight = c.weight.detach().requires_grad_()
    out = c.run([c.x.detach(), None, weight, None], "triton")
    before = torch.autograd.grad(out, weight, c.grad, retain_graph=True)[0]
    with torch.no_grad():
        weight.mul_(2)
    torch.testing.assert_close(torch.autograd.grad(out, weight, c.grad)[0], before, rtol=0, atol=0)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("special", [float("inf"), -float("inf"), float("nan")])
def test_rows_that_are_not_finite_stay_visible(special: float, centred: bool) -> None:
    c = case(4, 256, centred=centred, device=DEVICE)
    c.x[1, 3] = special
    leaves, exact = c.leaves(), c.leaves()
    for impl, bits, run in (("triton", 8, leaves), ("reference", None, exact)):
        c.run(run, impl, bits=bits).backward(c.grad)
    with torch.no_grad():
        out, expected = c.run(leaves, "triton"), c.run(exact, "reference", bits=None)
    assert torch.equal(out.isnan(), expected.isnan())
    assert leaves[0] is not None
    assert exact[0] is not None
    finite = [t.grad.isfinite().all(-1) for t in (leaves[0], exact[0])]
    assert torch.equal(*finite)
    assert not bool(finite[0][1])
    assert bool(finite[0][0])


@pytest.mark.parametrize("length", [256, 768])
@pytest.mark.parametrize("centred", [True, False])
def test_fused_gradients_are_those_of_the_separate_passes(centred: bool, length: int) -> None:
    # Both restore the same values, so that only the rounding of the sums differs.
    c = case(7, length, centred=centred, device=DEVICE)
    results = []
    for impl in ("triton", "reference"):
        leaves = c.leaves()
        c.run(leaves, impl).backward(c.grad)
        results.append([t.grad for t in leaves if t is not None])
    for fused, separate in zip(*results, strict=True):
        limit = 2 * (length + 12) * torch.finfo(torch.float32).eps * float(separate.abs().max())
        assert float((fused - separate).abs().max()) <= limit


def sums_and_gradients(c: Case, weight_dtype: torch.dtype, separate: bool, checkpointed: bool = False) -> list[Tensor]:
    """Return the norm, the sum and the gradients of x, residual and weight, by one function or by two."""
    leaves = [None if t is None else t.clone().requires_grad_() for t in (c.x, c.residual, c.weight.to(weight_dtype))]

    def run(x: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        if not separate:
            return add_rms_norm(x, residual, weight, EPSILON, codes=Codes(impl="triton"))
        total = x if residual is None else x + residual
        copy = residual is not None or (checkpointed and x.dtype.itemsize == 2)
        return rms_norm(total, weight, EPSILON, copy=copy, codes=Codes(impl="triton")), total

    normal_rows, total = (
        checkpoint(run, *leaves, use_reentrant=False) if checkpointed and not separate else run(*leaves)
    )
    of_total = normal(*c.x.shape, seed=7).to(total)
    torch.autograd.backward([normal_rows, total], [c.grad.to(normal_rows.dtype), of_total])
    return [normal_rows.detach(), total.detach(), *(t.grad for t in leaves if t is not None)]


# One row a program, whose mean square is summed in one order.
@pytest.mark.parametrize("shape", [(5, 256), (3, 768), (3, 2048), (3, 192)], ids=str)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "residual"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float16, None),
        (torch.float32, None),
    ],
    ids=str,
)
def test_norm_and_sum_are_those_of_the_separate_functions(
    dtype: torch.dtype, residual: torch.dtype | None, checkpointed: bool, shape: tuple[int, ...]
) -> None:
    c = case(*shape, dtype=dtype, residual=residual, centred=False, device=DEVICE)
    ours, theirs = (sums_and_gradients(c, torch.float32, separate, checkpointed) for separate in (False, True))
    assert [t.dtype for t in ours] == [t.dtype for t in theirs]
    assert torch.equal(ours[1], theirs[1])
    for got, expected in zip(ours, theirs, strict=True):
        # Interpreted, the order of a sum is that of the elements; compiled, it is that of a layout of its own.
        order = 0.0 if kernels.interpreted() else shape[-1] * EPS + torch.finfo(expected.dtype).eps
        exact = expected.double().cpu()
        assert_within(got, exact, order * (exact.abs() + 1))


def test_sum_is_kept_itself_and_x_in_codes() -> None:
    x, residual = (normal(5, 256, seed=seed).to(DEVICE, torch.bfloat16).requires_grad_() for seed in (0, 1))
    outputs: list[tuple[Tensor, Tensor]] = []
    saved = saved_by(lambda: outputs.append(add_rms_norm(x, residual, None, EPSILON, codes=Codes(impl="triton"))))
    assert [s.data_ptr() for s in saved if s.dtype is torch.uint8] == [outputs[0][1].data_ptr()]
    assert sum(s.nbytes for s in saved) == outputs[0][1].nbytes + 5 * 4
    assert torch.equal(recipe_of(outputs[0][0]).compute(torch.bfloat16), outputs[0][0])
    assert_codes_saved(
        saved_by(lambda: add_rms_norm(x, None, None, EPSILON, codes=Codes(impl="triton"))[0]), x, 8, 64, None
    )


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_writing_to_what_is_kept_is_an_error(given: bool, checkpointed: bool) -> None:
    x, residual = (normal(5, 256, seed=seed).to(DEVICE, torch.bfloat16).requires_grad_() for seed in (0, 1))

    def run(x: Tensor, residual: Tensor) -> Tensor:
        x = x * 1
        out, total = add_rms_norm(x, residual if given else None, None, EPSILON, codes=Codes(impl="triton"))
        (total if given else x).detach().add_(1.0)
        return out

    out = checkpoint(run, x, residual, use_reentrant=False) if checkpointed else run(x, residual)
    if given or checkpointed:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    else:  # of which there are codes
        out.sum().backward()


def test_norm_is_not_recomputed_from_a_sum_that_was_written_to() -> None:
    x, residual = (normal(5, 256, seed=seed).to(DEVICE, torch.bfloat16).requires_grad_() for seed in (0, 1))
    out, total = add_rms_norm(x, residual, None, EPSILON, codes=Codes(impl="triton"))
    recipe = recipe_of(out)
    del out  # while it is there, it is taken as it is
    total.detach().mul_(-3.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        recipe.compute(torch.bfloat16)


def test_sum_of_what_needs_no_gradient_needs_none() -> None:
    x, weight = normal(5, 256).to(DEVICE), normal(256, seed=1).to(DEVICE).requires_grad_()
    for residual in (None, x):
        normal_rows, total = add_rms_norm(x, residual, weight, EPSILON, codes=Codes(impl="triton"))
        assert (normal_rows.requires_grad, total.requires_grad) == (True, False)
        normal_rows.sum().backward()


@pytest.mark.parametrize("used", [0, 1])
def test_norm_or_sum_alone_has_a_gradient(used: int) -> None:
    c = case(5, 256, dtype=torch.bfloat16, residual=torch.float32, centred=False, device=DEVICE)
    assert c.residual is not None
    x, residual = (t.clone().requires_grad_() for t in (c.x, c.residual))
    outputs = add_rms_norm(x, residual, None, EPSILON, codes=Codes(impl="triton"))
    grads = torch.autograd.grad(outputs[used], (x, residual), c.grad)
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.float32]
    total = (c.x + c.residual).requires_grad_()
    alone = rms_norm(total, None, EPSILON, copy=True, codes=Codes(impl="triton")) if used == 0 else total * 1
    (expected,) = torch.autograd.grad(alone, total, c.grad)
    for got in grads:
        limit = 256 * EPS + torch.finfo(got.dtype).eps
        assert_within(got, expected.double().cpu(), limit * (expected.abs() + 1).double().cpu())


# Dropout on the way.


def philox(seed: int, counter: np.ndarray, thread: np.ndarray) -> np.ndarray:
    """Return the four numbers of ten rounds of Philox (Salmon et al., 2011), [..., 4]."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    c = [counter & low, counter >> shift, thread & low, thread >> shift]
    keys = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        k = [np.uint64(key) for key in keys]
        c = [second >> shift ^ c[1] ^ k[0], second & low, first >> shift ^ c[3] ^ k[1], first & low]
        keys = [(key + step) & 0xFFFFFFFF for key, step in zip(keys, (0x9E3779B9, 0xBB67AE85), strict=True)]
    return np.stack(c, -1)


def kept_by_torch(numel: int, noise: Noise) -> Tensor:
    """Return which elements torch's kernel keeps, by its loop: each thread takes a vector, then strides over all."""
    kept = np.zeros(numel, dtype=bool)
    vector = 4 * noise.quads
    thread = np.arange(noise.threads, dtype=np.uint64)
    counter = np.full(noise.threads, noise.counter, dtype=np.uint64)
    for begin in range(0, numel, noise.threads * vector):
        drawn = [philox(noise.seed % 2**64, counter + np.uint64(q), thread) for q in range(noise.quads)]
        counter += np.uint64(noise.quads)
        part = kept[begin : begin + noise.threads * vector]
        part[:] = np.concatenate(drawn, -1).reshape(-1)[: len(part)] < noise.below
    return torch.from_numpy(kept)


# A counter about to carry, a seed with its highest bit set, runs of two quads; threads that come round within a tile.
NOISES = [
    ((9, 1024), torch.float32, Noise(SEED, 12, 2048, 1, 2**31, (2.0, 2.5))),
    ((8, 256), torch.bfloat16, Noise(-SEED, 2**32 - 1, 256, 2, 3 * 2**30, (1.3, 1.4))),
    ((6, 384), torch.bfloat16, Noise(-SEED, 2**32 - 1, 256, 2, 3 * 2**30, (1.3, 1.4))),
    ((6, 384), torch.float32, Noise(SEED, 5, 512, 1, 2**32 - 2**29, (1.1, 1.2))),
]


@pytest.mark.parametrize(("shape", "dtype", "noise"), NOISES, ids=["plain", "carry", "carry-partial", "come-round"])
def test_norm_with_a_noise_is_that_of_what_torch_keeps(
    shape: tuple[int, ...], dtype: torch.dtype, noise: Noise
) -> None:
    c = case(*shape, dtype=dtype, residual=torch.float32, device=DEVICE)
    norm = launch.norm_of(shape[-1:], True, EPSILON, saving(Codes(seed=SEED, impl="triton")))
    kept = kept_by_torch(c.x.numel(), noise).view(shape).to(DEVICE)
    dropped = (c.x.float() * kept * noise.scales[0]).to(dtype)

    ours = norm.forward(c.x, c.residual, c.weight, c.bias, None, torch.float32, None, noise)
    plain = norm.forward(dropped, c.residual, c.weight, c.bias, None, torch.float32, None, None)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert 0 < (dropped == 0).float().mean() < 1

    _, packed, rstd = ours
    for dtypes in ((dtype, torch.float32), (dtype, None), (None, torch.float32), (torch.float32, torch.float32)):
        args = packed, rstd, c.weight, None, c.grad, dtypes, (True, True), None
        grads, undropped = norm.backward(*args, noise), norm.backward(*args, None)
        if dtypes[0] is not None:
            assert grads[0] is not grads[1]
            assert undropped[0] is not None
            undropped = ((undropped[0].float() * kept * noise.scales[1]).to(dtypes[0]), *undropped[1:])
        for a, b in zip(grads, undropped, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                # Compiled for other results, the same sums may be in another order, and a rounding turn.
                eps = 0.0 if kernels.interpreted() else 2 * torch.finfo(a.dtype).eps + shape[-1] * EPS
                assert float(((a - b).abs() - eps * (b.abs() + 1)).max()) <= 0


@pytest.mark.parametrize("p", [2.0**-33, 1e-9, 2.0**-25, 0.1, 1 / 3, 0.5, 0.999, 1 - 2.0**-25, 1 - 2.0**-33])
def test_threshold_is_where_torchs_comparison_turns(p: float) -> None:
    below, scales = noise._threshold(p)
    kept = np.float32(1.0 - p)
    numbers = np.arange(max(below - 300, 0), min(below + 300, 2**32), dtype=np.uint64)
    uniform = numbers.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    assert np.array_equal(uniform < kept, numbers < below)
    assert 0 <= below < 2**32
    assert scales == (np.float32(1.0 / float(kept)) if kept else np.inf, np.float32(1.0 / (1.0 - p)))


class _Waiting(Tensor):
    """Stands for what a tensor-parallel Linear returns, which has no memory before an operator waits for it."""


def test_kernels_are_given_no_subclass() -> None:
    x = normal(8, 256).to(DEVICE)
    how = saving(Codes(seed=0, impl="triton"))
    assert how.runs_kernels(x)
    assert how.runs_kernels(torch.nn.Parameter(x))
    assert not how.runs_kernels(x.as_subclass(_Waiting))


@pytest.mark.gpu
@pytest.mark.parametrize("p", [0.1, 0.5, 1 / 3, 0.999])
@pytest.mark.parametrize("shape", [(5, 256), (3, 768), (9000, 1024)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_drops_what_torchs_dropout_drops(dtype: torch.dtype, shape: tuple[int, ...], p: float) -> None:
    c = case(*shape, dtype=dtype, residual=torch.float32, device=DEVICE)
    results = []
    for fused in (True, False):
        torch.cuda.manual_seed(2**63 + 5)
        torch.rand(7, device=DEVICE)
        x, residual, weight, bias = c.leaves()
        assert x is not None
        assert residual is not None
        dropped, left = (x, p) if fused else (F.dropout(x, p), 0.0)
        out = add_layer_norm(dropped, residual, shape[-1], weight, bias, p=left)
        out.backward(c.grad)
        assert out.grad_fn is not None
        # A norm that drew nothing itself has the node of torch's dropout between itself and x.
        assert any(getattr(node, "variable", None) is x for node, _ in out.grad_fn.next_functions) == fused
        grads = [t.grad for t in (x, residual, weight, bias) if t is not None and t.grad is not None]
        results.append([out.detach(), *grads, torch.cuda.get_rng_state().to(DEVICE)])
    ours, torchs = results
    assert torch.equal(ours[0], torchs[0])
    assert torch.equal(ours[-1], torchs[-1])
    assert torch.equal(ours[1] == 0, torchs[1] == 0)
    for a, b in zip(ours[1:-1], torchs[1:-1], strict=True):
        # The same sums, of rows or over them, compiled for other results.
        limit = (max(shape) * EPS + 2 * torch.finfo(a.dtype).eps) * (b.double().abs() + 1)
        assert_within(a, b.double().cpu(), limit.cpu())


@pytest.mark.gpu
def test_norm_leaves_to_torch_what_it_draws_otherwise() -> None:
    x = normal(9, 256).to(DEVICE, torch.bfloat16)
    assert draw(x[1:], 0.5).quads == 2
    assert draw(x.float(), 0.5).quads == 1
    assert draw(x.view(-1)[1:-255], 0.5) is QUIET  # two bytes off an address that torch loads 16 from
    with Passing():
        assert draw(x, 0.5) is QUIET
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = draw(x * 1, 0.5)
    assert captured is QUIET


@pytest.mark.gpu
def test_graph_captured_after_a_run_draws_anew_on_each_replay() -> None:
    x, residual = (normal(64, 256, seed=seed).to(DEVICE) for seed in (0, 1))
    leaf = x.clone().requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        out = add_layer_norm(leaf, residual, 256, p=0.5)
        return out.detach(), torch.autograd.grad(out, leaf, x)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, grad = step()
    found = []
    for _ in range(2):
        graph.replay()
        found.append((out.clone(), grad.clone()))
        # What is dropped has no gradient; of what is kept, next to none is zero.
        rows = torch.nn.functional.layer_norm(torch.where(found[-1][1] == 0, 0, 2 * x) + residual, (256,))
        assert_within(found[-1][0], rows.double().cpu(), 256 * EPS * 8 * (rows.double().abs() + 1).cpu())
    assert not torch.equal(found[0][1] == 0, found[1][1] == 0)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [256, 200])
@pytest.mark.parametrize("bits", [None, 8])
def test_layer_norm_under_autocast_gives_float32(bits: int | None, length: int) -> None:
    x = normal(8, length).to(DEVICE, torch.bfloat16).requires_grad_()
    weight = normal(length).to(DEVICE).requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = layer_norm(x, length, weight, codes=Codes(bits=bits))
        expected = torch.nn.functional.layer_norm(x, (length,), weight)
    assert out.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(out, expected, rtol=0, atol=length * torch.finfo(torch.float32).eps * 8)
    out.sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert (x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [128, 768, 1024])
def test_exact_layer_norm_is_bitwise_that_of_torch(length: int, dtype: torch.dtype) -> None:
    c = case(300, length, dtype=dtype, device=DEVICE)
    ours, torchs = c.leaves(), c.leaves()
    out = c.run(ours, "auto", bits=None)
    expected = torch.nn.functional.layer_norm(torchs[0], (length,), *torchs[2:])
    assert torch.equal(out, expected)
    assert torch.equal(recipe_of(out).compute(dtype), expected)
    out.backward(c.grad)
    expected.backward(c.grad)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, torchs, strict=True) if a is not None)


@pytest.mark.gpu
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("length", [128, 1024])
def test_norm_sums_over_more_tiles_than_programs(length: int, centred: bool) -> None:
    check(case(20000, length, dtype=torch.bfloat16, centred=centred, device=DEVICE), "auto")


@pytest.mark.gpu
def test_automatic_choice_is_the_kernels_on_the_gpu() -> None:
    x = normal(64, 256).to(DEVICE, torch.bfloat16)
    auto: codec.Impl = "auto"
    assert launch.serves(x, None, (256,), x.dtype, saving(Codes(seed=0, impl=auto)))
    assert not launch.serves(x, None, (256,), x.dtype, saving(Codes(seed=0, impl="cuda")))


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1024, 2048, 4096])
def test_output_of_rms_norm_is_bitwise_that_of_the_operators(length: int) -> None:
    # Their mean adds in an order that the kernel repeats, and a deep model amplifies each bit.
    x = (3 * torch.randn(4096, length, generator=torch.Generator().manual_seed(0))).to("cuda", torch.bfloat16)
    weight = torch.randn(length, generator=torch.Generator().manual_seed(1)).to(x)
    wide = x.float()
    exact = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
    assert torch.equal(rms_norm(x.clone().requires_grad_(), weight, 1e-6, codes=Codes(impl="triton")), exact)
    half = (x / 2).requires_grad_()
    assert torch.equal(add_rms_norm(half, half.detach(), weight, 1e-6, codes=Codes(impl="triton"))[0], exact)
