"""Rows of programs: layers' results beside learnt parameters, in algebra that no rule was made for."""

from __future__ import annotations

import math

import torch
from exactness_rows import Operands, Row, enter
from torch import Tensor
from torch.nn import functional as F

ROWS: dict[str, Row] = {}
row = enter(ROWS)
SEED = torch.Generator().manual_seed(0)
NOISE = torch.randn(64, 64, generator=SEED)
IDS = torch.randint(0, 8, (64,), generator=SEED)
SEQUENCE = (4, 16, 32)
CAUSAL = torch.ones(16, 16).tril()


@row(SEQUENCE, p=[(32, 16), (32, 16), (32, 16), (32, 1), torch.full((16,), 3.0)])
def delta_rule(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wb: Tensor, shared: Tensor) -> Tensor:
    """Fast weights; a norm ignores what all values share."""
    q, k, v, beta = x @ wq, F.normalize(x @ wk, dim=-1), x @ wv + shared, (x @ wb).sigmoid()
    state, outputs = torch.zeros(4, 16, 16), []
    for t in range(6):
        key = k[:, t, :, None]
        state = state + beta[:, t, :, None] * (v[:, t, :, None] - state @ key) @ key.mT
        outputs.append(state @ q[:, t, :, None])
    return F.layer_norm(torch.stack(outputs, 1).squeeze(-1), (16,))


def near_its_gram() -> Operands:
    x, w = torch.randn(64, 32), torch.randn(32, 8) / 6
    z = x @ w
    return Operands([x], [w], [z @ z.t() + 0.05 * NOISE])


def low_rank_gram(x: Tensor, w: Tensor, gram: Tensor) -> Tensor:
    z = x @ w
    return ((z @ z.t() - gram) ** 2).mean()


ROWS["low rank gram"] = Row(low_rank_gram, near_its_gram)


@row(SEQUENCE, p=[(32, 32), (32, 32), (32, 32), (16, 16), torch.full((32,), 3.0)])
def masked_bias(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, bias: Tensor, shared: Tensor) -> Tensor:
    scores = (x @ wq) @ (x @ wk).mT / math.sqrt(32) + bias
    return F.layer_norm(scores.tril() @ (x @ wv + shared), (32,))


@row((64, 64), p=[torch.zeros(64), torch.full((1,), 1.5)], c=[NOISE])
def student_likelihood(mean: Tensor, s: Tensor, nu: Tensor, y: Tensor) -> Tensor:
    return ((nu.exp() + 1) / 2 * torch.log1p(((y - mean) / s.exp()) ** 2 / nu.exp()) + s).mean()


@row((64, 32), p=[(32, 32), (32, 32), torch.full((1,), 2.6)])
def image_and_text(x: Tensor, a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    scores = F.normalize(x @ a, dim=-1) @ F.normalize((x + 0.1 * NOISE[:, :32]) @ b, dim=-1).t() * scale.exp()
    return F.cross_entropy(scores, torch.arange(64)) + F.cross_entropy(scores.t(), torch.arange(64))


@row((64, 32), p=[(32, 24)], c=[NOISE[:, :1]])
def mixture_density(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    weight, mean, s = (x @ w).chunk(3, -1)
    return -(weight.log_softmax(-1) - 0.5 * ((y - mean) * (-s).exp()) ** 2 - s).logsumexp(-1).mean()


@row((64, 16), p=[(32, 16), torch.full((32,), -2.0), (32, 8)])
def radial_basis(x: Tensor, centres: Tensor, rate: Tensor, w: Tensor) -> Tensor:
    return torch.exp(-rate.exp() * (x[:, None] - centres).square().sum(-1)) @ w


@row((64, 16), (64, 16), p=[torch.full((1,), -3.0)])
def mean_discrepancy(x: Tensor, y: Tensor, rate: Tensor) -> Tensor:
    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return torch.exp(-rate.exp() * (a[:, None] - b).square().sum(-1)).mean()

    return kernel(x, x) + kernel(y, y) - 2 * kernel(x, y)


@row((32, 4), p=[torch.zeros(4), torch.full((1,), -2.0)], c=[NOISE[:32, :1]])
def gaussian_process(x: Tensor, s: Tensor, noise: Tensor, y: Tensor) -> Tensor:
    z = (x * s.exp()).float()
    k = torch.exp(-0.5 * (z[:, None] - z).square().sum(-1)) + noise.exp() * torch.eye(32)
    with torch.autocast("cpu", enabled=False):
        root = torch.linalg.cholesky(k)
        solved = torch.linalg.solve_triangular(root, y, upper=False)
    return solved.square().sum() / 2 + root.diagonal().log().sum()


@row((64, 32), p=[(32, 64), torch.zeros(64)], c=[NOISE.sigmoid()])
def gate_near_its_target(x: Tensor, w: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    gate = torch.sigmoid(0.01 * (x @ w) + bias + NOISE)
    return 1e4 * (gate - target).square().mean() + (gate * NOISE).mean()


@row(SEQUENCE, p=[(32, 64), (16, 64), torch.ones(64)])
def recurrent_cell(x: Tensor, w: Tensor, u: Tensor, bias: Tensor) -> Tensor:
    h = c = torch.zeros(4, 16)
    for t in range(6):
        i, f, g, o = (2 * (x[:, t] @ w + h @ u) + bias).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    return h


@row(SEQUENCE, p=[(32, 96), torch.ones(8), torch.full((1,), 2.0)])
def written_attention(x: Tensor, w: Tensor, gain: Tensor, scale: Tensor) -> Tensor:
    q, k, v = (x @ w).view(4, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
    q, k = (z * gain * torch.rsqrt(z.square().mean(-1, keepdim=True) + 1e-6) for z in (q, k))
    scores = (q @ k.mT * scale).masked_fill(CAUSAL == 0, -math.inf)
    return scores.softmax(-1) @ v


@row(SEQUENCE, p=[(32, 96), torch.full((4, 1, 1), -1.0)])
def distance_bias(x: Tensor, w: Tensor, slope: Tensor) -> Tensor:
    q, k, v = (x @ w).view(4, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
    far = (torch.arange(16) - torch.arange(16)[:, None]).abs()
    return (q @ k.mT / 3 - slope.exp() * far).softmax(-1) @ v


@row((64, 32), p=[(32, 16)])
def sparsest(x: Tensor, w: Tensor) -> Tensor:
    z = 3 * (x @ w)
    ordered = z.sort(-1, descending=True).values
    sums = ordered.cumsum(-1) - 1
    count = (torch.arange(1, 17) * ordered > sums).sum(-1, keepdim=True)
    return (z - sums.gather(-1, count - 1) / count).clamp(min=0)


@row(SEQUENCE, p=[(32, 16), (32, 16), (16, 32)])
def random_features(x: Tensor, a: Tensor, b: Tensor, projection: Tensor) -> Tensor:
    q, k = (torch.exp(z @ projection - z.square().sum(-1, keepdim=True) / 2) for z in (x @ a, x @ b))
    return q @ (k.mT @ x) / (q @ k.sum(1)[..., None] + 1e-6)


@row(SEQUENCE, p=[(32, 32), (32, 32), (32, 32), torch.full((1,), 2.0)])
def retention(x: Tensor, a: Tensor, b: Tensor, c: Tensor, decay: Tensor) -> Tensor:
    far = (torch.arange(16)[:, None] - torch.arange(16)).clamp(min=0)
    scores = (x @ a) @ (x @ b).mT / 6 * decay.sigmoid() ** far * CAUSAL
    return F.group_norm((scores @ (x @ c)).flatten(0, 1), 4)


@row(SEQUENCE, p=[(32, 16), (32, 8), (32, 8), torch.linspace(-2, 2, 8), torch.full((16,), -1.0), (32, 16)])
def selective_scan(x: Tensor, a: Tensor, b: Tensor, c: Tensor, rate: Tensor, bias: Tensor, w: Tensor) -> Tensor:
    u, dt, keys, queries = x @ w, F.softplus(x @ a + bias), x @ b, x @ c
    h, outputs = torch.zeros(4, 16, 8), []
    for t in range(6):
        h = h * torch.exp(-dt[:, t, :, None] * rate.exp()) + (dt * u)[:, t, :, None] * keys[:, t, None]
        outputs.append((h * queries[:, t, None]).sum(-1))
    return torch.stack(outputs) * F.silu(u[:, :6]).transpose(0, 1)


@row(SEQUENCE, p=[(32, 32), (32, 32), torch.linspace(-2, 1, 32), torch.ones(32)])
def receptance(x: Tensor, a: Tensor, b: Tensor, decay: Tensor, bonus: Tensor) -> Tensor:
    k, v, outputs = x @ a, x @ b, []
    total = weight = torch.zeros(4, 32)
    for t in range(6):
        now = (k[:, t] + bonus).exp()
        outputs.append((total + now * v[:, t]) / (weight + now))
        kept = (-decay.exp()).exp()
        total, weight = kept * total + k[:, t].exp() * v[:, t], kept * weight + k[:, t].exp()
    return torch.stack(outputs)


@row((64, 32), p=[(32, 4), (4, 32, 32)])
def soft_experts(x: Tensor, w: Tensor, experts: Tensor) -> Tensor:
    scores = x @ w
    best, chosen = scores.softmax(-1).topk(2, -1)
    gate = torch.zeros_like(scores).scatter(-1, chosen, (best / best.sum(-1, keepdim=True)).to(scores.dtype))
    y = torch.einsum("ne,nei->ni", gate, torch.einsum("nd,edi->nei", x, experts))
    return y.square().mean() + 4 * (scores.softmax(-1).mean(0) ** 2).sum() + 1e-2 * scores.logsumexp(-1).square().mean()


@row((64, 32), p=[(32, 32)])
def redundancy(x: Tensor, w: Tensor) -> Tensor:
    a, b = ((z - z.mean(0)) / z.std(0) for z in (x @ w, (x + 0.1 * NOISE[:, :32]) @ w))
    correlation = a.t() @ b / 64
    return (correlation.diagonal() - 1).square().sum() + 0.01 * (correlation * (1 - torch.eye(32))).square().sum()


@row((64, 32), p=[(32, 32)])
def variance_and_covariance(x: Tensor, w: Tensor) -> Tensor:
    z = x @ w
    centred = z - z.mean(0)
    covariance = centred.t() @ centred / 63
    return F.relu(1.1 - (z.var(0) + 1e-4).sqrt()).mean() + (covariance * (1 - torch.eye(32))).square().sum() / 32


@row((8, 64), p=[torch.full((1,), -1.0), (64, 64)])
def heat_equation(x: Tensor, diffusivity: Tensor, w: Tensor) -> Tensor:
    u = (x @ w).tanh().cumsum(-1)
    bend = u[:, 2:] - 2 * u[:, 1:-1] + u[:, :-2]
    rate = u.roll(-1, 0) - u
    return (rate[:, 1:-1] - diffusivity.exp() * bend).square().mean()


@row((64, 3), p=[torch.ones(1), torch.zeros(1)])
def pair_energy(x: Tensor, size: Tensor, depth: Tensor) -> Tensor:
    grid = 1.5 * torch.cartesian_prod(*(3 * [torch.arange(4.0)])) + 0.05 * x
    distance = (grid[:, None] - grid).square().sum(-1) + 100 * torch.eye(64)
    inverse = (size**2 / distance) ** 3
    return (depth.exp() * (inverse**2 - inverse)).mean()


@row((64, 32), p=[(32, 32), (32, 1)])
def slope_penalty(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    h = torch.tanh(x @ a)
    slope = ((1 - h**2) * b.t()) @ a.t()
    return (h @ b).square().mean() + (slope.norm(dim=-1) - 1).square().mean()


@row((64, 32), p=[(32, 32), torch.ones(32)])
def norm_of_a_weight(x: Tensor, v: Tensor, gain: Tensor) -> Tensor:
    return F.gelu(x @ (v / v.norm(dim=0) * gain))


@row((64, 32), p=[(32, 8)])
def factorization_machine(x: Tensor, v: Tensor) -> Tensor:
    return 0.5 * ((x @ v) ** 2 - x**2 @ v**2).sum(-1)


@row((64, 16), p=[(16, 16), (16, 1), (16, 1)])
def graph_attention(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    z, to = x @ w, IDS.repeat(4)
    source = torch.arange(256) % 64
    score = F.leaky_relu(2 * (z @ a)[source] + 2 * (z @ b)[to], 0.2).exp().float()
    total = torch.zeros(64, 1).index_add(0, to, score)
    return torch.zeros(64, 16).index_add(0, to, score / total[to] * z[source])


@row((64, 32), p=[(32, 4)], c=[NOISE[:, 0]])
def evidential_regression(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    mean, nu, alpha, beta = (x @ w).unbind(-1)
    nu, alpha, beta = F.softplus(nu) + 1e-2, F.softplus(alpha) + 1.01, F.softplus(beta) + 1e-2
    omega = 2 * beta * (1 + nu)
    likelihood = (alpha + 0.5) * ((y - mean) ** 2 * nu + omega).log() - alpha * omega.log() - 0.5 * nu.log()
    return (likelihood + alpha.lgamma() - (alpha + 0.5).lgamma()).mean()


@row((64, 16), p=[(16, 16), torch.full((1,), 0.5)])
def triplets(x: Tensor, w: Tensor, margin: Tensor) -> Tensor:
    z = x @ w
    near, far = (z - z.detach() - 0.1 * NOISE[:, :16]).norm(dim=-1), (z - z.roll(1, 0)).norm(dim=-1)
    return F.relu(near - far / 4 + margin).square().mean() - 0.1 * margin.sum()


@row((64, 32), p=[(32, 8)])
def angular_margin(x: Tensor, centres: Tensor) -> Tensor:
    cosine = (F.normalize(x, dim=-1) @ F.normalize(centres, dim=0)).float()
    moved = torch.cos(torch.acos(cosine.clamp(-0.999, 0.999)) + 0.5)
    return F.cross_entropy(16 * torch.where(F.one_hot(IDS, 8) > 0, moved, cosine), IDS)


@row((64, 16), p=[(16, 8)])
def hyperbolic_distance(x: Tensor, w: Tensor) -> Tensor:
    z = (x @ w).float()
    z = z / (1 + z.norm(dim=-1, keepdim=True))
    rest = 1 - z.square().sum(-1)
    distance = (z[:, None] - z).square().sum(-1)
    return torch.acosh(1 + 2 * distance / (rest[:, None] * rest) + 1e-3).mean()


@row((64, 32), p=[(32, 1)])
def survival(x: Tensor, w: Tensor) -> Tensor:
    hazard = 3 * (x @ w).squeeze(-1)
    return -((hazard - hazard.float().flip(0).logcumsumexp(0).flip(0)) * (IDS < 4)).mean()


@row((64, 32), p=[(32, 8), (32, 1), torch.zeros(1)], c=[NOISE[:, 0]])
def clipped_policy(x: Tensor, w: Tensor, v: Tensor, bonus: Tensor, advantage: Tensor) -> Tensor:
    logs = (x @ w).log_softmax(-1)
    chosen = logs.gather(1, IDS[:, None]).squeeze(1)
    ratio = (chosen - chosen.detach() - 0.1 * NOISE[:, 1]).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    value = ((x @ v).squeeze(-1) - advantage).square()
    return (value - gain).mean() + bonus.exp().sum() * 0.01 * (logs.exp() * logs).sum(-1).mean()


@row((64, 16), p=[(16, 16), (16, 16), torch.full((16,), -1.0)])
def differential_equation(x: Tensor, a: Tensor, b: Tensor, rate: Tensor) -> Tensor:
    def slope(y: Tensor) -> Tensor:
        return torch.tanh(y @ a) @ b - rate.exp() * y

    for _ in range(3):
        first = slope(x)
        second = slope(x + 0.15 * first)
        x = x + 0.3 * second
    return x


@row((16, 32, 16), p=[(16, 4), torch.zeros(1)])
def volume_rendering(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    density, colour = F.softplus((x @ w)[..., :1] * 2 + bias), (x @ w)[..., 1:].sigmoid()
    alpha = 1 - (-density * 0.3).exp()
    seen = torch.cumprod(1 - alpha + 1e-10, 1)
    return (alpha * seen * colour).sum(1)


@row((4, 256), p=[torch.ones(65)])
def spectral_loss(x: Tensor, weights: Tensor) -> Tensor:
    window = torch.hann_window(128)
    frames = torch.fft.rfft(x.float().unfold(-1, 128, 64) * window)
    power = frames.real**2 + frames.imag**2
    return (weights * (power + 1e-5).log()).abs().mean()


@row((64, 64), p=[torch.ones(64), torch.full((1,), 0.25)])
def learnt_power(x: Tensor, w: Tensor, exponent: Tensor) -> Tensor:
    """A generalised mean of squares, as pooling by norms takes it."""
    return ((x * w).square() + 1e-4).pow(exponent).mean(-1).pow(1 / exponent)


@row((4, 16, 32), p=[(32, 32), (32, 32), (4, 1, 1)])
def few_summands(x: Tensor, a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """Scores of short heads, of which backward takes differences over four elements."""
    q, k = ((x @ w).view(4, 16, 8, 4).transpose(1, 2) for w in (a, b))
    return F.adaptive_max_pool2d((scale[:, None].exp() * (q @ k.mT)).softmax(-1) @ k, 2).sin()
