"""What the tests of trainers share: a Trainer of few steps, and losses that follow those without compression."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from works_with import GRADIENT_BOUND, MIN_BYTES
from works_with_text import BATCH, built, llama, text, transformers

import pyactcomp

pytest.importorskip("accelerate", reason="the Trainer needs accelerate")

STEPS = 3
OPTIONS: dict[str, Any] = {"min_bytes": MIN_BYTES}
RATIO_BAR = 0.05
LR = 0.02


def ratio(report: pyactcomp.Report) -> float:
    """Return the stored bytes by those that plain torch would hold."""
    return report.stored_bytes / report.unique_bytes


def plain_loop(model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> float:
    """Return the ratio of one step of a compressed copy in a loop of one's own, loss included."""
    model = pyactcomp.compress(copy.deepcopy(model).train(), **OPTIONS)
    loss_of(model).backward()
    return ratio(pyactcomp.report(model))


def assert_ratio(report: pyactcomp.Report | None, expected: float) -> None:
    assert report is not None
    assert abs(ratio(report) - expected) <= RATIO_BAR, (ratio(report), expected)


def assert_follows(got: list[float], exact: list[float]) -> None:
    """Compare two curves of losses.

    To first order a step changes the loss by ``lr * g . g'``, and ``g'`` is off by at most the bar: twice the bar of
    all that the loss has moved leaves room for the curvature. Fused forwards sum in another order: an ulp or so.
    """
    assert len(got) == len(exact) >= STEPS
    moved = max(exact) - min(exact)
    assert moved > 0
    assert got[0] == pytest.approx(exact[0], rel=2.0**-20)
    for loss, expected in zip(got, exact, strict=True):
        assert abs(loss - expected) <= 2 * GRADIENT_BOUND * moved + 2.0**-20 * abs(expected)


def rows() -> list[dict[str, Tensor]]:
    return [{name: values[i] for name, values in text("cpu").items()} for i in range(BATCH)]


def arguments(kind: Any, directory: Path, **more: Any) -> Any:
    return kind(
        output_dir=str(directory),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **{"bf16": False, **more},
    )


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def trained(directory: Path, callback: Any, *, cover: bool = False, **more: Any) -> list[float]:
    loss_func = more.pop("compute_loss_func", None)
    trainer = transformers.Trainer(
        model=built(llama),
        args=arguments(transformers.TrainingArguments, directory, **more),
        train_dataset=rows(),
        callbacks=[callback] if callback else [],
        compute_loss_func=loss_func,
    )
    if cover:
        assert callback is not None
        callback.cover_loss(trainer)
    trainer.train()
    return losses(trainer)
