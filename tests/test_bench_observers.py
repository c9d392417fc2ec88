"""The bench of the two observers, on the CPU, and its table."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_cases import ORIGIN

from bench import __main__ as command_line
from bench import observers, rows
from pyactcomp.readers import observer
from pyactcomp.torch_private import extensions


@pytest.mark.skipif(extensions.load("_observer")[0] is None, reason="_observer is not built")
def test_without_the_library_nothing_is_stored_less_exactly_and_more_is_kept(tmp_path: Path) -> None:
    before = observer.observer()
    assert command_line.main(["observers", "--tiny", "--device", "cpu", "--out", str(tmp_path)]) == 0
    found = rows.read(tmp_path / "observers.json")
    assert [(row["status"], row["method"]) for row in found] == [("ok", method) for method in observers.METHODS]
    for row in found:
        assert row["looser"] == 0
        assert row["library"]["unique_bytes"] == row["without"]["unique_bytes"]
        assert row["library"]["stored_bytes"] <= row["without"]["stored_bytes"]
        assert len(row["ratios"]) == 2
    assert any(row["stricter"] for row in found)
    assert type(observer.observer()) is type(before)


def test_the_table_has_shares_and_the_range_of_the_ratios() -> None:
    sides = {name: {"stored_bytes": stored, "unique_bytes": 100} for name, stored in (("library", 25), ("without", 50))}
    row = {"workload": "m", "method": "int8", "scale": "full", "status": "ok", "time": "2026-01-01", "origin": ORIGIN}
    text = observers.observers_table(
        [{**row, **sides, "stricter": 3, "decisions": 9, "ratio": 1.5, "ratios": [1.0, 2.0]}]
    )
    assert "| `m` | int8 | 0.250 | 0.500 | 3 of 9 | 1.50 (1.00 to 2.00) |" in text
