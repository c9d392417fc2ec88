"""Checkpointed blocks take the same routes again, and divide by what they divided by."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from exactness_checks import distance, leaf
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from works_with import GRADIENT_BOUND

import pyactcomp
from pyactcomp.engine import reasons


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
    assert distance(got, exact) <= GRADIENT_BOUND
    inputs = [t for t in pyactcomp.report(model).tensors if t.shape == (1024, 64) and t.kept != reasons.NO_GRAD]
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
    of_blocks = [t for t in pyactcomp.report(model).tensors if t.shape == (1024, 64) and t.kept != reasons.NO_GRAD]
    assert [t.kept is None for t in of_blocks] == [True, False]


HALF = torch.arange(64) % 2 == 0
# Numbers and integers that a block makes of its input, and those that it makes of constants.
DECISIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "item": lambda x: x * x.mean().item(),
    "truth": lambda x: x * 2 if x.mean() else x,
    "cast": lambda x: x * x.long().index_select(0, (x[:, 0] * 8).int().clamp(0, 7)),
    "mask": lambda x: x * x.bool(),
    "none": lambda x: x.masked_fill(HALF, torch.tensor(0.0)).double().float() * (~HALF).int().long().float(),
}


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["nonreentrant", "reentrant"])
@pytest.mark.parametrize("name", DECISIONS)
def test_a_checkpointed_block_keeps_what_it_makes_numbers_and_integers_of(name: str, use_reentrant: bool) -> None:
    x = leaf(64, 64)
    block = DECISIONS[name]
    (exact,) = torch.autograd.grad(block(x * 1).square().sum(), x)
    with pyactcomp.compressed(min_bytes=0) as c:
        loss = checkpoint(block, x * 1, use_reentrant=use_reentrant).square().sum()
    loss.backward()
    assert x.grad is not None
    # Four bytes an element.
    assert (pyactcomp.report(c).tensors[0].stored_bytes == 4 * x.numel()) == (name != "none")
    assert distance((x.grad,), (exact,)) <= GRADIENT_BOUND


# Blocks that are run again from stored inputs.


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


ROUTES: dict[str, Callable[[Tensor], Tensor]] = {
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 1, 1),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 2),
    "embedding_bag": lambda x: F.embedding_bag(
        torch.arange(512), x.flatten(0, 2), torch.arange(0, 512, 16), mode="max"
    ),
    "amax": lambda x: x.amax(-1),
    "maximum": lambda x: torch.maximum(x, x.flip(-1)),
    "remainder": lambda x: torch.remainder(x * 8, 1.0),
    "hardshrink": lambda x: F.hardshrink(x, 0.5),
    "in place": lambda x: (x * 8).remainder_(1.0),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, math.inf, -1),
    "norm": lambda x: x.norm(-math.inf, 0),
    "cdist": lambda x: torch.cdist(x.flatten(0, 1), x.flatten(0, 1).roll(1, 0), p=math.inf),
    "fake_quantize": lambda x: x * torch.fake_quantize_per_tensor_affine(x, 0.5, 0, -128, 127),
    "grid_sample": lambda x: F.grid_sample(
        x, x.detach()[:, :2].permute(0, 2, 3, 1) / 20 - 1, "nearest", align_corners=False
    ),
    "grid_sample between pixels": lambda x: F.grid_sample(
        x, x[:, :2].permute(0, 2, 3, 1) / 20 - 1, align_corners=False
    ),
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ROUTES)
def test_a_block_that_is_run_again_takes_the_same_way(name: str, reentrant: bool) -> None:
    # Within a group the input spans 0 to 40, and its maxima are a tenth apart: less than a step of 8 bits.
    x = (torch.randint(0, 400, (4, 8, 16, 16)) * 0.1).requires_grad_()
    assert checkpointed_error(ROUTES[name], x, reentrant) <= GRADIENT_BOUND


DIVISORS: dict[str, Callable[[Tensor], Tensor]] = {
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.roll(1, -1), 0),
    "normalize": lambda x: F.normalize(x, dim=1),
    "quotient": lambda x: x / (x.square().sum(1, keepdim=True) + 1e-3),
    "rsqrt": lambda x: x * (x.square().mean((0, 1), keepdim=True) + 1e-3).rsqrt(),
    "in place": lambda x: (x * 1).div_(x.square().sum(1, keepdim=True) + 1e-3),
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", DIVISORS)
def test_a_block_with_divisors_of_few_elements_is_run_again_from_16_bits(name: str, reentrant: bool) -> None:
    # Sizes of columns lie three orders of magnitude apart, and columns share groups.
    x = (torch.randn(4, 4, 8, 8) * torch.logspace(-3, 0, 8)).requires_grad_()
    assert checkpointed_error(DIVISORS[name], x, reentrant) <= GRADIENT_BOUND


def test_a_block_with_divisors_of_whole_rows_is_run_again_from_codes() -> None:
    x = leaf(64, 256)

    def norm(z: Tensor) -> Tensor:
        return z * (z.square().mean(-1, keepdim=True) + 1e-6).rsqrt()

    with pyactcomp.compressed(min_bytes=0) as compressed:
        out = checkpoint(norm, x * 1, use_reentrant=False)
    out.sum().backward()
    # 8.5 bits an element; a 256-element row has one divisor.
    assert pyactcomp.report(compressed).stored_bytes <= 1.1 * x.numel()


# Masks.


class Biased(nn.Module):
    """Attention with relative positions, a learned bias to which a mask is added for all blocks."""

    def __init__(self, fill: float, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.qkv, self.bias = nn.Linear(16, 16), nn.Linear(16, 48), nn.Embedding(127, 4)
        self.fill, self.use_reentrant = fill, use_reentrant
        self.register_buffer("distances", torch.arange(64)[:, None] - torch.arange(64) + 63)

    def block(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 64, 3, 4, 4).permute(2, 0, 3, 1, 4)
        mixed = (q @ k.transpose(-1, -2) + bias).softmax(-1) @ v
        return x + mixed.transpose(1, 2).reshape(x.shape)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias(self.distances).permute(2, 0, 1)[None] + torch.ones(64, 64).triu(1) * self.fill
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.block, x, bias, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["nonreentrant", "reentrant"])
@pytest.mark.parametrize("fill", [-1e9, -1e4, -100.0])
def test_a_checkpointed_block_gets_its_mask_back(fill: float, use_reentrant: bool) -> None:
    plain, model = (Biased(fill, use_reentrant) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    pyactcomp.compress(model, min_bytes=0)
    x = torch.randn(8, 64, 16)
    for each in (plain, model):
        each(x).square().mean().backward()
    got, exact = ([p.grad for p in each.parameters() if p.grad is not None] for each in (model, plain))
    assert distance(tuple(got), tuple(exact)) <= GRADIENT_BOUND
    # To the stream between blocks no constant is added.
    inputs = [t for t in pyactcomp.report(model).tensors if t.shape == (8, 64, 16) and t.kept is None]
    assert inputs
    assert all(t.stored_bytes <= x.nbytes / 2 for t in inputs)
