"""The suite `mlp`: one gated MLP, in tiles and at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_cases import options

from bench import mlp
from bench.rows import Row


def _rows(path: Path) -> list[Row]:
    found: list[Row] = json.loads((path / "mlp.json").read_text())["rows"]
    return found


@pytest.mark.filterwarnings("ignore:nothing was compressed:UserWarning")
def test_each_row_is_measured_once_and_its_gradients_are_checked(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="Hugging Face transformers is not installed")
    mlp.run(options(tmp_path))
    found = _rows(tmp_path)
    assert [(row["workload"], row["method"]) for row in found] == [
        (workload, method) for workload in ("64 tokens", "64 tokens, frozen") for method in mlp.METHODS
    ]
    for row in found:
        assert row["status"] == "ok" or (row["method"] == "liger tiled" and row["status"] == "unavailable")
        if row["status"] == "ok":
            assert row["median_ms"] >= row["forward_ms"] > 0
            # Exact ones only sum again what plain sums; codes are off by 0.3 to 2 %.
            exact = row["method"] in ("plain", "checkpoint")
            assert row["grad_error"] == 0.0 if exact else 0.0 < row["grad_error"] < 0.02
    mlp.run(options(tmp_path))
    measured = [[row for row in rows if row["status"] == "ok"] for rows in (found, _rows(tmp_path))]
    assert measured[0] == measured[1]


def test_a_budget_that_is_used_up_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    used_up = options(tmp_path)
    used_up.budget.allows = lambda seconds: False  # type: ignore[method-assign]
    mlp.run(used_up)
    assert "the budget is used up" in capsys.readouterr().out
