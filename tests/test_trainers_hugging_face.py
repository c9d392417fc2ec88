"""Trainers based on Hugging Face's: losses follow those without compression, and bytes are a plain loop's."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainers import OPTIONS, STEPS, arguments, assert_follows, assert_ratio, losses, plain_loop, rows
from works_with import GRADIENT_BOUND
from works_with_text import BATCH, built, llama, text, transformers

from pyactcomp.integrations.transformers import CompressionCallback

# Packages that warn of their own deprecations, of few workers, and of loggers that nobody asked for.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def llama_ratio() -> float:
    return plain_loop(built(llama), lambda m: m(**text("cpu")).loss)


def tokenizer_of(special: list[str]) -> Any:
    """Return a tokenizer of numbers whose first two special tokens end a text and fill a batch."""
    tokenizers = pytest.importorskip("tokenizers", reason="transformers' tokenizers are not installed")
    tokens = [*map(str, range(120)), *(each for each in special if not each.isdigit())]
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(tokens)}, unk_token="0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token=special[0], pad_token=special[1])


def saved(model: Any, directory: Path, special: list[str]) -> None:
    """Write a model and its tokenizer."""
    model.save_pretrained(directory)
    tokenizer_of(special).save_pretrained(directory)


def numbers(first: int) -> str:
    """Return a text of 32 words."""
    return " ".join(str(2 + (first + 3 * i) % 118) for i in range(32))


def trl_trainer(kind: str, directory: Path, callbacks: list[Any]) -> Any:
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    datasets = pytest.importorskip("datasets", reason="TRL needs datasets")
    tokenizer = tokenizer_of(["1", "0"])
    texts = [numbers(7 * row) for row in range(BATCH)]
    common: dict[str, Any] = {"gradient_checkpointing": False}
    if kind == "DPO":
        data = [{"prompt": each[:20], "chosen": " 5" + each, "rejected": " 9" + each[::-1]} for each in texts]
        args = arguments(trl.DPOConfig, directory, **common)
        more: dict[str, Any] = {"ref_model": built(llama)}
    else:
        data = [{"prompt": each[:20]} for each in texts]
        args = arguments(trl.GRPOConfig, directory, num_generations=2, max_completion_length=32, **common)
        more = {"reward_funcs": lambda completions, **_: [float(len(set(c.split()))) for c in completions]}
    return getattr(trl, f"{kind}Trainer")(
        model=built(llama),
        args=args,
        train_dataset=datasets.Dataset.from_list(data),
        processing_class=tokenizer,
        callbacks=callbacks,
        **more,
    )


@pytest.mark.parametrize("kind", ["DPO", "GRPO"])
def test_trl(kind: str, tmp_path: Path, llama_ratio: float) -> None:
    callback = CompressionCallback(**OPTIONS)
    histories = []
    for callbacks in ([callback], []):
        trainer = trl_trainer(kind, tmp_path / str(len(callbacks)), callbacks)
        torch.manual_seed(0)
        trainer.train()
        histories.append([entry for entry in trainer.state.log_history if "loss" in entry])
    got, exact = histories
    assert_follows(*([entry["loss"] for entry in each] for each in histories))
    assert got[0]["grad_norm"] == pytest.approx(exact[0]["grad_norm"], rel=GRADIENT_BOUND)
    assert_ratio(callback.report, llama_ratio)


def test_axolotl(tmp_path: Path, llama_ratio: float) -> None:
    base = pytest.importorskip("axolotl.integrations.base", reason="axolotl is not installed")
    trainers = importlib.import_module("axolotl.core.trainers.base")
    kinds = importlib.import_module("axolotl.core.training_args")
    data = importlib.import_module("datasets").Dataset.from_list(
        [{k: v.tolist() for k, v in row.items()} for row in rows()]
    )
    name = "pyactcomp.integrations.axolotl.CompressionPlugin"
    manager = base.PluginManager.get_instance()
    manager.register(name)
    try:
        config = {"plugins": [name], "pyactcomp": OPTIONS}
        module, _, arguments_of = manager.get_input_args()[0].rpartition(".")
        assert getattr(importlib.import_module(module), arguments_of)(**config).pyactcomp == OPTIONS
        (callback,) = manager.add_callbacks_pre_trainer(config, None)
        curves = []
        for callbacks in ([callback], []):
            args = arguments(kinds.AxolotlTrainingArguments, tmp_path, remove_unused_columns=False)
            trainer = trainers.AxolotlTrainer(built(llama), args=args, train_dataset=data, callbacks=callbacks)
            trainer.train()
            curves.append(losses(trainer))
        assert_follows(*curves)
        assert_ratio(callback.report, llama_ratio)
    finally:
        manager.plugins.clear()


@pytest.mark.slow  # the import alone takes longer than all others
def test_ms_swift(tmp_path: Path) -> None:
    swift = pytest.importorskip("swift", reason="ms-swift is not installed")
    arguments_of = importlib.import_module("swift.arguments").SftArguments
    saved(transformers.Qwen2ForCausalLM(qwen2()), tmp_path / "model", ["<|im_end|>", "<|endoftext|>", "<|im_start|>"])
    turns = [("user", 7), ("assistant", 3)]
    lines = [
        json.dumps({"messages": [{"role": role, "content": numbers(factor * row)} for role, factor in turns]})
        for row in range(BATCH)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    plugin = f"from pyactcomp.integrations.swift import register\nregister(**{OPTIONS!r})\n"
    (tmp_path / "plugin.py").write_text(plugin)
    callbacks, make = [], CompressionCallback.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompressionCallback, "__init__", lambda self, **k: (callbacks.append(self), make(self, **k))[1])
        curves = []
        for more in ({"external_plugins": [str(tmp_path / "plugin.py")], "callbacks": ["pyactcomp"]}, {}):
            result = swift.sft_main(
                arguments_of(
                    model=str(tmp_path / "model"),
                    model_type="qwen2",
                    template="qwen2_5",
                    dataset=[str(tmp_path / "data.jsonl")],
                    tuner_type="full",
                    torch_dtype="float32",
                    max_steps=STEPS,
                    per_device_train_batch_size=BATCH,
                    logging_steps=1,
                    output_dir=str(tmp_path / "out"),
                    optim="sgd",
                    learning_rate=0.1,
                    lr_scheduler_type="constant",
                    gradient_checkpointing=False,
                    report_to=[],
                    save_strategy="no",
                    eval_strategy="no",
                    split_dataset_ratio=0.0,
                    **more,
                )
            )
            curves.append([entry["loss"] for entry in result["log_history"] if "loss" in entry])
    assert_follows(*curves)
    # What the template makes of a row: its own words around the numbers.
    (report,) = (callback.report for callback in callbacks)
    shape = next(tensor.shape for tensor in report.tensors if tensor.dtype == "int64")
    mask = torch.ones(shape, dtype=torch.int64)
    mask[1:, 0] = 0  # the rows have different lengths, and attention a mask
    batch = {"input_ids": torch.randint(123, shape), "attention_mask": mask}
    plain = transformers.Qwen2ForCausalLM(qwen2())
    assert_ratio(report, plain_loop(plain, lambda model: model(**batch, labels=batch["input_ids"]).loss))


def qwen2() -> Any:
    return transformers.Qwen2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )


def test_sentence_transformers(tmp_path: Path) -> None:
    package = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    datasets = importlib.import_module("datasets")
    config = transformers.BertConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    saved(transformers.BertModel(config), tmp_path / "model", ["1", "0"])
    texts = [numbers(7 * row) for row in range(2 * BATCH)]
    data = datasets.Dataset.from_dict({"anchor": texts[:BATCH], "positive": texts[BATCH:]})

    def made() -> Any:
        parts = importlib.import_module("sentence_transformers.models")
        first = parts.Transformer(str(tmp_path / "model"))
        return package.SentenceTransformer(modules=[first, parts.Pooling(64)], device="cpu")

    losses_of = importlib.import_module("sentence_transformers.losses")

    def loss_of(model: nn.Module) -> Tensor:
        rule: Any = losses_of.MultipleNegativesRankingLoss(model)
        batches = [model.tokenize(each) for each in (texts[:BATCH], texts[BATCH:])]
        return rule(batches, None)

    callback = CompressionCallback(**OPTIONS)
    curves = []
    for callbacks in ([callback], []):
        model = made()
        trainer = package.SentenceTransformerTrainer(
            model=model,
            args=arguments(package.SentenceTransformerTrainingArguments, tmp_path),
            train_dataset=data,
            loss=losses_of.MultipleNegativesRankingLoss(model),
            callbacks=callbacks,
        )
        trainer.train()
        curves.append(losses(trainer))
    assert_follows(*curves)
    assert_ratio(callback.report, plain_loop(made(), loss_of))
