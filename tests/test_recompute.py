"""What is computed again in backward: only where it is proven to be the same, and then to the bit."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from works_with import GRADIENT_BOUND, relative_error

import pyactcomp
from pyactcomp.engine import reasons
from pyactcomp.engine.marks import RECIPE
from pyactcomp.engine.saved import library

LOSSLESS = {"mode": "lossless", "min_bytes": 0}


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def reasons_of(c: object) -> list[str | None]:
    return [tensor.kept for tensor in pyactcomp.report(c).tensors]  # type: ignore[arg-type]


def gradients(compute: Callable[..., Tensor], *leaves: Tensor, **options: object) -> tuple[Tensor, ...]:
    if options:
        with pyactcomp.compressed(**options):
            out = compute(*leaves)
    else:
        out = compute(*leaves)
    return torch.autograd.grad(out.square().sum(), leaves)


def through_gelu(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(x * 2, approximate="tanh") @ w


def through_swiglu(x: Tensor, w: Tensor) -> Tensor:
    return (F.silu(x @ w) * (x + 1)) @ w


def through_weighted(x: Tensor, w: Tensor) -> Tensor:
    return (w[0] * x.sin()).view(-1, 32) @ w


def through_probabilities(x: Tensor, w: Tensor) -> Tensor:
    dropped = torch.native_dropout((x @ w).softmax(-1), 0.25, True)[0]
    return dropped @ w


def through_narrow(x: Tensor, w: Tensor) -> Tensor:
    wide = (x * 3).to(torch.bfloat16).float()
    return wide * wide.square().mean(-1, keepdim=True).rsqrt() @ w


def through_cast_probabilities(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).softmax(-1).to(torch.bfloat16) @ w.to(torch.bfloat16)


def through_pieces(x: Tensor, w: Tensor) -> Tensor:
    first, second = F.gelu(x * 2).split([8, 24], dim=1)
    return first @ w[:8] + second @ w[8:]


def through_parts_of_a_complex_cast(x: Tensor, w: Tensor) -> Tensor:
    activated = F.gelu(x @ w)
    parts = torch.view_as_real(activated.to(torch.complex64))
    return activated.sin() + parts.square().sum(-1)


def through_parts_of_a_narrow_cast(x: Tensor, w: Tensor) -> Tensor:
    parts = torch.view_as_real((x @ w).to(torch.bfloat16).to(torch.complex64))
    return parts.square().sum(-1) + parts.real.sin().sum(-1)


CASES = [through_gelu, through_swiglu, through_weighted, through_probabilities, through_narrow, through_pieces]
COMPLEX = [through_parts_of_a_complex_cast, through_parts_of_a_narrow_cast]


@pytest.mark.parametrize("compute", [*CASES, *COMPLEX, through_cast_probabilities], ids=lambda f: f.__name__)
def test_lossless_gradients_are_bitwise_those_of_torch(compute: Callable[..., Tensor]) -> None:
    leaves = leaf(16, 32), leaf(32, 32, seed=1)
    torch.manual_seed(0)
    exact = gradients(compute, *leaves)
    torch.manual_seed(0)
    for got, expected in zip(gradients(compute, *leaves, **LOSSLESS), exact, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
# 1 / (1 - p) rounded once differs, for some of these, from the reciprocal of a rounded 1 - p.
@pytest.mark.parametrize("p", [0.1, 0.3, 0.35, 0.7, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dropped_probabilities_are_those_of_the_forward(dtype: torch.dtype, p: float, device: str) -> None:
    x, v = (leaf(64, 64, seed=seed).detach().to(device, dtype).requires_grad_() for seed in (0, 1))

    def gradient() -> Tensor:
        torch.manual_seed(0)
        dropped = torch.native_dropout((x * 1).softmax(-1), p, True)[0]
        return (dropped * v).sum()

    (exact,) = torch.autograd.grad(gradient(), v)
    with pyactcomp.compressed(**LOSSLESS) as c:
        loss = gradient()
    assert (reasons.RECOMPUTED in reasons_of(c)) == (device == "cuda" or dtype.itemsize >= 4)
    # The gradient of the factor is the dropped tensor itself.
    assert torch.equal(torch.autograd.grad(loss, v)[0], exact)


# Bytes of one [16, 32] float32 tensor that each saves beside what must be stored, and what is stored of all.
@pytest.mark.parametrize(
    ("compute", "made_again"),
    [(through_gelu, 1), (through_swiglu, 2), (through_weighted, 1), (through_probabilities, 1)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_an_output_whose_operands_are_stored_is_not(compute: Callable[..., Tensor], made_again: int) -> None:
    with pyactcomp.compressed(**LOSSLESS) as c:
        compute(leaf(16, 32), leaf(32, 32, seed=1))
    assert reasons_of(c).count(reasons.RECOMPUTED) == made_again
    report = pyactcomp.report(c)
    recomputed = [t for t in report.tensors if t.kept == reasons.RECOMPUTED]
    assert sum(t.stored_bytes for t in recomputed) == 0
    assert sum(t.unique_bytes for t in recomputed) == made_again * 16 * 32 * 4


def test_pieces_of_an_output_are_made_of_the_whole() -> None:
    with pyactcomp.compressed(**LOSSLESS) as c:
        through_pieces(leaf(16, 32), leaf(32, 32, seed=1))
    pieces = [t for t in pyactcomp.report(c).tensors if t.kept == reasons.RECOMPUTED]
    assert [t.shape for t in pieces] == [(16, 8), (16, 24)]
    assert sum(t.stored_bytes for t in pieces) == 0


def test_a_cast_that_is_exact_is_stored_in_the_narrower_dtype() -> None:
    with pyactcomp.compressed(**LOSSLESS) as c:
        through_narrow(leaf(16, 32), leaf(32, 32, seed=1))
    wide = [t for t in pyactcomp.report(c).tensors if t.kept is None]
    # Saved by the square, by the product, and stored once, in half the bytes.
    assert [t.stored_bytes for t in wide] == [16 * 32 * 2, 0]


def test_nll_loss_gets_no_more_than_the_shape_of_what_it_saved() -> None:
    def loss_of(x: Tensor) -> Tensor:
        # As autocast has it: the logits' own dtype until the loss, which is float32.
        return F.nll_loss(x.to(torch.bfloat16).log_softmax(-1).float(), torch.arange(16))

    x = leaf(16, 32)
    before = library().counts()[2]
    assert_same(gradients(loss_of, x, **LOSSLESS), gradients(loss_of, x))
    assert library().counts()[2] == before


def test_what_nll_loss_shares_with_another_is_computed_again() -> None:
    def loss_of(x: Tensor) -> Tensor:
        wide = x.to(torch.bfloat16).log_softmax(-1).float()
        return F.nll_loss(wide, torch.arange(16)) + (wide.exp() * wide).sum()

    x = leaf(16, 32)
    assert_same(gradients(loss_of, x, **LOSSLESS), gradients(loss_of, x))


def test_a_norm_of_what_is_stored_narrower_is_kept() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32))
    x = leaf(64, 32)

    def gradients_of_a_step() -> list[Tensor]:
        # Autocast on a GPU gives a norm such a copy of a bfloat16 input.
        return list(torch.autograd.grad(model(x.to(torch.bfloat16).float()).sum(), [x, *model.parameters()]))

    exact = gradients_of_a_step()
    pyactcomp.compress(model, **LOSSLESS, fuse=False)
    assert_same(gradients_of_a_step(), exact)
    kept = {t.module: t.kept for t in pyactcomp.report(model).tensors if t.shape == (64, 32)}
    assert kept == {"0": None, "1": reasons.LOSSLESS, "2": reasons.RECOMPUTED}


def test_a_cast_that_was_written_to_is_stored_as_it_is() -> None:
    def compute(x: Tensor) -> Tensor:
        wide = x.to(torch.bfloat16).float()
        wide.add_(1e-6)  # no bfloat16 number
        return wide.sin()

    x = leaf(16, 32)
    assert torch.equal(*gradients(compute, x), *gradients(compute, x, **LOSSLESS))


@pytest.mark.parametrize("under_no_grad", [True, False])
def test_an_output_that_was_written_to_is_not_computed_again(under_no_grad: bool) -> None:
    def compute(x: Tensor, w: Tensor) -> Tensor:
        y = F.gelu(x * 2)
        with torch.set_grad_enabled(not under_no_grad):
            y.add_(1)
        return y @ w

    leaves = leaf(16, 32), leaf(32, 32, seed=1)
    for got, expected in zip(gradients(compute, *leaves, **LOSSLESS), gradients(compute, *leaves), strict=True):
        assert torch.equal(got, expected)


def test_an_operand_that_was_written_to_raises_as_torch_does() -> None:
    def compute(x: Tensor, w: Tensor) -> Tensor:
        y = x * 2
        out = F.gelu(y) @ w
        with torch.no_grad():
            y.add_(1)
        return out

    leaves = leaf(16, 32), leaf(32, 32, seed=1)
    for options in ({}, LOSSLESS, {"min_bytes": 0}):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(compute, *leaves, **options)


class Block(nn.Module):
    """A layer norm that three projections read; under autocast torch keeps three casts of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64, eps=0.5)
        self.projections = nn.ModuleList(nn.Linear(64, 16, bias=False) for _ in range(3))
        self.edit: Callable[[Tensor], None] = lambda _: None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x * 2)
        self.edit(y)
        return sum(projection(y) for projection in self.projections).float().square().sum()


@pytest.fixture
def block() -> Block:
    torch.manual_seed(0)
    return Block()


def step(block: Block, autocast: bool = True) -> list[Tensor]:
    block.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = block(leaf(4, 8, 64))
    loss.backward()
    return [p.grad.clone() for p in block.parameters() if p.grad is not None]


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def reasons_in_projections(block: Block) -> list[str | None]:
    return [t.kept for t in pyactcomp.report(block).tensors if t.module.startswith("projections")]


def test_a_layer_norm_is_made_again_once_with_its_own_eps(block: Block) -> None:
    exact = step(block, autocast=False)
    before = library().counts()[2]
    pyactcomp.compress(block, **LOSSLESS, fuse=False)
    assert_same(step(block, autocast=False), exact)
    assert reasons_in_projections(block).count(reasons.RECOMPUTED) == 3
    assert library().counts()[2] - before == 1


def test_casts_of_a_layer_norm_are_stored_once(block: Block) -> None:
    exact = step(block)
    pyactcomp.compress(block, mode="lossless", min_bytes=0, fuse=False)
    assert_same(step(block), exact)
    assert reasons_in_projections(block).count(reasons.SAME_CAST) == 2
    inputs = [t for t in pyactcomp.report(block).tensors if t.shape == (32, 64)]
    assert [t.unique_bytes for t in inputs] == [32 * 64 * 2] * 3
    assert [bool(t.stored_bytes) for t in inputs] == [True, False, False]


def test_casts_of_a_layer_norm_are_made_again_from_codes_of_its_input(block: Block) -> None:
    exact = step(block)
    pyactcomp.compress(block, min_bytes=0, fuse=False)
    got = step(block)
    assert reasons_in_projections(block).count(reasons.RECOMPUTED) == 3
    assert relative_error(dict(enumerate(got)), dict(enumerate(exact))) <= GRADIENT_BOUND


def test_casts_of_a_checkpointed_norm_are_stored_once(block: Block) -> None:
    pyactcomp.compress(block, min_bytes=0)
    block.norm.forward = functools.partial(checkpoint, block.norm.forward, use_reentrant=False)  # type: ignore[method-assign]
    step(block)
    # Its codes are thrown away with the rest of its first run, so it is stored: one of its casts.
    assert reasons_in_projections(block).count(reasons.SAME_CAST) == 2
    assert reasons_in_projections(block).count(reasons.RECOMPUTED) == 0


@pytest.mark.parametrize("mixed", [False, True])
def test_a_layer_norm_is_made_again_with_the_weights_that_it_read(mixed: bool) -> None:
    """A bfloat16 input and float32 weights, which torch takes as they are, and the same of one dtype."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(32)
    with torch.no_grad():
        norm.weight.normal_()
        norm.bias.normal_()
    dtype = torch.bfloat16 if mixed else torch.float32
    model = nn.Sequential(norm, nn.GELU(), nn.Linear(32, 32, dtype=dtype))
    x = leaf(64, 32).detach().to(dtype).requires_grad_()

    def gradients_of_a_step() -> list[Tensor]:
        return list(torch.autograd.grad(model(x).float().square().sum(), [x, *model.parameters()]))

    exact = gradients_of_a_step()
    pyactcomp.compress(model, **LOSSLESS, fuse=False)
    assert_same(gradients_of_a_step(), exact)
    # GELU's input is the norm's output.
    assert [t.kept for t in pyactcomp.report(model).tensors if t.module == "1"] == [
        reasons.LOSSLESS if mixed else reasons.RECOMPUTED
    ]


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.mark.parametrize("options", [{}, {"fuse": False}, {"mode": "lossless"}], ids=str)
@pytest.mark.parametrize("at_once", [False, True], ids=["after the forward", "at the end of the module"])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm, Scale])
def test_memory_that_a_parameter_has_no_more_is_what_is_read(
    kind: type[nn.Module], at_once: bool, options: dict[str, Any]
) -> None:
    """As under ZeRO, which takes a parameter's memory away between its forward and its backward."""
    torch.manual_seed(0)
    middle: Any = kind(64)
    model = nn.Sequential(nn.Linear(64, 64), middle, nn.Linear(64, 64))
    x, memory = torch.randn(32, 64), middle.weight.data

    def take_away(*_: object) -> None:
        middle.weight.data = torch.full((64,), 7.0)

    def gradient(taken: bool) -> Tensor:
        hook = middle.register_forward_hook(take_away) if taken and at_once else None
        loss = model(x).square().sum()
        if hook is not None:
            hook.remove()
        elif taken:
            take_away()
        # Its gradient reads what the norm's or the product's output was.
        found = torch.autograd.grad(loss, model[2].weight)[0]
        middle.weight.data = memory
        return found

    exact = gradient(False)
    pyactcomp.compress(model, min_bytes=0, **options)
    found = [gradient(taken) for taken in (False, True)]
    assert all(relative_error({"": each}, {"": exact}) <= GRADIENT_BOUND for each in found)
    if not at_once:  # otherwise the output is stored the second time, not recomputed
        assert torch.equal(*found)


@pytest.mark.gpu
def test_a_layer_norm_whose_weights_autocast_has_cast_is_kept() -> None:
    """Autocast takes a norm in float32: of bfloat16 weights the operator has read copies."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 256)).to("cuda", torch.bfloat16)
    with torch.no_grad():
        model[0].weight.normal_()
        model[0].bias.normal_()
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def gradients_of_a_step() -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).float().square().sum()
        return list(torch.autograd.grad(loss, [x, *model.parameters()]))

    exact = gradients_of_a_step()
    pyactcomp.compress(model, **LOSSLESS, fuse=False)
    assert_same(gradients_of_a_step(), exact)


@pytest.mark.parametrize("mode", ["int8", "lossless"])
def test_an_operand_may_be_written_to_where_torch_reads_the_output_alone(mode: str) -> None:
    x, v = leaf(16, 64), leaf(16, 64, seed=1)

    square = torch.eye(64).requires_grad_()

    def forward() -> tuple[Tensor, Tensor]:
        source = x @ square
        out = F.gelu(source)
        loss = (out * v).sum()
        with torch.no_grad():
            source.add_(1)
        return loss, out

    (exact,) = torch.autograd.grad(forward()[0], v)
    with pyactcomp.compressed(mode=mode, min_bytes=0):
        loss, out = forward()
        unheld = forward()[0]
    assert torch.equal(torch.autograd.grad(loss, v, retain_graph=True)[0], exact)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*hold on to that output"):
        torch.autograd.grad(unheld, v)
    with torch.no_grad():
        out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, v)


def test_casts_of_a_layer_norm_that_was_written_to_are_kept(block: Block) -> None:
    def edit(y: Tensor) -> None:
        with torch.no_grad():
            y.mul_(1.5)

    block.edit = edit
    exact = step(block)
    pyactcomp.compress(block, **LOSSLESS, fuse=False)
    assert_same(step(block), exact)
    assert not {reasons.RECOMPUTED, reasons.SAME_CAST} & {t.kept for t in pyactcomp.report(block).tensors}


class Halves(nn.Module):
    """Two projections of the two halves of one cast of a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.projections = nn.ModuleList(nn.Linear(32, 16, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x * 2)
        parts = y.to(torch.bfloat16).chunk(2, -1)
        out = sum(p(part.contiguous()) for p, part in zip(self.projections, parts, strict=True))
        out = out + sum(part @ p.weight.to(part.dtype).t() for p, part in zip(self.projections, parts, strict=True))
        return out.float().square().sum()


def test_parts_of_one_cast_are_not_taken_for_each_other() -> None:
    torch.manual_seed(0)
    model = Halves()
    exact = step(model)
    pyactcomp.compress(model, **LOSSLESS)
    assert_same(step(model), exact)


@pytest.mark.parametrize("patched", ["forward", "hook"])
def test_a_layer_norm_that_others_changed_is_not_made_again(block: Block, patched: str) -> None:
    if patched == "forward":
        block.norm.forward = lambda x: F.layer_norm(x, (64,), block.norm.weight, block.norm.bias, 0.01)
    else:
        block.norm.register_forward_hook(lambda module, args, output: F.layer_norm(args[0], (64,), eps=0.01))
    exact = step(block, autocast=False)
    pyactcomp.compress(block, **LOSSLESS)
    assert_same(step(block, autocast=False), exact)
    assert reasons.RECOMPUTED not in reasons_in_projections(block)


def test_eight_bits_compute_again_from_what_is_packed() -> None:
    x, w = leaf(64, 64), leaf(64, 64, seed=1)
    with pyactcomp.compressed(min_bytes=0) as c:
        y = x * 2
        out = F.gelu(y) @ w
    (gradient,) = torch.autograd.grad(out.sum(), w)
    assert reasons.RECOMPUTED in reasons_of(c)
    restored = pyactcomp.codec.dequantize(pyactcomp.codec.quantize(y))
    assert torch.equal(gradient, F.gelu(restored).t() @ torch.ones(64, 64))


def test_backward_twice_gives_the_same() -> None:
    leaves = leaf(16, 32), leaf(32, 32, seed=1)
    with pyactcomp.compressed(**LOSSLESS):
        out = through_swiglu(*leaves).sum()
    first = torch.autograd.grad(out, leaves, retain_graph=True)
    second = torch.autograd.grad(out, leaves)
    assert_same(list(second), list(first))


def test_double_backward_through_what_is_made_again() -> None:
    def penalty(x: Tensor, w: Tensor, **options: object) -> tuple[Tensor, ...]:
        if options:
            with pyactcomp.compressed(**options):
                out = through_swiglu(x, w).sum()
        else:
            out = through_swiglu(x, w).sum()
        (gradient,) = torch.autograd.grad(out, x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), (x, w))

    leaves = leaf(16, 32), leaf(32, 32, seed=1)
    for got, expected in zip(penalty(*leaves, **LOSSLESS), penalty(*leaves), strict=True):
        # Torch keeps the graph of what it saved, and what is made again has the same values.
        assert torch.equal(got, expected)


@pytest.fixture
def chain() -> Iterator[Callable[[Tensor], Tensor]]:
    def products(x: Tensor) -> Tensor:
        y = x
        for _ in range(2_000):
            y = y * y.sin()
        return y

    yield products
    gc.collect()


def test_long_chains_of_products_rest_on_no_more_than_two_recipes(chain: Callable[[Tensor], Tensor]) -> None:
    x = leaf(64)
    with pyactcomp.compressed(**LOSSLESS):
        y = chain(x)
    node: Any = y.grad_fn
    depths = []
    while node.next_functions:
        recipe = RECIPE.on(node)
        depths += [] if recipe is None else [recipe.depth]
        node = node.next_functions[0][0]
    assert set(depths) == {1, 2}
    y.sum().backward()
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())


def test_nothing_is_held_once_the_graph_is_gone() -> None:
    def held() -> int:
        return library().counts()[0]

    gc.collect()
    before = held()
    with pyactcomp.compressed(min_bytes=0):
        out = through_swiglu(leaf(16, 32), leaf(32, 32, seed=1)).sum()
    assert held() > before
    out.backward()
    del out
    assert held() == before


def test_dropout_that_is_told_not_to_train_is_not_computed_again_as_if_it_did() -> None:
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)

    def loss() -> torch.Tensor:
        return (torch.native_dropout((x * 1).softmax(-1), 0.5, False)[0] @ w).square().sum()

    exact = torch.autograd.grad(loss(), (x, w))
    with pyactcomp.compressed(min_bytes=0, mode="lossless"):
        value = loss()
    for got, expected in zip(torch.autograd.grad(value, (x, w)), exact, strict=True):
        assert torch.equal(got, expected)
