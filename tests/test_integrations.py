"""Compression inside trainers: what they train is what they train without it, and what conflicts is refused."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainers import OPTIONS, STEPS, arguments, losses, rows, trained
from works_with import GRADIENT_BOUND, Transformer, assert_compressed, assert_losses_agree, regression
from works_with_text import built, llama, text, transformers

import pyactcomp
from pyactcomp.integrations import accelerate as ours
from pyactcomp.integrations.transformers import CompressionCallback


@pytest.mark.parametrize("fuse_head", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
def test_trainer_follows_the_exact_loss_curve(tmp_path: Path, bf16: bool, fuse_head: bool) -> None:
    callback = CompressionCallback(fuse_head=fuse_head, **OPTIONS)
    got = trained(tmp_path / "ours", callback, bf16=bf16)
    exact = trained(tmp_path / "exact", None, bf16=bf16)
    # Fused forwards sum in another order: an ulp of the coarsest dtype, and the curves then differ by the bound.
    ulp = 2.0 ** -(8 if bf16 else 20)
    assert got[0] == pytest.approx(exact[0], rel=ulp)
    for loss, expected in zip(got, exact, strict=True):
        assert abs(loss - expected) <= 2 * GRADIENT_BOUND * (exact[0] - exact[-1]) + ulp * exact[0]
    assert exact[-1] < 0.9 * exact[0]
    assert callback.report is not None
    assert_compressed(callback.report)
    assert ("Head" in {form for _, form in callback.report.fused}) is fuse_head


def test_the_model_is_plain_again_when_training_has_ended_and_may_train_again(tmp_path: Path) -> None:
    callback = CompressionCallback(**OPTIONS)
    model = built(llama)
    classes = [type(module) for module in model.modules()]
    trainer = transformers.Trainer(
        model, arguments(transformers.TrainingArguments, tmp_path), train_dataset=rows(), callbacks=[callback]
    )
    for _ in range(2):
        trainer.train()
        assert [type(module) for module in model.modules()] == classes
        with pytest.raises(pyactcomp.PyactcompError, match="not compressed"):
            pyactcomp.report(model)


class Held:
    """Counts what a loss outside the model holds for backward, by the engine's own hooks or by none."""

    def __init__(self) -> None:
        self.packed: list[bool] = []

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        logits = outputs.logits[:, :-1].flatten(0, 1).float()
        loss = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)
        # log_softmax's node: what it gives back is its result, or, packed, a tensor made anew at each look.
        node = loss.grad_fn.next_functions[0][0]
        first, second = node._saved_result, node._saved_result  # both alive, or one may get the other's memory
        self.packed.append(first.data_ptr() != second.data_ptr())
        return loss


@pytest.mark.parametrize("cover", [False, True])
def test_a_loss_outside_the_model_is_covered_on_request(tmp_path: Path, cover: bool) -> None:
    held = Held()
    got = trained(tmp_path / "ours", CompressionCallback(fuse=False, **OPTIONS), cover=cover, compute_loss_func=held)
    assert held.packed == [cover] * STEPS
    assert_losses_agree(got, trained(tmp_path / "exact", None, compute_loss_func=Held()))


@pytest.mark.parametrize("fuse_head", [False, True])
def test_label_smoothing_is_a_loss_outside_the_model_for_which_heads_are_not_fused(
    tmp_path: Path, fuse_head: bool
) -> None:
    callback = CompressionCallback(fuse_head=fuse_head, fuse=False, **OPTIONS)
    got = trained(tmp_path / "ours", callback, cover=True, label_smoothing_factor=0.1)
    assert_losses_agree(got, trained(tmp_path / "exact", None, label_smoothing_factor=0.1))


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")  # renamed in transformers 5.23
def test_a_trainer_that_offloads_activations_is_refused(tmp_path: Path) -> None:
    more = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}}
    with pytest.raises(ValueError, match=r"CompressionCallback and gradient_checkpointing_kwargs=.*offload"):
        trained(tmp_path, CompressionCallback(), **more)
    with pytest.raises(ValueError, match=r"CompressionCallback and fsdp_config=.*activation_checkpointing_offload"):
        trained(tmp_path, CompressionCallback(), fsdp_config={"activation_checkpointing_offload": True})


def sft(directory: Path, callback: CompressionCallback | None, **more: Any) -> Any:
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    tokens = [{"input_ids": row["input_ids"].tolist()} for row in rows()]
    datasets = pytest.importorskip("datasets", reason="TRL needs datasets")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=_tokenizer(), eos_token="1", pad_token="0")
    return trl.SFTTrainer(
        model=built(llama),
        args=arguments(trl.SFTConfig, directory, dataset_kwargs={"skip_prepare_dataset": True}, **more),
        train_dataset=datasets.Dataset.from_list(tokens),
        processing_class=tokenizer,
        callbacks=[callback] if callback else [],
    )


def _tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers", reason="transformers' tokenizers are not installed")
    return tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(128)}, unk_token="0"))


@pytest.mark.filterwarnings("ignore")  # TRL and datasets warn of their own deprecations
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_sft_trainer_follows_the_exact_loss_curve(tmp_path: Path, gradient_checkpointing: bool) -> None:
    callback = CompressionCallback(fuse=False, **OPTIONS)
    more = {"gradient_checkpointing": gradient_checkpointing}
    runs = [sft(tmp_path / "ours", callback, **more), sft(tmp_path / "exact", None, **more)]
    for trainer in runs:
        trainer.train()
    assert_losses_agree(*map(losses, runs))
    assert callback.report is not None
    assert_compressed(callback.report)


@pytest.mark.filterwarnings("ignore")
def test_two_heads_and_two_offloaders_are_refused_in_trl(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fuse_head=True and TRL's fused_lm_head"):
        sft(tmp_path, CompressionCallback(fuse_head=True)).train()
    with pytest.raises(ValueError, match="CompressionCallback and activation_offloading=True"):
        sft(tmp_path, CompressionCallback(), activation_offloading=True)


class Interrupt(transformers.TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, *_: Any, **__: Any) -> None:
        raise KeyboardInterrupt


def trainer_of(model: nn.Module, directory: Path, *callbacks: Any, **more: Any) -> Any:
    return transformers.Trainer(
        model=model,
        args=arguments(transformers.TrainingArguments, directory, **more),
        train_dataset=rows(),
        callbacks=list(callbacks),
    )


def test_an_interrupted_training_is_run_again_as_a_first_one(tmp_path: Path) -> None:
    model, again, first = built(llama), CompressionCallback(**OPTIONS), CompressionCallback(**OPTIONS)
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyboardInterrupt):
        trainer_of(model, tmp_path, first, Interrupt()).train()
    model.load_state_dict(state)
    trainer = trainer_of(model, tmp_path, again)
    trainer.train()
    assert losses(trainer) == trained(tmp_path / "alone", CompressionCallback(**OPTIONS))
    assert again.report is not None
    assert_compressed(again.report)
    assert type(model).__name__ in str(type(model))
    with pytest.raises(pyactcomp.PyactcompError, match="not compressed"):
        pyactcomp.report(model)


def test_two_trainers_of_one_model_each_train_compressed(tmp_path: Path) -> None:
    model = built(llama)
    callbacks = [CompressionCallback(**OPTIONS) for _ in range(2)]
    trainers = [trainer_of(model, tmp_path, callback) for callback in callbacks]
    for trainer, callback in zip(trainers, callbacks, strict=True):
        trainer.train()
        assert callback.report is not None
        assert_compressed(callback.report)


def test_a_callback_added_after_mixed_precision_names_the_cause(tmp_path: Path) -> None:
    trainer = trainer_of(built(llama), tmp_path, bf16=True)
    trainer.add_callback(CompressionCallback(fuse_head=True, **OPTIONS))
    with pytest.raises(ValueError, match=r"accelerate's mixed precision has replaced it: .*Trainer\(callbacks="):
        trainer.train()


# TRL's own arguments set what transformers has renamed.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
def test_a_trainer_that_reads_the_logits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    monkeypatch.setattr("pyactcomp.integrations.transformers.version", lambda _: "0.24.0")
    callback = CompressionCallback(fuse_head=True)
    with pytest.raises(ValueError, match=r"SFTTrainer of trl 0\.24\.0 computes their entropy"):
        callback.on_init_end(arguments(trl.SFTConfig, tmp_path), None, None, model=built(llama))


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize("through_forward", [False, True])
@pytest.mark.filterwarnings("ignore")  # of few workers, and of a logger that nobody asked for
def test_lightning_trains_to_the_same_weights_and_covers_the_loss(package: str, through_forward: bool) -> None:
    lightning = pytest.importorskip(package, reason=f"{package} is not installed")
    compression = importlib.import_module("pyactcomp.integrations.lightning").Compression

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = Transformer()
            self.losses: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x)

        def training_step(self, batch: Any, index: int) -> Tensor:
            x, y = batch
            predicted = self(x) if through_forward else self.model(x)
            loss = nn.functional.mse_loss(predicted, y)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.02)

    def fitted(callbacks: list[Any]) -> Any:
        module = Module()
        inputs, targets = regression("cpu", 8)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = lightning.Trainer(
            max_epochs=6, accelerator="cpu", callbacks=callbacks, enable_model_summary=False, **quiet
        )
        trainer.fit(module, DataLoader([(inputs[i], targets[i]) for i in range(8)], batch_size=8))
        return module

    callback = compression(fuse=False, **OPTIONS)
    module, exact = fitted([callback]), fitted([])
    assert_losses_agree(module.losses, exact.losses)
    assert callback.report is not None
    assert_compressed(callback.report)
    fusing = compression(**OPTIONS)
    fitted([fusing])
    assert fusing.report is not None
    assert {kind for _, kind in fusing.report.fused} >= {"GELU", "LayerNorm"}
    assert "training_step" not in vars(module)
    with pytest.raises(pyactcomp.PyactcompError, match="not compressed"):
        pyactcomp.report(module)


@pytest.mark.filterwarnings("ignore")
def test_a_fit_that_fails_leaves_the_lightning_module_plain() -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    compression = importlib.import_module("pyactcomp.integrations.lightning").Compression

    class Failing(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(2, 2)

        def training_step(self, batch: Any, index: int) -> Tensor:
            raise ArithmeticError("out of luck")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Failing()
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=[compression()], logger=False, enable_checkpointing=False
    )
    with pytest.raises(ArithmeticError):
        trainer.fit(module, DataLoader(torch.ones(2, 2)))
    with pytest.raises(pyactcomp.PyactcompError, match="not compressed"):
        pyactcomp.report(module)
    assert "training_step" not in vars(module)


@pytest.fixture
def accelerator() -> Any:
    accelerate = importlib.import_module("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of a Trainer before
    made = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    yield made
    made.end_training()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerate_prepares_a_compressed_model_with_a_fused_head(accelerator: Any) -> None:
    exact = built(llama)
    model = copy.deepcopy(exact)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    prepared, optimizer = ours.prepare(accelerator, model, optimizer, fuse_head=True, **OPTIONS)
    with torch.autocast("cpu", torch.bfloat16):
        expected = exact(**text("cpu")).loss
    loss = prepared(**text("cpu")).loss
    accelerator.backward(loss)
    optimizer.step()
    assert loss.item() == pytest.approx(expected.item(), rel=2.0**-8)
    report = pyactcomp.report(accelerator.unwrap_model(prepared))
    assert_compressed(report)
    assert "Head" in {form for _, form in report.fused}


def test_accelerate_that_offloads_is_refused(accelerator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Plugin:
        activation_checkpointing_offload = True

    monkeypatch.setattr(type(accelerator.state), "fsdp_plugin", Plugin(), raising=False)
    with pytest.raises(ValueError, match=r"prepare\(\) of pyactcomp and activation_checkpointing_offload=True"):
        ours.prepare(accelerator, nn.Linear(2, 2))
