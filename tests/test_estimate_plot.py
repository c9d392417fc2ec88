"""The picture of an estimate: what a step holds over its events, and the room that the GPU has."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import pyactcomp

MODELS = Path(__file__).with_name("estimate_models.py")


def test_picture_of_a_step_shows_the_room_beside_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from matplotlib.figure import Figure

    from pyactcomp.estimate.plot import draw

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    found = pyactcomp.estimate(f"{MODELS}:perceptron", batch=4, modes=["plain"], gpu="4090")
    plain = found["plain"]
    # A room just above the curves: a line far above them is left out.
    memory = plain.context + max(reserved for _, reserved in plain.curve)
    draw(dataclasses.replace(found, memory=memory), tmp_path / "step.png")
    (line,) = (line for line in drawn[0].axes[0].get_lines() if line.get_linestyle() == "--")
    assert [round(height * 2**30) for height in line.get_ydata()] == [memory - plain.context] * 2
