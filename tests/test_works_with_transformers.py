"""Works with: Hugging Face models and their Trainer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from works_with import DEVICES, MIN_BYTES, assert_compressed, assert_losses_agree, assert_step_agrees
from works_with_text import BATCH, VOCABULARY, Inputs, gpt2, llama, text, transformers

import pyactcomp


def image(device: str) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(BATCH, 3, 32, 32, generator=generator)
    return {"pixel_values": pixels.to(device), "labels": torch.arange(BATCH, device=device)}


def bert(attention: str) -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            attn_implementation=attention,
        )
    )


def vit(attention: str) -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            image_size=32,
            patch_size=4,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            num_labels=BATCH,
            attn_implementation=attention,
        )
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("build", "inputs"), [(bert, text), (gpt2, text), (llama, text), (vit, image)])
def test_hugging_face_gradients_agree(
    device: str, attention: str, build: Callable[[str], nn.Module], inputs: Callable[[str], Inputs]
) -> None:
    torch.manual_seed(0)
    model = build(attention).to(device).train()
    batch = inputs(device)
    assert_step_agrees(model, lambda m: m(**batch).loss)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_hugging_face_gradient_checkpointing_holds_less_than_compression_alone() -> None:
    torch.manual_seed(0)
    model = llama("sdpa").train()
    batch = text("cpu")
    checkpointed = copy.deepcopy(model)
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    alone = assert_step_agrees(model, lambda m: m(**batch).loss)
    both = assert_step_agrees(checkpointed, lambda m: m(**batch).loss)
    assert both.stored_bytes < alone.stored_bytes


def trainer_losses(model: nn.Module, directory: Path) -> list[float]:
    from trainers import arguments, losses, rows  # skips where accelerate is missing

    trainer = transformers.Trainer(
        model=model, args=arguments(transformers.TrainingArguments, directory), train_dataset=rows()
    )
    trainer.train()
    return losses(trainer)


def test_trainer_follows_the_exact_loss_curve(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    torch.manual_seed(0)
    exact = llama("sdpa")
    model = pyactcomp.compress(copy.deepcopy(exact), min_bytes=MIN_BYTES)
    losses = trainer_losses(model, tmp_path / "compressed")
    assert len(losses) == 3
    assert_losses_agree(losses, trainer_losses(exact, tmp_path / "exact"))
    assert_compressed(pyactcomp.report(model))
