"""The keyword ``watch`` of the trainers' callbacks: each step is watched, and the figures reach the loggers."""

from __future__ import annotations

import importlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from works_with_text import BATCH, built, llama, text, transformers

import pyactcomp

accelerate = pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
from pyactcomp.integrations.accelerate import prepare  # noqa: E402
from pyactcomp.integrations.transformers import CompressionCallback  # noqa: E402

NAMES = {f"memory/{name}" for name in ("resident", "weights", "gradients", "optimizer")}


def watching() -> bool:
    return any(thread.name == "pyactcomp.watch" for thread in threading.enumerate())


class Later(transformers.TrainerCallback):
    """In place of a logger's callback."""

    def __init__(self, fails_at: int = -1) -> None:
        self.logged: list[dict[str, Any]] = []
        self.fails_at = fails_at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.fails_at:
            raise ArithmeticError

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.logged.append(dict(kwargs["logs"]))


def trainer(directory: Path, model: nn.Module, *callbacks: Any, steps: int = 3) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(directory),
        use_cpu=True,
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    rows = [{name: values[i] for name, values in text("cpu").items()} for i in range(BATCH)]
    return transformers.Trainer(model, arguments, train_dataset=rows, callbacks=list(callbacks))


def test_trainer_watches_each_step_and_logs(tmp_path: Path) -> None:
    callback, later = CompressionCallback(min_bytes=0, watch=True), Later()
    model = built(llama)
    trained = trainer(tmp_path, model, callback, later)
    trained.train()
    assert callback.watch is not None
    assert [step.step for step in callback.watch.steps] == [1, 2, 3]
    memory = callback.watch.steps[0].memory
    assert memory is not None
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    buffers = {buffer.data_ptr(): buffer.nbytes for buffer in model.buffers()}
    assert memory.weights == parameters + sum(buffers.values())
    assert memory.gradients == parameters  # before the trainer has freed these
    assert memory.optimizer == 2 * parameters + 4 * len(list(model.parameters()))  # moments, and a counter for each
    assert all(logs.keys() >= NAMES for logs in later.logged[:3])
    assert later.logged[0]["memory/weights"] == memory.weights / 2**30
    assert all(entry.keys() >= NAMES for entry in trained.state.log_history[:3])
    assert not watching()


def test_trainer_checks_for_leaks(tmp_path: Path) -> None:
    kept: list[Tensor] = []

    def loss_that_is_kept(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        kept.append(outputs.logits.float().square().mean())
        return kept[-1]

    callback = CompressionCallback(min_bytes=0, watch={"steps": 8})
    trained = trainer(tmp_path, built(llama), callback, steps=8)
    trained.compute_loss_func = loss_that_is_kept
    with pytest.warns(UserWarning, match=r"test_live_callbacks.py:\d+ in loss_that_is_kept"):
        trained.train()
    assert callback.watch is not None
    # The trainer divides by the number of micro-batches, so the result is a tensor of its own.
    assert any("kept[1]" in leak.holder and "x.detach()" in leak.advice for leak in callback.watch.leaks())
    kept.clear()


def test_trainer_without_a_leak_raises_no_alarm(tmp_path: Path) -> None:
    callback = CompressionCallback(min_bytes=0, watch={"steps": 8})
    trainer(tmp_path, built(llama), callback, steps=8).train()
    assert callback.watch is not None
    assert callback.watch.leaks() == ()


def test_watch_of_an_interrupted_training_ends_with_the_next(tmp_path: Path) -> None:
    model = built(llama)
    first = CompressionCallback(min_bytes=0, watch=True)
    with pytest.raises(ArithmeticError):
        trainer(tmp_path, model, first, Later(fails_at=2)).train()
    second = CompressionCallback(min_bytes=0)
    trainer(tmp_path, model, second).train()
    assert not watching()


@pytest.mark.filterwarnings("ignore")  # of few workers
def test_lightning_watches_each_step_and_logs() -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    compression = importlib.import_module("pyactcomp.integrations.lightning").Compression

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self.model(batch).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    module, callback = Module(), compression(min_bytes=0, watch=True)
    fitting = lightning.Trainer(
        max_epochs=1,
        accumulate_grad_batches=2,
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    fitting.fit(module, DataLoader(torch.randn(8, 16), batch_size=2))
    assert len(callback.watch.steps) == 2  # of the optimizer, in four batches
    memory = callback.watch.steps[0].memory
    assert memory.weights == memory.gradients == 4 * (16 * 16 + 16 + 16 + 1)
    assert fitting.callback_metrics.keys() >= NAMES
    assert not watching()


def test_accelerate_logs_by_its_own_function(tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer = prepare(accelerator, model, optimizer)
    logged: list[int | None] = []
    accelerator.log = lambda values, step=None: logged.append(step)
    with pyactcomp.watch(model, optimizer, log=accelerator.log) as w:
        for _ in range(2):
            optimizer.zero_grad()
            accelerator.backward(model(torch.ones(2, 4)).mean())
            optimizer.step()
    assert logged == [1, 2]
    assert w.steps[0].memory is not None
    assert w.steps[0].memory.optimizer == 2 * 4 * 5 + 2 * 4


@pytest.mark.parametrize("wrong", [3, "yes", None])
def test_wrong_watch(wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"watch must be True, False or a dict .*got {wrong!r}"):
        CompressionCallback(watch=wrong)
    with pytest.raises(ValueError, match="at least 8"):
        CompressionCallback(watch={"steps": 2})
    with pytest.raises(TypeError, match="unexpected keyword argument 'step'"):
        CompressionCallback(watch={"step": 8})
