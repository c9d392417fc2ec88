"""Functions of ``pyactcomp.functional`` beside torch's, for inputs and gradients in many layouts of memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from functional_checks import normal, turned
from torch import Tensor
from torch.nn import functional as F

from pyactcomp import functional
from pyactcomp.engine import recompute
from pyactcomp.functional import Codes
from pyactcomp.functional.activations.gelu.new_gelu import new_gelu
from pyactcomp.functional.convolutional.batch_norm import batch_norm
from pyactcomp.functional.convolutional.max_pool import max_pool2d
from pyactcomp.functional.norms.add_rms_norm import add_rms_norm
from pyactcomp.functional.norms.layer_norm import add_layer_norm
from pyactcomp.functional.windows.window_attention import window_attention

WIDTH = 64
WEIGHT, BIAS = normal(WIDTH, seed=5), normal(WIDTH, seed=6)
MATRIX = normal(32, WIDTH, seed=7)
COS, SIN = normal(1, 8, WIDTH, seed=8), normal(1, 8, WIDTH, seed=9)
LABELS = torch.arange(16)
# Eight bits of a group with a range of about six standard deviations are off by half a step, 1.2 % of one, and slopes
# are below 2. Elements that were taken for each other are off by 141 %.
FAR = 0.1


class Pair(NamedTuple):
    """A function of ours and torch's, both of x of a shape, the first of codes too."""

    shape: tuple[int, ...]
    ours: Callable[..., Tensor]
    torch: Callable[[Tensor], Tensor]


def rotated(x: Tensor, heads: int) -> Tensor:
    return x * COS.to(x.device).unsqueeze(heads) + turned(x) * SIN.to(x.device).unsqueeze(heads)


def rms(x: Tensor) -> Tensor:
    return WEIGHT.to(x.device) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def chain_of_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def normalised(x: Tensor, relu: bool, residual: Tensor | None = None) -> Tensor:
    out = F.batch_norm(x, None, None, WEIGHT.to(x.device), BIAS.to(x.device), training=True)
    out = out if residual is None else out + residual
    return F.relu(out) if relu else out


def attended(qkv: Tensor) -> Tensor:
    """Attention of windows as timm's Swin has it: 4 heads of 16."""
    count, tokens, _ = qkv.shape
    q, k, v = qkv.reshape(count, tokens, 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0)
    scores = (q * 0.25) @ k.transpose(-2, -1) + BIAS_OF_HEADS.to(qkv.device)
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(count, tokens, 64)


BIAS_OF_HEADS = normal(4, 8, 8, seed=11)


def on(x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.to(x.device) for t in tensors)


PAIRS: dict[str, Pair] = {
    "linear_cross_entropy": Pair(
        (16, 64),
        lambda x, codes: functional.linear_cross_entropy(x, *on(x, MATRIX, LABELS), impl=codes.impl),
        lambda x: F.cross_entropy(F.linear(x, *on(x, MATRIX)), *on(x, LABELS)),
    ),
    "gelu": Pair((2, 4, 8, 64), lambda x, codes: functional.gelu(x, codes=codes), F.gelu),
    "new_gelu": Pair((2, 4, 8, 64), lambda x, codes: new_gelu(x, codes=codes), chain_of_gelu),
    "dropout": Pair((2, 4, 8, 64), lambda x, codes: functional.dropout(x, 0.3), lambda x: F.dropout(x, 0.3)),
    "silu_mul": Pair(
        (2, 4, 8, 64), lambda x, codes: functional.silu_mul(x, 2 * x, codes=codes), lambda x: F.silu(x) * (2 * x)
    ),
    "silu_mul of two layouts": Pair(
        (2, 8, 64),
        lambda x, codes: functional.silu_mul(x.transpose(0, 1).contiguous().transpose(0, 1), 2 * x, codes=codes),
        lambda x: F.silu(x.transpose(0, 1).contiguous().transpose(0, 1)) * (2 * x),
    ),
    "layer_norm": Pair(
        (2, 4, 8, 64),
        lambda x, codes: functional.layer_norm(x, 64, *on(x, WEIGHT, BIAS), codes=codes),
        lambda x: F.layer_norm(x, (64,), *on(x, WEIGHT, BIAS)),
    ),
    "layer_norm of rows": Pair(
        (16, 64),
        lambda x, codes: functional.layer_norm(x, 64, rows=torch.arange(16, device=x.device).flip(0), codes=codes),
        lambda x: F.layer_norm(x.flip(0), (64,)),
    ),
    "add_layer_norm": Pair(
        (2, 8, 64),
        lambda x, codes: add_layer_norm(x, 2 * x, 64, *on(x, WEIGHT, BIAS), codes=codes),
        lambda x: F.layer_norm(x + 2 * x, (64,), *on(x, WEIGHT, BIAS)),
    ),
    "rms_norm": Pair((2, 4, 8, 64), lambda x, codes: functional.rms_norm(x, *on(x, WEIGHT), 1e-6, codes=codes), rms),
    "add_rms_norm": Pair(
        (2, 8, 64),
        lambda x, codes: add_rms_norm(x, 2 * x, *on(x, WEIGHT), 1e-6, codes=codes)[0],
        lambda x: rms(x + 2 * x),
    ),
    "batch_norm": Pair(
        (2, 64, 4, 8),
        lambda x, codes: batch_norm(x, None, None, *on(x, WEIGHT, BIAS), codes=codes),
        lambda x: normalised(x, relu=False),
    ),
    "batch_norm, add and relu": Pair(
        (2, 64, 4, 8),
        lambda x, codes: batch_norm(x, None, None, *on(x, WEIGHT, BIAS), relu=True, residual=2 * x, codes=codes),
        lambda x: normalised(x, relu=True, residual=2 * x),
    ),
    "max_pool2d": Pair(
        (2, 64, 4, 8),
        lambda x, codes: max_pool2d(x, 3, 2, 1, impl=codes.impl),
        lambda x: F.max_pool2d(x, 3, 2, 1),
    ),
    "rope": Pair(
        (2, 4, 8, 64),
        lambda x, codes: functional.rope(x, x, *on(x, COS, SIN), contiguous_grad=codes.bits is None, impl=codes.impl)[
            0
        ],
        lambda x: rotated(x, 1),
    ),
    "rope of tokens": Pair(
        (2, 8, 4, 64),
        lambda x, codes: functional.rope(
            x, x, *on(x, COS, SIN), 2, contiguous_grad=codes.bits is None, impl=codes.impl
        )[0],
        lambda x: rotated(x, 2),
    ),
    "window_attention": Pair(
        (2, 8, 192), lambda x, codes: window_attention(x, 4, *on(x, BIAS_OF_HEADS), codes=codes), attended
    ),
}
# ``residual_add`` has no function of torch's beside it: it takes any rows and returns contiguous ones.


def in_layout(layout: str, x: Tensor) -> Tensor:
    """Return the values of ``x``, or some of them where elements repeat, in a layout."""
    match layout:
        case "contiguous":
            return x.clone()
        case "transposed":
            return x.transpose(-1, -2).contiguous().transpose(-1, -2)
        case "first dimensions swapped":
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        case "channels_last" if x.dim() == 4:
            return x.contiguous(memory_format=torch.channels_last)
        case "channels_last":
            return x.movedim(-2, -1).contiguous().movedim(-1, -2)
        case "gapped":
            return x.repeat_interleave(2, -1)[..., ::2]
        case "transposed and gapped":
            wide = F.pad(x.transpose(-1, -2), (0, 3, 0, 5))
            return wide.transpose(-1, -2)[..., : x.shape[-2], : x.shape[-1]]
        case "expanded":
            return x[:1].contiguous().expand(x.shape)
    raise ValueError(layout)


LAYOUTS = [
    "contiguous",
    "transposed",
    "first dimensions swapped",
    "channels_last",
    "gapped",
    "transposed and gapped",
    "expanded",
]


def run(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a function's output, and its gradient for each layout of the output's."""
    torch.manual_seed(1)
    leaf = x.detach().requires_grad_()
    out = function(leaf)
    if out.dim() == 0:
        return out, {"none": torch.autograd.grad(out, leaf)[0]}
    values = normal(*out.shape, seed=3).to(x.device)
    grads = {layout: in_layout(layout, values) for layout in LAYOUTS}
    grads["as the output"] = torch.empty_like(out.detach()).copy_(values)
    return out, {name: torch.autograd.grad(out, leaf, g, retain_graph=True)[0] for name, g in grads.items()}


def off_by(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).detach().norm() / expected.detach().norm().clamp_min(1e-12))


def check(name: str, layout: str, bits: int | None, impl: str, device: torch.device, to_the_bit: bool) -> None:
    """Compare output, gradient and what is computed again, and how they lie in memory."""
    pair = PAIRS[name]
    x = in_layout(layout, normal(*pair.shape).to(device))
    out, grads = run(lambda x: pair.ours(x, Codes(bits=bits, impl=impl)), x)
    expected, exact = run(pair.torch, x)
    assert out.stride() == expected.stride()
    assert off_by(out, expected) < FAR
    for layout_of_grad, grad in grads.items():
        true = exact[layout_of_grad]
        assert off_by(grad, true) < FAR, layout_of_grad
        if bits is None:
            assert grad.stride() == true.stride(), layout_of_grad
            assert torch.equal(grad, true) or not to_the_bit, layout_of_grad
    if bits is None and to_the_bit:
        assert torch.equal(out, expected)
    again = recompute.recomputation_of(out)
    if again is not None:
        assert again().stride() == out.stride()
        assert off_by(again(), out) < FAR
