"""Fine-tuning a causal language model with Hugging Face's Trainer: one callback more.

``--model NAME`` takes a checkpoint of yours or of the Hub; without it a small Llama with random weights learns the
bytes of this file.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from pyactcomp.integrations.transformers import CompressionCallback


def load(name: str | None, width: int, layers: int) -> PreTrainedModel:
    """Return a checkpoint's model, or a small one over bytes."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    """Train, and print the report of the first step."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", help="a checkpoint; by default a small model with random weights")
    options.add_argument("--width", type=int, default=128)
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--length", type=int, default=256)
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--steps", type=int, default=10)
    arguments = options.parse_args()

    text = torch.tensor(list(Path(__file__).read_bytes() * 8))
    windows = text[: len(text) // arguments.length * arguments.length].view(-1, arguments.length)
    rows = [{"input_ids": window, "labels": window} for window in windows]

    # The model computes the loss here, so that fuse_head=True takes it in chunks, without the logits of the batch.
    callback = CompressionCallback(mode="int8", fuse_head=True)
    with tempfile.TemporaryDirectory() as folder:
        training = TrainingArguments(
            output_dir=folder,
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.batch,
            learning_rate=1e-3,
            logging_steps=max(arguments.steps // 5, 1),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        model = load(arguments.model, arguments.width, arguments.layers)
        trainer = Trainer(model=model, args=training, train_dataset=rows, callbacks=[callback])
        trainer.train()
    print(callback.report)


if __name__ == "__main__":
    main()
