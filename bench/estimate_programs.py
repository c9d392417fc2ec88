"""The models that ``python -m bench estimate`` predicts and measures: ``bench.estimate_programs:NAME`` names one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .workload import Batch, ClassifierLoss, LanguageModelLoss, Objective, Workload
from .workloads import WORKLOADS

Made = tuple[nn.Module, Batch]


def _tokens(vocabulary: int, length: int) -> Callable[[int, str, bool], Batch]:
    def draw(batch: int, device: str, tiny: bool) -> Batch:
        tokens = torch.randint(vocabulary, (batch, length), device=device)
        return tokens, tokens

    return draw


def _qwen3(tiny: bool) -> nn.Module:
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        intermediate_size=3072, vocab_size=151936, max_position_embeddings=4096, tie_word_embeddings=True,
        use_cache=False,
    )  # fmt: skip
    return LanguageModelLoss(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16))


def _t5(tiny: bool) -> nn.Module:
    from transformers import AutoModelForSeq2SeqLM, T5Config

    config = T5Config(
        d_model=768, d_ff=3072, num_layers=12, num_heads=12, use_cache=False, decoder_start_token_id=0, pad_token_id=0
    )
    return LanguageModelLoss(AutoModelForSeq2SeqLM.from_config(config, dtype=torch.bfloat16))


def _vit_large(tiny: bool) -> nn.Module:
    import timm

    return ClassifierLoss(timm.create_model("vit_large_patch16_224"))


def _images(batch: int, device: str, tiny: bool) -> Batch:
    return torch.randn(batch, 3, 224, 224, device=device), torch.randint(1000, (batch,), device=device)


class _Double(nn.Sequential):
    def __init__(self, into: int, out: int) -> None:
        halves = [(nn.Conv2d(n, out, 3, padding=1), nn.GroupNorm(8, out), nn.SiLU()) for n in (into, out)]
        super().__init__(*halves[0], *halves[1])


class _UNet(nn.Module):
    """Four levels, from 64 channels to 1024, with group norms; 21 classes."""

    def __init__(self) -> None:
        super().__init__()
        widths = [64 * 2**level for level in range(5)]
        pairs = list(itertools.pairwise(widths))
        self.first = _Double(3, widths[0])
        self.down = nn.ModuleList(_Double(a, b) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in reversed(pairs))
        self.join = nn.ModuleList(_Double(2 * a, a) for a, _ in reversed(pairs))
        self.last = nn.Conv2d(widths[0], 21, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skips = []
        for block in self.down:
            skips.append(x)
            x = block(nn.functional.max_pool2d(x, 2))
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat((up(x), skips.pop()), 1))
        out: Tensor = self.last(x)
        return out


def _unet_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(images), labels)


def _dense(batch: int, device: str, tiny: bool) -> Batch:
    labels = torch.randint(21, (batch, 256, 256), device=device)
    return torch.randn(batch, 3, 256, 256, device=device), labels


def _none(_: Any) -> list[nn.Module]:
    return []


MODELS: dict[str, Workload] = {
    **WORKLOADS,
    "qwen3_bf16": Workload("qwen3_bf16", _qwen3, _tokens(151936, 2048), _none, 4, "bf16"),
    "t5_bf16": Workload("t5_bf16", _t5, _tokens(32128, 512), _none, 16, "bf16"),
    "vit_large_amp": Workload("vit_large_amp", _vit_large, _images, _none, 64, "autocast bf16", autocast=True),
    "unet_amp": Workload(
        "unet_amp", lambda tiny: Objective(_UNet(), _unet_loss), _dense, _none, 16, "autocast bf16", autocast=True
    ),
}


def __getattr__(name: str) -> Callable[[int], Made]:
    """Return the function that builds a model and a batch; with ``_tiny`` at the size that tests the bench."""
    tiny = name.endswith("_tiny")
    if (key := name.removesuffix("_tiny")) not in MODELS:
        raise AttributeError(name)
    workload = MODELS[key]

    def build(batch: int) -> Made:
        if workload.tf32:
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
            torch.backends.cudnn.benchmark = True
        with torch.device("cuda"):
            module = workload.build(tiny)
        return module, workload.inputs(batch, "cuda", tiny)

    return build
