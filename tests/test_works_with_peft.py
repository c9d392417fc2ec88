"""Works with: LoRA through peft."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from works_with import DEVICES, assert_step_agrees, gradients, kept_for
from works_with_text import gpt2, llama, text

from pyactcomp.engine import reasons

peft = pytest.importorskip("peft", reason="peft is not installed")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("build", "targets"), [(llama, ["q_proj", "v_proj"]), (gpt2, ["c_attn"])])
def test_lora_on_a_frozen_base_under_autocast(
    device: str, build: Callable[[str], nn.Module], targets: list[str]
) -> None:
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, target_modules=targets, init_lora_weights=False, lora_dropout=0.1, fan_in_fan_out=build is gpt2
    )
    model = peft.get_peft_model(build("sdpa"), config).to(device).train()
    batch = text(device)
    frozen = {tuple(p.shape) for p in model.parameters() if not p.requires_grad and p.dim() == 2}

    def loss_of(m: nn.Module) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            return m(**batch).loss

    report = assert_step_agrees(model, loss_of)
    assert all("lora_" in name for name in gradients(model))
    shapes = {tuple(sorted(shape)) for shape in frozen}
    copies = [tensor for tensor in kept_for(report, reasons.NO_GRAD) if tuple(sorted(tensor.shape)) in shapes]
    # The weights below the first adapter save no copy; every frozen matrix above it does, each kept for its shape.
    assert {tensor.dtype for tensor in copies} == {"bfloat16"}
    mlp = 3 if build is llama else 2
    assert len(copies) >= mlp * model.config.num_hidden_layers
