"""A fused module raises what the module itself does where its function does not take an input."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pyactcomp
from pyactcomp.fusions import fused_modules


def outcome(module: nn.Module, x: Tensor) -> type[Exception] | torch.dtype:
    """Return the dtype of what a module gives, or the type of what its forward or its backward raises."""
    try:
        out = module(x)
        out.abs().sum().backward()
    except Exception as error:  # whichever: it is compared
        return type(error)
    dtype: torch.dtype = out.dtype
    return dtype


# Torch warns, once, of a weight that is not of the dtype of the input.
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize(
    "shape", [(512,), (8, 8), (2, 3, 7), (2, 3, 8, 8), (2, 8, 8, 8), (64,), (2, 64), (0, 64), (1,)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LayerNorm(64),
        lambda: nn.LayerNorm((8, 8)).to(torch.bfloat16),
        lambda: nn.RMSNorm(64, eps=1e-6),
        nn.GELU,
        lambda: nn.Dropout(0.5),
        lambda: nn.BatchNorm2d(8),
        lambda: nn.BatchNorm2d(3).to(torch.bfloat16),
        lambda: nn.MaxPool2d((2,)),
        lambda: nn.MaxPool2d(3, padding=2),
        lambda: nn.MaxPool2d((2, 2, 2)),
    ],
)
def test_what_a_module_does_not_take_raises_as_that_of_torch(
    make: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = torch.randn(shape, dtype=dtype)
    compressed = pyactcomp.compress(nn.Sequential(make()), min_bytes=0)
    assert fused_modules(compressed)
    found, expected = outcome(compressed, x.clone().requires_grad_()), outcome(make(), x.clone().requires_grad_())
    assert found is expected


@pytest.mark.parametrize(
    ("name", "value"),
    [("eps", None), ("weight", None), ("normalized_shape", (2, 64)), ("normalized_shape", (32,))],
    ids=str,
)
def test_a_norm_that_was_edited_after_compress_computes_what_torchs_would(name: str, value: object) -> None:
    torch.manual_seed(0)
    plain = nn.RMSNorm(64, eps=1e-1)
    compressed = pyactcomp.compress(nn.Sequential(copy.deepcopy(plain)), min_bytes=0)
    assert fused_modules(compressed) == [("0", "RMSNorm")]
    for norm in (plain, compressed[0]):
        setattr(norm, name, value)
    x = torch.randn(2, 64)
    found, expected = outcome(compressed, x.clone().requires_grad_()), outcome(plain, x.clone().requires_grad_())
    assert found is expected
    if isinstance(expected, torch.dtype):
        # A row of 64 elements, summed in another order.
        bound = 64 * torch.finfo(torch.float32).eps
        torch.testing.assert_close(compressed(x.requires_grad_()), plain(x), rtol=bound, atol=0)


@pytest.mark.parametrize("edit", ["up_proj", "norm"])
def test_a_decoder_layer_that_does_not_fit_raises_as_its_own(edit: str) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama", reason="its modules are fused")
    config = llama.LlamaConfig(hidden_size=64, intermediate_size=96, num_attention_heads=2, num_hidden_layers=1)
    for compressed in (False, True):
        layer = llama.LlamaDecoderLayer(config, 0)
        if edit == "up_proj":
            layer.mlp.up_proj = nn.Linear(64, 95)
        else:
            layer.post_attention_layernorm = llama.LlamaRMSNorm(63)
        if compressed:
            pyactcomp.compress(layer, min_bytes=0)
        angles = torch.zeros(1, 8, 32)
        with pytest.raises(RuntimeError, match="must match the size"):
            layer(torch.randn(1, 8, 64, requires_grad=True), position_embeddings=(angles, angles))
