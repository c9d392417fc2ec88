"""Estimates with offload: the tape itself runs on phantom tensors, so its counts are those of a tape that copies."""

from __future__ import annotations

from pathlib import Path

import estimate_models
import pytest
from estimate_children import forked  # noqa: F401
from estimate_models import SAMPLES
from offload_programs import Delayed, delayed_fixture, only  # noqa: F401

import pyactcomp
from pyactcomp.errors import PyactcompError
from pyactcomp.estimate.result import ModeEstimate
from pyactcomp.estimate.training import STEPS

MODELS = Path(__file__).with_name("estimate_models.py")
BATCH = SAMPLES["int8"]
CODECS = tuple(SAMPLES)


@pytest.fixture(scope="module")
def deep() -> dict[str, ModeEstimate]:
    modes = {"int8": ["int8", "int8+checkpoint"], "lossless": ["lossless"]}
    found = [
        pyactcomp.estimate(
            f"{MODELS}:deep", batch=samples, modes=[*modes[codec], *(f"{m}+offload" for m in modes[codec])], gpu="4090"
        )
        for codec, samples in SAMPLES.items()
    ]
    return {each.mode: each for of_codec in found for each in of_codec.modes}


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_that_leave_and_bytes_pinned_are_those_of_a_tape_that_copies(
    codec: str, deep: dict[str, ModeEstimate], delayed: Delayed
) -> None:
    delayed.use("early", window=0)
    model, batch, loss = estimate_models.deep(SAMPLES[codec])
    pyactcomp.compress(model, mode=codec, offload=1.0)
    left = []
    for _ in range(STEPS):
        model.zero_grad()
        result = loss(model(batch))
        left.append(only()["left_bytes"] - sum(left))
        result.backward()
    kept, offloaded = deep[codec], deep[f"{codec}+offload"]
    # The first window is of 1 GiB; later ones are of a layer, and what does not fit has left at the end of forward.
    assert left[0] == 0 < left[-1]
    assert kept.activations - offloaded.activations == left[-1]
    assert offloaded.pinned == only()["pinned_bytes"] > left[-1]
    assert kept.pinned == 0


@pytest.mark.parametrize("mode", ["int8", "lossless", "int8+checkpoint"])
def test_offload_lowers_the_peak_of_a_step_and_no_other_part(mode: str, deep: dict[str, ModeEstimate]) -> None:
    kept, offloaded = deep[mode], deep[f"{mode}+offload"]
    assert offloaded.peak_allocated < kept.peak_allocated
    for part in ("weights", "gradients", "optimizer", "inputs", "workspaces"):
        assert getattr(offloaded, part) == getattr(kept, part)


def test_offload_without_stored_bytes_is_refused() -> None:
    for mode in ("offload", "plain+offload", "checkpoint+offload", "offload+int8"):
        with pytest.raises(PyactcompError, match=r"mode is one of .*int8\+offload.*; got"):
            pyactcomp.estimate(f"{MODELS}:deep", modes=[mode])


def test_the_table_tells_the_pinned_memory_of_the_host(deep: dict[str, ModeEstimate]) -> None:
    for name in ("typer", "rich"):
        pytest.importorskip(name)
    from typer.testing import CliRunner

    from pyactcomp.cli.commands import app
    from pyactcomp.sizes import size_text

    for mode, told in (("int8+offload", True), ("int8", False)):
        command = ["estimate", f"{MODELS}:deep", "--batch", str(BATCH), "--mode", mode, "--no-largest"]
        ran = CliRunner().invoke(app, [*command, "--gpu", "4090"])
        assert ran.exit_code == 0, ran.stderr
        rows = [line for line in ran.stdout.splitlines() if "pinned on the host" in line]
        assert (deep[mode].pinned > 0) == told
        assert [size_text(deep[mode].pinned) in row for row in rows] == [True] * told
