"""How outputs, gradients and what is computed again lie in memory: as torch's do, whatever comes in.

Views of an output are taken by its strides, and sums are rounded in the order of memory.
"""

from __future__ import annotations

import pytest
import torch
from layout_checks import FAR, LAYOUTS, PAIRS, check, in_layout, normal, off_by
from torch import nn

import pyactcomp
from pyactcomp import functional
from pyactcomp.functional import Codes
from pyactcomp.functional.convolutional.batch_norm import batch_norm


def test_every_function_is_here() -> None:
    # A gated MLP in tiles takes no bits=None: its products are not torch's to the bit (test_functional_tiles.py).
    others = {"Codes", "gated_mlp", "Projection"}
    of_fused_modules = {"add_layer_norm", "add_rms_norm", "batch_norm", "max_pool2d", "new_gelu", "window_attention"}
    named = {name.split()[0].strip(",") for name in PAIRS}
    assert named == set(functional.__all__) - others | of_fused_modules


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PAIRS)
def test_results_lie_as_torchs(name: str, layout: str, bits: int | None) -> None:
    check(name, layout, bits, "auto", torch.device("cpu"), to_the_bit=name not in TO_AN_ULP)


# Their gradients are those of one formula instead of a chain of operators.
TO_AN_ULP = {"softmax", "softmax of columns", "window_attention", "linear_cross_entropy", "batch_norm, add and relu"}


def batch_norm_layouts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the values of ``x`` in layouts of any dimensions; where elements repeat, some of them."""
    found = {
        "contiguous": x.clone(),
        "transposed": x.transpose(-1, -2).contiguous().transpose(-1, -2),
        "first dimensions swapped": x.transpose(0, 1).contiguous().transpose(0, 1),
        "gapped": x.repeat_interleave(2, -1)[..., ::2],
        "every other sample": x.repeat_interleave(2, 0)[::2],
        "expanded": x[:1].contiguous().expand(x.shape),
        "expanded channels": x[:, :1].contiguous().expand(x.shape),
    }
    if x.dim() > 2:
        twice = torch.cat((x, x), 1).movedim(1, -1).contiguous().movedim(-1, 1)
        found["channels last"] = x.movedim(1, -1).contiguous().movedim(-1, 1)
        found["some of the channels last"] = twice[:, : x.shape[1]]
    return found


@pytest.mark.parametrize(
    ("device", "cudnn"),
    [
        ("cpu", True),
        pytest.param("cuda", True, marks=pytest.mark.gpu),
        pytest.param("cuda", False, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "shape", [(6, 64), (6, 64, 5), (6, 64, 4, 5), (1, 64, 4, 5), (6, 64, 4, 1), (6, 64, 1, 1), (6, 64, 3, 4, 5)]
)
def test_batch_norm_of_any_dimensions_lies_as_torchs(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, cudnn: bool
) -> None:
    """torch's kernels, for cuDNN, the GPU and the CPU, each have a rule of their own for outputs and gradients."""
    values, cotangent = (normal(*shape, seed=seed).to(dtype).to(device) for seed in (0, 1))
    for affine in (True, False):
        weight, bias = (normal(64, seed=seed).to(dtype).to(device) if affine else None for seed in (2, 3))
        for name, x in batch_norm_layouts(values).items():
            for bits, relu in ((None, False), (8, False), (8, True)):
                with torch.backends.cudnn.flags(enabled=cudnn):
                    leaf = x.detach().requires_grad_()
                    out = batch_norm(leaf, None, None, weight, bias, relu=relu, codes=Codes(bits=bits))
                    expected = torch.nn.functional.batch_norm(leaf, None, None, weight, bias, training=True)
                    expected = expected.relu() if relu else expected
                    where = f"{name}, bits {bits}, relu {relu}, affine {affine}"
                    assert out.stride() == expected.stride(), where
                    for of_grad, grad in batch_norm_layouts(cotangent).items():
                        got, true = (torch.autograd.grad(y, leaf, grad, retain_graph=True)[0] for y in (out, expected))
                        assert got.stride() == true.stride(), f"{where}, gradient {of_grad}"


class Patches(nn.Module):
    """Patches of a convolution, which lie in memory channel by channel, normalised before a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm, self.linear = nn.Conv2d(3, 64, 4, 4), nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(self.norm(self.patches(x).flatten(2).transpose(1, 2)))
        return out


@pytest.mark.parametrize("mode", ["int8", "lossless"])
def test_a_norm_of_transposed_patches_gives_the_next_layer_its_gradient(mode: str) -> None:
    torch.manual_seed(0)
    model, x, weight = Patches(), normal(8, 3, 32, 32), normal(8, 64, 64, seed=1)
    exact = torch.autograd.grad((model(x) * weight).sum(), list(model.parameters()))
    pyactcomp.compress(model, mode=mode, min_bytes=0)
    for got, expected in zip(
        torch.autograd.grad((model(x) * weight).sum(), list(model.parameters())), exact, strict=True
    ):
        assert torch.equal(got, expected) if mode == "lossless" else off_by(got, expected) < FAR


def test_sums_behind_a_rotary_embedding_are_rounded_as_torchs() -> None:
    """As where a norm of each head comes before it: its weight's gradient is a sum over tokens and heads."""
    cos, sin = normal(1, 64, 16, seed=1), normal(1, 64, 16, seed=2)
    x, weight, grad = normal(4, 64, 8, 16), normal(16, seed=3).requires_grad_(), normal(4, 8, 64, 16, seed=4)

    def gradient(heads_first: torch.Tensor, rotate: object) -> torch.Tensor:
        assert callable(rotate)
        return torch.autograd.grad(rotate(heads_first), weight, grad)[0]

    def of_torch(q: torch.Tensor) -> torch.Tensor:
        turned = torch.cat((-q[..., 8:], q[..., :8]), -1)
        return q * cos.unsqueeze(1) + turned * sin.unsqueeze(1)

    def of_ours(q: torch.Tensor) -> torch.Tensor:
        return functional.rope(q, q, cos, sin, contiguous_grad=True)[0]

    expected = gradient((x * weight).transpose(1, 2), of_torch)
    assert torch.equal(gradient((x * weight).transpose(1, 2), of_ours), expected)


def test_layouts_are_what_they_are_called() -> None:
    x = normal(4, 8, 16, 64)
    strides = {name: in_layout(name, x).stride() for name in LAYOUTS}
    assert len(set(strides.values())) == len(LAYOUTS)
    assert all(torch.equal(in_layout(name, x), x) for name in LAYOUTS if name != "expanded")
