"""Models that pyactcomp is not tuned on, each built and trained as its library's users do it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .plain_models import UNet3d
from .tuned import bert_large, images, tokens
from .workload import TINY_VOCABULARY, Batch, LanguageModelLoss, Objective, Workload

METHODS = ("vanilla", "int8", "ckpt", "vanilla-again")
STEPS = 6


def _classifier(name: str, tiny_name: str, channels_last: bool, **tiny_arguments: Any) -> Callable[[bool], nn.Module]:
    """Return how to build a classifier of timm."""

    def build(tiny: bool) -> nn.Module:
        import timm

        model = timm.create_model(tiny_name, num_classes=10, **tiny_arguments) if tiny else timm.create_model(name)
        objective = Objective(model, _classified, model.set_grad_checkpointing)
        return objective.to(memory_format=torch.channels_last) if channels_last else objective

    return build


def _classified(model: nn.Module, pictures: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(pictures), labels)


def _pretrained(model: Any, loss: Callable[..., Tensor]) -> Objective:
    """Return a model of transformers, which checkpoints without reentering autograd."""
    # The newer name; releases before 5.2 have only the older one, which the others warn of.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    return Objective(model, loss, partial(enable, {"use_reentrant": False}))


def _whisper(tiny: bool) -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    width, layers, heads = (64, 2, 2) if tiny else (1024, 24, 16)
    config = WhisperConfig(
        d_model=width, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=heads,
        decoder_attention_heads=heads, encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width, num_mel_bins=80,
        vocab_size=TINY_VOCABULARY if tiny else 51865, max_source_positions=64 if tiny else 1500,
        max_target_positions=64 if tiny else 448, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, use_cache=False,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    return _pretrained(model, lambda m, sound, labels: m(input_features=sound, labels=labels).loss)


def _spectrograms(batch: int, device: str, tiny: bool) -> Batch:
    frames, length, vocabulary = (128, 64, TINY_VOCABULARY) if tiny else (3000, 448, 51865)
    sound = torch.randn(batch, 80, frames, device=device)
    return sound, torch.randint(3, vocabulary, (batch, length), device=device)


def _wav2vec2(tiny: bool) -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    size: dict[str, Any] = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128,
        "conv_dim": (32,) * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    } if tiny else {}  # fmt: skip
    # Masks of the spectrogram come from numpy's generator, layers are dropped by torch's: each step would be another.
    config = Wav2Vec2Config(**size, vocab_size=32, apply_spec_augment=False, layerdrop=0.0, ctc_zero_infinity=True)
    return _pretrained(Wav2Vec2ForCTC(config), lambda m, sound, labels: m(input_values=sound, labels=labels).loss)


def _sounds(batch: int, device: str, tiny: bool) -> Batch:
    samples, letters = (16_000, 8) if tiny else (160_000, 120)
    return torch.randn(batch, samples, device=device), torch.randint(1, 32, (batch, letters), device=device)


def _unet(tiny: bool) -> nn.Module:
    from diffusers import UNet2DConditionModel

    size: dict[str, Any] = {
        "block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 32,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    } if tiny else {"cross_attention_dim": 768}  # fmt: skip
    model = UNet2DConditionModel(sample_size=16 if tiny else 64, attention_head_dim=8, **size)
    return Objective(model, _denoised, model.enable_gradient_checkpointing)


def _denoised(model: nn.Module, noisy: Tensor, times: Tensor, text: Tensor, noise: Tensor) -> Tensor:
    return F.mse_loss(model(noisy, times, text).sample.float(), noise)


def _latents(batch: int, device: str, tiny: bool) -> Batch:
    side, words, width = (32, 7, 32) if tiny else (64, 77, 768)
    noisy, noise = torch.randn(2, batch, 4, side, side, device=device)
    return (
        noisy,
        torch.randint(1000, (batch,), device=device),
        torch.randn(batch, words, width, device=device),
        noise,
    )


def _gatv2(tiny: bool) -> nn.Module:
    from torch_geometric.nn.models import GAT

    model = GAT(128, 32 if tiny else 256, 3, 47, heads=4, v2=True, dropout=0.0, concat=True)
    return Objective(model, _nodes_classified)


def _nodes_classified(model: nn.Module, nodes: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(nodes, edges), labels)


def _graph(batch: int, device: str, tiny: bool) -> Batch:
    """Return ``batch`` nodes, ten times as many edges, and the labels of the nodes."""
    nodes = batch * (100 if tiny else 1)
    edges = torch.randint(nodes, (2, 10 * nodes), device=device)
    return torch.randn(nodes, 128, device=device), edges, torch.randint(47, (nodes,), device=device)


class Encoder(nn.Module):
    """``nn.TransformerEncoder`` with all that its constructor defaults to, under a classifier of tokens."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, 1000)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        logits = self.head(self.encoder(self.tokens(words)).mean(1))
        return F.cross_entropy(logits, labels[:, 0] % 1000)


def _encoder(tiny: bool) -> nn.Module:
    return Encoder(TINY_VOCABULARY, 64, 2, 2) if tiny else Encoder(30522, 1024, 16, 12)


def _modernbert(tiny: bool) -> nn.Module:
    from transformers import AutoModelForMaskedLM, ModernBertConfig

    size: dict[str, Any] = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96,
        "vocab_size": TINY_VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
        "sep_token_id": 2,
    } if tiny else {}  # fmt: skip
    return LanguageModelLoss(AutoModelForMaskedLM.from_config(ModernBertConfig(**size), attn_implementation="sdpa"))


def _qwen3_moe(tiny: bool) -> nn.Module:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    size: dict[str, Any] = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "vocab_size": TINY_VOCABULARY,
    } if tiny else {
        "hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "vocab_size": 151936,
    }  # fmt: skip
    config = Qwen3MoeConfig(**size, use_cache=False)
    return LanguageModelLoss(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))


def _llama_lora(tiny: bool) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig

    size: dict[str, Any] = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128, "vocab_size": TINY_VOCABULARY,
    } if tiny else {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 128256, "rope_theta": 500000.0,
    }  # fmt: skip
    config = LlamaConfig(**size, max_position_embeddings=8192, use_cache=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    # peft makes adapters in float32, unless told that the weights of its adapters follow the model's.
    return LanguageModelLoss(get_peft_model(model, lora, autocast_adapter_dtype=False))


def _detr(tiny: bool) -> nn.Module:
    # The loss matches boxes by it, and says so only once it runs.
    importlib.import_module("scipy.optimize")
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone: dict[str, Any] = {
        "embedding_size": 32, "hidden_sizes": [32, 32, 64, 64], "depths": [1, 1, 1, 1],
    } if tiny else {}  # fmt: skip
    size: dict[str, Any] = {
        "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "num_queries": 20,
    } if tiny else {}  # fmt: skip
    config = DetrConfig(
        **size, num_labels=91, use_timm_backbone=False, use_pretrained_backbone=False,
        backbone_config=ResNetConfig(**backbone, out_features=["stage4"]),
    )  # fmt: skip
    return _pretrained(DetrForObjectDetection(config), _detected)


def _detected(model: nn.Module, pictures: Tensor, classes: Tensor, boxes: Tensor) -> Tensor:
    labels = [{"class_labels": c, "boxes": b} for c, b in zip(classes, boxes, strict=True)]
    loss: Tensor = model(pixel_values=pictures, labels=labels).loss
    return loss


def _boxed_pictures(batch: int, device: str, tiny: bool) -> Batch:
    side = 128 if tiny else 800
    pictures = torch.randn(batch, 3, side, side, device=device)
    boxes = 0.2 + 0.6 * torch.rand(batch, 7, 4, device=device)
    boxes[..., 2:] *= 0.4  # centre and size, inside the picture
    return pictures, torch.randint(91, (batch, 7), device=device), boxes


def _unet3d(tiny: bool) -> nn.Module:
    return UNet3d((8, 16), 3) if tiny else UNet3d((32, 64, 128, 256, 320, 320), 3)


def _volumes(batch: int, device: str, tiny: bool) -> Batch:
    side = 16 if tiny else 128
    return (
        torch.randn(batch, 1, side, side, side, device=device),
        torch.randint(3, (batch, side, side, side), device=device),
    )


_untuned = partial(Workload, steps=STEPS, methods=METHODS)
_checkpointing = partial(_untuned, blocks=lambda _: [], checkpoints_itself=True)


UNTUNED = {
    workload.name: workload
    for workload in (
        _checkpointing(
            "whisper_medium_amp", _whisper, _spectrograms, batch=8, autocast=True,
            conditions="transformers WhisperForConditionalGeneration, medium, 8 x 30 s, 448 tokens, bf16 autocast",
        ),
        _checkpointing(
            "maxvit_base_amp", _classifier("maxvit_base_tf_224", "maxvit_pico_rw_256", False, img_size=64),
            images(False, tiny_side=64), batch=64, autocast=True,
            conditions="timm maxvit_base_tf_224, 64 images of 224 px, bf16 autocast",
        ),
        _checkpointing(
            "convnext_base_amp", _classifier("convnext_base", "convnext_atto", False),
            images(False, tiny_side=64), batch=128, autocast=True,
            conditions="timm convnext_base, 128 images of 224 px, bf16 autocast",
        ),
        _checkpointing(
            "sd15_unet_amp", _unet, _latents, batch=8, autocast=True,
            conditions="diffusers UNet2DConditionModel of Stable Diffusion 1.5, 8 latents of 64 px, bf16 autocast",
        ),
        _untuned(
            "gatv2_fp32", _gatv2, _graph, lambda m: list(m.model.convs), 200_000,
            "PyG GAT of GATv2Conv, 3 layers of 256, 4 heads, 200,000 nodes, 2,000,000 edges, float32",
        ),
        _untuned(
            "bert_large_fp32", bert_large, tokens(30522, 512, False), lambda m: list(m.model.bert.encoder.layer), 8,
            "BertForMaskedLM, BERT-large, sdpa, 8 x 512 tokens, float32, dropout 0.1", language_model=True,
        ),
        _untuned(
            "encoder_amp", _encoder, tokens(30522, 512, False), lambda m: list(m.encoder.layers), 32,
            "nn.TransformerEncoder, 12 layers of 1024, 32 x 512 tokens, bf16 autocast, dropout 0.1", autocast=True,
        ),
        _checkpointing(
            "efficientnet_b4_amp", _classifier("efficientnet_b4", "efficientnet_b0", True),
            images(True, side=320, tiny_side=64), batch=64, autocast=True,
            conditions="timm efficientnet_b4, 64 images of 320 px, channels_last, bf16 autocast",
        ),
        _untuned(
            "modernbert_base_amp", _modernbert, tokens(50280, 1024, False), lambda m: list(m.model.model.layers), 16,
            "ModernBertForMaskedLM, base, sdpa, 16 x 1024 tokens, bf16 autocast", autocast=True, language_model=True,
        ),
        _untuned(
            "qwen3_moe_bf16", _qwen3_moe, tokens(151936, 2048, True), lambda m: list(m.model.model.layers), 4,
            "Qwen3MoeForCausalLM, 8 layers of 2048, 64 experts of 768, 8 for each token, 4 x 2048 tokens, pure bf16",
            language_model=True,
        ),
        _untuned(
            "llama_8b_lora_bf16", _llama_lora, tokens(128256, 8192, True),
            lambda m: list(m.model.base_model.model.model.layers), 1,
            "LlamaForCausalLM, 8 B, LoRA of rank 16 on all linear layers by peft, 1 x 8192 tokens, pure bf16",
            language_model=True,
        ),
        _checkpointing(
            "wav2vec2_base_amp", _wav2vec2, _sounds, batch=16, autocast=True,
            conditions="transformers Wav2Vec2ForCTC, base, 16 x 10 s, bf16 autocast",
        ),
        _checkpointing(
            "detr_resnet50_amp", _detr, _boxed_pictures, batch=8, autocast=True,
            conditions="transformers DetrForObjectDetection, ResNet-50, 8 images of 800 px, bf16 autocast",
        ),
        _untuned(
            "unet3d_amp", _unet3d, _volumes, lambda m: list(m.stages), 2,
            "U-Net for volumes in plain PyTorch (convolution, instance norm, leaky ReLU), 2 x 128 cubed, bf16 autocast",
            autocast=True,
        ),
    )
}  # fmt: skip
