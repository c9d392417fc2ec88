"""Checkpointed blocks take the same routes again, and divide by what they divided by."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from exactness_checks import BAR, distance, error, leaf
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pyactcomp
from pyactcomp.engine import policy


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# Routes.


class Routed(nn.Module):
    """A mixture of experts, the best two of eight."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 8)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        probability, chosen = self.gate(x).softmax(-1).topk(2, -1)
        y = x
        for index, expert in enumerate(self.experts):
            rows, columns = (chosen == index).nonzero(as_tuple=True)
            y = y.index_add(0, rows, expert(x[rows]) * probability[rows, columns, None])
        return y


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Network(nn.Module):
    def __init__(self, blocks: list[nn.Module], use_reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(blocks)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_a_checkpointed_block_that_routes_takes_the_same_routes_again(use_reentrant: bool) -> None:
    plain = Network([Plain(), Routed(), Plain(), Routed()], use_reentrant)
    model = pyactcomp.compress(copy.deepcopy(plain), min_bytes=0)
    x, w = torch.randn(1024, 64), torch.randn(1024, 64)
    for each in (plain, model):
        (each(x) * w).sum().backward()
    got, exact = (tuple(p.grad for p in each.parameters() if p.grad is not None) for each in (model, plain))
    assert distance(got, exact) <= BAR
    inputs = [t for t in pyactcomp.report(model).tensors if t.shape == (1024, 64) and t.kept != policy.NO_GRAD]
    whole = 1024 * 64 * 4
    # The inputs of the blocks that route, and of those that do not.
    assert [t.stored_bytes == whole for t in inputs] == [False, True, False, True]
    assert all(t.kept is None and t.stored_bytes < whole / 3 for t in inputs[::2])


class DropsPaths(Plain):
    """Stochastic depth as timm writes it, and a mask drawn from probabilities that depend on the input."""

    def __init__(self, by_value: bool) -> None:
        super().__init__()
        self.by_value = by_value

    def forward(self, x: Tensor) -> Tensor:
        path = x.new_empty(len(x), 1).bernoulli_(0.9)
        if self.by_value:
            path = path * torch.bernoulli(x.detach().sigmoid())
        return x + self.layers(x) * path


def test_a_draw_decides_only_where_values_give_the_probabilities() -> None:
    model = Network([DropsPaths(False), DropsPaths(True)], use_reentrant=False)
    pyactcomp.compress(model, min_bytes=0)
    model(torch.randn(1024, 64)).square().sum().backward()
    of_blocks = [t for t in pyactcomp.report(model).tensors if t.shape == (1024, 64) and t.kept != policy.NO_GRAD]
    assert [t.kept is None for t in of_blocks] == [True, False]


def test_a_checkpointed_block_whose_shapes_depend_on_values_has_them_again() -> None:
    first, gate, expert = (nn.Linear(64, n) for n in (64, 4, 64))

    def block(x: Tensor) -> Tensor:
        chosen = (gate(x).argmax(-1) == 0).nonzero()[:, 0]
        return x.index_add(0, chosen, expert(x[chosen]))

    leaves = [*first.parameters(), *expert.parameters()]
    x = torch.randn(4096, 64)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, leaves)

    loss = checkpoint(block, first(x), use_reentrant=False).square().mean()
    exact = gradients()
    with pyactcomp.compressed(min_bytes=0):
        loss = checkpoint(block, first(x), use_reentrant=False).square().mean()
    assert distance(gradients(), exact) <= BAR


def by_item(x: Tensor) -> Tensor:
    return x * x.mean().item()


def by_truth(x: Tensor) -> Tensor:
    return x * 2 if x.mean() else x


def by_cast(x: Tensor) -> Tensor:
    return x * x.long().index_select(0, (x[:, 0] * 8).int().clamp(0, 7))


def by_mask(x: Tensor) -> Tensor:
    return x * x.bool()


def by_none(x: Tensor) -> Tensor:
    mask = torch.arange(64) % 2 == 0
    return x.masked_fill(mask, torch.tensor(0.0)).double().float() * (~mask).int().long().float()


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["nonreentrant", "reentrant"])
@pytest.mark.parametrize("block", [by_item, by_truth, by_cast, by_mask, by_none], ids=lambda block: block.__name__)
def test_a_checkpointed_block_keeps_what_it_makes_numbers_and_integers_of(
    block: Callable[[Tensor], Tensor], use_reentrant: bool
) -> None:
    x = leaf(64, 64)
    (exact,) = torch.autograd.grad(block(x * 1).square().sum(), x)
    with pyactcomp.compressed(min_bytes=0) as c:
        loss = checkpoint(block, x * 1, use_reentrant=use_reentrant).square().sum()
    loss.backward()
    assert x.grad is not None
    # Four bytes an element.
    assert (pyactcomp.report(c).tensors[0].stored_bytes == 4 * x.numel()) == (block is not by_none)
    assert distance((x.grad,), (exact,)) <= BAR


# Blocks that are run again from stored inputs, and rows shorter than a group.


def checkpointed_error(block: Callable[[Tensor], Tensor], x: Tensor, reentrant: bool) -> float:
    """Return how far the gradient of ``x`` is off; torch.autograd.grad does not serve reentrant checkpoints."""
    found = []
    for context in (nullcontext(), pyactcomp.compressed(min_bytes=0)):
        with context:
            out = checkpoint(block, x * 1, use_reentrant=reentrant)
            loss = (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum()
        loss.backward()
        assert x.grad is not None
        found.append(x.grad)
        x.grad = None
    exact, ours = found
    return distance((ours,), (exact,))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "route",
    [
        lambda x: F.max_pool2d(x, 3, 1, 1),
        lambda x: F.adaptive_max_pool2d(x, 2),
        lambda x: F.embedding_bag(torch.arange(512), x.flatten(0, 2), torch.arange(0, 512, 16), mode="max"),
        lambda x: x.amax(-1),
        lambda x: torch.maximum(x, x.flip(-1)),
        lambda x: torch.remainder(x * 8, 1.0),
        lambda x: F.hardshrink(x, 0.5),
        lambda x: (x * 8).remainder_(1.0),
        lambda x: torch.linalg.vector_norm(x, math.inf, -1),
        lambda x: x.norm(-math.inf, 0),
        lambda x: torch.cdist(x.flatten(0, 1), x.flatten(0, 1).roll(1, 0), p=math.inf),
        lambda x: x * torch.fake_quantize_per_tensor_affine(x, 0.5, 0, -128, 127),
        lambda x: F.grid_sample(x, x.detach()[:, :2].permute(0, 2, 3, 1) / 20 - 1, "nearest", align_corners=False),
    ],
    ids=[
        "max_pool2d",
        "adaptive_max_pool2d",
        "embedding_bag",
        "amax",
        "maximum",
        "remainder",
        "hardshrink",
        "remainder_",
        "vector_norm",
        "norm",
        "cdist",
        "fake_quantize",
        "grid_sample",
    ],
)
def test_a_block_that_is_run_again_takes_the_same_way(route: Callable[[Tensor], Tensor], reentrant: bool) -> None:
    # Within a group the input spans 0 to 40, and its maxima are a tenth apart: less than a step of 8 bits.
    x = (torch.randint(0, 400, (4, 8, 16, 16)) * 0.1).requires_grad_()

    assert checkpointed_error(route, x, reentrant) <= BAR


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "divide",
    [
        lambda x: F.cosine_similarity(x, x.roll(1, -1), 0),
        lambda x: F.normalize(x, dim=1),
        lambda x: x / (x.square().sum(1, keepdim=True) + 1e-3),
        lambda x: x * (x.square().mean((0, 1), keepdim=True) + 1e-3).rsqrt(),
        lambda x: (x * 1).div_(x.square().sum(1, keepdim=True) + 1e-3),
        lambda x: x * (x.square().mean((0, 1), keepdim=True) + 1e-3).pow_(-0.5),
    ],
    ids=["cosine_similarity", "normalize", "quotient", "rsqrt", "div_", "pow_"],
)
def test_a_block_with_divisors_of_few_elements_is_run_again_from_16_bits(
    divide: Callable[[Tensor], Tensor], reentrant: bool
) -> None:
    # Sizes of columns lie three orders of magnitude apart, and columns share groups.
    x = (torch.randn(4, 4, 8, 8) * torch.logspace(-3, 0, 8)).requires_grad_()

    assert checkpointed_error(divide, x, reentrant) <= BAR


def test_a_block_with_divisors_of_whole_rows_is_run_again_from_codes() -> None:
    x = leaf(64, 256)

    def norm(z: Tensor) -> Tensor:
        return z * (z.square().mean(-1, keepdim=True) + 1e-6).rsqrt()

    with pyactcomp.compressed(min_bytes=0) as compressed:
        out = checkpoint(norm, x * 1, use_reentrant=False)
    out.sum().backward()
    # 8.5 bits an element; a 256-element row has one divisor.
    assert pyactcomp.report(compressed).stored_bytes <= 1.1 * x.numel()


def test_a_square_behind_a_norm_of_short_rows() -> None:
    # A row of zeros passes a gradient a thousand times that of the others.
    x = torch.randn(12, 12).masked_fill(torch.arange(12)[:, None] % 4 == 0, 0.0).requires_grad_()

    def loss(z: Tensor) -> Tensor:
        y = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + 1e-6)
        return torch.minimum(y, z).square().mean()

    assert error(loss, x) <= BAR


def test_heads_shorter_than_a_group() -> None:
    # The gradient of a score is a difference of sums over 4 elements; here the fifth draw is off by most in 8 bits.
    torch.manual_seed(4)
    q, k, v = leaf(2, 4, 4, 4), leaf(2, 4, 4, 4), torch.randn(2, 4, 4, 4).relu().cos()

    def loss(q: Tensor, k: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.adaptive_max_pool2d(out, 2).sin().sum()

    assert error(loss, q, k) <= BAR
