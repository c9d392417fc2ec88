"""Tiny Hugging Face language models and a batch of text, for the tests that need both."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from works_with import gradients

transformers = pytest.importorskip("transformers", reason="Hugging Face transformers is not installed")

VOCABULARY = 128
BATCH, LENGTH = 4, 32
WIDTH = 64
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
MORE = {**SIZES, "vocab_size": VOCABULARY, "intermediate_size": 192}

Inputs = dict[str, torch.Tensor]


def text(device: str) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator).to(device)
    padding = torch.ones_like(tokens)
    padding[0, LENGTH // 2 :] = 0
    return {"input_ids": tokens, "attention_mask": padding, "labels": tokens.masked_fill(padding == 0, -100)}


def gpt2(attention: str) -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, attn_implementation=attention
        )
    )


def llama(attention: str) -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
            attn_implementation=attention,
        )
    )


def qwen3(attention: str) -> nn.Module:
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            **SIZES,
            vocab_size=VOCABULARY,
            intermediate_size=192,
            num_key_value_heads=2,
            head_dim=16,
            attn_implementation=attention,
        )
    )


def phi3(attention: str) -> nn.Module:
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**MORE, **tokens, attn_implementation=attention))


def built(build: Callable[[str], nn.Module], attention: str = "sdpa") -> nn.Module:
    torch.manual_seed(0)
    return build(attention).train()


def step(model: nn.Module, autocast: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**text("cpu")).loss
    loss.backward()
    return loss.detach(), gradients(model)
