"""The models that pyactcomp is tuned on: the five of the front page, and two in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .plain_models import GPT, ViT
from .workload import TINY_VOCABULARY, Batch, ClassifierLoss, LanguageModelLoss, Workload


def bert_large(tiny: bool) -> nn.Module:
    from transformers import AutoModelForMaskedLM, BertConfig

    size: dict[str, Any] = (
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
        if tiny
        else {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    )
    return LanguageModelLoss(
        AutoModelForMaskedLM.from_config(
            BertConfig(**size, vocab_size=TINY_VOCABULARY if tiny else 30522), attn_implementation="sdpa"
        )
    )


def _gpt2(tiny: bool) -> nn.Module:
    from transformers import AutoModelForCausalLM, GPT2Config

    size: dict[str, Any] = (
        {"n_embd": 64, "n_layer": 2, "n_head": 2} if tiny else {"n_embd": 1024, "n_layer": 24, "n_head": 16}
    )
    config = GPT2Config(**size, vocab_size=TINY_VOCABULARY if tiny else 50257, use_cache=False)
    return LanguageModelLoss(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"))


def _llama(tiny: bool) -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    size: dict[str, Any] = (
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
        if tiny
        else {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "intermediate_size": 8192}
    )
    config = LlamaConfig(
        **size,
        num_key_value_heads=2 if tiny else 8,
        vocab_size=TINY_VOCABULARY if tiny else 32000,
        max_position_embeddings=4096,
        use_cache=False,
    )
    return LanguageModelLoss(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16))


def _swin(tiny: bool) -> nn.Module:
    import timm

    if tiny:
        model = timm.models.swin_transformer.SwinTransformer(
            img_size=56, num_classes=10, embed_dim=32, depths=(1, 2), num_heads=(1, 2)
        )
    else:
        model = timm.create_model("swin_base_patch4_window7_224")
    return ClassifierLoss(model)


def _resnet(tiny: bool) -> nn.Module:
    import timm

    model = timm.create_model("resnet18", num_classes=10) if tiny else timm.create_model("resnet50")
    return ClassifierLoss(model).to(memory_format=torch.channels_last)


def _plain_gpt(tiny: bool) -> nn.Module:
    return GPT(2, 64, 2, TINY_VOCABULARY, 64) if tiny else GPT(24, 1024, 16, 50257, 1024)


def _plain_vit(tiny: bool) -> nn.Module:
    return ViT(2, 64, 2, 10, 56, 14) if tiny else ViT(24, 1024, 16, 1000, 224, 14)


def tokens(vocabulary: int, length: int, labelled_by_itself: bool) -> Callable[[int, str, bool], Batch]:
    """Return how to draw tokens and labels."""

    def draw(batch: int, device: str, tiny: bool) -> Batch:
        shape = (batch, 64 if tiny else length)
        known = TINY_VOCABULARY if tiny else vocabulary
        drawn = torch.randint(known, shape, device=device)
        return drawn, drawn if labelled_by_itself else torch.randint(known, shape, device=device)

    return draw


def images(channels_last: bool, side: int = 224, tiny_side: int = 56) -> Callable[[int, str, bool], Batch]:
    """Return how to draw images and their classes."""

    def draw(batch: int, device: str, tiny: bool) -> Batch:
        width, classes = (tiny_side, 10) if tiny else (side, 1000)
        drawn = torch.randn(batch, 3, width, width, device=device)
        if channels_last:
            drawn = drawn.to(memory_format=torch.channels_last)
        return drawn, torch.randint(classes, (batch,), device=device)

    return draw


def _swin_blocks(module: Any) -> list[nn.Module]:
    return [block for stage in module.model.layers for block in stage.blocks]


def _resnet_blocks(module: Any) -> list[nn.Module]:
    model = module.model
    return [block for stage in (model.layer1, model.layer2, model.layer3, model.layer4) for block in stage]


TUNED = {
    workload.name: workload
    for workload in (
        Workload(
            "bert_large_amp", bert_large, tokens(30522, 512, False), lambda m: list(m.model.bert.encoder.layer), 32,
            "BertForMaskedLM, BERT-large, sdpa, 32 x 512 tokens, bf16 autocast, dropout 0.1", autocast=True,
            language_model=True,
        ),
        Workload(
            "llama_1b_bf16", _llama, tokens(32000, 4096, True), lambda m: list(m.model.model.layers), 4,
            "LlamaForCausalLM, 16 layers of 2048, 4 x 4096 tokens, pure bf16", first_batch=1, language_model=True,
            liger=True,
        ),
        Workload(
            "gpt2_medium_amp", _gpt2, tokens(50257, 1024, True), lambda m: list(m.model.transformer.h), 16,
            "GPT2LMHeadModel, 24 layers of 1024, 16 x 1024 tokens, bf16 autocast, dropout 0.1", autocast=True,
            first_batch=2, language_model=True,
        ),
        Workload(
            "swin_base_amp", _swin, images(False), _swin_blocks, 128,
            "timm swin_base_patch4_window7_224, 128 images of 224 px, bf16 autocast", autocast=True, first_batch=32,
        ),
        Workload(
            "resnet50_tf32", _resnet, images(True), _resnet_blocks, 256,
            "timm resnet50, 256 images of 224 px, channels_last, TF32, cudnn.benchmark", tf32=True, first_batch=64,
        ),
        Workload(
            "plain_gpt_amp", _plain_gpt, tokens(50257, 1024, True), lambda m: list(m.blocks), 16,
            "GPT in plain PyTorch, 24 layers of 1024, 16 x 1024 tokens, bf16 autocast", autocast=True, first_batch=2,
            written_loss=True,
        ),
        Workload(
            "plain_vit_amp", _plain_vit, images(False), lambda m: list(m.blocks), 128,
            "ViT-L/14 in plain PyTorch, 128 images of 224 px, bf16 autocast", autocast=True, first_batch=16,
        ),
    )
}  # fmt: skip
