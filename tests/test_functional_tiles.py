"""``gated_mlp``: results of tiles, the peak, what is saved, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functional_checks import EPS, assert_within, normal, saved_by
from gated_mlp_checks import apart, in_torch, leaves_of, projections
from live_bytes import LiveBytes
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pyactcomp.codec import format as fmt
from pyactcomp.errors import PyactcompError
from pyactcomp.functional import Codes, Projection, gated_mlp, rms_norm, tiles
from pyactcomp.functional.activations.gated.projection import Product

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
WIDTH, MIDDLE, TOKENS = 64, 192, 150


def _step(tile: int | None, activation: Any, rich: bool, recipe: bool, around: Any = None) -> list[Tensor]:
    """Return the output, and the gradients of the input and of each leaf."""
    x = normal(2, TOKENS, WIDTH).requires_grad_()
    given = projections(WIDTH, MIDDLE, torch.float32, rich=rich)

    def compute(x: Tensor) -> Tensor:
        # With a recipe backward computes x and up again; without, it reads their codes.
        rows = rms_norm(x, None, 1e-6, copy=True) if recipe else x * 1
        return gated_mlp(rows, *given, activation=activation, tile=tile)

    out = compute(x) if around is None else around(compute, x)
    return [out.detach(), *torch.autograd.grad(out, [x, *leaves_of(*given)], normal(*out.shape, seed=50))]


@pytest.mark.parametrize("recipe", [True, False])
@pytest.mark.parametrize("rich", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_tiles_are_those_of_one(activation: Any, rich: bool, recipe: bool) -> None:
    # 300 rows in tiles of 64: the last one is not whole. Groups of codes are the same, as rows hold whole ones.
    (out, of_x, *tiled), (whole, of_x_whole, *once) = (_step(t, activation, rich, recipe) for t in (64, None))
    given = projections(WIDTH, MIDDLE, torch.float32, rich=rich)
    x = normal(2, TOKENS, WIDTH)
    rows = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) if recipe else x
    # Codes move an operand by up to half a step of 1/255 of a range of at most twice the largest magnitude.
    bounds = apart(rows.abs() + rows.abs().max() / 255, *given, normal(*out.shape, seed=50))
    torch.testing.assert_close(out, whole, rtol=0.0, atol=float(2 * MIDDLE * EPS * whole.abs().max()))
    for a, b, bound in zip(tiled, once, bounds[1:], strict=True):
        assert_within(a, b.double(), bound)
    if not recipe:
        assert_within(of_x.flatten(0, 1), of_x_whole.flatten(0, 1).double(), bounds[0])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_result_is_torchs_and_gradients_are_off_by_codes_alone(activation: Any) -> None:
    x = normal(2, TOKENS, WIDTH).requires_grad_()
    given = projections(WIDTH, MIDDLE, torch.float32, rich=True)
    exact = in_torch(x, *given, activation)
    expected = torch.autograd.grad(exact, [x, *leaves_of(*given)], normal(*exact.shape, seed=50))
    out, *got = _step(64, activation, True, False)
    torch.testing.assert_close(out, exact.detach(), rtol=0.0, atol=float(2 * MIDDLE * EPS * exact.detach().abs().max()))
    for a, b in zip(got, expected, strict=True):
        # Codes of gate, up and x: each is off by 1/510 of its group's range, about 5 deviations, uniformly; so by
        # 5 / 510 / 3 ** 0.5 of a deviation. Of each a gradient reads two at most, to the second derivative of 1.
        assert float((a - b).norm()) <= 3 * 5 / 510 / 3**0.5 * float(b.norm())
    # The bias of down is a sum of exact gradients.
    grad = normal(*exact.shape, seed=50).flatten(0, 1).double()
    assert_within(got[-3], grad.sum(0), (len(grad) + 1) * EPS * grad.abs().sum(0))


@pytest.mark.parametrize("rich", [True, False])
def test_checkpointed_gradients_are_exact_and_the_rerun_computes_nothing(
    rich: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    own = Product.of
    monkeypatch.setattr(Product, "of", lambda self, rows, out=None: ran.append(len(rows)) or own(self, rows, out))
    x = normal(2, TOKENS, WIDTH).requires_grad_()
    given = projections(WIDTH, MIDDLE, torch.float32, rich=rich)
    exact = in_torch(x, *given, "silu")
    expected = torch.autograd.grad(exact, [x, *leaves_of(*given)], normal(*exact.shape, seed=50))
    _, *got = _step(64, "silu", rich, False, lambda f, x: checkpoint(f, x, use_reentrant=False))
    bounds = apart(x, *given, normal(*exact.shape, seed=50))
    for a, b, bound in zip(got, expected, bounds, strict=True):
        assert_within(a.view(bound.shape), b.view(bound.shape).double(), bound)
    # Forward: three products of each tile. Backward: gate and up, which no other run computes a second time.
    assert sum(ran) == 2 * TOKENS * (3 + 2)


@pytest.mark.parametrize("early_stop", [True, False])
def test_checkpointed_block_that_reads_the_output_gets_it_again(early_stop: bool) -> None:
    def around(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        def block(x: Tensor) -> Tensor:
            out = compute(x)
            return out.sin() if early_stop else out

        with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
            return checkpoint(block, x, use_reentrant=False)

    plain = _step(64, "silu", False, False, lambda f, x: f(x).sin() if early_stop else f(x))
    for a, b in zip(_step(64, "silu", False, False, around), plain, strict=True):
        # The rerun stores codes of gate and up, and x itself where the plain run stores its codes.
        assert float((a - b).norm()) <= 5 / 510 / 3**0.5 * float(b.norm())


def _peaks(tile: int | None, activation: Any, trained: bool, tokens: int, middle: int) -> tuple[int, int, int]:
    """Return the peak of forward, what is alive afterwards and the peak of backward beside that, in bytes."""
    x = normal(tokens, WIDTH).requires_grad_()
    weights = [p.weight.detach().requires_grad_(trained) for p in projections(WIDTH, middle, torch.float32, rich=False)]
    rows = rms_norm(x * 1, None, 1e-6, copy=True)
    with LiveBytes() as forward:
        out = gated_mlp(rows, *weights, activation=activation, tile=tile)
    stored = forward.nbytes
    grad = torch.ones_like(out)
    with LiveBytes() as backward:
        found = torch.autograd.grad(out, [rows, *weights] if trained else [rows], grad)
    assert all(each is not None for each in found)
    return forward.peak, stored, backward.peak


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_peak_does_not_grow_with_the_tokens(activation: Any, trained: bool) -> None:
    tokens, middle, tile = 4096, 512, 128
    forward, stored, backward = _peaks(tile, activation, trained, tokens, middle)
    row, wide_row = 4 * WIDTH, 4 * middle
    sums = 3 * WIDTH * wide_row if trained else 0
    # Formulas of the docstring: two tensors of a tile in forward, four in backward, and x, its gradient's memory.
    assert stored == tokens * row + tokens * middle // 64 * 68
    assert forward <= stored + 2 * tile * wide_row
    assert backward <= 4 * tile * wide_row + sums + tokens * row
    of_one = _peaks(None, activation, trained, tokens, middle)
    assert of_one[1] == stored
    assert of_one[0] >= stored + 2 * tokens * wide_row
    assert of_one[2] >= 4 * tokens * wide_row > 4 * backward


def test_codes_are_those_of_each_tile_and_no_more_bytes_than_of_one() -> None:
    given = [p.weight for p in projections(WIDTH, MIDDLE, torch.float32, rich=False)]
    x = normal(256, WIDTH).requires_grad_()
    for rows, saves in ((x * 1, (MIDDLE, MIDDLE, WIDTH)), (rms_norm(x, None, 1e-6), (MIDDLE,))):
        sizes = []
        for tile in (64, None):
            saved = saved_by(lambda rows=rows, tile=tile: gated_mlp(rows, *given, tile=tile))  # type: ignore[misc]
            codes = [t for t in saved if t.dtype is torch.uint8]
            count = 256 // (tile or 256)
            assert [t.nbytes for t in codes] == [fmt.packed_nbytes((tile or 256) * n, 8, 64) for n in saves] * count
            assert [t for t in saved if t.dtype is not torch.uint8 and all(t is not w for w in given)] == []
            sizes.append(sum(t.nbytes for t in codes))
        assert sizes[0] == sizes[1]


def test_sums_over_tiles_are_rounded_once() -> None:
    count, tile, width = 4096, 128, 32
    grad, rows = normal(count, width).bfloat16(), normal(count, width, seed=1).bfloat16()
    product = Product([torch.zeros(width, width, dtype=torch.bfloat16), None, None, None], 1.0, torch.bfloat16)
    product.begin_sums((True, False, False, False))
    for g, x in zip(grad.split(tile), rows.split(tile), strict=True):
        product.add(x, g)
    weight, *_ = product.gradients([torch.bfloat16, None, None, None])
    assert weight is not None
    g, x = grad.double(), rows.double()
    # The docstring's bound; assert_within adds the rounding to bfloat16.
    assert_within(weight, g.T @ x, (count + 1) * 2.0**-24 * g.abs().T @ x.abs())


def test_stochastic_codes_draw_other_numbers_for_each_tile() -> None:
    x = normal(64, WIDTH).repeat(2, 1).requires_grad_()
    given = [p.weight.detach() for p in projections(WIDTH, MIDDLE, torch.float32, rich=False)]
    codes = Codes(rounding="stochastic", seed=7)
    first, _, second, _ = (
        t for t in saved_by(lambda: gated_mlp(x, *given, tile=64, codes=codes)) if t.dtype is torch.uint8
    )
    assert not torch.equal(first, second)  # the same rows
    assert float((first != second).double().mean()) < 0.75


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_autocast_casts_as_torch(x_dtype: torch.dtype) -> None:
    x = normal(100, WIDTH).to(x_dtype).requires_grad_()
    given = projections(WIDTH, MIDDLE, torch.float32, rich=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, exact = gated_mlp(x, *given, tile=32), in_torch(x, *given, "silu")
    assert out.dtype is exact.dtype is torch.bfloat16
    grad = normal(*out.shape, seed=50).bfloat16()
    for a, b in zip(*(torch.autograd.grad(o, [x, *leaves_of(*given)], grad) for o in (out, exact)), strict=True):
        assert a.dtype is b.dtype
        # As above for codes, and half a dozen roundings to bfloat16.
        assert float((a - b).norm()) <= (3 * 5 / 510 / 3**0.5 + 6 * 2**-8) * float(b.norm())


def test_only_what_is_asked_for_is_computed() -> None:
    x = normal(100, WIDTH).requires_grad_()
    gate, up, down = projections(WIDTH, MIDDLE, torch.float32, rich=False)
    everything = torch.autograd.grad(gated_mlp(x, gate, up, down, tile=32).sum(), [x, *leaves_of(gate, up, down)])
    for index, leaf in enumerate([x, *leaves_of(gate, up, down)]):
        (alone,) = torch.autograd.grad(gated_mlp(x, gate, up, down, tile=32).sum(), [leaf])
        assert torch.equal(alone, everything[index])
    for frozen in (gate, up, down):
        frozen.weight.requires_grad_(False)
    (of_x,) = torch.autograd.grad(gated_mlp(x, gate, up, down, tile=32).sum(), [x])
    assert torch.equal(of_x, everything[0])


def test_second_derivative_and_edits_raise() -> None:
    x = normal(100, WIDTH).requires_grad_()
    given = projections(WIDTH, MIDDLE, torch.float32, rich=False)
    with pytest.raises(PyactcompError, match="only once"):
        torch.autograd.grad(gated_mlp(x, *given, tile=32).sum(), x, create_graph=True)
    for edited in (0, 3):
        rows = x * 1
        out = gated_mlp(rows, *given, tile=32).sum()
        with torch.no_grad():
            [rows, *leaves_of(*given)][edited].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()


def test_a_retained_graph_gives_the_gradients_again_and_a_freed_one_holds_nothing() -> None:
    x = normal(256, WIDTH).requires_grad_()
    weights = [p.weight.detach() for p in projections(WIDTH, MIDDLE, torch.float32, rich=False)]
    with LiveBytes() as alive:
        out = gated_mlp(rms_norm(x, None, 1e-6, copy=True), *weights, tile=64).sum()
        grads = [torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2)]
        assert torch.equal(*grads)
        del grads
        out.backward()
    assert alive.nbytes == 4 + 4 * x.numel()  # out, and the gradient of x


def test_rows_of_a_tile() -> None:
    limit = tiles.TILE_BYTES
    assert tiles.rows_of("auto", 2**17, 28672) == 9472  # Llama-3.1-8B at 128k tokens: 14 tiles, multiples of 128
    assert tiles.rows_of("auto", 2 * limit // 28672, 28672) is None
    assert tiles.rows_of("auto", 2 * limit // 28672 + 1, 28672) == 6272
    assert [tiles.rows_of(tile, 100, 8) for tile in (None, 99, 100, 101)] == [None, 99, None, None]


X, W, V = normal(8, 4), normal(6, 4), normal(4, 6)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        *(
            (lambda tile=tile: gated_mlp(X, W, W, V, tile=tile), ValueError, "tile must be a number of tokens")
            for tile in (0, -1, True, 1.5, "all")
        ),
        (lambda: gated_mlp(X, W, W, V, activation="relu"), ValueError, "activation must be one of"),  # type: ignore[arg-type]
        (lambda: gated_mlp(X, W, W, V, codes=Codes(bits=None)), ValueError, "takes no bits=None"),
        (lambda: gated_mlp(X.int(), W, W, V), TypeError, "x must be a floating-point"),
        (lambda: gated_mlp(X, W.int(), W, V), TypeError, r"gate\.weight must be a floating-point"),
        (lambda: gated_mlp(X, V, W, V), ValueError, r"gate of \[out, 4\].*got \{'weight': \(4, 6\)\}"),
        (lambda: gated_mlp(X, W, normal(5, 4), V), ValueError, "one size, got 6 and 5"),
        (lambda: gated_mlp(X, Projection(W, V), W, V), ValueError, r"bias of \[out\]"),
        (lambda: gated_mlp(X, Projection(W, None, W), W, V), ValueError, "both a and b of gate"),
        (lambda: gated_mlp(X, W.double(), W, V), ValueError, "one dtype without autocast"),
        (lambda: gated_mlp(X[0, 0], W, W, V), ValueError, "without dimensions"),
    ],
)
def test_bad_arguments_raise(call: Callable[[], Tensor], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()


@pytest.mark.gpu
def test_peak_on_a_gpu_is_that_of_a_tile() -> None:
    """Widths of Llama-3.1-8B at 32k tokens, of which one MLP's backward takes 3.4 GiB more without tiles."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    width, middle, tokens = 4096, 14336, 2**15
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    shapes = ((middle, width), (middle, width), (width, middle))
    weights = [(torch.randn(*s, device="cuda", dtype=torch.bfloat16) / 64).requires_grad_() for s in shapes]
    rows = rms_norm(x, None, 1e-6, copy=True)
    out = gated_mlp(rows, *weights)
    grad = torch.randn_like(out)
    del rows
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out.backward(grad)
    peak = torch.cuda.max_memory_allocated() - before
    tile = tiles.rows_of("auto", tokens, middle * 2)
    assert tile is not None
    of_tile, sums, stream = 2 * tile * middle * 2, 3 * width * middle * 4, 3 * tokens * width * 2
    # The workspaces of cuBLAS, and one gradient that is converted while its sum is alive.
    assert peak <= of_tile + sums + stream + width * middle * 2 + 2**26
