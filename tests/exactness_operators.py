"""Rows of single operators: those that compare, divide or span magnitudes, activations, norms, decompositions."""

from __future__ import annotations

import math

import torch
from exactness_rows import Loss, Operands, Row, gained, normal
from torch import Tensor, nn
from torch.nn import functional as F

ROWS: dict[str, Row] = {}
EAGER = ("plain", "layers")


def in_float32(function: Loss) -> Loss:
    """Return a function that torch lacks in bfloat16."""

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return function(x)

    return run


def parallel(x: Tensor, step: Tensor) -> Tensor:
    return torch.linalg.cross(x, x + step, dim=0)


# Comparisons of an element with a result.

BUCKETS = torch.arange(256) % 16
COMPARING: dict[str, Loss] = {
    "amax": lambda x: x.amax(0),
    "amin of two dimensions": lambda x: x.view(4, 64, 64).amin((1, 2)),
    "max of a dimension": lambda x: x.max(0).values,
    "max of all": lambda x: x.max() * x,
    "aminmax": lambda x: x.aminmax(dim=0)[1] - x.aminmax(dim=0)[0],
    "norm inf": lambda x: torch.linalg.vector_norm(x, ord=math.inf, dim=-1),
    "scatter_reduce": lambda x: torch.zeros(16, 64).scatter_reduce(
        0, BUCKETS[:, None].expand_as(x), x, "amax", include_self=False
    ),
    "maximum": lambda x: torch.maximum(x, x.roll(1)),
    "minimum with a bound": lambda x: torch.minimum(x, torch.tensor(0.5)),
    "median": lambda x: x.median(0).values,
    "cummax": lambda x: x.cummax(0).values,
    "kthvalue": lambda x: x.kthvalue(5, dim=0).values,
    "topk": lambda x: x.topk(5, dim=0).values,
    "sort": lambda x: x.sort(0).values,
    "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x, 16),
    "huber_loss": lambda x: F.huber_loss(x, torch.zeros_like(x), reduction="none"),
    "l1_loss": lambda x: F.l1_loss(x, torch.zeros_like(x), reduction="none"),
    "mse_loss": lambda x: F.mse_loss(x, x.detach() + 1e-3, reduction="none"),
    "clamp": lambda x: x.clamp(-0.5, 1.0),
    "clamp by tensors": lambda x: x.clamp(torch.tensor(-0.5), torch.tensor(1.0)),
    "abs": torch.abs,
    "sign": lambda x: x * x.sign(),
    "renorm": lambda x: x.renorm(2, 0, 5.0),
    "std": lambda x: x.std(0),
    "cdist": lambda x: torch.cdist(x[:64], x[64:128]),
    "cdist of near points": lambda x: torch.cdist(x, x.detach() + 0.01 * NEAR).diagonal(),
}
# Of torch alone in eager mode: torch.compile does not trace them as one graph.
BETA: dict[str, Loss] = {
    "index_reduce": lambda x: torch.zeros(16, 64).index_reduce(0, BUCKETS, x, "amax", include_self=False),
    "segment_reduce": lambda x: torch.segment_reduce(x, "max", lengths=torch.full((16,), 16)),
}
NEAR = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))

# Operators that divide, or whose derivative spans orders of magnitude.

DIVIDING: dict[str, Loss] = {
    "prod": lambda x: x[:, :8].clamp(-2, 2).prod(-1),
    "scatter_reduce prod": lambda x: torch.ones(16, 64).scatter_reduce(0, BUCKETS[:, None].expand_as(x), x, "prod"),
    "cumprod": lambda x: torch.cumprod(1 - torch.sigmoid(4 * x) + 1e-10, -1),
    "sqrt of a square": lambda x: (x.square() + 1e-6).sqrt(),
    "rsqrt": lambda x: (x.abs() + 1e-3).rsqrt(),
    "reciprocal": lambda x: (x.abs() + 1e-3).reciprocal(),
    "a divisor": lambda x: 1 / (x * x + 1e-3),
    "a ratio": lambda x: x / (x.roll(1).abs() + 1e-2),
    "addcdiv": lambda x: torch.addcdiv(x, x, x.roll(1).abs() + 1e-2),
    "log of softmax": lambda x: torch.log(torch.softmax(3 * x, -1) + 1e-8),
    "log1p": lambda x: torch.log1p(x.sigmoid().neg() + 1e-4),
    "log2": lambda x: x.square().add(1e-4).log2(),
    "atan2": lambda x: torch.atan2(x, x.roll(1)),
    "logsumexp": lambda x: x.logsumexp(0),
    "logaddexp": lambda x: torch.logaddexp(10 * x, 10 * x.roll(1)),
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "negative power": lambda x: (x.abs() + 1e-2).pow(-1.5),
    "high power": lambda x: (x / 2).pow(20),
    "root of a relu": lambda x: x.relu().add(1e-6).pow(0.5),
    "power of a tensor": lambda x: torch.pow(x.abs() + 0.1, x.roll(1)),
    "power of a number": lambda x: torch.pow(2.0, 4 * x),
    "exp": lambda x: torch.exp(4 * x),
    "expm1": lambda x: torch.expm1(x * 1e-3),
    "sinh of the small": lambda x: torch.sinh(4 * x) * (x.abs() < 0.6),
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
    "cross of parallel vectors": lambda x: parallel(x[:255].view(3, -1).float(), 1e-3 * NEAR[:255].view(3, -1)),
}
ROWS |= {name: Row(f, normal((256, 64))) for name, f in {**COMPARING, **DIVIDING}.items()}
ROWS |= {name: Row(f, normal((256, 64)), ways=EAGER) for name, f in BETA.items()}

# What is divided by is a product, whose factors are gone by then.


class Doubled(torch.autograd.Function):
    """A function of a user, which saves nothing."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return 2 * grad


def many_others(x: Tensor) -> Tensor:
    product = (x - 1).square()
    others = sum(((x + k) * (x - k)).mean() for k in range(9))
    return 1 / (product + 1e-2) + 1e-6 * others


def clamped_bands(x: Tensor) -> Tensor:
    spectrum = x.repeat(1, 8) * torch.logspace(-2, 1, 64)
    return (spectrum**2 @ torch.eye(8).repeat_interleave(8, 0)).clamp(min=1e-9).log()


def centroid(x: Tensor, weights: Tensor) -> Tensor:
    power = (x.view(64, -1) * torch.logspace(-2, 1, 64)) ** 2 * weights[:, None]
    return (torch.arange(64.0)[:, None] * power).sum(0) / power.sum(0)


TEMPORARIES: dict[str, Loss] = {
    "square": lambda x: ((x - 1).square() + 1e-2).reciprocal(),
    "product": lambda x: 1 / ((x + 1) * (x - 1) + 4).square().add(1e-2),
    "addcmul": lambda x: 1 / torch.addcmul(torch.full_like(x, 1e-2), x - 1, x - 1),
    "lerp": lambda x: F.rms_norm(torch.lerp(x, x.roll(1, -1), x.roll(1, 0).sigmoid()), (8,), eps=1e-7),
    "gelu": lambda x: 1 / (F.gelu(2 * x).square() + 1e-3),
    "glu": lambda x: 1 / (F.glu(2 * x).square() + 1e-3),
    "products of them": lambda x: ((x - 1).square() + 0.1).prod(-1).div(1e3),
    "short rows": lambda x: 1 / ((x - 1).view(-1, 4, 4) @ x.detach().view(-1, 4, 4)).square().add(1e-2),
    "function of a user": lambda x: 1 / (Doubled.apply((x - 1).square()) + 1e-2),  # type: ignore[no-untyped-call]
    "many others between": many_others,
    "clamped bands": clamped_bands,
    "moving average": lambda x: (
        F.conv1d(((x.view(-1, 1, 64) * torch.logspace(-2, 1, 64)) ** 2), torch.ones(1, 1, 5) / 5) + 1e-6
    ).log(),
    "variance of neighbours": lambda x: ((PAIRED @ (x + 1) ** 2 - (PAIRED @ (x + 1)) ** 2).relu() + 1e-3).sqrt(),
}
PAIRED = (torch.eye(512) + torch.eye(512).roll(1, 0)) / 2
ROWS |= {f"divisor, {name}": Row(f, normal((512, 8))) for name, f in TEMPORARIES.items()}
ROWS["divisor, sums of sums"] = Row(centroid, lambda: Operands([torch.randn(512, 8)], [torch.ones(64)]))

# Decompositions of a covariance of features, which have much smaller deviations in some directions than in others.

ROTATION = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))[0]


def features() -> Operands:
    x = (torch.randn(256, 16) * torch.logspace(-1.5, 0, 16)) @ ROTATION
    return Operands([x], [torch.ones(16)])


def covariance(x: Tensor) -> Tensor:
    x = x - x.mean(0)
    return (x.t() @ x / len(x)).float()


def whitened(x: Tensor, w: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(covariance(x * w))
    return x @ ((vectors * values.rsqrt()) @ vectors.t())


SOLUTIONS: dict[str, Loss] = {
    "eigh": lambda c: torch.linalg.eigh(c)[1].abs(),
    "qr": lambda c: torch.linalg.qr(c)[0],
    "lu_factor": lambda c: torch.linalg.lu_factor(c)[0],
    "pinv": in_float32(torch.linalg.pinv),
}
ROWS |= {f"covariance, {name}": Row(lambda x, w, f=f: f(covariance(x * w)), features) for name, f in SOLUTIONS.items()}
ROWS["covariance, lstsq"] = Row(
    lambda x, w: torch.linalg.lstsq(covariance(x * w), torch.ones(16, 3)).solution,
    features,
    ways=EAGER,  # the shape of what it returns depends on values, which torch.compile does not trace
)
ROWS["whitening"] = Row(whitened, features)

# Norms of few elements: rows of four, each a thousand times larger than one beside it; and of two that nearly agree.

FEW: dict[str, Loss] = {
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
TWO: dict[str, Loss] = {
    "layer norm": lambda x: F.layer_norm(x, (2,)),
    "batch norm": lambda x: F.batch_norm(x.t(), None, None, training=True),
    "group norm": lambda x: F.group_norm(x[..., None], 1),
}


def small_rows(width: int, rows: int = 1024) -> Operands:
    sizes = torch.logspace(0, -3, 4).repeat(rows // 4)[:, None]
    return Operands([torch.randn(rows, width) * sizes], [torch.ones(width)])


def nearly_agreeing() -> Operands:
    """Draw pairs a hundredth apart, where bfloat16 rounds one in 512."""
    return Operands([1.5 * (1 + torch.rand(512, 1) + torch.tensor([-0.005, 0.005]))])


ROWS |= {f"few, {name}": Row(lambda x, w, f=f: f(x * w), lambda: small_rows(4)) for name, f in FEW.items()}
# A layer's product in bfloat16 would hide what the operator loses.
ROWS |= {f"two, {name}": Row(f, nearly_agreeing, ways=("plain", "graph")) for name, f in TWO.items()}


def padded() -> Operands:
    """Draw rows of which each eighth is zeros, with 1 / rms of 1000."""
    x = torch.randn(256, 64)
    x[7::8] = 0
    return Operands([x], [torch.zeros(64)])


ROWS["padding"] = Row(
    lambda x, w: (x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + w))[: len(x) - len(x) // 8], padded
)
ROWS["padding of short rows"] = Row(
    lambda x: torch.minimum(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6), x).square(),
    lambda: Operands([torch.randn(64, 12) * (torch.arange(64)[:, None] % 4 > 0)]),
)
ROWS["coordinates"] = Row(
    lambda image, theta: F.grid_sample(
        image, F.affine_grid(theta * 1.05, [2, 4, 32, 32], align_corners=False), align_corners=False
    ),
    lambda: Operands([torch.randn(2, 4, 16, 16)], [torch.eye(2, 3).repeat(2, 1, 1)]),
)

# Activations; saturated ones pass the gradient of the few small elements, with a group's largest near 60.

ACTIVATIONS: list[nn.Module] = [
    *(nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Mish(), nn.ELU(2.0), nn.SELU(), nn.CELU(1.5), nn.PReLU()),
    *(nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6(), nn.LeakyReLU(0.1), nn.Hardswish(), nn.Hardsigmoid()),
    *(nn.Hardtanh(), nn.Hardshrink(), nn.Softshrink(), nn.Softsign(), nn.Softplus(), nn.LogSigmoid(), nn.Tanh()),
    *(nn.Tanhshrink(), nn.Sigmoid(), nn.Threshold(0.1, 20.0), nn.RReLU(), nn.GLU(), nn.ELU(1.5, inplace=True)),
    *(nn.Softmax(-1), nn.LogSoftmax(-1), nn.Softmin(-1), nn.Hardswish(inplace=True), nn.SELU(inplace=True)),
]
SATURATED: dict[str, Loss] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "glu": F.glu,
    "cell": lambda x: torch.sigmoid(x) * torch.tanh(x.roll(1, 0)),
    "gelu": F.gelu,
    "gelu by hand": lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3))),
    "silu": F.silu,
}
ROWS |= {
    f"activation, {f}": Row(lambda x, b, f=f: f(x + b), normal((256, 64), parameters=((64,),))) for f in ACTIVATIONS
}
ROWS |= {f"saturated, {name}": Row(f, lambda: Operands([16 * torch.randn(256, 64)])) for name, f in SATURATED.items()}

# A gain for each column before a function that passes the gradient of some elements alone: the gain's own gradient is
# a sum of products with these.

GAINS: dict[str, Loss] = {
    "tanh": lambda x: torch.tanh(4 * x),
    "sigmoid": lambda x: torch.sigmoid(4 * x),
    "exp": lambda x: torch.exp(2 * x),
    "softmax": lambda x: torch.softmax(4 * x, -1),
    "gelu": F.gelu,
    "relu": F.relu,
    "median": lambda x: x.median(0).values,
    "largest": lambda x: x.amax(0),
    "lgamma": lambda x: torch.lgamma(x.abs() + 1e-2),
    "rms norm": lambda x: F.rms_norm(x, (64,)),
    "near zero": lambda x: torch.where(x.abs() < 0.1, x, 0),
}
ROWS |= {f"gain, {name}": Row(lambda x, w, f=f: f(x * w), gained(256, 64)) for name, f in GAINS.items()}
