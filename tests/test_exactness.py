"""Gradients stay within 2 % where codes would not do: low losses, masks, maxima, divisions, activations."""

from __future__ import annotations

import math
from collections.abc import Callable

import losses
import pytest
import torch
from exactness_checks import BAR, distance, error, leaf
from torch import Tensor, nn
from torch.nn import functional as F

import pyactcomp


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# Losses from 8 down to 1e-4.


@pytest.mark.parametrize("loss", losses.SIZES)
@pytest.mark.parametrize("function", [*losses.LOSSES, *losses.SMOOTH_LOSSES], ids=lambda f: f.__name__)
def test_gradients_of_a_loss_stay_exact_however_low_it_is(function: Callable[..., Tensor], loss: float) -> None:
    z, t = losses.classes(loss)
    assert F.cross_entropy(z, t).item() == pytest.approx(loss, rel=1e-2)
    assert error(lambda z: function(z, t), z) <= BAR


@pytest.mark.parametrize("loss", losses.SIZES)
@pytest.mark.parametrize(("function", "sample"), losses.NEAR, ids=lambda f: f.__name__)
def test_gradients_stay_exact_however_near_a_distribution_is_to_its_target(
    function: Callable[..., Tensor], sample: Callable[[float], tuple[Tensor, Tensor]], loss: float
) -> None:
    z, targets = sample(loss)
    assert error(lambda z: function(z, targets), z) <= BAR


@pytest.mark.parametrize("loss", losses.SIZES)
@pytest.mark.parametrize("function", losses.BINARY_LOSSES, ids=lambda f: f.__name__)
def test_gradients_of_a_binary_loss_stay_exact_however_low_it_is(function: Callable[..., Tensor], loss: float) -> None:
    z, y = losses.answers(loss)
    assert error(lambda z: function(z, y), z) <= BAR


def test_a_model_is_trained_to_a_low_loss_with_the_gradients_of_torch() -> None:
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 256))
    ids, targets = torch.arange(64).repeat(4), torch.randint(0, 256, (64,)).repeat(4)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    reached = []
    for step in range(101):
        if step % 25 == 0:
            found = pyactcomp.verify(model, ids, lambda y: F.cross_entropy(y, targets), min_bytes=0)
            assert found.error <= BAR
            reached.append(found.loss_exact)
        optimizer.zero_grad()
        F.cross_entropy(model(ids), targets).backward()
        optimizer.step()
    assert reached[0] > 5
    assert reached[-1] < 0.01


# Masks.

LEGAL = torch.rand(256, 64, generator=torch.Generator().manual_seed(0)) < 0.5
CHOSEN = LEGAL.int().argmax(-1)
WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "cross_entropy": lambda y: F.cross_entropy(y, CHOSEN),
    "log_softmax": lambda y: -y.log_softmax(-1).gather(1, CHOSEN[:, None]).mean(),
    "nll_loss": lambda y: F.nll_loss(y.log_softmax(-1), CHOSEN),
    "softmax": lambda y: (y.softmax(-1) * torch.arange(64)).mean(),
    "logsumexp": lambda y: y.logsumexp(-1).mean(),
    "log_prob": lambda y: -torch.distributions.Categorical(logits=y, validate_args=False).log_prob(CHOSEN).mean(),
    "attention": lambda y: (y.softmax(-1) @ y.detach().clamp(min=-1).T).square().mean(),
}


@pytest.mark.parametrize("fill", [-math.inf, torch.finfo(torch.float32).min, -1e9, -1e4, -100.0])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("masked", ["filled", "added", "chosen"])
def test_masked_logits_keep_the_gradients_of_the_others(way: str, fill: float, masked: str) -> None:
    def loss(z: Tensor) -> Tensor:
        if masked == "filled":
            y = z.masked_fill(~LEGAL, fill)
        elif masked == "added":
            y = z + torch.zeros(256, 64).masked_fill(~LEGAL, fill)
        else:
            y = torch.where(LEGAL, z, fill)
        return WAYS[way](y)

    assert error(loss, leaf(256, 64)) <= BAR


@pytest.mark.parametrize("fill", [-math.inf, -1e9])
def test_a_policy_with_illegal_actions_has_the_gradients_of_torch(fill: float) -> None:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return F.cross_entropy(self.layer(x).masked_fill(~LEGAL, fill), CHOSEN)

    assert pyactcomp.verify(Policy(), torch.randn(256, 64), lambda y: y, min_bytes=0).error <= BAR


# Maxima, medians, norms and other comparisons of an element with a result.

BUCKETS = torch.arange(1024) % 64
COMPARING: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda x: x.amax(0),
    "amin of two dimensions": lambda x: x.view(4, 256, 64).amin((1, 2)),
    "max of a dimension": lambda x: x.max(0).values,
    "max of all": lambda x: x.max() * x,
    "aminmax": lambda x: x.aminmax(dim=0)[1] - x.aminmax(dim=0)[0],
    "norm inf": lambda x: torch.linalg.vector_norm(x, ord=math.inf, dim=-1),
    "scatter_reduce": lambda x: torch.zeros(64, 64).scatter_reduce(
        0, BUCKETS[:, None].expand_as(x), x, "amax", include_self=False
    ),
    "index_reduce": lambda x: torch.zeros(64, 64).index_reduce(0, BUCKETS, x, "amax", include_self=False),
    "segment_reduce": lambda x: torch.segment_reduce(x, "max", lengths=torch.full((16,), 64)),
    "maximum": lambda x: torch.maximum(x, x.roll(1)),
    "minimum with a bound": lambda x: torch.minimum(x, torch.tensor(0.5)),
    "median": lambda x: x.median(0).values,
    "cummax": lambda x: x.cummax(0).values,
    "kthvalue": lambda x: x.kthvalue(5, dim=0).values,
    "topk": lambda x: x.topk(5, dim=0).values,
    "sort": lambda x: x.sort(0).values,
    "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x, 16),
    "huber_loss": lambda x: F.huber_loss(x, torch.zeros_like(x), reduction="none"),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, torch.zeros_like(x), reduction="none"),
    "l1_loss": lambda x: F.l1_loss(x, torch.zeros_like(x), reduction="none"),
    "mse_loss": lambda x: F.mse_loss(x, x.detach() + 1e-3, reduction="none"),
    "hinge": lambda x: F.relu(1 - x),
    "clamp": lambda x: x.clamp(-0.5, 1.0),
    "clamp by tensors": lambda x: x.clamp(torch.tensor(-0.5), torch.tensor(1.0)),
    "abs": lambda x: x.abs(),
    "sign": lambda x: x * x.sign(),
    "renorm": lambda x: x.renorm(2, 0, 5.0),
    "std": lambda x: x.std(0),
    "cdist": lambda x: torch.cdist(x[:64], x[64:128]),
}
DIVIDING: dict[str, Callable[[Tensor], Tensor]] = {
    "prod": lambda x: x[:, :8].clamp(-2, 2).prod(-1),
    "cumprod": lambda x: torch.cumprod(1 - torch.sigmoid(4 * x) + 1e-10, -1),
    "log of softmax": lambda x: torch.log(torch.softmax(3 * x, -1) + 1e-8),
    "square root of relu": lambda x: x.relu().add(1e-6).pow(0.5),
    "sqrt": lambda x: (x.abs() + 1e-6).sqrt(),
    "sqrt of a square": lambda x: (x.square() + 1e-6).sqrt(),
    "rsqrt": lambda x: (x.abs() + 1e-3).rsqrt(),
    "rsqrt of a square": lambda x: (x.square() + 1e-3).rsqrt(),
    "reciprocal": lambda x: (x.abs() + 1e-3).reciprocal(),
    "a divisor": lambda x: 1 / (x * x + 1e-3),
    "a ratio": lambda x: x / (x.roll(1).abs() + 1e-2),
    "addcdiv": lambda x: torch.addcdiv(x, x, x.roll(1).abs() + 1e-2),
    "log1p": lambda x: torch.log1p(x.sigmoid().neg() + 1e-4),
    "log2": lambda x: x.abs().add(1e-4).log2(),
    "log2 of a square": lambda x: x.square().add(1e-4).log2(),
    "atan2": lambda x: torch.atan2(x, x.roll(1)),
    "logsumexp": lambda x: x.logsumexp(0),
    "logaddexp": lambda x: torch.logaddexp(10 * x, 10 * x.roll(1)),
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "negative power": lambda x: (x.abs() + 1e-2).pow(-1.5),
    "high power": lambda x: (x / 2).pow(20),
    "power of a tensor": lambda x: torch.pow(x.abs() + 0.1, x.roll(1)),
    "power of a number": lambda x: torch.pow(2.0, 4 * x),
    "exp": lambda x: torch.exp(4 * x),
    "expm1": lambda x: torch.expm1(x * 1e-3),
    "waves": lambda x: torch.sin(30 * x) + torch.cos(1024 * x),
    "tan": lambda x: torch.tan(x.clamp(-1.5, 1.5)),
    "atanh": lambda x: torch.atanh(torch.tanh(x) * 0.999),
    "acos": lambda x: torch.acos(torch.tanh(x) * 0.999),
    "erfinv": lambda x: torch.erfinv(torch.tanh(x) * 0.999),
    "cosine similarity": lambda x: F.cosine_similarity(x, x.roll(1, 0), dim=-1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "lgamma": lambda x: torch.lgamma(x.abs() + 1e-2),
    "xlogy": lambda x: torch.xlogy(x.abs(), x.roll(1).abs() + 1e-3),
    "linalg.solve": lambda x: torch.linalg.solve(x[:64] + 8 * torch.eye(64), x[64:128]),
    "cholesky": lambda x: torch.linalg.cholesky(x.T @ x + torch.eye(64)),
    "tanh near one": lambda x: torch.tanh(3 * x).square().neg().add(1 + 1e-6).log(),
    "softplus inverse": lambda x: torch.log(torch.expm1(F.softplus(x) + 1e-3)),
}


@pytest.mark.filterwarnings("ignore:index_reduce\\(\\) is in beta:UserWarning")
@pytest.mark.parametrize("name", [*COMPARING, *DIVIDING])
def test_gradients_that_compare_or_divide_are_within_the_bar(name: str) -> None:
    w = torch.randn(1024 * 64)

    def loss(x: Tensor) -> Tensor:
        y = {**COMPARING, **DIVIDING}[name](x)
        return (y * w[: y.numel()].view(y.shape)).sum()

    assert error(loss, leaf(1024, 64)) <= BAR


@pytest.mark.parametrize("first", ["product first", "maximum first"])
def test_a_tensor_that_a_product_and_a_maximum_read_is_exact_for_both(first: str) -> None:
    weight = leaf(64, 64)

    def loss(x: Tensor) -> Tensor:
        y = F.gelu(x)  # else computed again from codes
        operators = [lambda: (y @ weight).sum(), lambda: y.amax(0).square().sum()]
        first_one, other = operators if first == "product first" else reversed(operators)
        return first_one() + other()

    assert error(loss, leaf(1024, 64)) <= BAR


def divergence(p: Tensor, q: Tensor) -> Tensor:
    return F.kl_div(q.log_softmax(-1), p.softmax(-1), reduction="batchmean")


def jensen_shannon(a: Tensor, b: Tensor) -> Tensor:
    p, q = a.softmax(-1), b.softmax(-1)
    middle = ((p + q) / 2).log()
    return F.kl_div(middle, p, reduction="batchmean") + F.kl_div(middle, q, reduction="batchmean")


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "both ways": lambda a, b: divergence(a, b) + divergence(b, a),
    "of logarithms": lambda a, b: F.kl_div(b.log_softmax(-1), a.log_softmax(-1), reduction="sum", log_target=True),
    "written out": lambda a, b: (a.softmax(-1) * (a.log_softmax(-1) - b.log_softmax(-1))).sum(),
    "less the entropy": lambda a, b: (
        F.cross_entropy(b, a.softmax(-1)) + (a.softmax(-1) * a.log_softmax(-1)).sum(-1).mean()
    ),
    "from the middle": jensen_shannon,
}


# Nearer, some of the operands are too coarse in 16 bits (docs/exactness.md, "What is left").
NEAREST = {"from the middle": 0.3, "of logarithms": 0.1}
APART = [(name, apart) for name in DIVERGENCES for apart in (0.3, 0.1, 0.015) if apart >= NEAREST.get(name, 0)]


@pytest.mark.parametrize(("name", "apart"), APART)
def test_a_divergence_whose_two_sides_have_gradients(name: str, apart: float) -> None:
    first = torch.randn(1024, 64)
    second = (first + apart * torch.randn(1024, 64)).requires_grad_()
    assert error(DIVERGENCES[name], first.requires_grad_(), second) <= BAR


KINDS: dict[str, Callable[[Tensor], torch.distributions.Distribution]] = {
    "Beta": lambda x: torch.distributions.Beta(*(3 * F.softplus(x) + 1e-3).chunk(2)),
    "Chi2": lambda x: torch.distributions.Chi2(3 * F.softplus(x) + 1e-3),
    "Categorical": lambda x: torch.distributions.Categorical(probs=x.softmax(-1)),
    "Normal": lambda x: torch.distributions.Normal(x, 1 + x**2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_divergence_of_a_distribution_near_the_one_it_learns(kind: str) -> None:
    learnt = 0.8 * torch.randn(512, 64)
    target = KINDS[kind](learnt + 0.05 * torch.randn(512, 64))
    # Their gradient cancels: what bfloat16 costs is 0.2 to 17 %.
    assert (
        error(lambda x: torch.distributions.kl_divergence(KINDS[kind](x), target).mean(), learnt.requires_grad_())
        <= BAR
    )


def test_a_normal_distributions_log_probability() -> None:
    y = torch.randn(256, 512)

    def loss(s: Tensor, mean: Tensor) -> Tensor:
        return -torch.distributions.Normal(mean, torch.exp(s), validate_args=False).log_prob(y).mean()

    assert error(loss, leaf(256, 512), leaf(256, 512)) <= BAR


def test_the_reparametrised_sample_and_the_divergence_of_an_autoencoder() -> None:
    noise = torch.randn(256, 512)

    def loss(mean: Tensor, log_variance: Tensor) -> Tensor:
        sample = mean + noise * torch.exp(0.5 * log_variance)
        divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum()
        return sample.square().sum() + divergence

    assert error(loss, leaf(256, 512), leaf(256, 512, scale=3)) <= BAR


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_coordinates_that_are_looked_up_with_are_exact(mode: str) -> None:
    image, theta = torch.randn(2, 4, 32, 32), torch.eye(2, 3).repeat(2, 1, 1)

    def loss(image: Tensor, theta: Tensor) -> Tensor:
        grid = F.affine_grid(theta * 1.05, [2, 4, 64, 64], align_corners=False)
        return F.grid_sample(image, grid, mode=mode, align_corners=False).square().sum()

    assert error(loss, image.requires_grad_(), theta.requires_grad_()) <= BAR


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


@pytest.mark.parametrize("padding", [0, 8])
def test_a_norm_without_a_fused_form_is_exact_beside_padding(padding: int) -> None:
    """A row of zeros has 1 / rms = 1000, and its neighbours 1."""
    ids = torch.randint(1, 384, (64, 64))
    ids[:, 64 - padding :] = 0
    model = nn.Sequential(nn.Embedding(384, 64, padding_idx=0), Norm(64), nn.Linear(64, 64))
    w = torch.randn(64, 64, 64)
    found = pyactcomp.verify(model, ids, lambda y: (y * w * (ids > 0)[..., None]).mean(), min_bytes=0)
    assert max(found.errors.values()) <= BAR


# Norms of few elements, and what goes into a division.

FEW: dict[str, Callable[[Tensor], Tensor]] = {
    "layer norm": lambda x: F.layer_norm(x, (4,)),
    "rms norm": lambda x: F.rms_norm(x, (4,), eps=1e-6),
    "rms norm of operators": lambda x: x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt(),
    "norm of operators": lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-6).sqrt(),
    "standard deviation": lambda x: x.std(-1),
    "normalised": lambda x: F.normalize(x, dim=-1),
    "group norm": lambda x: F.group_norm(x[..., None], 1),
    "instance norm": lambda x: F.instance_norm(x.view(64, 16, 2, 2)),
    "cosine similarity": lambda x: F.cosine_similarity(x, x.flip(-1), -1),
}


@pytest.mark.parametrize("name", FEW)
def test_norms_of_few_elements_beside_larger_neighbours(name: str) -> None:
    """Rows of four, each a thousand times larger than one beside it, whose step would hide it."""
    size = torch.logspace(0, -3, 4).repeat(256)[:, None]
    function, w = FEW[name], torch.randn(4096)

    def loss(x: Tensor) -> Tensor:
        y = function(x * size)
        return (y.flatten() * w[: y.numel()]).sum()

    assert error(loss, leaf(1024, 4)) <= BAR


PAIRS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer norm": lambda x: F.layer_norm(x, (2,)),
    "batch norm": lambda x: F.batch_norm(x.t(), None, None, training=True),
    "group norm": lambda x: F.group_norm(x[..., None], 1),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("rows", [16, 1024])
def test_norms_of_two_elements_that_nearly_agree(name: str, rows: int) -> None:
    """A hundredth apart, where bfloat16 rounds one in 512."""
    function, w = PAIRS[name], torch.randn(rows * 2)
    x = (1 + torch.rand(rows, 1) + torch.tensor([-0.005, 0.005])).requires_grad_()
    assert error(lambda x: (function(x * 1.5).flatten() * w).sum(), x) <= BAR


MANY: dict[str, Callable[[Tensor], Tensor]] = {
    "layer norm": lambda x: F.layer_norm(x, (64,)),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "group norm": lambda x: F.group_norm(x.view(8, 32, 64), 8),
}


@pytest.mark.parametrize("name", MANY)
def test_norms_of_a_group_and_more_are_packed(name: str) -> None:
    with pyactcomp.compressed(min_bytes=0) as c:
        x = leaf(256, 64) * 1.5
        MANY[name](x)
    (packed,) = (t for t in pyactcomp.report(c).tensors if t.kept is None)
    assert packed.stored_bytes <= x.nbytes / 2


# Activations.


def test_relu_in_place_on_a_view_with_gaps_keeps_its_sign() -> None:
    x = leaf(96)

    def loss() -> Tensor:
        y = x * 1
        y.view(-1)[::2].relu_()
        return y.sum()

    (exact,) = torch.autograd.grad(loss(), x)
    with pyactcomp.compressed(min_bytes=0):
        value = loss()
    assert torch.equal(torch.autograd.grad(value, x)[0], exact)


@pytest.mark.parametrize("name", ["tanh_", "sigmoid_"])
def test_a_form_for_one_operators_results_holds_nothing_else_of_their_base(name: str) -> None:
    # The other elements of the base reach 8, where neither a logit nor an inverse tangent exists.
    def loss(x: Tensor) -> Tensor:
        y = 2 * x
        getattr(y.view(-1)[::2], name)()
        return y.square().sum()

    assert error(loss, leaf(512)) <= BAR


@pytest.mark.parametrize("scale", [1, 10, 100, 1000])
def test_a_gate_that_saturates_keeps_the_gradient_of_small_operands(scale: int) -> None:
    w = torch.randn(256, 32)
    assert error(lambda x: (F.glu(scale * x) * w).sum(), leaf(256, 64)) <= BAR


def test_vectors_that_are_nearly_parallel() -> None:
    step = 1e-3 * torch.randn(256, 3)
    assert error(lambda x: torch.linalg.cross(x, x + step).abs().mean(), leaf(256, 3)) <= BAR


def test_a_cast_that_was_first_packed_in_another_shape_keeps_its_own() -> None:
    x, layer = torch.randn(2, 64, 8, dtype=torch.float16).requires_grad_(), nn.Linear(8, 8)

    def loss() -> Tensor:
        y = x.float()
        return F.gelu(layer(y)).sum() + y.sin().sum()

    (exact,) = torch.autograd.grad(loss(), x)
    with pyactcomp.compressed(min_bytes=0):
        value = loss()
    assert distance(torch.autograd.grad(value, x), (exact,)) <= BAR


def test_relu_in_place_on_a_view_keeps_its_sign() -> None:
    layer = nn.Linear(64, 64)
    with torch.no_grad():
        layer.weight.mul_(torch.logspace(-6, 0, 64)[:, None])  # results that codes would take for zero
        layer.bias.zero_()
    for shape in ((256, 64), (16, 16, 64)):  # of the second nn.Linear returns a view
        x = leaf(*shape)
        (exact,) = torch.autograd.grad(torch.relu_(layer(x)).sum(), x)
        with pyactcomp.compressed(layer, min_bytes=0):
            out = torch.relu_(layer(x))
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], exact)


ACTIVATIONS = [
    *(nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Mish(), nn.ELU(), nn.ELU(2.0), nn.SELU(), nn.CELU(1.5), nn.PReLU()),
    *(nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6(), nn.LeakyReLU(0.1), nn.Hardswish(), nn.Hardsigmoid()),
    *(nn.Hardtanh(), nn.Hardshrink(), nn.Softshrink(), nn.Softsign(), nn.Softplus(), nn.LogSigmoid(), nn.Tanh()),
    *(nn.Tanhshrink(), nn.Sigmoid(), nn.Threshold(0.1, 20.0), nn.RReLU(), nn.GLU(), nn.ELU(1.5, inplace=True)),
    *(nn.Softmax(-1), nn.LogSoftmax(-1), nn.Softmin(-1), nn.Hardswish(inplace=True), nn.SELU(inplace=True)),
]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_every_activation_of_torch_is_within_the_bar(activation: nn.Module) -> None:
    w = torch.randn(1024, 64)

    def loss(x: Tensor) -> Tensor:
        y = activation(x)
        return (y * w[:, : y.shape[1]]).sum()

    assert error(loss, leaf(1024, 64)) <= BAR
