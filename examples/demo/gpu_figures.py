"""Figures of a GPU for a demo on a CPU, from the committed rows of the benchmark."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "frontier.json"
_WORKLOAD = "gpt2_medium_amp"
_NAMES = {
    "vanilla": "plain",
    "lossless": "lossless",
    "int8": "int8",
    "ckpt": "checkpoint",
    "int8+ckpt": "int8 + checkpoint",
}


@dataclass(frozen=True)
class Figures:
    """Memory and time of a step of GPT-2 medium, as multiples of plain PyTorch's in the same run."""

    method: str
    saved: float
    peak: float
    step: float
    device: str


def load(path: Path = RESULTS) -> dict[str, Figures]:
    """Return the latest figures of each method of the demo."""
    rows = [
        row
        for row in json.loads(path.read_text())["rows"]
        if row["workload"] == _WORKLOAD and row["scale"] == "full" and row["status"] == "ok"
        if row["origin"]["device"] != "cpu"
    ]
    plain = {row["run"]: row for row in rows if row["method"] == "vanilla"}
    latest = {row["method"]: row for row in rows if row["run"] in plain}
    return {
        _NAMES[method]: _ratios(_NAMES[method], row, plain[row["run"]])
        for method, row in latest.items()
        if method in _NAMES
    }


def _ratios(method: str, row: dict[str, Any], plain: dict[str, Any]) -> Figures:
    saved, peak, step = (row[name] / plain[name] for name in ("act_bytes", "peak_minus_base_bytes", "median_ms"))
    return Figures(method, saved, peak, step, row["origin"]["device"])
